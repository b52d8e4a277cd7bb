"""Events of a run: steps, phases, saves, incidents and decisions, each a line of events.jsonl.

The file is the one record of a run.  Every attempt adds to it and none takes from it: a step that
is done again stands there twice, so that what failures cost can be read from it
(`planner.whatif.pricing.survival`).  metrics.jsonl, TensorBoard and Weights & Biases are readers of
it. Seconds that were predicted stand beside those that were measured.
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
"""What a run does beside its steps."""
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
"""What ended an attempt, as far as it is known."""
PlanSource = Literal["given", "book", "solved"]
"""Where a plan comes from: the run was started with it, it was solved while the run trained, or
when it was wanted."""
Reaction = Literal["interval", "restart", "replan", "spare", "shrink", "grow", "hand_over", "stop"]


class StepRecord(Part):
    """What a step was; one line of metrics.jsonl."""

    step: Positive
    loss: float
    grad_norm: float
    step_s: Amount
    tokens_per_s: Amount | None = None
    samples_per_s: Amount | None = None
    """Of a script, whose samples need not have tokens."""
    epoch: Count
    learning_rate: Amount | None = None
    mfu: Amount | None = None
    """Of this step: the model's FLOPs per second over the devices' peak."""
    eval_loss: float | None = None
    """On the held-out corpus, after the step."""
    peak_memory_bytes: Count | None = None
    """Of rank 0 so far, where the device counts it."""
    expert_load: float | None = None
    """Tokens of the busiest expert over the mean, averaged over layers."""


class _Event(Part):
    at_unix_s: Amount


class Attempt(_Event):
    """Ranks are about to start."""

    event: Literal["attempt"] = "attempt"
    plan: Text
    """Its digest."""
    devices: Positive
    after_step: Count = 0
    """The step that it goes on from."""
    predicted_step_s: Amount | None = None


class Expected(_Event):
    """Where the seconds of a run should go, as predicted before its first attempt."""

    event: Literal["expected"] = "expected"
    seconds: dict[Text, Amount]
    """By part; they add up to its wall clock."""
    failures: Amount
    goodput: Proportion
    goodput_low: Proportion
    goodput_high: Proportion

    @property
    def is_of_training(self) -> bool:
        """Whether the goodput is more than a guess of how long ranks take to start.

        Of a run that trains for less than ten times its start it is not: nobody knows that before.
        """
        return self.seconds.get("steps", 0.0) > START_TIMES * self.seconds.get("start", 0.0)


class StepDone(_Event):
    """A step was done."""

    event: Literal["step"] = "step"
    record: StepRecord
    predicted_s: Amount | None = None


class PhaseDone(_Event):
    """Something beside steps was done."""

    event: Literal["phase"] = "phase"
    phase: Phase
    measured_s: Amount
    predicted_s: Amount | None = None


class Saved(_Event):
    """A checkpoint was written."""

    event: Literal["saved"] = "saved"
    step: Count
    blocked_s: Amount
    """That training waited for it."""
    written_s: Amount
    """From its begin until it counted."""
    predicted_blocked_s: Amount | None = None
    predicted_written_s: Amount | None = None


class SaveFailed(_Event):
    """A checkpoint could not be written; training goes on, and the next save tries again."""

    event: Literal["save_failed"] = "save_failed"
    step: Count
    why: Text

    @property
    def text(self) -> str:
        """What a report says of it."""
        return (
            f"the state after step {self.step} is not saved: {self.why}; training goes on, and the "
            "next save tries again"
        )


class CopyInterval(_Event):
    """How often ranks copy their state to memory that outlives them, from now on."""

    event: Literal["copies"] = "copies"
    every_steps: Positive
    step_s: Amount
    state_bytes: Count
    """Of one rank."""

    @property
    def text(self) -> str:
        """What a run says of it: the most that the loss of a rank costs."""
        every, most = self.every_steps, self.every_steps + 1
        steps = "each step" if every == 1 else f"every {every} steps"
        return (
            f"the state of a rank ({bytes_text(self.state_bytes)}) is copied in memory {steps}: "
            f"a rank that is lost costs {most} steps ({seconds_text(most * self.step_s)}) at most"
        )


class Incident(_Event):
    """Something went wrong, or was announced."""

    event: Literal["incident"] = "incident"
    cause: Cause
    rank: Count | None = None
    node: Count | None = None
    after_step: Count = 0
    evidence: Text


class Drift(_Event):
    """The pace of a run left its prediction or came back, or one rank fell behind."""

    event: Literal["drift"] = "drift"
    cause: Text
    """The part of a step with the largest miss."""
    rank: Count | None = None
    stage: Count | None = None
    after_step: Count = 0
    measured_s: Amount
    predicted_s: Amount
    """Of a straggler what its peers take."""
    text: Text


class RankPart(Part):
    """What a step of a rank takes on average."""

    rank: Count
    stage: Count = 0
    data_s: Amount
    """Reading its batch."""
    work_s: Amount | None = None
    """Of its own; None where waiting for others is not distinguished from it."""
    step_s: Amount


class Paced(_Event):
    """What the slowest ranks of a node took, over some steps."""

    event: Literal["paced"] = "paced"
    after_step: Count
    ranks: tuple[RankPart, ...]
    """The slowest first."""


class Decision(_Event):
    """What is done next."""

    event: Literal["decision"] = "decision"
    reaction: Reaction
    why: Text
    predicted_s: Amount | None = None
    """Until training goes on."""
    every_steps: Positive | None = None
    """Between checkpoints from here on."""
    devices: Positive | None = None
    plan: Text | None = None
    plan_source: PlanSource | None = None


class AttemptEnded(_Event):
    """Ranks have ended, as they should."""

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
