"""Report of a failed launch: the error that names the rank, the cause, and the way out.

Incidents are written down, and evidence of them stored, in the folder of the run.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from meshwright.planner.documents.events import Cause, Event, Incident
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.documents.units import bytes_text
from meshwright.planner.errors import DocumentError, LaunchError
from meshwright.planner.system.safe_files import folder_within, open_below
from meshwright.runtime.checkpoint import checkpoint, object_store
from meshwright.runtime.launch import failure_cause as faults
from meshwright.runtime.launch.hardware_errors import HardwareError, hardware_error
from meshwright.runtime.launch.preflight import LocalRanks
from meshwright.runtime.launch.rank_processes import BadEnd, blames_a_peer, is_timeout, log_end
from meshwright.runtime.launch.transient_errors import (
    device_problem,
    folder_problem,
    is_of_device,
    is_transient,
)
from meshwright.runtime.resilience.hang_detector import HungRank
from meshwright.runtime.resilience.heartbeat import stack_file
from meshwright.runtime.resilience.shared_memory import Slots
from meshwright.runtime.resilience.state_rescue import newest_copy_step
from meshwright.runtime.run import run_folder as run
from meshwright.runtime.run.launch_options import LaunchRun
from meshwright.runtime.run.recovery_policy import RankEnd
from meshwright.runtime.run.rendezvous import NodeLeft
from meshwright.runtime.run.run_clock import unix_now_s
from meshwright.runtime.run.run_folder import log_text


class RunContext(Protocol):
    """Run whose ranks have ended, as far as it is known: of a launch, or of a script."""

    @property
    def plan(self) -> Plan:
        """Plan by which its ranks are laid out."""

    @property
    def run(self) -> LaunchRun:
        """Options that it was asked for."""

    @property
    def ranks(self) -> LocalRanks:
        """Ranks of this node."""

    @property
    def output(self) -> Path:
        """Its folder."""


NOTHING_SAVED = "; nothing was saved"
MOST_EVIDENCE = 1000
"""Characters of an error that are written down."""
MOST_KEPT = 4000
"""Characters of a rank's stack, and of the end of its log, that are stored with an incident."""
MOST_WAITING = 3
"""Ranks that an error names beside the one that they wait for."""


class RunEnded(LaunchError):  # noqa: N818 - reads as the sentence that it is
    """A run ended before its time: what happened, what was saved, and what else is known."""

    def __init__(self, lead: str, *, saved: str = "", rest: str = "") -> None:
        super().__init__(lead)
        self.lead, self.saved, self.rest = lead, saved, rest

    def __str__(self) -> str:
        return f"{self.lead}{self.saved}{self.rest}"


class RankFailed(RunEnded):
    """A rank ended, and its program has not said why: the same training may go on."""

    def __init__(
        self,
        lead: str,
        *,
        output: Path,
        saved: str = "",
        rest: str = "",
        local_rank: int = 0,
        end: RankEnd | None = None,
        left: NodeLeft | None = None,
    ) -> None:
        super().__init__(lead, saved=saved, rest=rest)
        self.left = left
        """Error with which another node left, where it was another node."""
        self.local_rank = local_rank
        self.end = end
        """None where it was a rank of another node, which tells it."""
        self.output = output


class EndsToGrow(RankFailed):
    """The ranks have ended after a save, so that the run goes on on more nodes."""


class RanksHang(RankFailed):
    """Ranks waited for others in vain."""


class RankSlow(RankFailed):
    """All ranks wait for a slow one, and another node is there in its place."""


class RankLost(RankFailed):
    """A rank ended as if its device were gone: killed from outside, or by its driver."""


def log_event(ready: RunContext, event: Event) -> None:
    """Write down what happened, on the node that leads."""
    if ready.ranks.leads:
        run.append_record(event, run.events_file(ready.output))


def hung(ready: RunContext, waiting: Sequence[HungRank], *, after_step: int) -> RanksHang:
    """Return the error that names the rank that the others wait for, and where they do."""
    first, *others = waiting
    lead = f"the run hangs after step {after_step}: {first.text}"
    lead += "".join(f"; {rank.text}" for rank in others[:MOST_WAITING])
    return RanksHang(
        lead,
        saved=way_on(ready),
        rest=f". Stacks of all ranks are in {ready.output / 'flight'}",
        local_rank=ready.ranks.devices[first.rank],
        end=RankEnd(
            cause="hang",
            rank=first.rank,
            after_step=after_step,
            waits=first.collective is not None,
        ),
        output=ready.output,
    )


def write_incident(ready: RunContext, error: Exception, *, after_step: int) -> None:
    """Write down what ended an attempt, with what its ranks left behind."""
    keep_evidence(ready)
    end = error.end if isinstance(error, RankFailed) else None
    cause = end.cause if end else "program"
    rank = end.rank if end else None
    log_event(ready, incident(cause, str(error), after_step=after_step, rank=rank))


def keep_evidence(ready: RunContext) -> None:
    """Copy this node's stacks and the ends of its logs: the next attempt empties their folders."""
    with run.never_fatal(ready.output / "incidents"):
        _keep_evidence(ready)


def _keep_evidence(ready: RunContext) -> None:
    attempt = run.account_of(ready.output).attempts
    for rank in ready.ranks.devices:
        name = f"rank-{rank:05}"
        for file, kind in (
            (stack_file(ready.output, rank), "stack"),
            (run.log_file(ready.output, rank), "log"),
        ):
            if text := log_text(file)[-MOST_KEPT:]:
                kept_in = run.evidence_folder(ready.output, attempt)
                folder = folder_within(
                    folder_within(ready.output, kept_in.parent.name), kept_in.name
                )
                with open_below(folder / f"{name}.{kind}", within=ready.output) as kept:
                    kept.write(text.encode(errors="replace"))


def incident(cause: Cause, evidence: str, *, after_step: int, rank: int | None = None) -> Incident:
    """Return an incident of now."""
    return Incident(
        at_unix_s=unix_now_s(),
        cause=cause,
        rank=rank,
        after_step=after_step,
        evidence=evidence[:MOST_EVIDENCE] or "nothing was said",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Memory of a rank that has ended, as far as it is known."""

    prediction: Prediction | None = None
    killed: bool = False
    """True if the system has killed a process of this launch for memory."""
    most_bytes: int | None = None
    """The most host memory that the rank had, where that was looked at."""


def _out_of_memory(
    ready: RunContext, bad: BadEnd, memory: MemoryUse, *, after_step: int
) -> tuple[str, RankEnd] | None:
    """Return what the rank held beside what was predicted, and its end; None for another end."""
    ended, failure = bad.cause, bad.failure
    raised = failure is not None and failure.kind == "OutOfMemoryError"
    if not raised and not (memory.killed and failure is None and ended.code == -signal.SIGKILL):
        return None
    on_host = ready.ranks.device == "cuda" and not raised
    held = dict(failure.held) if failure is not None else {}
    total = failure.needed_bytes if failure is not None else memory.most_bytes
    needed = None
    sizes = ", ".join(f"{kind} {bytes_text(size)}" for kind, size in held.items() if size)
    text = f"; held: {sizes}" if sizes else ""
    text += f"; needed {bytes_text(total)} at least" if total else ""
    if memory.prediction is not None and not on_host:
        stage = memory.prediction.stages[ready.plan.first_stage(ended.rank)]
        parts = stage.memory_parts.items()
        listed = ", ".join(f"{kind} {bytes_text(size)}" for kind, size in parts if size)
        text += f"; predicted: {listed}, {bytes_text(stage.peak_memory_bytes)} in all"
        if total:
            needed = min(1e3, max(1.0, total / stage.peak_memory_bytes))
    return text, RankEnd(
        cause="out_of_memory",
        rank=ended.rank,
        after_step=after_step,
        needed=needed,
        on_host=on_host,
    )


_WRONG: Mapping[str, Cause] = {
    "ReplicaDrifted": "corruption",
    "StepDiffered": "corruption",
    "NotANumber": "not_a_number",
    "DoubtfulStep": "doubtful_step",
}
"""Causes of the ends of ranks whose numbers are wrong, by the kind of failure."""


def _wrong_numbers(
    ready: RunContext, rank: int, failure: run.Failure, *, after_step: int
) -> RankFailed:
    """Return the error of damaged memory or arithmetic, or of a loss that is no number."""
    suspect = rank if failure.suspect is None else failure.suspect
    return RankFailed(
        failure.message,
        local_rank=ready.ranks.devices.get(suspect, 0),
        end=RankEnd(
            cause=_WRONG[failure.kind],
            rank=suspect,
            after_step=after_step,
            named=failure.suspect is not None,
            copies_hold=failure.kind == "StepDiffered",
        ),
        output=ready.output,
    )


def bad_end(
    ready: RunContext, bad: BadEnd, *, after_step: int, memory: MemoryUse | None = None
) -> Exception:
    """Return the error that says which rank ended the run, how, and what can be done."""
    ended, failure = bad.cause, bad.failure
    if failure is not None and failure.kind == "DocumentError":
        return DocumentError("", failure.message)
    if failure is not None and failure.kind in _WRONG:
        return _wrong_numbers(ready, ended.rank, failure, after_step=after_step)
    if failure is not None and failure.kind in ("LaunchError", "NoPlanFits"):
        return LaunchError(failure.message)
    log = run.log_file(ready.output, ended.rank)
    said = log_text(log)
    how, waits = _how(ready, bad, said, after_step=after_step)
    words = f"{failure.message if failure is not None else ''}\n{said}"
    named = None if failure is not None and faults.assertion(failure) else hardware_error(words)
    if named is not None:
        how += f"; the {named.part}: {named.name}"
    kind: type[RankFailed] | None = None
    end: RankEnd | None = None
    cause: Cause = "crash"
    full = _out_of_memory(ready, bad, memory or MemoryUse(), after_step=after_step)
    if full is not None:
        kind, (text, end) = RankFailed, full
        how += text
    elif faults.device_lost(ended.code, failure, said):
        # SIGKILL alone is no evidence of the device: its rank may start on it again.
        killed = failure is None and not faults.names_hardware(said)
        kind, cause = RankLost, "crash" if killed else "device"
    elif waits:
        kind, cause = RanksHang, "hang"
    elif failure is not None and (_may_pass(failure) or is_of_link(named, failure)):
        kind = RankFailed
        end, problem = _test_result(ready, bad, failure, after_step=after_step)
        how += problem
    elif failure is None:
        kind = RankFailed  # neither its program nor a driver has said why
    elif failure is not None and blames_a_peer(failure):
        # No rank ended before it: a connection did, of which each side blames the other.
        kind = RankFailed
        end = RankEnd(cause="hang", rank=ended.rank, after_step=after_step, waits=True)
    saved, rest = way_on(ready), log_end(log)
    if kind is None:
        return RunEnded(how, saved=saved, rest=rest)
    return kind(
        how,
        saved=saved,
        rest=rest,
        local_rank=ready.ranks.devices[ended.rank],
        end=end or RankEnd(cause=cause, rank=ended.rank, after_step=after_step),
        output=ready.output,
    )


def is_of_link(named: HardwareError | None, failure: run.Failure) -> bool:
    """Say whether a link failed, and not only this rank's peer."""
    return named is not None and named.part == "link" and not blames_a_peer(failure)


def _may_pass(failure: run.Failure) -> bool:
    of_others = blames_a_peer(failure) or faults.assertion(failure)
    return is_transient(failure) and not of_others


def _test_result(
    ready: RunContext, bad: BadEnd, failure: run.Failure, *, after_step: int
) -> tuple[RankEnd, str]:
    """Test what gave an error that may pass; return the end, and what is wrong as words behind."""
    rank = bad.cause.rank
    of_device = is_of_device(failure)
    end = RankEnd(cause="transient", rank=rank, after_step=after_step, named=of_device)
    if of_device and ready.ranks.device == "cuda":
        problem = device_problem(ready.ranks.devices[rank])
        if problem is not None:
            return end.model_copy(update={"cause": "device"}), f"; of its device: {problem}"
    folder = ready.run.checkpoint
    if not of_device and folder is not None and (problem := folder_problem(folder)) is not None:
        return end.model_copy(update={"cause": "program"}), f"; and {folder}: {problem}"
    return end, ""


def _how(ready: RunContext, bad: BadEnd, message: str, *, after_step: int) -> tuple[str, bool]:
    """Return which rank ended the run and how, and whether it waited for others in vain."""
    ended, failure = bad.cause, bad.failure
    waited = faults.hang(message)
    if waited is not None:
        late = faults.fewest_collectives(ready.output, waited.group)
        others = ", ".join(f"rank {rank} began {count}" for rank, count in late.items())
        how = f"{waited.text} after step {after_step}"
        return (f"{how}; {others}" if others else how), True
    if failure is not None and is_timeout(failure):
        seen = {seen.rank for seen in bad.seen}
        silent = [rank for rank in ready.ranks.devices if rank not in seen]
        named = f" (ranks {', '.join(map(str, silent[:8]))} said nothing)" if silent else ""
        limit = f"{ready.plan.timeout_s:g} s (the plan's timeout_s)"
        how = f"waited {limit} for other ranks{named}"
        return f"rank {ended.rank} {how} after step {after_step}", True
    how = faults.how(ended.code, failure)
    return f"rank {ended.rank} {how} after step {after_step}", False


def name_copies(error: Exception, slots: Slots | None) -> None:
    """Have an error say that copies in memory have a state, where no checkpoint has one."""
    step = newest_copy_step(slots)
    if step and isinstance(error, RunEnded) and error.saved == NOTHING_SAVED:
        error.saved = (
            f"; the state of step {step} is in memory, and is written to a checkpoint when the run "
            "ends"
        )


def way_on(ready: RunContext) -> str:
    """Return what was saved, as the end of a sentence."""
    return saved_text(ready.run.checkpoint)


def saved_text(folder: Path | None) -> str:
    """Return what a folder of checkpoints has to go on from, as the end of a sentence."""
    saved = checkpoint.newest(folder) if folder else None
    name = (folder and object_store.newest_name(folder)) or (saved and str(saved))
    return f"; {name} is complete and can be resumed" if name else NOTHING_SAVED
