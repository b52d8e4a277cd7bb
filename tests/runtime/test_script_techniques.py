"""Techniques of `launch` on a script's own module: adapters, 8 bits, host memory, wires."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.planner.documents.training import Lora
from meshwright.planner.errors import DocumentError, LaunchError
from meshwright.runtime.core import pinned_memory as host
from meshwright.runtime.core.seeds import seed_of
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.parallel.gradient_compression import RANK
from meshwright.runtime.techniques import lora
from meshwright.runtime.techniques.packed_weights import is_packed, pack, restore
from tests.runtime.ranks import on_ranks

WIDTH, SAMPLES, STEPS = 32, 8, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Stem(nn.Module):
    """A frozen table, a scalar that no rank divides, and a parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.unread = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = Stem()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, SAMPLES, 4, WIDTH, generator=generator)
    return x, y


def loss(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return (outputs.float() - batch[1]).square().mean((1, 2)).sum(), len(outputs)


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, eps=1e-3)


Run = tuple[list[float], list[float], dict[str, Tensor], int]


def trained(
    fields: dict[str, Any], steps: int = STEPS, build: type[nn.Module] | None = None
) -> Run:
    """Return losses, gradient norms and weights, and how many parameters lie on the host."""
    engine = Engine(build or Net, fields, loss=loss, optimizer=adamw, batch=batch_of(0))
    results = [engine.step(engine.slice(batch_of(step))) for step in range(steps)]
    hosted = sum(host.on_host(slot.local) for slot in engine._optimizers.slots)
    found = [result.loss for result in results], [result.grad_norm for result in results]
    return *found, engine.state_dict(), hosted


def all_trained(every: list[dict[str, Any]], steps: int = STEPS) -> list[Run]:
    return [trained(fields, steps) for fields in every]


def plainly(change: Any = lambda net: net, steps: int = STEPS) -> Run:
    torch.manual_seed(0)
    net = change(Net())
    optimizer = adamw([p for p in net.parameters() if p.requires_grad])
    losses, norms = [], []
    for step in range(steps):
        total, count = loss(net(batch_of(step)[0]), batch_of(step))
        (total / count).backward()
        norms.append(float(nn.utils.get_total_norm([
            p.grad for p in net.parameters() if p.grad is not None
        ])))  # fmt: skip
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item() / count)
    return losses, norms, dict(net.state_dict()), 0


def check(run: Run, expected: Run, where: object) -> None:
    losses, norms, weights, _ = run
    assert losses == pytest.approx(expected[0], rel=1e-6), where
    assert norms == pytest.approx(expected[1], rel=1e-5), where
    assert weights.keys() == expected[2].keys()
    for name, value in expected[2].items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6, msg=name)


HOSTED: list[dict[str, Any]] = [
    {},
    {"zero": 2, "micro_batches": 2, "recompute": "full"},
    {"zero": 3},
    {"pipeline": 2, "virtual_stages": 2, "schedule": "zbv", "cuts": [1, 2, 1, 1]},
]


@pytest.mark.ranks
@pytest.mark.parametrize("part", ["some", pytest.param("all", marks=pytest.mark.matrix)])
def test_parameters_on_the_host_train_as_a_plain_loop(part: str) -> None:
    every = [
        {**one, "offload": "parameters"} for one in (HOSTED[2:3] if part == "some" else HOSTED)
    ]
    expected = plainly()

    for runs in on_ranks(2, all_trained, every):
        for fields, run in zip(every, runs, strict=True):
            check(run, expected, fields)
            assert run[3] > 2, fields


BOUNDS = {"bf16": 1e-3, "fp16": 1e-4}
"""Relative, of losses; measured up to 1e-4 and 1e-5."""


@pytest.mark.ranks
@pytest.mark.matrix
def test_gradients_that_travel_in_fewer_bytes_lose_little() -> None:
    wires: list[dict[str, Any]] = [
        {"gradient_compression": "bf16", "zero": 3},
        {"gradient_compression": "fp16", "zero": 1, "micro_batches": 2},
    ]
    expected = plainly()

    for runs in on_ranks(2, all_trained, wires):
        for fields, (losses, *_) in zip(wires, runs, strict=True):
            bound = BOUNDS[fields["gradient_compression"]]
            assert losses == pytest.approx(expected[0], rel=bound), fields
            assert losses != pytest.approx(expected[0], rel=bound / 1e4), fields


def gradients(fields: dict[str, Any]) -> dict[str, Tensor]:
    engine = Engine(Net, fields, loss=loss, optimizer=adamw, batch=batch_of(0))
    engine.forward_backward(engine.slice(batch_of(0)))
    return engine.gradients()


@pytest.mark.ranks
@pytest.mark.matrix
def test_matrices_travel_by_low_rank_and_vectors_whole() -> None:
    whole = gradients({})

    for found in on_ranks(2, gradients, {"gradient_compression": "powersgd"}):
        assert found.keys() == whole.keys()
        for name, value in found.items():
            if value.ndim > 1:
                assert torch.linalg.matrix_rank(whole[name]) > RANK
                assert torch.linalg.matrix_rank(value) == RANK, name
            else:
                torch.testing.assert_close(value, whole[name], rtol=1e-4, atol=1e-6)


class Adapted(nn.Module):
    """What an adapter is, written down once more."""

    def __init__(self, linear: nn.Linear, name: str, settings: Lora) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach(), requires_grad=False)
        self.bias = nn.Parameter(linear.bias.detach(), requires_grad=False)
        rows, columns = linear.weight.shape
        self.lora_a = nn.Parameter(torch.empty(settings.rank, columns))
        self.lora_b = nn.Parameter(torch.zeros(rows, settings.rank))
        generator = torch.Generator().manual_seed(seed_of(0, f"{name}.lora_a"))
        lora.fill(f"{name}.lora_a", self.lora_a.data, generator)
        self._scale = settings.alpha / settings.rank

    def forward(self, x: Tensor) -> Tensor:
        added = x @ self.lora_a.T @ self.lora_b.T
        return functional.linear(x, self.weight, self.bias) + self._scale * added


def adapted(net: nn.Module, *, settings: Lora, ends: tuple[str, ...]) -> nn.Module:
    net.requires_grad_(False)
    for name, part in list(net.named_modules()):
        if isinstance(part, nn.Linear) and name.endswith(ends):
            owner, _, attribute = name.rpartition(".")
            setattr(net.get_submodule(owner), attribute, Adapted(part, name, settings))
    return net


ADAPTED: list[dict[str, Any]] = [
    {"zero": 3},
    {"tensor": 2},
    {"pipeline": 2, "schedule": "zb-h1"},
    {"micro_batches": 2, "recompute": "full"},
    {"zero": 2, "offload": "optimizer"},
]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("part", "ends"),
    [
        ("some", ("up", "down", "unread")),
        pytest.param("all", ("up", "down", "unread"), marks=pytest.mark.matrix),
        pytest.param("all", ("down",), marks=pytest.mark.matrix),
    ],
)
def test_adapters_train_as_those_of_a_plain_loop(part: str, ends: tuple[str, ...]) -> None:
    targets = ("all-linear",) if len(ends) > 1 else ends
    settings = Lora(rank=4, alpha=8.0, targets=targets)
    every = [{**one, "lora": settings} for one in (ADAPTED[1:3] if part == "some" else ADAPTED)]
    expected = plainly(functools.partial(adapted, settings=settings, ends=ends))

    for runs in on_ranks(2, all_trained, every):
        for fields, run in zip(every, runs, strict=True):
            check(run, expected, fields)


def test_adapters_that_no_module_gets_are_refused() -> None:
    with pytest.raises(LaunchError, match=r"lora\.targets: no linear layer in Net's .* q_proj"):
        trained({"lora": Lora(rank=4, targets=("q_proj",))})
    with pytest.raises(DocumentError, match=r"lora.*rank"):
        trained({"lora": {"rank": 0}})
    with pytest.raises(LaunchError, match=r"lora\.weights: is nf4, and no unit of Narrow .*full"):
        trained({"lora": Lora(rank=4, weights="nf4")}, build=Narrow)


class Narrow(nn.Module):
    """No row of a block fills an element of the computation's type."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x[..., :3]) + self.blocks[1](x[..., :3])


class Reader(nn.Module):
    """A block with weights that others read: a product's, two modules' and one of odd rows."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(WIDTH, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight
        self.odd = nn.Linear(27, WIDTH)
        self.inner = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.inner.linear1.weight.dtype) + functional.linear(x, self.read.weight)
        return self.inner(self.second(self.first(x)) + self.odd(x[..., :27]))


class Readers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Reader() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PACKED = [f"blocks.{block}.inner.linear{n}" for block in (0, 1) for n in (1, 2)]


def restored() -> nn.Module:
    """Return the module with the weights that packing leaves."""
    net = Readers()
    for path in PACKED:
        weight = net.get_parameter(f"{path}.weight")
        weight.data = restore(pack(weight.data, "nf4"), "nf4", torch.float32)
    return net


def test_weights_that_their_linear_alone_reads_are_packed() -> None:
    engines = [
        Engine(build, {"lora": Lora(rank=4, weights=weights), "recompute": "full"}, loss=loss,
               optimizer=adamw, batch=batch_of(0))
        for build, weights in ((Readers, "nf4"), (restored, "full"))
    ]  # fmt: skip

    packed, whole = ([engine.step(batch_of(step)).loss for step in range(STEPS)]
                     for engine in engines)  # fmt: skip

    assert packed == pytest.approx(whole, rel=1e-6)
    parts = engines[0]._parts[0].module.named_modules()
    assert [path for path, part in parts if is_packed(part, "weight")] == PACKED
    # torch's kernel for whole layers in eval mode would leave adapters out.
    assert engines[0].evaluate(batch_of(9)).loss == pytest.approx(
        engines[1].evaluate(batch_of(9)).loss, rel=1e-6
    )
    assert not {f"{path}.weight" for path in PACKED} & engines[0].state_dict().keys()


def test_evaluation_has_the_adapters_of_an_encoders_layer() -> None:
    engine = Engine(Readers, {"lora": Lora(rank=4), "precision": "bf16"}, loss=loss,
                    optimizer=adamw, batch=batch_of(0))  # fmt: skip
    engine.step(batch_of(0))
    frozen = [p for p in engine._parts[0].module.parameters() if not p.requires_grad]
    assert {parameter.dtype for parameter in frozen} == {torch.bfloat16}

    evaluated = engine.evaluate(batch_of(1)).loss

    assert engine.step(batch_of(1)).loss == pytest.approx(evaluated, rel=1e-3)
    assert engine.evaluate(batch_of(1)).loss != pytest.approx(evaluated, rel=1e-3)


STALE: list[dict[str, Any]] = [
    {"pipeline": 2, "micro_batches": 2},
    {"pipeline": 2, "micro_batches": 4, "recompute": "full", "offload": "optimizer"},
]


def stale_trained(every: list[dict[str, Any]]) -> list[Run]:
    return [trained({**fields, "schedule": "pipedream-2bw"}) for fields in every]


def stale_plainly() -> Run:
    """Each update by the gradient at the weights of the update before it."""
    torch.manual_seed(0)
    net = Net()
    optimizer = adamw([p for p in net.parameters() if p.requires_grad])
    history = [{name: value.clone() for name, value in net.state_dict().items()}]
    losses = []
    for step in range(STEPS):
        net.load_state_dict(history[max(0, step - 1)])
        total, count = loss(net(batch_of(step)[0]), batch_of(step))
        (total / count).backward()
        net.load_state_dict(history[-1])
        optimizer.step()
        optimizer.zero_grad()
        history.append({name: value.clone() for name, value in net.state_dict().items()})
        losses.append(total.item() / count)
    return losses, [], history[-1], 0


@pytest.mark.ranks
@pytest.mark.matrix
def test_a_pipeline_that_never_drains_follows_its_rule() -> None:
    expected = stale_plainly()

    for runs in on_ranks(2, stale_trained, STALE):
        for fields, (losses, _, weights, _) in zip(STALE, runs, strict=True):
            check((losses, [], weights, 0), expected, fields)


def late_alone() -> str:
    fields = {"pipeline": 2, "micro_batches": 2, "schedule": "pipedream-2bw"}
    engine = Engine(Net, fields, loss=loss, optimizer=adamw, batch=batch_of(0))
    with pytest.raises(LaunchError) as refused:
        engine.forward_backward(engine.slice(batch_of(0)))
    return str(refused.value)


@pytest.mark.ranks
@pytest.mark.matrix
def test_a_late_step_is_not_taken_apart() -> None:
    (said, _) = on_ranks(2, late_alone)

    assert "forward_backward: schedule pipedream-2bw ends the backward pass" in said


NARROW: list[dict[str, Any]] = [
    {"precision": "bf16"},
    {"precision": "fp8"},
    {"precision": "fp8", "scales": "rowwise"},
    {"precision": "mxfp8"},
]


@pytest.mark.ranks
@pytest.mark.matrix
def test_products_in_eight_bits_stay_beside_sixteen_and_follow_no_plan() -> None:
    """Two ranks have the micro-batches of one, and so the scales of its products."""
    one = on_ranks(1, all_trained, [{**fields, "micro_batch": 4} for fields in NARROW])[0]
    staged = {"precision": "fp8", "pipeline": 2, "micro_batch": 4, "recompute": "full"}
    two = on_ranks(2, all_trained, [*({**fields, "zero": 3} for fields in NARROW), staged])

    sixteen = one[0][0]
    for runs in two:
        for fields, own, run in zip(NARROW, one, runs, strict=False):
            assert run[0] == pytest.approx(own[0], rel=1e-4), fields
            assert own[0] == pytest.approx(sixteen, rel=0.02), fields
        assert runs[-1][0] == pytest.approx(one[1][0], rel=1e-4)
    assert len({tuple(run[0]) for run in one}) == len(NARROW)


@pytest.mark.ranks
@pytest.mark.matrix
def test_weights_gathered_in_eight_bits_change_no_value() -> None:
    """They are rounded before the gather in place of behind it."""
    every = [
        {"precision": "fp8", "zero": 3, "weight_gather_dtype": wire, "recompute": "full"}
        for wire in ("full", "fp8")
    ]
    every.append({"precision": "bf16", "zero": 3, "recompute": "full"})

    for full, narrow, sixteen in on_ranks(2, all_trained, every, 2):
        assert narrow[:2] == full[:2]
        assert full[0] != sixteen[0]
        assert full[0] == pytest.approx(sixteen[0], rel=0.02)


def test_eight_bits_without_a_product_that_has_them_are_refused() -> None:
    with pytest.raises(LaunchError, match=r"precision: is fp8, and no unit of Linear has an nn\."):
        Engine(
            functools.partial(nn.Linear, WIDTH, WIDTH),
            {"precision": "fp8"},
            loss=loss,
            optimizer=adamw,
            batch=batch_of(0),
        )
