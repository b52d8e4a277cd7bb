"""Options of a run: its launch, and the place where it runs.

The descriptions of fields are the command line's help, so that this loads for every `--help`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from meshwright.planner.documents.document import Part
from meshwright.planner.documents.training import check_lengths
from meshwright.planner.documents.units import Amount
from meshwright.planner.errors import DocumentError
from meshwright.runtime.run.node_rank import NodeRank, node_rank_of

SCALE_UP_AFTER_S = 1800.0


class LaunchRun(Part):
    """Options of a launch beside its plan; the descriptions are the command line's help.

    Raises LaunchError for numbers of steps, batches, checkpoints or seconds that no run has.
    """

    data: Path | None = Field(
        default=None,
        description="Text, or rows (.jsonl, .parquet) of text or conversations; a file or a "
        "folder. Default: Python's sources",
    )
    tokenizer: Path | None = Field(
        default=None, description="A local tokenizer folder; default: bytes"
    )
    steps: int = Field(default=20, description="Total steps, counted from the start of training")
    checkpoint: Path | None = Field(
        default=None, description="Save here: a folder, or s3://BUCKET/PATH (gs://, hf://)"
    )
    checkpoint_every: int | None = Field(
        default=None,
        description="Steps; default: the interval that loses least time by measured saves",
    )
    keep_checkpoints: int = Field(default=2, description="Keep only the newest N")
    resume: bool = Field(default=False, description="Continue from the newest checkpoint")
    or_start: bool = Field(default=False, description="With --resume: start if there is none yet")
    max_seconds: float | None = Field(
        default=None, description="Stop with a checkpoint after this time"
    )
    weights: Path | None = Field(default=None, description="A Hugging Face folder of safetensors")
    training: tuple[str, ...] = Field(
        default=(), description="Change a setting: learning_rate=1e-4, warmup_steps=100"
    )
    evaluate: Path | None = Field(default=None, description="Held-out text, a file or folder")
    evaluate_every: int | None = Field(
        default=None, description="Steps; default: after the last only"
    )
    evaluate_batches: int = Field(default=8, description="Global batches per evaluation")
    tensorboard: bool = Field(default=False, description="Write events for TensorBoard too")
    wandb: str | None = Field(
        default=None, description="Log to this project on Weights & Biases too"
    )
    mlflow: str | None = Field(
        default=None, description="Log to this experiment of MLflow too (MLFLOW_TRACKING_URI)"
    )
    logger: tuple[str, ...] = Field(
        default=(), description="Log by an installed package's logger too: catalog --plugins"
    )
    prometheus: str | None = Field(
        default=None, description="Serve figures at [HOST:]PORT/metrics; host: 127.0.0.1"
    )
    opentelemetry: str | None = Field(
        default=None, description="Send figures to this OTLP endpoint (http://...)"
    )
    output: Path | None = Field(default=None, description="Folder of logs and metrics")
    preflight: bool = Field(
        default=False,
        description="Time devices and links first, in at most 2 minutes, and name slow ones",
    )
    replace_stragglers: bool = Field(
        default=False,
        description="With --elastic: let a spare take the place of a node with a slow rank",
    )
    scale_up_after: Amount = Field(
        default=SCALE_UP_AFTER_S,
        description="With --elastic: seconds until a run that lost nodes grows again",
    )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        check_lengths(
            steps=self.steps,
            checkpoint_every=self.checkpoint_every,
            keep_checkpoints=self.keep_checkpoints,
            max_seconds=self.max_seconds,
            evaluate_every=self.evaluate_every,
            evaluate_batches=self.evaluate_batches,
        )
        return self


class Where(Part):
    """Place where a command runs: here, on several nodes, or as a scheduler's job.

    Nodes each start it, or are hosts on which it is started from here.
    """

    on: str = Field(
        default="local",
        description="local; ray: an existing cluster; or submit a job: slurm, kubernetes",
    )
    job: tuple[str, ...] = Field(
        default=(), description="Of that job: partition=gpu, time=24:00:00; image=NAME"
    )
    hosts: str | None = Field(
        default=None, description="Start it on these over ssh: a,b[0-63]; those beyond are spares"
    )
    nodes: int | None = Field(
        default=None, description="Number of nodes; run the same command on each"
    )
    node: int | None = Field(default=None, description="Number of this node, from 0")
    rendezvous: str | None = Field(default=None, description="HOST:PORT of node 0")

    def refuse_job(self) -> None:
        """Refuse settings of a job where none is written."""
        if self.job:
            raise DocumentError(
                "job", "settings go with --on slurm, kubernetes or ray; add it, or leave --job out"
            )

    @property
    def told_hosts(self) -> str:
        """The hosts that it is started on; DocumentError where other settings say something else.

        >>> Where(hosts="a,b").told_hosts
        'a,b'
        """
        for name in ("nodes", "node"):
            if getattr(self, name) is not None:
                raise DocumentError(name, "goes with a launcher on each node; --hosts starts them")
        return self.hosts or ""

    def node_rank(self) -> NodeRank:
        """Return this node's rank: as asked for, or as whatever started us says."""
        return node_rank_of(
            os.environ, nodes=self.nodes, node=self.node, rendezvous=self.rendezvous
        )


HERE = Where.model_construct()
