"""The loop is run in one process on an engine of a few lines whose every step can be told apart."""

from __future__ import annotations

import errno
import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from meshwright.planner.documents.model import Layer, ModelGraph  # noqa: E402
from meshwright.planner.documents.plan import Mesh, PlacedLayer, Plan, PlannedModel, Stage, Training  # noqa: E402
from meshwright.planner.errors import LaunchError, MeshwrightError  # noqa: E402
from meshwright.runtime.checkpoint import checkpoint  # noqa: E402
from meshwright.runtime.checkpoint.state_snapshot import Snapshot, boxes, put_back, take_snapshot  # noqa: E402
from meshwright.runtime.core.torch_api_hints import LossValue  # noqa: E402
from meshwright.runtime.data.corpus import Corpus, CorpusSamples, files, prepare  # noqa: E402
from meshwright.runtime.data.sample_digest import SampleDigest  # noqa: E402
from meshwright.runtime.engine.engine import StepResult  # noqa: E402
from meshwright.runtime.launch.training_loop import Loop, step_seed  # noqa: E402
from meshwright.runtime.resilience.in_memory_checkpoint import Mirror  # noqa: E402
from meshwright.runtime.resilience.shared_memory import Slots  # noqa: E402
from meshwright.runtime.resilience.step_replay import StepDiffered  # noqa: E402
from meshwright.runtime.run import run_folder as run  # noqa: E402
from meshwright.runtime.run.run_folder import RankOrders  # noqa: E402
from tests.limits import PATIENCE_S  # noqa: E402


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    """Join a process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


MODEL = ModelGraph(name="toy", layers=(Layer(name="a", kind="block", parameters=3),))


def result(loss: float, grad_norm: float, *, skipped: bool = False) -> StepResult:
    return StepResult(LossValue(loss), 80.0, grad_norm, skipped=skipped)


class Averaging:
    """Keeps a running mean of the tokens; the loss depends on it, on them and on luck."""

    stage = 0
    compiler = None
    graphs = None

    def __init__(self, *, slice_rank: int = 0, slices: int = 1) -> None:
        self.slice_rank = slice_rank
        self.slices = slices
        self.mean = torch.zeros(1, dtype=torch.float64)
        self.seen: list[torch.Tensor] = []
        self.next_sample = 0
        self.out_of_time: Callable[[], bool] = lambda: False

    def end_when(self, out_of_time: Callable[[], bool]) -> None:
        self.out_of_time = out_of_time

    def step(self, batch: tuple[torch.Tensor]) -> StepResult:
        (tokens,) = batch
        self.seen.append(tokens)
        self.next_sample += len(tokens) * self.slices
        self.mean.mul_(0.9).add_(0.1 * tokens.double().mean() + torch.rand(1).double())
        return replace(result(float(self.mean), 1.0), out_of_time=self.out_of_time())

    def evaluate(self, batch: tuple[torch.Tensor]) -> StepResult:
        return result(float(self.mean + batch[0].double().mean()), 1.0)

    def refuse_drifted(self) -> None: ...

    def configuration(self) -> str | None:
        return None

    def state(self) -> dict[str, torch.Tensor]:
        return {"model.mean": self.mean}

    def resident_tensors(self) -> dict[str, torch.Tensor]:
        return self.state()


class FailsAt(Averaging):
    """Gives a loss or gradient norm that is no number at one step."""

    def __init__(self, step: int, result: StepResult) -> None:
        super().__init__()
        self.fails = (step, result)

    def step(self, batch: tuple[torch.Tensor]) -> StepResult:
        good = super().step(batch)
        return self.fails[1] if len(self.seen) == self.fails[0] else good


class Replayed(Averaging):
    """Gives another result at one of its steps, or always behind one sample."""

    def __init__(self, result: StepResult, *, call: int = 0, sample: int = 0) -> None:
        super().__init__()
        self.other, self.call, self.sample = result, call, sample
        self.own_values = torch.zeros(2)

    def step(self, batch: tuple[torch.Tensor]) -> StepResult:
        good = super().step(batch)
        is_other = len(self.seen) == self.call or self.next_sample == self.sample
        found = self.other if is_other else good
        self.own_values = torch.tensor([found.loss, 1.0])
        return found

    def measure_own_gradient(self) -> None:
        self.own_values = torch.zeros(2)

    def snapshot(self, *, copied: bool = True) -> Snapshot:
        step = self.next_sample // 8
        return take_snapshot(self.state(), step=step, next_sample=self.next_sample, copied=copied)

    def restore(self, snapshots: Sequence[Snapshot]) -> None:
        put_back(self.state(), snapshots)
        self.next_sample = snapshots[0].next_sample


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number}.txt").write_text(f"text number {number} " * (number + 1))
    return prepare(files(folder), cache=tmp_path / "cache")


def plan(data: int = 1) -> Plan:
    return Plan(
        model=PlannedModel(name="toy", source="toy", digest=MODEL.digest),
        cluster="local",
        seq_len=10,
        global_batch=8,
        precision="fp32",
        mesh=Mesh(data_replicate=data),
        zero=0,
        schedule="1f1b",
        micro_batch=8 // data,
        micro_batches=1,
        training=Training(seed=5),
        stages=(Stage(layers=(PlacedLayer(layer="a"),)),),
    )


def loop(
    engine: Averaging,
    corpus: Corpus,
    output: Path,
    steps: int,
    *,
    mirror: Mirror | None = None,
    **orders: object,
) -> Loop:
    output.mkdir(exist_ok=True)
    told = RankOrders.of(
        {
            "token": "r",
            "output": str(output),
            "corpus": str(corpus.folder),
            "device": "cpu",
            "steps": steps,
            "started_unix_s": time.time(),
            **orders,
        }
    )
    return Loop(
        engine,
        plan=plan(engine.slices),
        model=MODEL,
        corpus=corpus,
        orders=told,
        rank=engine.slice_rank,
        mirror=mirror,
        now_s=lambda: 10.0 * len(engine.seen),
    )


def losses(output: Path) -> list[float]:
    return [record.loss for record in run.read_records(run.metrics_file(output))]


@pytest.mark.spread(1)
@pytest.mark.parametrize("data", [2, 4, 8])
def test_data_ranks_together_see_what_one_rank_sees(
    corpus: Corpus, tmp_path: Path, data: int
) -> None:
    alone = Averaging()
    loop(alone, corpus, tmp_path / "alone", 5).run()

    ranks = [Averaging(slice_rank=rank, slices=data) for rank in range(data)]
    for engine in ranks:
        loop(engine, corpus, tmp_path / "many", 5).run()

    for step in range(5):
        together = torch.cat([engine.seen[step] for engine in ranks])
        assert torch.equal(together, alone.seen[step])
    assert alone.seen[0].shape == (8, 11)


def test_the_next_batch_is_read_beside_the_step(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    second = threading.Event()
    whole = CorpusSamples.batch

    def batch(samples: CorpusSamples, first: int, count: int) -> Any:
        read.append(first)
        if first == 8:
            second.set()
        return whole(samples, first, count)

    class Waiting(Averaging):
        def step(self, batch: tuple[torch.Tensor]) -> StepResult:
            assert second.wait(PATIENCE_S)
            assert not gc.isenabled()  # all ranks look for cycles between the same steps
            return super().step(batch)

    monkeypatch.setattr(CorpusSamples, "batch", batch)
    loop(Waiting(), corpus, tmp_path / "out", 3).run()

    assert read[:3] == [0, 8, 16]
    assert sorted(set(read)) == sorted(read)  # each once
    assert gc.isenabled()


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(corpus: Corpus, tmp_path: Path) -> None:
    loop(Averaging(), corpus, tmp_path / "whole", 10).run()
    saved = str(tmp_path / "saved")
    loop(Averaging(), corpus, tmp_path / "parts", 6, checkpoint=saved, checkpoint_every=4).run()

    again = loop(Averaging(), corpus, tmp_path / "parts", 10, checkpoint=saved)
    again.resume(tmp_path / "saved" / "step-000006")
    record = again.run()

    assert record.first_step == 7
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_checkpoints_come_every_so_often_and_at_the_end(corpus: Corpus, tmp_path: Path) -> None:
    saved = tmp_path / "saved"

    record = loop(
        Averaging(), corpus, tmp_path / "out", 5, checkpoint=str(saved), checkpoint_every=2
    ).run()

    assert [path.name for path in checkpoint.complete(saved)] == ["step-000004", "step-000005"]
    assert record.checkpoint == str(saved / "step-000005")
    kept = checkpoint.progress(saved / "step-000005")
    assert (kept.step, kept.sample, kept.epoch) == (5, 40, 40 * 10 // corpus.tokens)


@pytest.mark.parametrize(
    "result", [result(float("nan"), 1.0), result(float("inf"), 1.0), result(1.0, float("nan"))]
)
def test_nonsense_ends_the_run_and_names_the_last_good_checkpoint(
    corpus: Corpus, tmp_path: Path, result: StepResult
) -> None:
    saved = tmp_path / "saved"

    with pytest.raises(LaunchError) as error:
        loop(
            FailsAt(4, result),
            corpus,
            tmp_path / "out",
            9,
            checkpoint=str(saved),
            checkpoint_every=2,
        ).run()

    assert f"step 4 gave loss {result.loss:g} and gradient norm {result.grad_norm:g}" in str(
        error.value
    )
    assert f"the last good checkpoint is {saved}/step-000002" in str(error.value)
    assert "from sample 24 on" in str(error.value)
    assert [path.name for path in checkpoint.complete(saved)] == ["step-000002"]
    assert len(losses(tmp_path / "out")) == 3


def test_nonsense_without_checkpoints_says_so(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="nothing was saved"):
        loop(FailsAt(1, result(float("nan"), 1.0)), corpus, tmp_path / "out", 9).run()


@pytest.fixture
def mirror(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    """Copies of the state, after every fourth step."""
    with Slots() as slots:
        for name, told in {**slots.environment(1), "LOCAL_WORLD_SIZE": "1"}.items():
            monkeypatch.setenv(name, told)
        identity = checkpoint.TrainingIdentity.of(
            plan=plan(), model=MODEL, corpus=corpus, frozen=None
        )
        found = Mirror.of_environment(local_rank=0, run="r", plan="p", identity=identity)
        assert found is not None
        monkeypatch.setattr(found, "is_due", lambda step: step % 4 == 0)
        yield found


@pytest.mark.parametrize("changed", ["nothing", "data", "model", "seed", "seq_len", "unsaid"])
def test_a_copy_is_gone_on_from_by_the_same_training_alone(
    corpus: Corpus, tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    if changed == "unsaid":
        monkeypatch.setattr(mirror, "_identity", None)
    saved = {"checkpoint": tmp_path / "s"}
    engine = Replayed(result(1.0, 1.0))
    loop(engine, corpus, tmp_path / "out", 5, mirror=mirror, **saved).run()
    kept = mirror.newest(boxes(engine.state()))
    assert kept is not None
    if changed == "data":
        (tmp_path / "texts" / "0.txt").write_text("another text")
        corpus = prepare(files(tmp_path / "texts"), cache=tmp_path / "cache")
    again = loop(Replayed(result(1.0, 1.0)), corpus, tmp_path / "out", 9, mirror=mirror, **saved)
    if changed == "model":
        again.model = MODEL.model_copy(
            update={"layers": (Layer(name="a", kind="block", parameters=4),)}
        )
    if changed == "seed":
        again.plan = again.plan.model_copy(update={"training": Training(seed=6)})
    if changed == "seq_len":
        again.plan = again.plan.model_copy(update={"seq_len": 5})

    if changed == "nothing":
        again.go_on_from(kept, after_saved=0)
        assert again.steps_done == 4
        return
    with pytest.raises(MeshwrightError, match="the copy in memory of step 4"):
        again.go_on_from(kept, after_saved=0)
    assert again.steps_done == 0


def full_disk_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the save of one step fail when some of its bytes are written."""
    finish = checkpoint.finish

    def full(temporary: Path, done: Any, written: Any) -> None:
        if done.step == step:
            raise OSError(errno.ENOSPC, "No space left on device", str(temporary))
        finish(temporary, done, written)

    monkeypatch.setattr(checkpoint, "finish", full)


def test_a_save_that_fails_ends_no_run_that_survives(
    corpus: Corpus, tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "s"
    full_disk_at(4, monkeypatch)

    options = {"checkpoint": saved, "checkpoint_every": 2, "keep_checkpoints": 9}
    record = loop(
        Replayed(result(1.0, 1.0)), corpus, tmp_path / "out", 8, mirror=mirror, **options
    ).run()

    assert record.checkpoint == str(saved / "step-000008")
    assert sorted(saved.glob(".step*")) == []
    assert [one.name for one in checkpoint.complete(saved)] == [
        f"step-{step:06}" for step in (2, 6, 8)
    ]
    (failed,) = [one for one in run.events(tmp_path / "out") if one.event == "save_failed"]
    assert failed.step == 4
    assert "No space left on device" in failed.text


@pytest.mark.parametrize("elastic", [True, False])
def test_a_run_whose_last_save_fails_says_so(
    corpus: Corpus,
    tmp_path: Path,
    mirror: Mirror,
    monkeypatch: pytest.MonkeyPatch,
    elastic: bool,
) -> None:
    full_disk_at(8 if elastic else 2, monkeypatch)
    more: dict[str, Any] = {"mirror": mirror} if elastic else {}

    with pytest.raises(LaunchError, match="No space left on device"):
        loop(
            Replayed(result(1.0, 1.0)),
            corpus,
            tmp_path / "out",
            8,
            checkpoint=tmp_path / "s",
            checkpoint_every=2,
            **more,
        ).run()


@pytest.mark.parametrize("step", [6, 8])
def test_a_value_that_does_not_come_again_was_the_devices(
    corpus: Corpus, tmp_path: Path, mirror: Mirror, step: int
) -> None:
    """Copies are of steps 4 and, with the same fault behind it, none newer."""
    engine = Replayed(result(float("nan"), 1.0), call=step)

    with pytest.raises(StepDiffered) as found:
        loop(engine, corpus, tmp_path / "out", 9, mirror=mirror, checkpoint=tmp_path / "s").run()

    assert f"step {step} gave loss nan and gradient norm 1, and " in str(found.value)
    assert "rank 0's memory or arithmetic is damaged" in str(found.value)
    assert found.value.suspect == 0
    assert len(engine.seen) == step + (step - 4)


def test_a_value_that_comes_again_is_the_datas(
    corpus: Corpus, tmp_path: Path, mirror: Mirror
) -> None:
    engine = Replayed(result(float("nan"), 1.0), sample=8 * 6)

    with pytest.raises(LaunchError) as found:
        loop(engine, corpus, tmp_path / "out", 9, mirror=mirror, checkpoint=tmp_path / "s").run()

    assert "a replay from step 4 gave the same, so the cause is the data" in str(found.value)
    assert len(engine.seen) == 6 + 2
    assert len(losses(tmp_path / "out")) == 5


@pytest.mark.parametrize("where", ["data", "device"])
def test_a_spike_is_done_again_and_the_run_goes_on_if_it_is_its_own(
    corpus: Corpus, tmp_path: Path, mirror: Mirror, where: str
) -> None:
    """Seen first in step 30; the same samples give it again, or not."""
    spike = result(1.0, 11.0)
    place = {"sample": 8 * 30} if where == "data" else {"call": 30}
    saved = tmp_path / "s"
    run = loop(
        Replayed(spike, **place), corpus, tmp_path / "out", 34, mirror=mirror, checkpoint=saved
    )

    if where == "device":
        with pytest.raises(StepDiffered, match="gradient norm 11, and"):
            run.run()
        return
    run.run()

    undisturbed = loop(Averaging(), corpus, tmp_path / "other", 34)
    undisturbed.run()
    of_both = zip(losses(tmp_path / "out"), losses(tmp_path / "other"), strict=True)
    assert [step for step, (one, other) in enumerate(of_both, 1) if one != other] == [30]
    assert checkpoint.progress(checkpoint.newest(saved)).used == SampleDigest.of_first(34 * 8)


def test_a_skipped_step_is_no_nonsense_and_has_no_record(corpus: Corpus, tmp_path: Path) -> None:
    engine = FailsAt(2, result(float("nan"), float("inf"), skipped=True))
    saved = tmp_path / "saved"

    loop(engine, corpus, tmp_path / "out", 2, checkpoint=str(saved)).run()

    records = losses(tmp_path / "out")
    assert len(records) == 1
    assert checkpoint.progress(checkpoint.newest(saved)).loss == records[0]  # the last that is one


def test_the_step_in_which_the_seconds_are_over_is_the_last(corpus: Corpus, tmp_path: Path) -> None:
    engine = Averaging()

    record = loop(
        engine, corpus, tmp_path / "out", 99, max_seconds=25.0, checkpoint=str(tmp_path / "saved")
    ).run()

    assert (len(engine.seen), record.stopped) == (3, "max_seconds")
    assert record.checkpoint == str(tmp_path / "saved" / "step-000003")


@pytest.mark.parametrize("jump_s", [-86400.0, 86400.0])
def test_a_clock_that_is_set_ends_no_run(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    engine = Averaging()
    made = loop(engine, corpus, tmp_path / "out", 99, max_seconds=25.0)
    wall_s = time.time
    monkeypatch.setattr(time, "time", lambda: wall_s() + jump_s * bool(engine.seen))

    made.run()

    assert len(engine.seen) == 3
    at_s = [event.at_unix_s for event in run.events(tmp_path / "out")]
    assert 0.0 <= max(at_s) - min(at_s) <= PATIENCE_S
    assert abs(at_s[0] - wall_s()) <= PATIENCE_S


def test_each_step_leaves_one_line(corpus: Corpus, tmp_path: Path) -> None:
    record = loop(Averaging(), corpus, tmp_path / "out", 3).run()

    lines = run.metrics_file(tmp_path / "out").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    for line, seconds in zip(lines, record.step_s, strict=True):
        values = json.loads(line)
        assert values["step_s"] == seconds
        assert values["tokens_per_s"] == pytest.approx(8 * 10 / seconds)


def test_the_step_that_is_watched_for_memory_is_not_timed(corpus: Corpus, tmp_path: Path) -> None:
    record = loop(Averaging(), corpus, tmp_path / "out", 4).run()

    assert record.untimed_steps == (2,)
    assert record.peak_memory_bytes is not None


def test_a_run_of_one_step_is_watched_too(corpus: Corpus, tmp_path: Path) -> None:
    record = loop(Averaging(), corpus, tmp_path / "out", 1).run()

    assert record.untimed_steps == (1,)


def test_ranks_that_share_samples_share_luck_and_others_do_not() -> None:
    seeds = {
        step_seed(seed, step=step, stage=stage, data_rank=rank)
        for seed in range(2)
        for step in range(3)
        for stage in range(3)
        for rank in range(3)
    }

    assert len(seeds) == 2 * 3 * 3 * 3
    assert step_seed(1, step=2, stage=0, data_rank=1) == step_seed(1, step=2, stage=0, data_rank=1)


def test_held_out_text_is_evaluated_every_so_often_and_at_the_end(
    corpus: Corpus, tmp_path: Path
) -> None:
    folder = tmp_path / "held out"
    folder.mkdir()
    (folder / "text.txt").write_text("nobody trains on this " * 20)
    held_out = prepare(files(folder), cache=tmp_path / "cache")
    orders = {"evaluate": str(held_out.folder), "evaluate_every": 2, "evaluate_batches": 2}
    engine, undisturbed = Averaging(), Averaging()

    loop(engine, corpus, tmp_path / "out", 5, **orders).run()
    loop(undisturbed, corpus, tmp_path / "without", 5).run()

    records = list(run.read_records(run.metrics_file(tmp_path / "out")))
    assert [record.eval_loss is not None for record in records] == [False, True, False, True, True]
    batches = CorpusSamples(held_out, seq_len=10, seed=5).batch(0, 16).tokens.astype(float)
    expected = records[-1].loss + (batches[:8].mean() + batches[8:].mean()) / 2
    assert records[-1].eval_loss == pytest.approx(expected)
    assert losses(tmp_path / "out") == losses(tmp_path / "without")


def test_a_record_tells_rate_and_utilisation(corpus: Corpus, tmp_path: Path) -> None:
    loop(Averaging(), corpus, tmp_path / "out", 2, peak_step_s=1e-3).run()

    for record in run.read_records(run.metrics_file(tmp_path / "out")):
        assert record.learning_rate == Training().learning_rate
        assert record.mfu == pytest.approx(1e-3 / record.step_s)


def test_tensorboard_reads_what_the_lines_say(corpus: Corpus, tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    loop(Averaging(), corpus, tmp_path / "out", 3, tensorboard=True).run()

    events = reader.EventAccumulator(str(run.tensorboard_folder(tmp_path / "out")))
    events.Reload()
    seen = [(event.step, event.value) for event in events.Scalars("loss")]
    assert [step for step, _ in seen] == [1, 2, 3]
    assert [value for _, value in seen] == pytest.approx(losses(tmp_path / "out"))


class Project:
    """What wandb is for a run."""

    def __init__(self) -> None:
        self.begun: list[dict[str, Any]] = []
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def init(self, **settings: Any) -> Project:
        self.begun.append(settings)
        return self

    def log(self, values: dict[str, float], *, step: int) -> None:
        self.rows.append((step, values))

    def finish(self) -> None:
        self.finished += 1


def test_wandb_is_told_what_the_lines_say(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = Project()
    monkeypatch.setitem(sys.modules, "wandb", project)

    for folder, steps in (("out", 3), ("out", 3), ("other", 1)):
        loop(Averaging(), corpus, tmp_path / folder, steps, wandb="my-project").run()

    written = losses(tmp_path / "out")
    assert [step for step, _ in project.rows] == [1, 2, 3, 1, 2, 3, 1]
    assert [values["loss"] for _, values in project.rows[:6]] == pytest.approx(written)
    assert [one["project"] for one in project.begun] == ["my-project"] * 3
    first, again, other = (one["id"] for one in project.begun)
    assert first == again != other
    assert project.begun[0]["config"]["global_batch"] == plan(1).global_batch
    assert project.finished == 3


class Experiment:
    """What mlflow is for a run: it refuses parameters and metrics without a run that is open."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.open: str | None = None
        self.rows: list[tuple[str, int, float]] = []
        self.parameters: dict[str, dict[str, str]] = {}
        self.name = ""

    def set_experiment(self, name: str) -> None:
        self.name = name

    def start_run(self, *, run_id: str | None = None, run_name: str | None = None) -> Any:
        assert self.open is None and (run_id is None) != (run_name is None)
        assert run_id is None or run_id in self.runs
        self.open = run_id or f"run-{len(self.runs)}"
        self.runs += [] if run_id else [self.open]
        return SimpleNamespace(info=SimpleNamespace(run_id=self.open))

    def log_params(self, values: dict[str, str]) -> None:
        assert self.open is not None and self.open not in self.parameters
        self.parameters[self.open] = values

    def log_metrics(self, values: dict[str, float], *, step: int) -> None:
        assert self.open is not None
        self.rows.append((self.open, step, values["loss"]))

    def end_run(self) -> None:
        self.open = None


def test_mlflow_has_one_run_for_each_folder(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = Experiment()
    monkeypatch.setitem(sys.modules, "mlflow", experiment)

    for folder, steps in (("out", 2), ("out", 2), ("other", 1)):
        loop(Averaging(), corpus, tmp_path / folder, steps, mlflow="mine").run()

    assert [(run, step) for run, step, _ in experiment.rows] == [
        *[("run-0", 1), ("run-0", 2)] * 2,
        ("run-1", 1),
    ]
    assert [loss for *_, loss in experiment.rows[:4]] == pytest.approx(losses(tmp_path / "out"))
    assert experiment.name == "mine" and experiment.open is None
    assert experiment.parameters["run-0"]["global_batch"] == str(plan(1).global_batch)
    assert all(len(value) <= 250 for value in experiment.parameters["run-1"].values())
