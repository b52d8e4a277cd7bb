"""Step records of a script: what `meshwright run` follows while a script's Engine trains."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from meshwright.planner.documents.events import StepRecord
from meshwright.planner.documents.plan import Plan
from meshwright.runtime.launch.script_rank_main import OUTPUT_VARIABLE
from meshwright.runtime.run import run_folder as run
from meshwright.runtime.run.metrics import Metrics


class ScriptRecords:
    """Steps written down for `meshwright run`, which started this process."""

    _taken = False

    def __init__(self, output: Path) -> None:
        self._file = run.metrics_file(output)
        self._metrics = Metrics(output)
        self._begun = False

    @classmethod
    def of_this_process(cls) -> ScriptRecords | None:
        """Return where the first engine of a process writes; others write nothing."""
        output = os.environ.get(OUTPUT_VARIABLE)
        if output is None or cls._taken:
            return None
        cls._taken = True
        return cls(Path(output))

    def write(
        self,
        plan: Plan,
        step: int,
        loss: float,
        norm: float,
        step_s: float,
        *,
        device: torch.device,
    ) -> None:
        """Add a step; those that it does again, behind a restart, are forgotten first."""
        on_cuda = device.type == "cuda"
        if not self._begun:
            with run.never_fatal(self._file):
                run.forget_steps_after(step - 1, self._file)
            self._begun = True
        self._metrics.write(
            StepRecord(
                step=step,
                loss=loss,
                grad_norm=norm,
                step_s=step_s,
                samples_per_s=plan.global_batch / step_s,
                epoch=0,
                peak_memory_bytes=torch.cuda.max_memory_allocated(device) if on_cuda else None,
            )
        )
