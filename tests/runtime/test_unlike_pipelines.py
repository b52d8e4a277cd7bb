"""Pipelines that differ train together like one process, whatever their depths and cuts.

The oracles share no code with the runtime: transformers' own classes in a plain loop
(tests/runtime/library_runs.py), and a module of torch in another.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from meshwright.planner.documents.plan import Mesh, Plan
from meshwright.planner.errors import DocumentError, LaunchError
from meshwright.planner.schedules import SCHEDULES
from meshwright.runtime.checkpoint.weight_export import to_huggingface
from meshwright.runtime.core.auxiliary_loss import batch_sum
from meshwright.runtime.core.global_batch_loss import whole_batch
from meshwright.runtime.core.mesh import place_of
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.engine.unsupported import unsupported_reason
from meshwright.runtime.launch import launch as launching
from meshwright.runtime.launch.training_loop import token_engine
from meshwright.runtime.optim.replica_check import ReplicaDrifted
from meshwright.runtime.parallel.holders import holders_of
from meshwright.runtime.tracing.stage import step_seed, unit_seed
from tests.parts import some_and_others
from tests.runtime import cases, combinations, library_rows
from tests.runtime.combinations import Row, bound
from tests.runtime.library_rows import ROUND_OFFS, TRAINING, OnCrew, apart, launched_plan
from tests.runtime.ranks import Crew, on_ranks
from tests.runtime.runs import errors, train_all
from tests.runtime.test_against_transformers import BOUNDS
from tests.runtime.test_matrix import alone, ready

PART_OF_A_STEP = 0.1
"""Largest part of AdamW's full step by which a weight is off after all steps.  A gradient that is
all rounding takes such steps: a launch in one process is up to 0.032 off the library.  A gradient
that lacks a pipeline's part takes others from the first."""
Pipelines = tuple[int, int, tuple[int, ...]]
"""Number of pipelines, micro-batches of each, numbers of layers of their stages."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A launch of one of the library's models; layers are embedding, three blocks and head."""

    name: str = "llama"
    kinds: tuple[Pipelines, ...]
    tensor: int = 1
    precision: str = "fp32"
    schedule: str = "1f1b"
    recompute: str = "none"
    """Of the kinds behind the first."""

    @property
    def folder(self) -> Path:
        """Where the weights are."""
        return library_rows.published(self.name, 3, "fp32")

    def plan(self) -> Plan:
        """Return the plan that is launched."""
        data, micro_batches, cuts = self.kinds[0]
        graph = library_rows.graph_of(self.folder)
        first = cases.plan(
            graph,
            cuts=cuts,
            schedule=self.schedule,
            micro_batches=micro_batches,
            global_batch=2 * data * micro_batches,
            precision=self.precision,
            pipeline=len(cuts),
            data_replicate=data,
            tensor=self.tensor,
        )
        plan = cases.unlike(first, *self.kinds[1:], recompute=self.recompute)
        return plan.model_copy(update={"training": TRAINING})


CASES = (
    Case(kinds=((1, 4, (2, 3)), (1, 2, (5,)))),
    Case(kinds=((2, 2, (5,)), (1, 3, (1, 4))), name="tied llama"),
    Case(kinds=((1, 5, (2, 1, 2)), (1, 2, (5,)))),
    Case(kinds=((1, 5, (2, 3)), (1, 4, (4, 1))), recompute="full"),
    Case(kinds=((1, 2, (5,)), (1, 4, (2, 3))), precision="bf16"),
    Case(kinds=((1, 5, (2, 3)), (1, 2, (5,))), tensor=2),
    Case(kinds=((1, 4, (1, 4)), (1, 2, (5,))), tensor=2, name="tied llama"),
    Case(kinds=((1, 2, (5,)), (1, 4, (2, 2, 1)), (1, 3, (4, 1))), name="gpt2"),
    Case(kinds=((1, 4, (2, 2, 1)), (1, 2, (5,))), schedule="zb-h1", recompute="selective"),
    Case(kinds=((1, 3, (2, 3)), (2, 1, (5,))), schedule="gpipe", name="gemma2"),
    Case(kinds=((1, 4, (2, 3)), (1, 3, (3, 2))), name="tied llama", precision="bf16"),
    Case(kinds=((1, 4, (5,)), (1, 2, (5,)))),
    Case(kinds=((1, 4, (2, 3)), (1, 2, (5,))), name="mixtral"),
)
SOME = [CASES[1]]


@pytest.fixture(autouse=True)
def _one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def off(case: Case, plan: Plan, found: library_rows.Found) -> dict[str, float]:
    """Return how far a launch is off the library's run, beyond what its bounds allow."""
    bound, half = BOUNDS[case.precision], case.precision == "bf16"
    wanted = library_rows.expected(case.folder, plan.global_batch, half=half, stale=False)
    noise = [0.0] * len(wanted.norms)
    if not half:
        noise = library_rows.round_off(case.folder, plan.global_batch, stale=False)
    norms = [
        abs(a - b) / b - ROUND_OFFS * c - bound.norm
        for a, b, c in zip(found.norms, wanted.norms, noise, strict=True)
    ]
    excess = {"loss": apart(found.losses, wanted.losses) - bound.loss, "norm": max(norms)}
    return {name: value for name, value in excess.items() if value > 0}


@pytest.mark.ranks
@pytest.mark.parametrize("rows", some_and_others(CASES, SOME))
def test_a_launch_of_unlike_pipelines_trains_like_the_library(
    rows: Sequence[Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = {}
    for number, case in enumerate(rows):
        plan, output = case.plan(), tmp_path / str(number)
        with Crew(plan.ranks) as crew:
            monkeypatch.setattr(launching, "supervise", OnCrew(crew))
            found = launched_plan(plan, output, weights=case.folder, checkpoint=output / "saved")
        to_huggingface(output / "saved", output / "exported")
        exported = load_file(output / "exported" / "model.safetensors")
        wanted = library_rows.expected(
            case.folder, plan.global_batch, half=case.precision == "bf16", stale=False
        ).weights
        excess = off(case, plan, found)
        if case.precision == "fp32" and case.name != "mixtral":  # whose files have other names
            assert exported.keys() == wanted.keys()
            steps = max(
                float((exported[name] - weight).abs().max()) for name, weight in wanted.items()
            )
            excess |= {"weights": steps} if steps > PART_OF_A_STEP * TRAINING.learning_rate else {}
        if excess:
            bad[plan.layout_text] = excess

    assert bad == {}


@pytest.mark.ranks
@pytest.mark.parametrize("first_is_unlike", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_a_run_goes_on_under_another_plan(
    first_is_unlike: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(kinds=((1, 4, (2, 3)), (1, 2, (5,))), name="tied llama")
    unlike = case.plan()
    alone = cases.plan(
        library_rows.graph_of(case.folder), micro_batches=1, global_batch=unlike.global_batch
    ).model_copy(update={"training": TRAINING})
    plans = (unlike, alone) if first_is_unlike else (alone, unlike)

    for plan, steps in zip(plans, (3, library_rows.STEPS), strict=True):
        with Crew(plan.ranks) as crew:
            monkeypatch.setattr(launching, "supervise", OnCrew(crew))
            found = launched_plan(
                plan,
                tmp_path / str(steps),
                weights=case.folder,
                checkpoint=tmp_path / "saved",
                steps=steps,
                resume=steps > 3,
            )

    wanted = library_rows.expected(case.folder, unlike.global_batch, half=False, stale=False)
    assert apart(found.losses, wanted.losses[3:]) < BOUNDS["fp32"].loss


# --- with all else that a plan can say ---------------------------------------------------------


ROWS, MOST_RANKS = 46, 6
MIXED_CHOICES = ("recompute", "activations", "loss", "precision", "family", "documents")


@dataclass(frozen=True)
class Mixed:
    """A row with pipelines of other kinds beside its own."""

    row: Row
    others: tuple[Pipelines, ...]

    def plan(self) -> Plan:
        return cases.unlike(self.row.plan(), *self.others, recompute=self.row.recompute)


@functools.cache
def mixed_rows(count: int) -> tuple[Mixed, ...]:
    """Return rows with random choices, each with one or two kinds of other pipelines beside it."""
    rng, table = random.Random(0), combinations.choices()
    found: list[Mixed] = []
    while len(found) < count:
        row = Row(
            pipeline=rng.randint(1, 3),
            data_replicate=rng.randint(1, 2),
            tensor=rng.choice((1, 1, 2)),
            schedule=rng.choice([(name, 1) for name in SCHEDULES]),
            several=rng.random() < 0.8,
            outside_in=rng.random() < 0.3,
            uneven=rng.random() < 0.3,
            tied=rng.random() < 0.4,
            **{name: rng.choice(table[name]) for name in MIXED_CHOICES},
        )
        if row.recompute == combinations.MIXED or combinations.reason(row) is not None:
            continue
        layers = len(row.graph().chain)
        others = tuple(
            (rng.randint(1, 2), rng.randint(1, 3), random_cuts(rng, layers, row))
            for _ in range(rng.randint(1, 2))
        )
        with contextlib.suppress(DocumentError, ValidationError):
            mixed = Mixed(row, others)
            plan = mixed.plan()
            if plan.ranks <= MOST_RANKS and unsupported_reason(plan, row.graph()) is None:
                found.append(mixed)
    return tuple(found)


def random_cuts(rng: random.Random, layers: int, row: Row) -> tuple[int, ...]:
    """Return numbers of layers of up to three stages, of which some schedules take no one."""
    depth = rng.randint(1, min(3, layers)) if row.pipeline > 1 else 1
    ends = sorted(rng.sample(range(1, layers), depth - 1))
    return tuple(end - begin for begin, end in zip([0, *ends], [*ends, layers], strict=True))


def mixed_errors(mixed: Mixed) -> str | None:
    """Return how far it trains from one process, where that is more than its bound."""
    plan, row, steps = mixed.plan(), mixed.row, 2
    wanted = alone(
        (row.model, row.precision, row.scales, row.document_len, plan.global_batch), steps
    )
    runs = on_ranks(plan.ranks, train_all, [(row.text, plan, row.graph())], steps)
    found = errors([run for ((run, _),) in runs], wanted)
    alike = len({str((run.losses, run.norms)) for ((run, _),) in runs}) == 1
    within = all(found[name] <= value for name, value in bound(row)._asdict().items())
    return None if within and alike else f"{plan.layout_text}, {row.text}: {found}, {alike}"


@pytest.mark.ranks
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.matrix) for part in range(1, 10))]
)
def test_unlike_pipelines_go_with_all_else_that_a_plan_can_say(part: int) -> None:
    rows = mixed_rows(1) if part == 0 else mixed_rows(ROWS)[1:][part - 1 :: 9]
    for family in {mixed.row.family for mixed in rows} & {*cases.COVERED}:
        ready(family)

    assert [text for mixed in rows if (text := mixed_errors(mixed))] == []


# --- what ranks hold together -------------------------------------------------------------------


def small_plan(*, tensor: int = 1) -> Plan:
    """Return a pipeline of (2, 3) layers, one of (4, 1) and two of 5, of a model with tied ends."""
    model = cases.transformer(tied_embeddings=True)
    first = cases.plan(
        model, cuts=(2, 3), pipeline=2, tensor=tensor, micro_batches=3, global_batch=6
    )
    return cases.unlike(first, (1, 2, (4, 1)), (2, 1, (5,)))


def groups_of_layers() -> dict[str, list[int]]:
    plan = small_plan()
    readers = {item.layer: (item.layer,) for stage in plan.stages for item in stage.layers}
    readers["ends"] = ("embedding", "head")
    place = place_of(plan, torch.device("cpu"))
    return {
        name: dist.get_process_group_ranks(by.group)
        for name, by in holders_of(plan, place, readers).items()
    }


@pytest.mark.ranks
def test_layers_between_the_cuts_of_all_kinds_have_the_same_holders() -> None:
    """Ranks 0 and 1 are the first pipeline, 2 and 3 the second, 4 and 5 whole ones."""
    first, middle, last = [0, 2, 4, 5], [1, 2, 4, 5], [1, 3, 4, 5]
    wanted = {
        "embedding": first, "block.0": first, "block.1": middle, "block.2": middle,
        "head": last, "ends": [0, 1, 2, 3, 4, 5],
    }  # fmt: skip

    for rank, groups in enumerate(on_ranks(6, groups_of_layers)):
        assert groups == {name: ranks for name, ranks in wanted.items() if rank in ranks}


def two_batches_a_step(plan: Plan) -> tuple[list[float], float, dict[str, Tensor], int]:
    """Return norms of two steps, of two batches each, a held-out loss, all weights, and how many
    groups of ranks were made: a rank that makes others waits for nobody, or for ever."""
    model = cases.transformer(tied_embeddings=True)
    engine = token_engine(plan, model, device=torch.device("cpu"), documents=False)
    own = plan.samples_of(engine.slice_rank)
    part = slice(own.start, own.stop)
    norms = []
    for step in range(2):
        for half in range(2):
            tokens = cases.global_tokens(2 * step + half, global_batch=plan.global_batch)
            engine.forward_backward((tokens[part], None, None))
        norms.append(engine.optimizer_step().grad_norm)
    tokens = cases.global_tokens(9, global_batch=plan.global_batch)
    held_out = float(engine.evaluate((tokens[part], None, None)).loss)
    return norms, held_out, engine.state_dict(), dist.distributed_c10d._world.group_count


@pytest.mark.ranks
def test_several_batches_of_a_step_and_held_out_ones_are_those_of_one_process() -> None:
    plan = small_plan()
    alone = cases.plan(
        cases.transformer(tied_embeddings=True), micro_batches=1, global_batch=plan.global_batch
    )
    [(norms, held_out, weights, _)] = on_ranks(1, two_batches_a_step, alone)

    found = on_ranks(plan.ranks, two_batches_a_step, plan)

    assert len({(tuple(run[0]), run[3]) for run in found}) == 1
    for run in found:
        assert apart(run[0], norms) < 1e-6
        assert run[1] == pytest.approx(held_out, rel=1e-6)
        assert run[2].keys() == weights.keys()
        for name, value in weights.items():
            torch.testing.assert_close(run[2][name], value, rtol=1e-4, atol=1e-6)


def drifted(layer: str, rank: int) -> str:
    """Return what is said where a rank's copy of a layer has changed by itself."""
    plan = small_plan()
    model = cases.transformer(tied_embeddings=True)
    engine = token_engine(plan, model, device=torch.device("cpu"), documents=False)
    own = plan.samples_of(engine.slice_rank)
    if dist.get_rank() == rank:
        with torch.no_grad():
            next(iter(engine.units[layer].parameters())).view(-1)[3] += 1e-6
    tokens = cases.global_tokens(0, global_batch=plan.global_batch)
    try:
        engine.step((tokens[own.start : own.stop], None, None))
    except ReplicaDrifted as error:
        return f"{error.suspect}: {error}"
    return "nothing"


@pytest.mark.ranks
@pytest.mark.parametrize(("layer", "rank"), [("block.1", 2), ("embedding", 4)])
def test_a_copy_that_drifts_is_found_on_whichever_pipeline(layer: str, rank: int) -> None:
    for text in on_ranks(6, drifted, layer, rank):
        assert text.startswith(f"{rank}: ")
        assert f"rank {rank} has another value than ranks" in text


# --- modules of scripts -------------------------------------------------------------------------


class Net(nn.Module):
    """Tied ends, dropout in each block, and a weight that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.3),
                          nn.Linear(32, 16))
            for _ in range(3)
        )  # fmt: skip
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.table.weight
        self.unread = nn.Parameter(torch.ones(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


SIZE, SAMPLES, STEPS, CLIP = 2, 14, 3, 0.5


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 20, (SAMPLES, 7), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1], ids[:, 1:]


def loss(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    total = functional.cross_entropy(outputs.flatten(0, 1), batch[1].flatten(), reduction="sum")
    return total, batch[1].numel()


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.5, momentum=0.9)


def new_engine(plan: Plan | dict[str, Any], build: Any = Net, **options: Any) -> Engine:
    options = {"loss": loss, "clip_norm": CLIP, **options}
    return Engine(
        build,
        plan,
        optimizer=sgd,
        batch=batch_of(0),
        inputs=lambda batch: batch[0],
        **options,
    )


@functools.cache
def script_plan(*kinds: Pipelines) -> Plan:
    """Return a plan of these kinds of pipelines for the module of a script."""
    alone = new_engine({"micro_batch": SIZE}).plan
    data, micro_batches, cuts = kinds[0]
    [stage] = alone.stages
    ends = list(itertools.accumulate(cuts))
    stages = [
        stage.model_copy(update={"layers": stage.layers[begin:end]})
        for begin, end in zip([0, *ends], ends, strict=False)
    ]
    assert ends[-1] == len(stage.layers)
    first = {
        "mesh": Mesh(pipeline=len(cuts), data_replicate=data),
        "stages": tuple(stages),
        "micro_batches": micro_batches,
        "global_batch": SIZE * data * micro_batches,
    }
    return cases.unlike(Plan(**{**dict(alone), **first}), *kinds[1:])


def trained(plan: Plan, folder: str = "", stops_at: int = STEPS) -> list[Any]:
    engine = new_engine(plan)
    if folder:
        engine.resume(folder)
    results = []
    for step in range(engine.steps, stops_at):
        result = engine.step(engine.slice(batch_of(step)))
        results.append((float(result.loss), result.grad_norm))
    if folder and stops_at < STEPS:
        engine.save(folder)
    return [engine.state_dict(), results]


def resumed(plan: Plan, other: Plan, folder: str) -> list[Any]:
    """Train two steps under another plan, and the others under a plan."""
    trained(other, folder=folder, stops_at=2)
    dist.barrier()
    return trained(plan, folder=folder)


def plainly() -> tuple[dict[str, Tensor], list[tuple[float, float]]]:
    """Train in a plain loop, with torch's generator seeded before each block, which draws."""
    torch.manual_seed(0)
    model = Net()
    optimizer = sgd(model.parameters())
    current = [0]

    def seeding(name: str) -> Any:
        return lambda *_: torch.manual_seed(unit_seed(current[0], name)) and None

    for at, block in enumerate(model.blocks):
        block.register_forward_pre_hook(seeding(f"blocks.{at}"))
    results = []
    for step in range(STEPS):
        inputs, targets = batch_of(step)
        whole = 0.0
        for first in range(0, SAMPLES, SIZE):
            current[0] = step_seed(0, step, first)
            part = slice(first, first + SIZE)
            value = loss(model(inputs[part]), (None, targets[part]))[0] / targets.numel()
            value.backward()
            whole += float(value.detach())
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        results.append((whole, float(norm)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}, results


@pytest.mark.ranks
@pytest.mark.parametrize(
    "kinds",
    [
        ((1, 5, (2, 3)), (1, 2, (5,))),
        pytest.param(((1, 2, (5,)), (1, 5, (4, 1))), marks=pytest.mark.matrix),
        pytest.param(((1, 4, (1, 4)), (1, 3, (2, 3))), marks=pytest.mark.matrix),
        pytest.param(((1, 4, (1, 2, 2)), (3, 1, (5,))), marks=pytest.mark.matrix),
    ],
)
def test_a_script_draws_clips_ties_and_resumes_as_in_one_process(
    kinds: tuple[Pipelines, ...],
) -> None:
    wanted, results = plainly()
    plan = script_plan(*kinds)
    other = script_plan(*reversed(kinds))
    assert min(norm for _, norm in results) > CLIP

    with tempfile.TemporaryDirectory() as folder:
        found = on_ranks(plan.ranks, resumed, plan, other, str(Path(folder, "saved")))

    for weights, steps in found:
        for pair, one in zip(results[2:], steps, strict=True):
            assert one == pytest.approx(pair, rel=1e-5)
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6, msg=name)


class Normed(Net):
    """The same with statistics over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.norm(self.table(ids).flatten(0, 1)).sum()


class Summing(Net):
    """The same with a sum over the batch."""

    def forward(self, ids: Tensor) -> Tensor:
        out = super().forward(ids)
        return out / batch_sum(out.square().sum().detach())


@pytest.mark.parametrize(
    ("build", "options", "says"),
    [
        (Normed, {}, "other_pipelines: differ, .* norm is a BatchNorm"),
        (Net, {"loss": whole_batch(loss)}, "other_pipelines: differ, .* over the whole batch"),
        (Summing, {}, "other_pipelines: differ, and the module asks for sums over the batch"),
    ],
)
def test_what_gathers_over_all_slices_is_refused(
    build: Any, options: dict[str, Any], says: str
) -> None:
    plan = script_plan((1, 5, (2, 3)), (1, 2, (5,)))

    with pytest.raises(LaunchError, match=says):
        new_engine(plan, build, **options)
