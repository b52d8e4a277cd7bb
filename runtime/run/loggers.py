"""Loggers: where a run's figures go beside its own lines: TensorBoard, Weights & Biases, MLflow.

A logger is anything with `log` and `close`; rank 0 has them.  What is written is the same for all.
Installed packages add others (`planner/documents/plugins.py`): a function of `output` (the run's
folder), `first` (the first step that it gets) and `config` (the plan) that returns a logger.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from meshwright.planner.documents.document import read_text, write_text
from meshwright.planner.system.safe_files import folder_within

MOST_PARAMETER = 250
"""Longest value of a parameter, in characters, that every store of MLflow takes."""


class Logger(Protocol):
    """Receiver of the figures of every step."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take a step's figures, by their names in metrics.jsonl."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class TensorBoard:
    """Events in a folder; those of steps that are done again count no more."""

    def __init__(self, folder: Path, *, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - only where wanted

        folder_within(folder.parent, folder.name)
        self._events: Any = SummaryWriter(folder, purge_step=first)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a scalar for each figure."""
        for name, value in values.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()

    def close(self) -> None:
        """Write what is left."""
        self._events.close()


class WeightsAndBiases:
    """A run of a project on wandb; a launch that goes on in the same folder goes on in that run."""

    def __init__(self, project: str, *, output: Path, config: Mapping[str, Any]) -> None:
        import wandb  # noqa: PLC0415 - only where wanted

        folder_within(output, "wandb")

        self._run: Any = wandb.init(
            project=project,
            name=output.name,
            id=_kept_id(output / "wandb-id"),
            resume="allow",
            dir=str(output),
            config=dict(config),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a row; wandb itself drops those of steps that it has."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Wait until all has been sent."""
        self._run.finish()


class MLflow:
    """A run of an experiment on MLflow; a later launch in the same folder continues that run."""

    def __init__(self, experiment: str, *, output: Path, config: Mapping[str, Any]) -> None:
        import mlflow  # noqa: PLC0415 - only where wanted

        self._mlflow: Any = mlflow
        mlflow.set_experiment(experiment)
        file = output / "mlflow-id"
        if file.exists():
            mlflow.start_run(run_id=read_text(file).strip())
            return
        run = mlflow.start_run(run_name=output.name)
        write_text(run.info.run_id, file)
        mlflow.log_params({name: str(value)[:MOST_PARAMETER] for name, value in config.items()})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a metric for each figure."""
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


def _kept_id(file: Path) -> str:
    """Return the id of the run in a folder: a new one is written there."""
    if not file.exists():
        write_text(secrets.token_hex(8), file)
    return read_text(file).strip()
