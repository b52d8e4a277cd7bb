"""`tune` measures what it does not know, keeps what it measured, and goes on where it stopped."""

import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright import cli
from meshwright.api.commands import predict
from meshwright.api.inputs import machine_of, model_of
from meshwright.planner.costs.predict import predict as priced
from meshwright.planner.documents import document
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.profile import Profile
from meshwright.planner.documents.training import Training
from meshwright.planner.documents.units import seconds_text
from meshwright.planner.errors import DocumentError, LaunchError
from meshwright.planner.requests.pins import read_pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.answer import Answer
from meshwright.planner.search.search import search
from meshwright.planner.tuning import candidates as candidates_module
from meshwright.planner.tuning.candidates import TrialCandidate
from meshwright.planner.tuning.next_trial import Tuner
from meshwright.planner.tuning.record import FILE, read_trials
from meshwright.tune import tune as tuning
from meshwright.tune.trial import Measured, TrialProcess
from meshwright.tune.tune import TuningResult, tune

ASKED = ("demo-4m", "2xh100-sxm-80gb")
JOB = {"seq_len": 128, "global_batch": 16}


class Machine:
    """Runs trials of plans: those with a pipeline are faster than predicted, beside others."""

    def __init__(self) -> None:
        self.tried: list[str] = []
        self.interrupted_at: int | None = None
        self.broken: set[str] = set()
        self.full: set[str] = set()

    def __call__(self, run: TrialProcess, **_: Any) -> Measured:
        if self.interrupted_at == len(self.tried):
            raise KeyboardInterrupt
        plan = document.read(Plan, run.folder / "plan.yaml")
        self.tried.append(plan.digest)
        if plan.digest in self.broken:
            return Measured(ended="failed", seconds=1.0, why="no data")
        if plan.digest in self.full:
            return Measured(ended="out of memory", seconds=1.0)
        step_s = 0.09 if plan.layout.pipeline > 1 else 0.1
        return Measured(ended="ran", step_s=step_s, noise=0.005, steps=5, seconds=9.0)


@functools.cache
def searched(global_batch: int) -> tuple[Answer, tuple[TrialCandidate, ...]]:
    """Return what is planned, once for all tests."""
    request = Request.create(
        model_of(ASKED[0], seq_len=JOB["seq_len"]),
        machine_of(ASKED[1], None),
        seq_len=JOB["seq_len"],
        global_batch=global_batch,
        called=ASKED[1],
        pins=read_pins(["compile=none", "loss=full"]),
    )
    answer = search(request)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates_module, "VARIED", 0)
        return answer, candidates_module.candidates(request, answer)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    made = Machine()
    monkeypatch.setattr(tuning, "trial", made)
    monkeypatch.setattr(tuning, "need_torch", lambda what: None)
    monkeypatch.setattr(
        tuning, "answer_to", lambda request, *_, **more: searched(request.job.global_batch)[0]
    )
    monkeypatch.setattr(
        tuning, "_runnable", lambda request, *_: searched(request.job.global_batch)[1]
    )
    monkeypatch.setattr(tuning, "search", lambda request: searched(request.job.global_batch)[0])
    monkeypatch.chdir(tmp_path)
    return made


def tuned(**more: Any) -> TuningResult:
    return tune(*ASKED, **{**JOB, **more})


def test_the_answer_is_the_fastest_measured_and_its_plan_is_written(machine: Machine) -> None:
    found = tuned(budget="4 trials")

    layout = document.read(Plan, "plan.yaml").layout
    assert layout == found.chosen.plan.layout
    assert layout.pipeline > 1
    assert (found.first_s, found.step_s) == (0.1, 0.09)
    assert len(machine.tried) == len(set(machine.tried)) == len(found.trials) <= 4
    calibrated = document.read(Profile, "plan-trials/constants.yaml")
    assert calibrated.calibration is not None
    assert calibrated.calibration.runs == len(found.trials)
    told = document.read(ClusterSpec, "plan-trials/cluster.yaml").groups[0].accelerator
    assert calibrated.calibration.matmul is not None
    assert calibrated.calibration.pace is not None
    paced = calibrated.calibration.matmul / calibrated.calibration.pace
    assert told.curve.matmul == pytest.approx(paced)


def slower(cluster: ClusterSpec, compute: float, links: float) -> ClusterSpec:
    """Return a cluster whose kernels and links take so many times as long."""
    (group,) = cluster.groups
    curve = group.accelerator.curve
    changed = {
        name: getattr(curve, name) / compute
        for name in ("matmul", "attention_forward", "attention_backward", "memory")
    } | {"launch_s": curve.launch_s * compute}
    accelerator = group.accelerator.model_copy(update={"curve": curve.model_copy(update=changed)})
    return cluster.model_copy(
        update={
            "groups": (group.model_copy(update={"accelerator": accelerator}),),
            "tiers": tuple(
                tier.model_copy(
                    update={
                        "bytes_per_s": tier.bytes_per_s / links,
                        "latency_s": tier.latency_s * links,
                    }
                )
                for tier in cluster.tiers
            ),
        }
    )


@pytest.mark.parametrize(("compute", "links"), [(5.0, 1.0), (1.0, 8.0), (6.0, 20.0), (0.9, 1.0)])
def test_constants_predict_what_was_measured_however_slow_the_machine_is(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, compute: float, links: float
) -> None:
    """The answer's step exactly, the steps of all other trials within their ranges."""
    truth = slower(machine_of(ASKED[1], None), compute, links)

    def measured(run: TrialProcess, **_: Any) -> Measured:
        plan = document.read(Plan, run.folder / "plan.yaml")
        step_s = priced(plan, model_of(ASKED[0], seq_len=JOB["seq_len"]), truth).step_time_s
        return Measured(ended="ran", step_s=step_s, noise=0.001, steps=5, seconds=9.0)

    monkeypatch.setattr(tuning, "trial", measured)
    monkeypatch.setattr(tuning.Tuning, "_proof", lambda self, tuner: None)

    found = tuned(budget="4 trials")

    for one in found.trials:
        plan = f"plan-trials/{one.trial:02}/plan.yaml"
        now = predict(plan, ASKED[1], profile="plan-trials/constants.yaml")
        assert one.step_s is not None
        assert now.step_time_low_s <= one.step_s * (1 + 1e-9)
        assert one.step_s <= now.step_time_high_s * (1 + 1e-9)
    now = predict("plan.yaml", ASKED[1], profile="plan-trials/constants.yaml")
    assert now.step_time_s == pytest.approx(found.step_s, rel=1e-3)


@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupt_loses_no_finished_trial_and_the_next_goes_on(
    machine: Machine, at: int
) -> None:
    machine.interrupted_at = at
    first = tuned(budget="3 trials")
    assert "interrupted" in first.stopped
    assert document.read(Plan, "plan.yaml").digest in machine.tried
    machine.interrupted_at = None

    found = tuned(budget="3 trials")

    assert found.trials[:at] == first.trials
    assert len(machine.tried) == len(set(machine.tried)) == 3
    assert tuned(budget="3 trials").trials == found.trials  # nothing is left to do
    assert len(machine.tried) == 3


def test_a_line_that_was_cut_off_is_tried_again(machine: Machine) -> None:
    tuned(budget="2 trials")
    path = Path("plan-trials", FILE)
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{second[:40]}")

    found = tuned(budget="2 trials")

    assert len(found.trials) == 2
    assert [json.loads(line)["trial"] for line in path.read_text().splitlines()] == [1, 2]
    assert machine.tried[1] == machine.tried[2]


@pytest.mark.matrix
def test_trials_of_another_job_are_refused(machine: Machine) -> None:
    tuned(budget="1 trials")

    with pytest.raises(DocumentError, match="another global_batch"):
        tuned(budget="1 trials", global_batch=32)
    assert len(read_trials(Path("plan-trials"))) == 1


def test_a_failed_trial_is_not_made_again_and_tells_nothing(machine: Machine) -> None:
    first = tuned(budget="1 trials", dry_run=True).candidates[0].plan.digest
    machine.broken.add(first)

    found = tuned(budget="3 trials")

    assert machine.tried.count(first) == 1
    assert [one.ended for one in found.trials] == ["failed", "ran", "ran"]
    assert found.chosen.plan.digest != first


def test_a_plan_out_of_memory_is_never_the_answer(machine: Machine) -> None:
    first = tuned(dry_run=True).candidates[0].plan.digest
    machine.full.add(first)

    found = tuned(budget="2 trials")

    assert [one.ended for one in found.trials] == ["out of memory", "ran"]
    assert found.chosen.plan.digest == machine.tried[1]


def test_a_machine_on_which_nothing_runs_is_an_error_with_the_reason(machine: Machine) -> None:
    every = tuned(dry_run=True).candidates
    machine.broken |= {one.plan.digest for one in every}

    with pytest.raises(LaunchError, match="no data"):
        tuned(budget="2 trials")


def test_a_budget_of_time_ends_before_it_is_passed(machine: Machine) -> None:
    found = tuned(budget="25s")

    assert found.stopped == "the budget is used"
    assert 0 < sum(one.seconds for one in found.trials) <= 25


def test_a_dry_run_runs_nothing_and_writes_nothing(
    machine: Machine, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["tune", *(ASKED[0], "--cluster", ASKED[1]), "--seq-len", "128", "--global-batch", "16"]

    assert cli.main([*words, "--dry-run"]) == 0

    said = capsys.readouterr().out
    assert len(said.splitlines()) <= 10
    assert "device-minutes" in said
    assert machine.tried == []
    assert list(tmp_path.iterdir()) == []


def test_the_answer_has_ten_lines_and_the_same_as_json(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tune", *(ASKED[0], "--cluster", ASKED[1]), "--seq-len", "128", "--global-batch", "16"]
    assert cli.main([*words, "--budget", "3 trials"]) == 0
    said = capsys.readouterr().out

    assert cli.main([*words, "--budget", "3 trials", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert len(said.splitlines()) <= 10
    assert found["layout"] in " ".join(said.split())
    assert found["step_time_s"] == 0.09
    assert len(found["trials"]) == 3


def test_a_plan_is_tuned_with_its_own_job_and_training(machine: Machine) -> None:
    mine = tuned(dry_run=True).chosen.plan.model_copy(
        update={
            "training": Training().with_settings(["learning_rate=0.5"]),
            "not_understood": ("--unheard-of",),
        }
    )
    document.write(mine, "mine.yaml")

    found = tune("mine.yaml", ASKED[1], budget="2 trials", output="best.yaml")

    assert len(found.trials) == 2
    best = document.read(Plan, "best.yaml")
    assert (best.job, best.training) == (mine.job, mine.training)
    assert best.not_understood == ("--unheard-of",)
    assert 0.1 < (found.chosen.prediction.fit_probability or 0) < 0.9
    with pytest.raises(DocumentError, match="seq-len: a plan has its own already"):
        tune("mine.yaml", ASKED[1], seq_len=64)


def test_a_template_gets_the_configuration_of_its_framework(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The whole way of another framework: written, run, its log read."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        "import sys\n"
        "micro = open(sys.argv[1]).read().partition('--micro-batch-size ')[2].split()[0]\n"
        "for n in range(1, 9):\n"
        "    print(f' iteration {n}/9 | elapsed time per iteration (ms): {500 / int(micro)} |')\n"
    )

    found = tune(
        "demo-4m",
        "2xh100-sxm-80gb",
        framework="megatron",
        run=f"{sys.executable} -S train.py {{config}}",
        budget="3 trials",
        **JOB,
    )

    assert {one.ended for one in found.trials} <= {"ran", "slower"}
    steps_s = [one.step_s for one in found.trials if one.step_s is not None]
    assert found.step_s == min(steps_s)
    assert found.step_s == pytest.approx(0.5 / found.chosen.plan.micro_batch)
    assert "--micro-batch-size" in Path("plan-trials/01/config.args").read_text()


def test_another_framework_needs_to_be_told_how_it_trains(machine: Machine) -> None:
    with pytest.raises(DocumentError, match="say how megatron trains"):
        tuned(framework="megatron")


def test_plans_are_tried_in_small_and_the_answer_is_of_the_large_cluster(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tune", ASKED[0], "--cluster", ASKED[1], "--seq-len", "128", "--global-batch", "16"]
    in_small = [*words, "--trial-cluster", "1xh100-sxm-80gb", "--budget", "2 trials"]
    assert cli.main(in_small) == 0
    said = capsys.readouterr().out
    machine.interrupted_at = 2  # nothing is tried again

    assert cli.main([*in_small, "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert len(said.splitlines()) <= 10
    assert "1 to 2 devices" in said
    assert found["step_time_s"] is None
    plan = document.read(Plan, "plan.yaml")
    assert plan.mesh.devices == 2
    tried = document.read(Plan, "plan-trials/01/plan.yaml")
    assert (tried.mesh.devices, tried.cluster) == (1, "1xh100-sxm-80gb")
    assert Path("plan-trials/01", tried.model.source, "config.json").is_file()
    with pytest.raises(DocumentError, match="another trial_cluster"):
        tuned(budget="1 trials")


def test_the_page_has_every_trial_beside_its_prediction_and_what_moved(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tune", ASKED[0], "--cluster", ASKED[1], "--seq-len", "128", "--global-batch", "16"]

    assert cli.main([*words, "--budget", "3 trials", "--html", "trials.html"]) == 0

    page = Path("trials.html").read_text()
    assert "trials.html" in capsys.readouterr().out
    assert len(page) < 400_000
    assert "http" not in page
    trials = read_trials(Path("plan-trials"))
    rows = [row for row in page.split("<tr>") if row.startswith('<td class="n">')]
    assert len(rows) == len(trials) == 3
    for row, one in zip(rows, trials, strict=True):
        assert one.layout in row
        assert seconds_text(one.predicted_s) in row
        assert seconds_text(one.step_s or 0.0) in row
    assert page.count("<circle") == 3
    moved = page.partition("What moved")[2].partition("</table>")[0]
    assert "kernels" in moved
    assert cli.main([*words, "--dry-run", "--html", "none.html"]) != 0
    assert not Path("none.html").exists()


def test_the_proof_is_taken_again_with_what_trials_told(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "search", search)

    found = tuned(budget="3 trials", fix=["compile=none,loss=full,recompute=none,v=1"])

    again = predict("plan.yaml", "plan-trials/cluster.yaml", profile="plan-trials/constants.yaml")
    before = found.chosen.prediction.step_time_s
    assert found.proof is not None
    assert found.proof.chosen_s == pytest.approx(again.step_time_s)
    assert found.proof.chosen_s > 1.01 * before  # all trials were slower than predicted
    assert found.proof.lower_bound_s <= found.proof.chosen_s
    assert found.proof.lower_bound_s > before * (1 - found.proof.gap) ** 2


def test_this_machine_is_measured_first_where_that_pays_and_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def measure(model: str, cluster: str, *, output: str, **_: Any) -> None:
        measured.append(cluster)
        document.write(document.read(Profile, "constants.yaml"), output)

    monkeypatch.setattr(tuning, "measure", measure)
    monkeypatch.setattr(tuning.Tuning, "_proof", lambda self, tuner: None)
    monkeypatch.setattr(tuning.Tuning, "_predicted_s", lambda self, constants, option: 1.0)
    tuned(budget="1 trials", trials="others")
    Path("others/constants.yaml").rename("constants.yaml")
    for pays, cluster, times in ((False, "local:2", 0), (True, ASKED[1], 0), (True, "local:2", 1)):
        monkeypatch.setattr(Tuner, "profile_pays", lambda self, seconds, says=pays: says)
        for _ in range(2):
            tune(ASKED[0], cluster, **JOB, budget="1 trials", trials=f"{cluster}-{pays}")
        assert len(measured) == times
    assert Path("local:2-True/profile.yaml").is_file()
