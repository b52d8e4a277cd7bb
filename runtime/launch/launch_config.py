"""One launch of a plan, as one record: what is asked for, what is known, and what lives longer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from meshwright.planner.documents.events import Decision, Drift, Expected, Paced
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.whatif.pricing.survival import SaveFigures
from meshwright.runtime.launch.fork_client import Zygote
from meshwright.runtime.resilience.node_agent import NodeAgent
from meshwright.runtime.resilience.shared_memory import Slots
from meshwright.runtime.run.launch_options import LaunchRun
from meshwright.runtime.run.node_rank import ALONE, NodeRank
from meshwright.runtime.run.run_folder import Device


@dataclass(frozen=True, slots=True)
class Launch:
    """A plan, what its run is asked for, and what this node has for one attempt at it."""

    plan: Path | str
    run: LaunchRun
    _: KW_ONLY
    model: ModelGraph | None = None
    """The graph of the plan's model; given for a `file.py:factory`, which takes torch to trace."""
    device: Device | None = None
    """None for what the plan's cluster has."""
    dry_run: bool = False
    """Print the commands of ranks alone."""
    quiet: bool = False
    """Print neither progress nor warnings on stderr."""
    node_rank: NodeRank = ALONE
    nodes: Sequence[int] = ()
    """Number of devices of each of several nodes."""

    prediction: Prediction | None = None
    """With it the report has the MFU, and steps that leave its range are named."""
    caution: str | None = None
    """Printed as a warning once the plan, the devices and the data are checked."""
    expect: Callable[[int], Expected] | None = None
    """Expected seconds of a number of steps by part, which the report compares."""
    saves: SaveFigures | None = None
    """From these the steps between checkpoints are computed again, as saves are measured."""

    elastic: bool = False
    """Ranks tell where they are; one that hangs ends the run, and slower ones are named."""
    agent: NodeAgent | None = None
    """Says whether other nodes live; by its epochs no other launch is in our folders."""
    zygote: Zygote | None = None
    """Forks the ranks, so that the next attempt need not import torch again."""
    slots: Slots | None = None
    """Slots into which ranks copy their state."""
    copies: bool = True
    """True if ranks go on from what is in slots."""
    before: Decision | None = None
    """Why the plan is another than the one that the run was given."""
    again: bool = False
    """Ranks of this command ran before, and what was to be said about its request was said."""
    begun: Callable[[], None] | None = None
    """Called after the first step, on the node with rank 0."""
    paced: Callable[[Drift | Paced], None] | None = None
    """Called with what is found of the pace of this node's ranks; it may raise RankSlow."""
    meanwhile: Callable[[], None] | None = None
    """Called while ranks run, on the node with rank 0."""

    @property
    def predicted_step_s(self) -> float | None:
        """Predicted seconds of a step."""
        return self.prediction.step_time_s if self.prediction else None

    @property
    def peak_step_s(self) -> float | None:
        """Seconds of a step with every device at its peak."""
        prediction = self.prediction
        return prediction.mfu * prediction.step_time_s or None if prediction else None
