"""What a recorded module's layers cost is what the whole module costs, counted by others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import meshwright
import meshwright.runtime.engine.module_graph
from meshwright.planner.documents.plan import Mesh, PlacedLayer, Plan, PlannedModel, Stage
from meshwright.planner.errors import PlanError, RecordError
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.engine.module_graph import (
    SAMPLES,
    changing_names,
    check_module,
    check_replay,
    few_samples,
    script_model,
)
from meshwright.runtime.tracing.meta_costs import identities
from meshwright.runtime.tracing.tracer import Inputs, Recorder, arguments
from tests.runtime.own_modules import GPT, MODULES, WIDTH, WORDS, Undecided


@pytest.mark.spread(2)
@pytest.mark.parametrize("kind", MODULES)
def test_layers_add_up_to_the_module(kind: str) -> None:
    torch.manual_seed(0)
    build, example, inputs = MODULES[kind]
    module = build()
    batch = few_samples(example(), 2)
    graph = script_model(module, batch, inputs, name="build")
    args, kwargs = arguments(inputs(batch))
    with FlopCounterMode(display=False) as flops:
        outputs = module(*args, **kwargs)

    assert sum(layer.trace.forward_flops for layer in graph.layers if layer.trace) == (
        flops.get_total_flops() / 2
    )
    assert graph.parameters == sum(p.numel() for p in module.parameters())
    last = graph.layers[-1].trace
    assert last is not None
    made = {
        x.data_ptr(): x.untyped_storage().nbytes()
        for x in tree_leaves(outputs)
        if isinstance(x, Tensor)
    }
    assert last.output_bytes == sum(made.values()) // 2


def test_stored_bytes_are_what_autograd_saves() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    batch = torch.randn(2, 4)
    graph = script_model(module, batch, name="build")
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(batch)
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    wanted = sum(size for key, size in saved.items() if key not in own)

    # Tanh's result is saved by it and by what reads it, which are two layers.
    found = sum(layer.trace.stored_bytes for layer in graph.layers if layer.trace)
    assert found == wanted / 2 + 8 * 4


class Dropping(nn.Module):
    """Makes what nobody reads, whose graph goes before the forward ends."""

    def __init__(self, dropped: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 8)
        self.dropped = dropped

    def forward(self, x: Tensor) -> Tensor:
        """Return as a Linear and Tanh do."""
        for width in range(self.dropped):
            self.layer(x).repeat(1, width + 1).tanh()
        return self.layer(x).tanh()


def test_what_autograd_lets_go_of_before_the_forward_ends_is_not_stored() -> None:
    batch = torch.randn(2, 4)

    modules = [nn.Sequential(Dropping(dropped)) for dropped in (0, 3)]
    graphs = [script_model(one, batch, units=["0"], name="build") for one in modules]
    stored = [sum(layer.trace.stored_bytes for layer in g.layers if layer.trace) for g in graphs]

    assert stored[0] == stored[1] > 0


def test_the_loss_is_of_the_last_layer() -> None:
    batch = torch.randint(0, WORDS, (2, 7))

    def loss(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
        flat = functional.cross_entropy(outputs.flatten(0, 1), batch.flatten(), reduction="sum")
        return flat, batch.numel()

    plain = script_model(GPT(), batch, name="build").layers
    with_loss = script_model(GPT(), batch, name="build", loss=loss).layers

    assert plain[:-1] == with_loss[:-1]
    assert plain[-1].trace is not None and with_loss[-1].trace is not None
    assert with_loss[-1].trace.stored_bytes >= plain[-1].trace.stored_bytes + 7 * WORDS * 4


def test_like_blocks_are_one_kind() -> None:
    graph = script_model(GPT(), torch.ones(4, 7).long(), name="build")
    assert graph.chain_kinds == ("embedding", *["block"] * 4, "layer_norm")


class Numbered(nn.Module):
    """A block that does what its number, its dropout and its weights say, scaled by its depth."""

    def __init__(self, index: int, weight: nn.Linear | None = None, drop: float = 0.0) -> None:
        super().__init__()
        self.layer_idx = index
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = weight or nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)
        self.scale = 0.5**index

    def forward(self, x: Tensor) -> Tensor:
        """Add to x, from the fourth block on without an activation."""
        wide = self.up(x)
        return x + self.scale * self.drop(
            self.down(wide if self.layer_idx >= 3 else functional.gelu(wide))
        )


def blocks() -> nn.Sequential:
    """Return blocks of which two that stand behind each other are alike, and no others."""
    tied = nn.Linear(2 * WIDTH, WIDTH)
    made = [Numbered(at, tied if at in (5, 6) else None, 0.5 * (at == 7)) for at in range(10)]
    made[8].up.requires_grad_(False)
    return nn.Sequential(*made)


@pytest.mark.spread(2)
@pytest.mark.parametrize("kind", ["blocks", *MODULES])
def test_layers_that_are_alike_are_priced_once_at_the_same_figures(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, batch, inputs = blocks(), torch.ones(2, WIDTH), None
    if kind != "blocks":
        build, example, inputs = MODULES[kind]
        module, batch = build(), few_samples(example(), 2)
    graph = script_model(module, batch, inputs, name="build", degrees=(2,))
    monkeypatch.setattr(
        meshwright.runtime.engine.module_graph,
        "identities",
        lambda _, recording: range(len(recording.layers)),
    )

    assert graph == script_model(module, batch, inputs, name="build", degrees=(2,))


def test_only_layers_that_do_the_same_are_alike() -> None:
    module = blocks()
    found = identities(module, Recorder(module, torch.ones(2, WIDTH)).first)
    firsts = [found.index(one) for one in found]

    # The first gets no gradient to hand on, 7 draws, weights of 8 are not trained, 9 is the last.
    assert firsts == [0, 1, 1, 3, 3, 3, 3, 7, 8, 9]


def test_neither_values_nor_the_number_of_samples_count() -> None:
    one = script_model(GPT(), torch.ones(4, 7).long(), name="build")
    other = script_model(GPT(), torch.zeros(1, 7).long(), name="build")
    assert one.digest == other.digest
    assert script_model(GPT(), torch.ones(4, 8).long(), name="build").digest != one.digest


def planned(module: nn.Module, batch: Any) -> Plan:
    graph = script_model(module, batch, name="build")
    layers = tuple(PlacedLayer(layer=name) for name, _ in graph.chain)
    return Plan(
        model=PlannedModel.of(graph),
        cluster="local",
        seq_len=1,
        global_batch=4,
        precision="fp32",
        mesh=Mesh(),
        zero=0,
        schedule="1f1b",
        micro_batch=4,
        micro_batches=1,
        stages=(Stage(layers=layers),),
    )


def recorded(module: nn.Module, batch: Any, inputs: Inputs | None = None) -> Recorder:
    return Recorder.of_units(module, few_samples(batch, SAMPLES), inputs)


class Wider(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up = nn.Linear(WIDTH, 3 * WIDTH)
        self.blocks[1].down = nn.Linear(3 * WIDTH, WIDTH)


def test_a_plan_is_of_one_module() -> None:
    batch = torch.randint(0, WORDS, (4, 7))
    plan = planned(GPT(), batch)

    check_module(plan, recorded(GPT(), batch))
    check_module(plan, recorded(GPT(), batch[:3]))
    with pytest.raises(PlanError, match=r"another module or batch .*shapes or calls differ"):
        check_module(plan, recorded(Wider(), batch))
    with pytest.raises(PlanError, match="another module or batch"):
        check_module(plan, recorded(GPT(), batch[:, :5]))
    with pytest.raises(PlanError, match=r"it differs in model, words"):
        check_module(plan, recorded(Undecided(), torch.randn(4, WIDTH)))


@pytest.mark.parametrize("kind", ["resnet", "experts", "two_towers", "changing", "lstm"])
def test_a_replayed_forward_is_checked_on_real_data(kind: str) -> None:
    build, example, inputs = MODULES[kind]
    module = build()
    before = {name: value.clone() for name, value in module.state_dict().items()}

    check_replay(module, recorded(module, example(), inputs), few_samples(example(), SAMPLES))

    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])


class Counting(GPT):
    calls = 0

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(ids) * self.calls


def test_a_forward_that_counts_its_calls_is_refused() -> None:
    with pytest.raises(RecordError, match="depends on Python's own state"):
        ids = torch.ones(SAMPLES, 7).long()
        module = Counting()
        check_replay(module, recorded(module, ids), ids)


@pytest.mark.long("<lambda>-0.0", "<lambda>-12.0", "<lambda>-4.0", "Adafactor-None")
@pytest.mark.parametrize(
    ("optimizer", "wanted"),
    [
        (lambda groups: torch.optim.SGD(groups, lr=0.1), 0.0),
        (lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9), 4.0),
        (torch.optim.AdamW, 8.0),
        (lambda groups: torch.optim.AdamW(groups, amsgrad=True), 12.0),
        (torch.optim.Adafactor, None),
    ],
)
def test_memory_of_states_is_that_of_the_scripts_optimizer(optimizer: Any, wanted: Any) -> None:
    batch = torch.randint(0, WORDS, (4, 7))

    def loss(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
        return outputs.square().sum(), batch.numel()

    plan = meshwright.plan(
        GPT, "4xa100-sxm-80gb", batch=batch, loss=loss, optimizer=optimizer, fix=["dp=4", "zero=0"]
    )
    told = meshwright.predict(plan)

    engine = Engine(GPT, {}, loss=loss, optimizer=optimizer, batch=batch)
    engine.step(batch)
    kept = sum(
        value.nbytes
        for one in engine.optimizer.state.values()
        for value in one.values()
        if isinstance(value, Tensor) and value.ndim
    )
    found = told.stages[0].memory_parts.get("optimizer", 0.0)
    assert found == pytest.approx(kept, rel=1e-9)
    if wanted is not None:
        assert kept == wanted * sum(p.numel() for p in GPT().parameters())


def test_vectors_that_hardly_move_are_seen_to_move() -> None:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    layer = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    module = nn.Sequential(layer, nn.Tanh(), nn.BatchNorm1d(WIDTH))
    for _ in range(5):
        module(x)

    names = changing_names(module, Recorder(module, x), x)

    assert names == {f"0.parametrizations.weight.0.{vector}" for vector in ("_u", "_v")}


class Scaled(nn.Module):
    """A buffer that the first forward makes: a table of its length, or a mean of its samples."""

    def __init__(self, *, by_samples: bool) -> None:
        super().__init__()
        self.linear, self.by_samples = nn.Linear(WIDTH, WIDTH), by_samples

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            scale = x.mean(0) if self.by_samples else torch.arange(x.shape[1]).cos()
            self.register_buffer("scale", scale.detach())
        made: Tensor = self.linear(x * self.scale)
        return made


@pytest.mark.parametrize("by_samples", [False, True])
def test_what_a_first_forward_makes_changes_if_it_is_of_samples(by_samples: bool) -> None:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    module = Scaled(by_samples=by_samples)

    names = changing_names(module, Recorder(module, x), x)

    assert names == ({"scale"} if by_samples else set())
