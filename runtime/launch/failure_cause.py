"""Cause of a rank's end: a lost device, a hang, or its program; recognised by its traces.

Only evidence of the hardware counts for a lost device: errors that the driver reports as such, Xid
numbers of the hardware, or SIGKILL, with which a driver ends the users of a device that is gone.  A
time-out of NCCL ends a rank by SIGABRT and is a hang; a failed assertion of a kernel or an access
out of bounds is the program's.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.planner.documents.document import MAX_BYTES, read_bytes
from meshwright.runtime.launch.hardware_errors import hardware_error
from meshwright.runtime.run.run_folder import Failure

_ASSERTION = "device-side assert"
_TIMED_OUT = re.compile(
    r"Rank (?P<rank>\d+)\] Watchdog caught collective operation timeout: WorkNCCL\(SeqNum="
    r"(?P<number>\d+), OpType=(?P<operation>\w+).*?ran for (?P<ms>\d+) milliseconds"
)
_GROUP = re.compile(r"\[PG ID (?P<group>\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """A collective that a rank waited for until NCCL's watchdog ended it."""

    rank: int
    operation: str
    number: int
    """Number of the collective among those of its process group, in order."""
    waited_s: float
    group: str = "0"

    @property
    def text(self) -> str:
        """The hang as a report states it.

        >>> Hang(rank=3, operation="ALLREDUCE", number=17, waited_s=600.0).text
        'rank 3 waited 600 s in collective 17 of its group (ALLREDUCE)'
        """
        return (
            f"rank {self.rank} waited {self.waited_s:g} s in collective {self.number} of its group "
            f"({self.operation})"
        )


def how(code: int, failure: Failure | None) -> str:
    """Return how a rank ended, from its exit code, or minus a signal, and its own words.

    >>> how(-9, None), how(3, None)
    ('was killed by SIGKILL (as the system does when host memory runs out)', 'exited with code 3')
    """
    if failure is not None and failure.kind == "OutOfMemoryError":
        return "ran out of device memory (plan again with less memory per device)"
    if failure is not None and assertion(failure):
        return "stopped at a kernel's own check (an index out of range, as of a token or a target)"
    if failure is not None:
        first = (failure.message.splitlines() or [""])[0]
        return f"stopped with {failure.kind}: {first[:300]}"
    if code >= 0:
        return f"exited with code {code}" + " before its work was done" * (code == 0)
    killed = f"was killed by {signal.Signals(-code).name}"
    if -code == signal.SIGKILL:
        return f"{killed} (as the system does when host memory runs out)"
    return killed


def device_lost(code: int, failure: Failure | None, log: str) -> bool:
    """Tell whether a rank's device is gone, from its exit code, its own words and its log."""
    text = f"{failure.message if failure else ''}\n{log}"
    if _ASSERTION in text:
        return False
    return names_hardware(text) or (failure is None and code == -9)


def names_hardware(words: str) -> bool:
    """Tell whether a driver's words name the hardware as what failed.

    >>> names_hardware("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus")
    True
    """
    error = hardware_error(words)
    return error is not None and error.part == "device"


def assertion(failure: Failure) -> bool:
    """Tell whether a kernel's own check failed: an index out of range, most of all."""
    return _ASSERTION in failure.message


def hang(log: str) -> Hang | None:
    """Return the first collective that a log says a rank waited for in vain.

    >>> found = hang("[PG ID 0 PG GUID 0(default_pg) Rank 1] Watchdog caught collective operation "
    ...     "timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
    ...     "Timeout(ms)=10000) ran for 10007 milliseconds before timing out.")
    >>> found.rank, found.number, found.operation
    (1, 7, 'ALLREDUCE')
    """
    for line in log.splitlines():
        seen = _TIMED_OUT.search(line)
        if seen is not None:
            group = _GROUP.search(line)
            return Hang(
                rank=int(seen["rank"]),
                operation=seen["operation"],
                number=int(seen["number"]),
                waited_s=int(seen["ms"]) / 1e3,
                group=group["group"] if group else "0",
            )
    return None


def recorder(folder: Path) -> dict[str, str]:
    """Return the environment in which NCCL writes down every rank's last collectives on a hang."""
    prefix = str(folder / "flight" / "rank-")
    return {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",  # the older name
        "TORCH_FR_DUMP_TEMP_FILE": prefix,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": prefix,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }


def fewest_collectives(folder: Path, group: str) -> dict[int, int]:
    """Return how many collectives of a group each rank began that began the fewest.

    Read from the flight recorder's files; empty where there are none, or all began as many.
    """
    begun = {}
    for file in sorted((folder / "flight").glob("rank-*")):
        number = file.name.removeprefix("rank-")
        with contextlib.suppress(Exception):  # a file that is no record says nothing
            data = read_bytes(file, most=MAX_BYTES)
            status: Mapping[str, Any] = _unpickle_record(data)["pg_status"]
            begun[int(number)] = int(status[group]["last_enqueued_collective"])
    if len(set(begun.values())) < 2:
        return {}
    least = min(begun.values())
    return {rank: count for rank, count in begun.items() if count == least}


class _PlainUnpickler(pickle.Unpickler):
    """Reads plain data; what a recorder writes names lists by their type, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch.jit._pickle" and name.startswith("build_"):
            return list
        raise pickle.UnpicklingError(f"names {module}.{name}")


def _unpickle_record(data: bytes) -> dict[str, Any]:

    data_read = _PlainUnpickler(io.BytesIO(data)).load()
    if not isinstance(data_read, dict):
        raise ValueError("is not a record")
    return data_read
