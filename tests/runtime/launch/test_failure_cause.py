"""Why a rank ended, from what NCCL, CUDA and the driver really write."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshwright.planner.documents.document import json_line
from meshwright.planner.documents.events import Attempt
from meshwright.planner.documents.prediction import StagePrediction
from meshwright.planner.documents.units import GIB
from meshwright.runtime.launch import failure_cause as faults
from meshwright.runtime.launch import failure_report as bad_ends
from meshwright.runtime.launch.hardware_errors import hardware_error
from meshwright.runtime.launch.host_memory_limits import killed_for_memory, most_bytes
from meshwright.runtime.launch.rank_processes import BadEnd, Exit
from meshwright.runtime.launch.transient_errors import WAITS_S, folder_problem
from meshwright.runtime.resilience.heartbeat import stack_file
from meshwright.runtime.run.launch_options import LaunchRun
from meshwright.runtime.run.recovery_policy import RankEnd, verdict
from meshwright.runtime.run.run_folder import Failure, events_file, evidence_folder, log_file
from tests.runtime.rooms import plan_of

WATCHDOG = (
    "[rank3]:[E1018 09:01:57.220 ProcessGroupNCCL.cpp:685] [PG ID 2 PG GUID 5(mesh_tensor) Rank 3] "
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=17, OpType=ALLREDUCE, "
    "NumelIn=8192, NumelOut=8192, Timeout(ms)=600000) ran for 600029 milliseconds before timing "
    "out.\nterminate called after throwing an instance of 'c10::DistBackendError'\n"
)


def failure(message: str, kind: str = "AcceleratorError") -> Failure:
    return Failure(rank=0, kind=kind, message=message, at_unix_s=1.0)


@pytest.mark.parametrize(
    ("code", "said", "log"),
    [
        (1, "CUDA error: uncorrectable ECC error encountered", ""),
        (1, "CUDA error: unknown error", "NVRM: Xid (PCI:0000:3b:00): 79, GPU has gone"),
        (1, "CUDA error: unspecified launch failure", "Xid (PCI:0000:3b:00): 48, DBE"),
        (1, "CUDA error: CUDA-capable device(s) is/are busy or unavailable", ""),
        (-signal.SIGKILL, None, ""),
    ],
)
def test_hardware_that_fails_is_a_lost_device(code: int, said: str | None, log: str) -> None:
    assert faults.device_lost(code, failure(said) if said else None, log)


@pytest.mark.parametrize(
    ("code", "said", "log"),
    [
        (1, "CUDA error: device-side assert triggered", "Xid (PCI:0000:3b:00): 43"),
        (1, "CUDA error: an illegal memory access was encountered", "Xid (PCI:0000:3b): 31, pid"),
        (1, "CUDA error: invalid configuration argument", ""),
        (-signal.SIGABRT, None, WATCHDOG),
        (-signal.SIGSEGV, None, "Fatal Python error: Segmentation fault"),
        (1, None, ""),
    ],
)
def test_a_hang_and_a_wrong_program_lose_no_device(code: int, said: str | None, log: str) -> None:
    assert not faults.device_lost(code, failure(said) if said else None, log)


def ended(tmp_path: Path, *, code: int, log: str, said: Failure | None = None) -> Exception:
    file = log_file(tmp_path, 3)
    file.parent.mkdir(parents=True)
    file.write_text(log)
    ready: Any = SimpleNamespace(
        output=tmp_path,
        run=LaunchRun(),
        ranks=SimpleNamespace(devices={3: 1}, device="cpu"),
        resumed=None,
    )
    cause = Exit(rank=3, code=code)
    return bad_ends.bad_end(ready, BadEnd(seen=(cause,), cause=cause, failure=said), after_step=5)


def test_a_hang_is_told_with_rank_collective_and_who_is_behind(tmp_path: Path) -> None:
    (tmp_path / "flight").mkdir()
    for rank, begun in ((2, 17), (3, 17), (5, 16)):
        record = {"pg_status": {"2": {"last_enqueued_collective": begun}}, "entries": []}
        (tmp_path / "flight" / f"rank-{rank}").write_bytes(pickle.dumps(record, protocol=2))
    (tmp_path / "flight" / "rank-7").write_bytes(pickle.dumps(Path("x")))  # names a class

    error = ended(tmp_path, code=-signal.SIGABRT, log=WATCHDOG)

    assert type(error) is bad_ends.RanksHang  # no device is taken out
    assert str(error).startswith(
        "rank 3 waited 600.029 s in collective 17 of its group (ALLREDUCE) after step 5; "
        "rank 5 began 16; nothing was saved"
    )


def test_a_kernels_own_check_is_told_as_the_programs(tmp_path: Path) -> None:
    error = ended(
        tmp_path, code=1, log="", said=failure("CUDA error: device-side assert triggered\nmore")
    )

    assert type(error) is bad_ends.RunEnded
    assert "rank 3 stopped at a kernel's own check (an index out of range" in str(error)


def test_a_lost_device_names_its_place(tmp_path: Path) -> None:
    said = failure("CUDA error: uncorrectable ECC error encountered")

    error = ended(tmp_path, code=1, log="", said=said)

    assert isinstance(error, bad_ends.RankLost)
    assert cast(Any, error).local_rank == 1


def test_every_rank_writes_down_its_collectives(tmp_path: Path) -> None:
    environment = faults.recorder(tmp_path)

    assert environment["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "flight" / "rank-")
    assert int(environment["TORCH_FR_BUFFER_SIZE"]) > 0
    assert faults.fewest_collectives(tmp_path, "0") == {}


def of_memory(tmp_path: Path, *, code: int, said: Failure | None, **known: Any) -> Exception:
    """Return how a rank of stage 1 of 2 ended, of which 6 GiB were predicted."""
    file = log_file(tmp_path, 1)
    file.parent.mkdir(parents=True)
    file.write_text("")
    stages = [
        StagePrediction(
            forward_s=1.0,
            backward_s=1.0,
            peak_memory_bytes=peak,
            memory_capacity_bytes=8 * GIB,
            memory_parts={"parameters": peak / 2, "activations": peak / 2, "transient": 0.0},
        )
        for peak in (2 * GIB, 6 * GIB)
    ]
    prediction: Any = SimpleNamespace(stages=stages)
    ready: Any = SimpleNamespace(
        output=tmp_path,
        run=LaunchRun(),
        ranks=SimpleNamespace(devices={0: 0, 1: 1}, device=known.pop("device", "cuda")),
        plan=plan_of(pipeline=2),
        resumed=None,
    )
    cause = Exit(rank=1, code=code)
    memory = bad_ends.MemoryUse(prediction=prediction, **known)
    bad = BadEnd(seen=(cause,), cause=cause, failure=said)
    return bad_ends.bad_end(ready, bad, after_step=5, memory=memory)


def test_out_of_memory_is_told_by_kind_beside_what_was_predicted(tmp_path: Path) -> None:
    said = Failure(
        rank=1,
        kind="OutOfMemoryError",
        message="CUDA out of memory",
        at_unix_s=1.0,
        held={"parameters": 3 * GIB, "gradients": 0},
        needed_bytes=9 * GIB,
    )

    error = of_memory(tmp_path, code=1, said=said)

    assert isinstance(error, bad_ends.RankFailed)
    assert error.end == RankEnd(cause="out_of_memory", rank=1, after_step=5, needed=1.5)
    assert error.lead == (
        "rank 1 ran out of device memory (plan again with less memory per device) after step 5; "
        "held: parameters 3.0 GiB; needed 9.0 GiB at least; predicted: parameters 3.0 GiB, "
        "activations 3.0 GiB, 6.0 GiB in all"
    )


def test_a_kill_is_one_for_memory_where_the_system_counts_it(tmp_path: Path) -> None:
    code = -signal.SIGKILL
    own = of_memory(tmp_path / "a", code=code, said=None, killed=True, device="cpu", most_bytes=1)
    host = of_memory(tmp_path / "b", code=code, said=None, killed=True, most_bytes=7)
    other = of_memory(tmp_path / "c", code=code, said=None, killed=False)

    ends = [cast(bad_ends.RankFailed, error).end for error in (own, host, other)]
    assert [end and (end.cause, end.needed, end.on_host) for end in ends] == [
        ("out_of_memory", 1.0, False),
        ("out_of_memory", None, True),
        ("crash", None, False),
    ]


@pytest.mark.parametrize(
    ("groups", "file"),
    [
        ("0::/job/step", "job/step/memory.events"),
        ("4:memory:/job\n0::/", "memory/job/memory.oom_control"),
        ("9:cpu:/x\n4:hugetlb,memory:/job\n", "memory/memory.oom_control"),
        ("0::/elsewhere", "memory.events"),
    ],
)
def test_kills_are_counted_in_both_kinds_of_control_groups(
    tmp_path: Path, groups: str, file: str
) -> None:
    own = tmp_path / "own"
    own.write_text(groups)
    assert killed_for_memory(own, tmp_path) == 0
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("low 0\noom 9\noom_kill 3\noom_group_kill 7\n")

    assert killed_for_memory(own, tmp_path) == 3
    assert killed_for_memory(tmp_path / "none", tmp_path) == 0


def test_the_most_memory_of_a_process_is_known() -> None:
    assert most_bytes(os.getpid()) > 10 * 2**20
    assert most_bytes(2**22 + 1) == 0


@pytest.mark.parametrize(
    ("kind", "suspect", "end"),
    [
        ("ReplicaDrifted", 4, RankEnd(cause="corruption", rank=4, after_step=5)),
        ("ReplicaDrifted", None, RankEnd(cause="corruption", rank=3, after_step=5, named=False)),
        ("StepDiffered", 0, RankEnd(cause="corruption", rank=0, after_step=5, copies_hold=True)),
        ("NotANumber", None, RankEnd(cause="not_a_number", rank=3, after_step=5, named=False)),
        ("DoubtfulStep", None, RankEnd(cause="doubtful_step", rank=3, after_step=5, named=False)),
    ],
)
def test_wrong_numbers_are_a_cause_with_the_rank_that_differs(
    tmp_path: Path, kind: str, suspect: int | None, end: RankEnd
) -> None:
    said = Failure(rank=3, kind=kind, message="w: rank 4 has", at_unix_s=1.0, suspect=suspect)

    error = ended(tmp_path, code=1, log="", said=said)

    assert isinstance(error, bad_ends.RankFailed)
    assert (str(error), error.end) == ("w: rank 4 has", end)
    assert end.spoils_copies == (kind == "ReplicaDrifted")


def test_where_all_ranks_only_lost_a_peer_they_are_started_again(tmp_path: Path) -> None:
    """A connection broke, or the node that knows more stands still: nobody is to blame."""
    text = "[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:7073"
    said = Failure(rank=3, kind="RuntimeError", message=text, at_unix_s=1.0)

    error = ended(tmp_path, code=1, log="", said=said)

    assert isinstance(error, bad_ends.RankFailed)
    assert error.end is not None
    assert (error.end.cause, error.end.waits) == ("hang", True)
    found = verdict([error.end], devices=3)
    assert found is not None
    assert found.reaction == "restart"


def test_stacks_and_ends_of_logs_are_kept_with_the_attempt_that_ended(tmp_path: Path) -> None:
    for file, text in (
        (log_file(tmp_path, 3), "a" * 9000 + " the end"),
        (stack_file(tmp_path, 3), "File x"),
        (log_file(tmp_path, 4), "of another node"),
    ):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    events_file(tmp_path).write_text(
        "".join(json_line(Attempt(at_unix_s=at, plan="p", devices=2)) for at in (1.0, 2.0))
    )
    ready: Any = SimpleNamespace(output=tmp_path, ranks=SimpleNamespace(devices={3: 0, 5: 1}))

    bad_ends.keep_evidence(ready)

    kept = evidence_folder(tmp_path, 2)
    assert {file.name for file in kept.iterdir()} == {"rank-00003.log", "rank-00003.stack"}
    assert (kept / "rank-00003.stack").read_text() == "File x"
    log = (kept / "rank-00003.log").read_text()
    assert (len(log), log[-8:]) == (bad_ends.MOST_KEPT, " the end")


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("[Errno 5] Input/output error: '/data/tokens.bin'", "transient"),
        ("[Errno 116] Stale file handle", "transient"),
        ("[Errno 2] No such file or directory: 'x'", None),
        ("[Errno 28] No space left on device", None),
        ("CUDA error: an illegal memory access was encountered", "transient"),
        ("CUDA error: unspecified launch failure", "transient"),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`", "transient"),
        ("NCCL error: unhandled system error, ncclSystemError: System call failed", "transient"),
        ("The size of tensor a (3) must match", None),
    ],
)
def test_errors_that_may_pass_are_tried_again(tmp_path: Path, said: str, cause: str | None) -> None:
    error = ended(tmp_path, code=1, log="", said=failure(said, "RuntimeError"))

    assert isinstance(error, bad_ends.RunEnded)
    assert isinstance(error, bad_ends.RankFailed) == (cause is not None)
    end = getattr(error, "end", None)
    assert (end and end.cause) == cause


def test_a_folder_that_gives_errors_is_tried_for_a_while(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            folder.mkdir()

    assert folder_problem(folder, wait=wait) is None
    assert len(waits) == 3
    assert not list(folder.iterdir())
    said = folder_problem(tmp_path / "none", wait=waits.append)
    assert said is not None
    assert len(waits) == 3 + len(WAITS_S)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        *(
            (f"NVRM: Xid (PCI:0000:3b:00): {number}, X Fatal", "device")
            for number in range(144, 151)
        ),
        ("NVRM: Xid (PCI:0000:3b:00): 145, RLW_SRC_TRACK Nonfatal XC0", "link"),
        ("NVRM: Xid (PCI:0000:3b:00): 13, Graphics Exception", None),
        ("amdgpu 0000:83:00.0: amdgpu: GPU reset begin!", "device"),
        ("amdgpu 0000:83:00.0: 2 uncorrectable hardware errors detected in umc block", "device"),
        ("NCCL WARN NET/IB : Got completion from peer 10.0.0.2 with status=12 opcode=0", "link"),
        ("NCCL WARN NET/OFI Request completed with error. RC: 12", "link"),
        ("mlx5_core 0000:5e:00.0: Port module event: module 0, Cable unplugged", "link"),
        ("an engine that fatigues", None),
        ("the report of an error", None),
    ],
)
def test_errors_of_hardware_are_called_by_their_names(words: str, part: str | None) -> None:
    error = hardware_error(words)
    assert (error and error.part) == part
    assert faults.names_hardware(words) == (part == "device")
