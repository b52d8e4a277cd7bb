"""A trial is a child that is watched, ended when enough is known, and told apart by how it ends."""

import os
import sys
import time
from pathlib import Path

import pytest

from meshwright.planner.documents.events import StepRecord
from meshwright.planner.documents.plan import Job
from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.logs import LoggedWork, Said, megatron
from meshwright.planner.tuning.measurement_noise import Steadiness
from meshwright.planner.tuning.posterior import Timed
from meshwright.runtime.run.run_folder import (
    Failure,
    append_record,
    failure_file,
    metrics_file,
    write_json,
)
from meshwright.tune.trial import TrialProcess, enough, trial, warm_step_seconds, words_of

LINE = "' iteration %d/9999 | elapsed time per iteration (ms): %.1f |' % (n, ms)"


def run(
    tmp_path: Path, script: str, *, best_s: float | None = None, most_s: float = 20.0
) -> tuple[object, ...]:
    one = TrialProcess(
        words=(sys.executable, "-S", "-c", f"import os, sys, time\n{script}"),
        folder=tmp_path / "01",
        ranks=1,
        work=LoggedWork(job=Job(seq_len=8, global_batch=8), devices=1),
        reader=megatron,
    )
    best = None if best_s is None else Timed(option=0, step_s=best_s)
    found = trial(one, best=best, most_s=most_s)
    return found.ended, found.step_s, found.steps, found.why


def steps(milliseconds: str, *, count: int = 9999, pause_s: float = 0.001) -> str:
    return (
        f"for n in range(1, {count + 1}):\n ms = {milliseconds}\n print({LINE}, flush=True)\n"
        f" time.sleep({pause_s})"
    )


def test_steps_after_the_warm_up_are_counted_and_the_child_is_ended(tmp_path: Path) -> None:
    started = time.monotonic()

    found = run(tmp_path, steps("9000 if n < 3 else 500", pause_s=0.02))

    assert found[:2] == ("ran", 0.5)
    assert time.monotonic() - started < 15


def test_a_plan_that_is_surely_slower_is_ended_early(tmp_path: Path) -> None:
    ended, step_s, count, _ = run(tmp_path, steps("900 + 90 * n", pause_s=0.3), best_s=0.1)

    assert ended == "slower"
    assert step_s is not None
    assert count < 6  # type: ignore[operator]


def test_on_an_unsteady_machine_two_steps_that_are_alike_decide_nothing() -> None:
    best = Timed(option=0, step_s=0.49, noise=0.043)
    unsteady = Steadiness().and_trial(noise=0.05, steps=18)

    assert enough([0.65, 0.66], best) == "slower"
    assert enough([0.65, 0.66], best, steadiness=unsteady) is None
    assert enough([0.65] * 20, best, steadiness=unsteady) == "slower"
    assert enough([1.65, 1.66], best, steadiness=unsteady) == "slower"
    assert enough([0.41, 0.41, 0.41], best) == "ran"
    assert enough([0.46, 0.46, 0.46], best, steadiness=unsteady) is None
    assert enough([0.21, 0.21, 0.21], best, steadiness=unsteady) == "ran"


def test_a_run_without_memory_is_no_failure(tmp_path: Path) -> None:
    raised = "raise RuntimeError('CUDA out of memory. Tried to allocate 2 GiB')"

    assert run(tmp_path, raised)[0] == "out of memory"


def test_a_failure_says_its_last_words(tmp_path: Path) -> None:
    assert run(tmp_path, "raise ValueError('no such data')")[::3] == (
        "failed",
        "ValueError: no such data",
    )
    ended, _, _, why = run(tmp_path, "pass")
    assert (ended, why) == ("failed", "logged 0 steps; 5 are needed")


def test_a_child_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    child = (
        "import os, subprocess\n"
        "inner = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'new')!r}, 'w').write(str(inner.pid))\n"
        f"os.replace({str(tmp_path / 'new')!r}, {str(tmp_path / 'pid')!r})\n"
        "time.sleep(60)"
    )

    for most_s in (0.5, 2.0, 8.0, 32.0):  # a loaded machine starts it late
        assert run(tmp_path, child, most_s=most_s)[0] == "failed"
        if (tmp_path / "pid").is_file():
            break

    time.sleep(0.1)
    pid = int((tmp_path / "pid").read_text())
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z" or os.getpid() == pid


def test_what_a_killed_attempt_left_behind_tells_nothing(tmp_path: Path) -> None:
    """Its steps and its lack of memory are not those of the attempt that is watched now."""
    folder = tmp_path / "01"
    (folder / "ranks").mkdir(parents=True)
    record = StepRecord(step=1, loss=1.0, grad_norm=1.0, step_s=0.25, epoch=0)
    for _ in range(8):
        append_record(record, metrics_file(folder))
    failure = Failure(rank=0, kind="OutOfMemoryError", message="", at_unix_s=1.0)
    write_json(failure, failure_file(folder, 0))
    one = TrialProcess(
        words=(sys.executable, "-S", "-c", "raise SystemExit('no data')"),
        folder=folder,
        ranks=1,
        work=LoggedWork(job=Job(seq_len=8, global_batch=8), devices=1),
    )

    found = trial(one, best=None, most_s=20.0)

    assert (found.ended, found.why) == ("failed", "no data")


def test_steps_told_as_a_mean_of_several_count_for_the_warm_up() -> None:
    assert warm_step_seconds(
        [Said(step_s=9.0), Said(step_s=2.0, steps=9), Said(step_s=1.0, steps=10)]
    ) == [1.0]


@pytest.mark.parametrize(
    ("template", "why"),
    [("torchrun train.py", "runs no plan"), ("x '{plan}", "no command")],
)
def test_a_template_that_runs_no_plan_is_refused(template: str, why: str) -> None:
    with pytest.raises(DocumentError, match=why):
        words_of(template, config="c", plan="p", output=Path("o"))
