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
    "corruption",
    "transient",
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
    loss: float
    grad_norm: float
    step_s: Amount
    tokens_per_s: Amount | None = None
    samples_per_s: Amount | None = None
    """Samples per second of a script whose samples need not have tokens."""
    epoch: Count
    learning_rate: Amount | None = None
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


class Attempt(_Event):
    """Start of an attempt: its ranks are about to start."""

    event: Literal["attempt"] = "attempt"
    plan: Text
    """Digest of the plan."""
    devices: Positive
    after_step: Count = 0
    """Number of the step after which the attempt continues."""
    predicted_step_s: Amount | None = None


class Expected(_Event):
    """Predicted wall clock of a run by part, made before its first attempt."""

    event: Literal["expected"] = "expected"
    seconds: dict[Text, Amount]
    """Seconds by part; their sum is the wall clock."""
    failures: Amount
    goodput: Proportion
    goodput_low: Proportion
    goodput_high: Proportion

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
    predicted_s: Amount | None = None


class PhaseDone(_Event):
    """Completion of a phase other than steps."""

    event: Literal["phase"] = "phase"
    phase: Phase
    measured_s: Amount
    predicted_s: Amount | None = None


class Saved(_Event):
    """Completion of a checkpoint."""

    event: Literal["saved"] = "saved"
    step: Count
    blocked_s: Amount
    """Seconds that training waited for the checkpoint."""
    written_s: Amount
    """Seconds from the begin of the checkpoint until it was valid."""
    predicted_blocked_s: Amount | None = None
    predicted_written_s: Amount | None = None


class SaveFailed(_Event):
    """Failure to write a checkpoint; training goes on, and the next save tries again."""

    event: Literal["save_failed"] = "save_failed"
    step: Count
    why: Text

    @property
    def text(self) -> str:
        """Sentence of the report on the failed save."""
        return (
            f"the state after step {self.step} is not saved: {self.why}; training goes on, and the "
            "next save tries again"
        )


class CopyInterval(_Event):
    """Interval, valid from now on, at which ranks copy their state to memory that outlives them."""

    event: Literal["copies"] = "copies"
    every_steps: Positive
    step_s: Amount
    state_bytes: Count
    """Bytes of the state of one rank."""

    @property
    def text(self) -> str:
        """Sentence of the run on the interval: the most that the loss of a rank costs."""
        every, most = self.every_steps, self.every_steps + 1
        steps = "each step" if every == 1 else f"every {every} steps"
        return (
            f"the state of a rank ({bytes_text(self.state_bytes)}) is copied in memory {steps}: "
            f"a rank that is lost costs {most} steps ({seconds_text(most * self.step_s)}) at most"
        )


class Incident(_Event):
    """Fault, or announcement of one."""

    event: Literal["incident"] = "incident"
    cause: Cause
    rank: Count | None = None
    node: Count | None = None
    after_step: Count = 0
    evidence: Text


class Drift(_Event):
    """Change of a run's pace away from its prediction or back, or of a rank that fell behind."""

    event: Literal["drift"] = "drift"
    cause: Text
    """Part of a step with the largest miss."""
    rank: Count | None = None
    stage: Count | None = None
    after_step: Count = 0
    measured_s: Amount
    predicted_s: Amount
    """Predicted seconds; for a straggler, the seconds that its peers take."""
    text: Text


class RankPart(Part):
    """Mean seconds of a rank's step and of its parts."""

    rank: Count
    stage: Count = 0
    data_s: Amount
    """Seconds of reading the rank's batch."""
    work_s: Amount | None = None
    """Seconds of the rank's own work; None where they are not separated from waiting for others."""
    step_s: Amount


class Paced(_Event):
    """Seconds of the slowest ranks of a node, averaged over some steps."""

    event: Literal["paced"] = "paced"
    after_step: Count
    ranks: tuple[RankPart, ...]
    """Ranks with their seconds, the slowest first."""


class Decision(_Event):
    """Reaction that was chosen, and the reason."""

    event: Literal["decision"] = "decision"
    reaction: Reaction
    why: Text
    predicted_s: Amount | None = None
    """Predicted seconds until training goes on."""
    every_steps: Positive | None = None
    """Steps between checkpoints from here on."""
    devices: Positive | None = None
    plan: Text | None = None
    plan_source: PlanSource | None = None


class AttemptEnded(_Event):
    """Regular end of an attempt."""

    event: Literal["ended"] = "ended"
    stopped: Text
    after_step: Count


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
