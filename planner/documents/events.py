"""Events of a run: steps, phases, saves, incidents and decisions, each a line of events.jsonl.

The file is the one record of a run.  Every attempt adds to it and none takes from it: a repeated
step appears twice, so that the cost of failures can be computed from it
(`planner.whatif.pricing.survival`).  metrics.jsonl, TensorBoard and Weights & Biases are readers of
it. Predicted seconds are beside measured ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from meshwright.planner.documents.document import Part
from meshwright.planner.documents.units import (
    Amount,
    Count,
    Positive,
    Proportion,
    Text,
    bytes_text,
    seconds_text,
)

LONGEST_EVENT_BYTES = 1 << 16
START_TIMES = 10.0
Phase = Literal["prepare", "start", "detect", "agree", "decide", "load", "first_step", "train"]
"""Activity of a run other than its steps."""
Cause = Literal[
    "crash",
    "device",
    "node",
    "hang",
    "out_of_memory",
    "not_a_number",
    "doubtful_step",
    "corruption",
    "transient",
    "straggler",
    "program",
    "notice",
    "user",
]
"""Known cause of the end of an attempt."""
PlanSource = Literal["given", "book", "solved"]
"""Origin of a plan: the run was started with it (`given`), it was solved while the run trained
(`book`), or it was solved when it was needed (`solved`)."""
Reaction = Literal["interval", "restart", "replan", "spare", "shrink", "grow", "hand_over", "stop"]


class StepRecord(Part):
    """Figures of one step; one line of metrics.jsonl."""

    step: Positive
    """Number of the step, from 1."""
    loss: float
    """Mean loss of the step."""
    grad_norm: float
    """Norm of the gradients before clipping."""
    step_s: Amount
    """Seconds of the step."""
    tokens_per_s: Amount | None = None
    """Trained tokens per second."""
    samples_per_s: Amount | None = None
    """Samples per second of a script whose samples need not have tokens."""
    epoch: Count
    """Number of the epoch."""
    learning_rate: Amount | None = None
    """Learning rate of the step."""
    mfu: Amount | None = None
    """Model FLOPs utilization of this step: the model's FLOPs per second over the devices' peak."""
    eval_loss: float | None = None
    """Loss on the held-out corpus after the step."""
    peak_memory_bytes: Count | None = None
    """Peak memory of rank 0 so far in bytes, where the device counts it."""
    expert_load: float | None = None
    """Tokens of the busiest expert over the mean of all experts, averaged over layers."""


class _Event(Part):
    at_unix_s: Amount
    """Time of the event in Unix seconds."""


class Attempt(_Event):
    """Start of an attempt: its ranks are about to start."""

    event: Literal["attempt"] = "attempt"
    plan: Text
    """Digest of the plan."""
    devices: Positive
    """Number of devices of the attempt."""
    after_step: Count = 0
    """Number of the step after which the attempt continues."""
    predicted_step_s: Amount | None = None
    """Predicted seconds of a step."""


class Expected(_Event):
    """Predicted wall clock of a run by part, made before its first attempt."""

    event: Literal["expected"] = "expected"
    seconds: dict[Text, Amount]
    """Seconds by part; their sum is the wall clock."""
    failures: Amount
    """Expected number of failures."""
    goodput: Proportion
    """Share of the wall clock in which steps advance the training."""
    goodput_low: Proportion
    """Lower end of the range of the goodput."""
    goodput_high: Proportion
    """Upper end of the range of the goodput."""

    @property
    def is_of_training(self) -> bool:
        """True if the goodput says more than how long ranks take to start.

        It does not for a run that trains for less than ten times its start, whose length is unknown
        before the run.
        """
        return self.seconds.get("steps", 0.0) > START_TIMES * self.seconds.get("start", 0.0)


class StepDone(_Event):
    """Completion of a step."""

    event: Literal["step"] = "step"
    record: StepRecord
    """Figures of the step."""
    predicted_s: Amount | None = None
    """Predicted seconds of the step."""


class PhaseDone(_Event):
    """Completion of a phase other than steps."""

    event: Literal["phase"] = "phase"
    phase: Phase
    """Phase that is complete."""
    measured_s: Amount
    """Measured seconds of the phase."""
    predicted_s: Amount | None = None
    """Predicted seconds of the phase."""


class Saved(_Event):
    """Completion of a checkpoint."""

    event: Literal["saved"] = "saved"
    step: Count
    """Step whose state is saved."""
    blocked_s: Amount
    """Seconds that training waited for the checkpoint."""
    written_s: Amount
    """Seconds from the begin of the checkpoint until it was valid."""
    predicted_blocked_s: Amount | None = None
    """Predicted seconds for which training waits."""
    predicted_written_s: Amount | None = None
    """Predicted seconds until the checkpoint is valid."""


class SaveFailed(_Event):
    """Failure to write a checkpoint; training goes on, and the next save tries again."""

    event: Literal["save_failed"] = "save_failed"
    step: Count
    """Step whose state is not saved."""
    why: Text
    """Reason of the failure."""

    @property
    def text(self) -> str:
        """Sentence of the report on the failed save."""
        return (
            f"the state after step {self.step} is not saved: {self.why}; training goes on, and the "
            "next save tries again"
        )


GIVEN_UP_S = 5.0
"""Seconds within which a run goes on without a node that stands still."""


class CopyInterval(_Event):
    """Interval, valid from now on, at which ranks copy their state to memory that outlives them."""

    event: Literal["copies"] = "copies"
    every_steps: Positive
    """Steps between two copies."""
    stored_steps: Positive | None = None
    """Steps until a copy is on another node, too; None: no other node keeps copies."""
    step_s: Amount
    """Seconds of a step."""
    state_bytes: Count
    """Bytes of the state of one rank."""

    @property
    def text(self) -> str:
        """Sentence of the run on the interval: the most that one fault costs."""
        every, most = self.every_steps, self.every_steps + 1
        steps = "each step" if every == 1 else f"every {every} steps"
        text = (
            f"the state of a rank ({bytes_text(self.state_bytes)}) is copied in memory {steps}: "
            f"a rank that is lost costs {most} steps ({seconds_text(most * self.step_s)}) at most"
        )
        if self.stored_steps is None:
            return text
        return (
            f"{text}, a lost node {most + self.stored_steps}, and one that stands still those of "
            f"{GIVEN_UP_S:g} s more"
        )


class Incident(_Event):
    """Fault, or announcement of one."""

    event: Literal["incident"] = "incident"
    cause: Cause
    """Cause of the incident."""
    rank: Count | None = None
    """Rank of the incident; None: not known, or none."""
    node: Count | None = None
    """Node of the incident; None: not known, or none."""
    after_step: Count = 0
    """Last step before the incident."""
    evidence: Text
    """Evidence for the cause, in words."""


class Drift(_Event):
    """Change of a run's pace away from its prediction or back, or of a rank that fell behind."""

    event: Literal["drift"] = "drift"
    cause: Text
    """Part of a step with the largest miss."""
    rank: Count | None = None
    """Rank that fell behind; None: all ranks."""
    stage: Count | None = None
    """Pipeline stage of that rank."""
    after_step: Count = 0
    """Last step before the change."""
    measured_s: Amount
    """Measured seconds."""
    predicted_s: Amount
    """Predicted seconds; for a straggler, the seconds that its peers take."""
    text: Text
    """Sentence of the report."""


class RankPart(Part):
    """Mean seconds of a rank's step and of its parts."""

    rank: Count
    """Number of the rank."""
    stage: Count = 0
    """Pipeline stage of the rank."""
    data_s: Amount
    """Seconds of reading the rank's batch."""
    work_s: Amount | None = None
    """Seconds of the rank's own work; None where they are not separated from waiting for others."""
    step_s: Amount
    """Seconds of the step."""


class Paced(_Event):
    """Seconds of the slowest ranks of a node, averaged over some steps."""

    event: Literal["paced"] = "paced"
    after_step: Count
    """Last step of the average."""
    ranks: tuple[RankPart, ...]
    """Ranks with their seconds, the slowest first."""


class Decision(_Event):
    """Reaction that was chosen, and the reason."""

    event: Literal["decision"] = "decision"
    reaction: Reaction
    """Reaction that was chosen."""
    why: Text
    """Reason for the reaction."""
    predicted_s: Amount | None = None
    """Predicted seconds until training goes on."""
    every_steps: Positive | None = None
    """Steps between checkpoints from here on."""
    devices: Positive | None = None
    """Number of devices from here on."""
    plan: Text | None = None
    """Digest of the plan from here on."""
    plan_source: PlanSource | None = None
    """Origin of that plan."""


class AttemptEnded(_Event):
    """Regular end of an attempt."""

    event: Literal["ended"] = "ended"
    stopped: Text
    """Reason of the end."""
    after_step: Count
    """Last step of the attempt."""


Event = Annotated[
    Expected
    | Attempt
    | StepDone
    | PhaseDone
    | Saved
    | SaveFailed
    | CopyInterval
    | Incident
    | Drift
    | Paced
    | Decision
    | AttemptEnded,
    Field(discriminator="event"),
]
_EVENT: TypeAdapter[Event] = TypeAdapter(Event)


def events_of(lines: Iterable[bytes]) -> Iterator[Event]:
    """Yield the events of a file's lines; a line that is none, or was cut off, is left out.

    >>> line = b'{"event": "ended", "at_unix_s": 1.0, "stopped": "steps", "after_step": 3}'
    >>> [event.event for event in events_of([b"{", line, b'{"event": "ended"}'])]
    ['ended']
    """
    for line in lines:
        if len(line) <= LONGEST_EVENT_BYTES:
            try:
                yield _EVENT.validate_json(line)
            except ValueError:
                continue
