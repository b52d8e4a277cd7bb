"""Transient errors: those of devices, files and links that another attempt may not meet.

Whether they do is not known before: an access out of bounds is a program's error most of the time,
and a stale handle of a file server's passes.  So what failed is tested first, a device by products
of known value and a folder by a file that is written and read, and ranks start again a bounded
number of times (`runtime.run.recovery_policy`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from meshwright.planner.errors import MeshwrightError
from meshwright.planner.system.safe_files import open_below
from meshwright.runtime.run.run_folder import Failure

_OF_FILES = re.compile(r"\[Errno (\d+)\]")
_ERRNOS = frozenset(
    {
        errno.EIO,
        errno.EAGAIN,
        errno.EINTR,
        errno.EBUSY,
        errno.ESTALE,
        errno.EREMOTEIO,
        errno.ETIMEDOUT,
        errno.ENOBUFS,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENETRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ECONNABORTED,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
    }
)
_OF_DEVICES = (
    "an illegal memory access",
    "an illegal instruction",
    "misaligned address",
    "unspecified launch failure",
    "the launch timed out",
    "CUDA error: unknown error",
    "CUBLAS_STATUS_EXECUTION_FAILED",
    "CUBLAS_STATUS_INTERNAL_ERROR",
    "CUBLAS_STATUS_MAPPING_ERROR",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_EXECUTION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR",
    "HIP error: unspecified launch failure",
    "HIP error: an illegal memory access",
    "HIPBLAS_STATUS_INTERNAL_ERROR",
    "HIPBLAS_STATUS_EXECUTION_FAILED",
)
_OF_LINKS = (
    "ncclSystemError",
    "ncclInternalError",
    "ncclRemoteError",
    "ncclUnhandledCudaError",
    "unhandled system error",
    "unhandled cuda error",
    "IBV_WC_RETRY_EXC_ERR",
    "transport retry counter exceeded",
)
TEST_S = 120.0
"""Seconds that a device has for its test."""
WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Between tries of a folder that gives errors."""
_DEVICE_TEST = """
import sys
import torch
device = torch.device("cuda", int(sys.argv[1]))
free, _ = torch.cuda.mem_get_info(device)
pattern = torch.arange(2**20, dtype=torch.int64, device=device)
held = [pattern * 0x9E3779B1 + block for block in range(min(1024, free // 4 // pattern.nbytes))]
product = torch.eye(2048, device=device, dtype=torch.float64) * 3
for _ in range(20):
    result = product @ product
torch.cuda.synchronize(device)
right = bool((result == torch.eye(2048, device=device, dtype=torch.float64) * 9).all())
right &= all(bool((b == pattern * 0x9E3779B1 + n).all()) for n, b in enumerate(held))
sys.exit(0 if right else 3)
"""


def is_of_device(failure: Failure) -> bool:
    """Say whether a rank's last words are of an error of its device that may pass."""
    return any(sign in failure.message for sign in _OF_DEVICES)


def is_transient(failure: Failure) -> bool:
    """Say whether another attempt may not meet what a rank says that ended it.

    >>> stale = Failure(rank=0, kind="OSError", message="[Errno 116] Stale file handle: '/data'",
    ...     at_unix_s=0.0)
    >>> is_transient(stale), is_transient(stale.model_copy(update={"message": "a shape"}))
    (True, False)
    """
    number = _OF_FILES.match(failure.message)
    of_files = number is not None and int(number[1]) in _ERRNOS
    return of_files or is_of_device(failure) or any(sign in failure.message for sign in _OF_LINKS)


def device_problem(local_rank: int, *, environment: dict[str, str] | None = None) -> str | None:
    """Test a CUDA device in a process of its own; return what is wrong with it."""
    try:
        tested = subprocess.run(
            [sys.executable, "-c", _DEVICE_TEST, str(local_rank)],
            env={**os.environ, **(environment or {})},
            timeout=TEST_S,
            capture_output=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it did not answer a test within {TEST_S:g} s"
    if tested.returncode == 3:
        return "its results in a test were wrong"
    if tested.returncode != 0:
        last = tested.stderr.decode(errors="replace").strip().splitlines()[-1:] or [""]
        return f"it failed a test: {last[0][:300]}"
    return None


def folder_problem(folder: Path, *, wait: Callable[[float], object] = time.sleep) -> str | None:
    """Write and read a file in a folder until that succeeds; return what is wrong at the end."""
    problem = ""
    for wait_s in (*WAITS_S, None):
        test = folder / f".test-{os.getpid()}"
        try:
            with open_below(test, within=folder) as file:
                file.write(b"test")
                file.flush()
                os.fsync(file.fileno())
            if test.read_bytes() == b"test":
                return None
            problem = "what is read is not what was written"
        except (OSError, MeshwrightError) as error:
            problem = str(error)
        finally:
            with contextlib.suppress(OSError):
                test.unlink()
        if wait_s is not None:
            wait(wait_s)
    return problem
