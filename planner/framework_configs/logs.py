"""Step times and memory as other frameworks print them while they train.

Each reader goes through the lines of a log and yields the figures of each: the seconds of a step,
or the most that a device's allocator had, in bytes.  Formats are those of the frameworks' own code:
Megatron-LM's training.py and its report of memory, torchtitan's metrics, DeepSpeed's
ThroughputTimer, and the logs of transformers' Trainer, which accelerate's users print.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from meshwright.planner.documents.plan import Job
from meshwright.planner.documents.units import GIB

MIB = 1 << 20
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = r"([0-9][0-9,]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)"
_BAR = re.compile(
    rf"(?:\]:\s*|^|\s)([A-Za-z][^%|]*:)?\s*\d+%\|[^|]*\|\s*(\d+)/(\d+) "
    rf"\[[^\]]*,\s*{_NUMBER}(s/it|it/s)"
)
"""A bar of tqdm: its name, steps done and to do, and the rate."""
_OF_STEPS = re.compile(r"\b(?:step|train|epoch|iter)", re.IGNORECASE)
"""Words in the names of progress bars that count training steps."""
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|(?:CUDA|HIP)(?: error:)? out of memory|ran out of device memory"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """Figures in a line of a log."""

    step_s: float | None = None
    steps: int = 1
    """Number of steps whose mean `step_s` is."""
    peak_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedWork:
    """Work of a step, by which rates are converted into seconds."""

    job: Job
    devices: int


Reader = Callable[[Iterable[str], LoggedWork], Iterator[Said]]


def megatron(lines: Iterable[str], work: LoggedWork) -> Iterator[Said]:
    """Read Megatron-LM's log; each line is the mean of the steps since the last one.

    >>> from meshwright.planner.documents.plan import Job
    >>> work = LoggedWork(job=Job(seq_len=4096, global_batch=16), devices=8)
    >>> next(megatron([" iteration  20/ 50 | elapsed time per iteration (ms): 512.5 |"], work))
    Said(step_s=0.5125, steps=1, peak_bytes=None)
    """
    before = 0
    for line in lines:
        if seen := re.search(rf"elapsed time per iteration \(ms\):\s*{_NUMBER}", line):
            at = re.search(r"\biteration\s+(\d+)\s*/", line)
            now = int(at[1]) if at else before + 1
            if now <= before:  # written to two places that are one file
                continue
            yield Said(step_s=_number(seen[1]) / 1e3, steps=now - before if before else 1)
            before = now
        elif seen := re.search(rf"memory \(MB\) \|.*max reserved:\s*{_NUMBER}", line):
            yield Said(peak_bytes=_number(seen[1]) * MIB)


def torchtitan(lines: Iterable[str], work: LoggedWork) -> Iterator[Said]:
    """Read torchtitan's log: `tps` are tokens per second and device.

    >>> from meshwright.planner.documents.plan import Job
    >>> work = LoggedWork(job=Job(seq_len=8192, global_batch=8), devices=8)
    >>> line = "[titan] - INFO - step: 10  loss:  7.1  memory: 40.00GiB(50.5%)  tps: 8,192"
    >>> [said] = torchtitan([line], work)
    >>> said.step_s, said.peak_bytes == 40 * 2**30
    (1.0, True)
    """
    before = 0
    for line in lines:
        text = _COLOUR.sub("", line)
        at = re.search(r"\bstep:\s*(\d+)\b", text)
        rate = re.search(rf"\btps:\s*{_NUMBER}", text)
        if at is None or rate is None or not _number(rate[1]):
            continue
        memory = re.search(rf"\bmemory:\s*{_NUMBER}GiB", text)
        tokens = work.job.seq_len * work.job.global_batch / work.devices
        now = int(at[1])
        if now <= before:  # another rank's line of the same step
            continue
        yield Said(
            step_s=tokens / _number(rate[1]),
            steps=now - before if before else 1,
            peak_bytes=_number(memory[1]) * GIB if memory else None,
        )
        before = now


def deepspeed_throughput(lines: Iterable[str], work: LoggedWork) -> Iterator[Said]:
    """Read DeepSpeed's log: samples per second of the whole job, of the newest step.

    Releases before 0.8 count steps as `0/40`, and those before 0.7 report the mean rate alone.

    >>> from meshwright.planner.documents.plan import Job
    >>> work = LoggedWork(job=Job(seq_len=2048, global_batch=64), devices=8)
    >>> line = ("epoch=0/micro_step=40/global_step=10, RunningAvgSamplesPerSec=31.0, "
    ...         "CurrSamplesPerSec=32.0, MemAllocated=4.32GB, MaxMemAllocated=38.5GB")
    >>> next(deepspeed_throughput([line], work)).step_s
    2.0
    """
    before = 0
    for line in lines:
        rate = re.search(rf"\b(?:Curr)?SamplesPerSec={_NUMBER}", line)
        if rate is None or not _number(rate[1]):
            continue
        memory = re.search(rf"MaxMemAllocated={_NUMBER}\s*GB", line)
        at = re.search(r"global_step=(\d+)|\b\d+/(\d+),", line)
        now = int(at[1] or at[2]) if at else before + 1
        if now <= before:
            continue
        yield Said(
            step_s=work.job.global_batch / _number(rate[1]),
            steps=now - before if before else 1,
            peak_bytes=_number(memory[1]) * GIB if memory else None,
        )
        before = now


def accelerate(lines: Iterable[str], work: LoggedWork) -> Iterator[Said]:
    """Read the output of transformers' Trainer: its bar of progress, and its metrics at the end.

    Bars of what comes before (`Loading checkpoint shards`) are named, and the bar of an evaluation
    has another length.

    >>> from meshwright.planner.documents.plan import Job
    >>> work = LoggedWork(job=Job(seq_len=2048, global_batch=64), devices=8)
    >>> [said.step_s for said in accelerate([" 40%|####  | 4/10 [00:08<00:12,  2.00s/it]"], work)]
    [2.0]
    """
    done, length = 0, None
    for line in lines:
        for piece in line.split("\r"):
            if seen := _BAR.search(piece):
                count, rate, named = int(seen[2]), _number(seen[4]), seen[1]
                if named and not _OF_STEPS.search(named):
                    continue
                if length is None:
                    length = seen[3]
                if seen[3] != length:
                    continue
                if count > done and rate:
                    step_s = rate if seen[5] == "s/it" else 1 / rate
                    yield Said(step_s=step_s, steps=count - done)
                done = max(done, count)
            elif (seen := re.search(rf"'train_steps_per_second': '?{_NUMBER}", piece)) and _number(
                seen[1]
            ):
                yield Said(step_s=1 / _number(seen[1]), steps=max(1, done))


def _measured(reader: Reader) -> Reader:
    """Return a reader that leaves out seconds and bytes that no clock or allocator gives."""

    def read(lines: Iterable[str], work: LoggedWork) -> Iterator[Said]:
        for step in reader(lines, work):
            figures = [figure for figure in (step.step_s, step.peak_bytes) if figure is not None]
            if all(0 < figure < math.inf for figure in figures):
                yield step

    return read


READERS: dict[str, Reader] = {
    "megatron": _measured(megatron),
    "megatron-deepspeed": _measured(megatron),
    "torchtitan": _measured(torchtitan),
    "deepspeed": _measured(deepspeed_throughput),
    "accelerate": _measured(accelerate),
    "fsdp": _measured(accelerate),
}
"""Readers of logs by the base of a plan's framework."""


def out_of_memory(text: str) -> bool:
    """Return True if a log reports that device memory was not enough.

    >>> out_of_memory("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    True
    """
    return _OUT_OF_MEMORY.search(text) is not None


def _number(text: str) -> float:
    return float(text.replace(",", ""))
