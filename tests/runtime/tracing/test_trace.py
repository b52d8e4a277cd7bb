"""A recorded module, cut anywhere, does what the module does, bit by bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshwright.planner.errors import RecordError
from meshwright.runtime.tracing.replayed_stage import RecordedStage
from meshwright.runtime.tracing.stage import MicroBatch
from meshwright.runtime.tracing.tracer import Recorder, arguments
from tests.runtime.own_modules import GPT, MODULES, WIDTH, Bert, Dicts, ResNet, Undecided, UNet


def outputs_of(module: nn.Module, inputs: Any, batch: Any) -> list[Any]:
    args, kwargs = arguments(inputs(batch))
    return tree_leaves(module(*args, **kwargs))


def stages_of(module: nn.Module, recorder: Recorder, *cuts: int) -> list[RecordedStage]:
    ends = [*cuts, len(recorder.first.layers)]
    return [
        RecordedStage(module, recorder, first, last)
        for first, last in zip([0, *cuts], ends, strict=True)
    ]


def declared_by(stage: RecordedStage, batch: Any) -> tuple[Tensor, ...]:
    return stage.received(stage._recorder.recording(batch, training=stage.training))


def through(stages: list[RecordedStage], batch: Any, seed: int | None = None) -> Any:
    """Run stages one after the other on what the one before it sent, as a message is."""
    passed: tuple[Tensor, ...] = ()
    for stage in stages:
        for got, declared in zip(passed, declared_by(stage, batch), strict=True):
            assert (got.shape, got.dtype) == (declared.shape, declared.dtype)
            assert got.requires_grad == declared.requires_grad
        result = stage(*passed, micro=MicroBatch(batch, seed))
        passed = result
    return result


def assert_same(left: list[Any], right: list[Any]) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        if isinstance(one, Tensor):
            assert torch.equal(one, other)
        else:
            assert one == other


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.spread(2)
@pytest.mark.parametrize("kind", MODULES)
def test_replay_in_stages_equals_the_module(kind: str) -> None:
    torch.manual_seed(0)
    build, example, inputs = MODULES[kind]
    module = build()
    plain = copy.deepcopy(module)
    recorder = Recorder(module, example(), inputs)
    count = len(recorder.first.layers)
    stages = stages_of(module, recorder, *sorted({count // 3, 2 * count // 3} - {0}))
    batch = example()  # other values than those of the example

    expected = outputs_of(plain, inputs, batch)
    replayed = tree_leaves(through(stages, batch))

    assert_same(replayed, expected)
    torch.manual_seed(1)
    loss = sum(x.square().sum() for x in expected if isinstance(x, Tensor) and x.requires_grad)
    loss.backward()
    loss = sum(x.square().sum() for x in replayed if isinstance(x, Tensor) and x.requires_grad)
    loss.backward()
    wanted = gradients(plain)
    found = gradients(module)
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert (grad is None) == (found[name] is None), name
        if grad is not None:
            torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-6)
    for (name, one), other in zip(plain.named_buffers(), module.buffers(), strict=True):
        assert torch.equal(one, other), name
    assert {name for stage in stages for name, _ in stage.named_parameters()} <= set(
        recorder.aliases
    )


@pytest.mark.spread(2)
@pytest.mark.parametrize("kind", MODULES)
def test_every_cut_can_be_made(kind: str) -> None:
    torch.manual_seed(0)
    build, example, inputs = MODULES[kind]
    module = build().eval()
    recorder = Recorder(module, example(), inputs)
    count = len(recorder.first.layers)
    batch = example()

    replayed = tree_leaves(through(stages_of(module, recorder, *range(1, count)), batch))

    assert count >= 2
    assert_same(replayed, outputs_of(module, inputs, batch))


def test_layers_are_the_users_own_parts() -> None:
    recorder = Recorder(ResNet(), torch.randn(2, 3, 8, 8))
    names = [layer.name for layer in recorder.first.layers]

    # bn1's output is changed in place by the activation behind it, which is of the same layer.
    assert names == [
        "conv1", "bn1", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "fc",
    ]  # fmt: skip
    assert recorder.first.layers[1].units == ("bn1", "relu", "maxpool")


def test_what_is_made_of_the_batch_alone_crosses_no_cut() -> None:
    recorder = Recorder(Bert(), (torch.ones(2, 7).long(), torch.ones(2, 7)), lambda b: b)

    for at in range(len(recorder.first.layers) - 1):
        (hidden,) = recorder.first.sent(at)
        assert hidden.shape == (2, 7, WIDTH)


def test_skips_cross_every_cut_between_both_ends() -> None:
    recorder = Recorder(UNet(), torch.randn(2, 3, 8, 8))
    names = [layer.name for layer in recorder.first.layers]
    sent = {name: len(recorder.first.sent(at)) for at, name in enumerate(names[:-1])}

    assert sent["stem"] == 1
    assert sent["norms.0"] == 2
    assert sent["norms.1"] == 3
    assert sent["ups.0"] == 2
    assert sent["ups.1"] == 1


def test_units_that_the_user_names_stay_whole() -> None:
    module = MODULES["two_towers"][0]()
    batch = MODULES["two_towers"][1]()
    recorder = Recorder(module, batch, lambda b: b, units=["image", "text"])

    assert [layer.name for layer in recorder.first.layers] == ["image", "left", "text", "right"]


def test_a_value_read_between_units_is_refused_with_its_line() -> None:
    with pytest.raises(RecordError, match=r"own_modules.py:\d+: bool reads the value") as caught:
        Recorder(Undecided(), torch.randn(2, WIDTH))
    path, _, line = str(caught.value.where).rpartition(":")
    assert "if x.mean() > 0" in Path(path).read_text().splitlines()[int(line) - 1]


def test_a_module_that_cannot_be_recorded_is_one_unit() -> None:
    torch.manual_seed(0)
    module = Undecided()
    batch = torch.randn(4, WIDTH)
    recorder = Recorder.of_units(module, batch)
    (stage,) = stages_of(module, recorder)

    assert "bool reads the value" in str(recorder.refused)
    assert [layer.name for layer in recorder.first.layers] == ["model"]
    assert dict(stage.named_parameters()).keys() == dict(module.named_parameters()).keys()
    assert stage.units.keys() == {"parts.0", "parts.1"}
    for one in (batch, -batch):
        assert torch.equal(through([stage], one), module(one))
    with pytest.raises(RecordError, match="cannot be run on the example"):
        Recorder.of_units(module, batch.to("meta"))


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Remembering() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        for part in self.parts:
            x = part(x, cache)
        return x


class Cache:
    def __init__(self) -> None:
        self.seen: list[Tensor] = []


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.seen.append(x)
        return self.linear(x) + len(cache.seen)


def test_state_handed_to_a_unit_is_refused() -> None:
    with pytest.raises(RecordError, match=r"parts.0 gets a Cache, .*use_cache=False"):
        Recorder(Cached(), torch.randn(2, WIDTH))


class Changes(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "batch":
            x[:, 0] = 0
        if self.what == "parameter":
            with torch.no_grad():
                self.weight.clamp_(max=1.0)
        for part in self.parts:
            x = part(x * self.weight)
        return x


@pytest.mark.parametrize("what", ["batch", "parameter"])
def test_changing_what_all_stages_have_is_refused(what: str) -> None:
    with pytest.raises(RecordError, match=rf"changes the {what}.* in place"):
        Recorder(Changes(what), torch.randn(2, WIDTH))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 7  # not what autograd would find by itself


class OwnBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[1](Doubled.apply(self.parts[0](x)))


def test_a_backward_of_the_users_own_is_kept() -> None:
    module = OwnBackward()
    plain = copy.deepcopy(module)
    batch = torch.randn(2, WIDTH)
    recorder = Recorder(module, batch)

    through(stages_of(module, recorder, 1), batch).sum().backward()
    plain(batch).sum().backward()

    assert_same(list(gradients(module).values()), list(gradients(plain).values()))


@pytest.mark.spread(2)
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("kind", ["gpt_tied", "resnet", "t5", "changing"])
def test_recomputed_layers_have_the_same_gradients(kind: str, recompute: Any) -> None:
    torch.manual_seed(0)
    build, example, inputs = MODULES[kind]
    module = build()
    plain = copy.deepcopy(module)
    batch = example()
    recorder = Recorder(module, batch, inputs)
    stages = stages_of(module, recorder, 1)
    for stage in stages:
        stage.recompute = {layer.name: recompute for layer in stage.layers}
    calls: list[str] = []
    for name, part in module.named_modules():
        part.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    units = [node.unit for node in recorder.first.nodes]

    through(stages, batch).square().sum().backward()
    outputs_of(plain, inputs, batch)[0].square().sum().backward()

    for name, grad in gradients(plain).items():
        if grad is not None:
            torch.testing.assert_close(gradients(module)[name], grad, rtol=1e-5, atol=1e-6)
    unit = recorder.first.layers[1].units[0]
    assert calls.count(unit) == 2 * units.count(unit)


def test_eval_mode_is_recorded_too_and_parts_in_eval_stay_there() -> None:
    torch.manual_seed(0)
    module = Bert(dropout=0.5)
    module.blocks[0].eval()
    batch = MODULES["bert"][1]()
    recorder = Recorder(module, batch, lambda b: b)
    stages = stages_of(module, recorder, 4)

    for stage in stages:
        stage.eval()
    assert_same([through(stages, batch)], [copy.deepcopy(module).eval()(*batch)])
    for stage in stages:
        stage.train()
    assert not stages[0].get_submodule("blocks.0.drop").training
    assert stages[0].get_submodule("drop").training


def test_dropout_is_seeded_by_sample_and_unit_and_recomputed_alike() -> None:
    torch.manual_seed(0)
    whole, cut = Bert(dropout=0.5), Bert(dropout=0.5)
    cut.load_state_dict(whole.state_dict())
    batch = MODULES["bert"][1]()
    one = stages_of(whole, Recorder(whole, batch, lambda b: b))
    two = stages_of(cut, Recorder(cut, batch, lambda b: b), 2)
    for stage in two:
        stage.recompute = {layer.name: "full" for layer in stage.layers}

    torch.manual_seed(1)
    first = through(one, batch, seed=5)
    torch.manual_seed(2)
    second = through(two, batch, seed=5)
    first.square().sum().backward()
    second.square().sum().backward()

    assert torch.equal(first, second)
    for name, grad in gradients(whole).items():
        torch.testing.assert_close(gradients(cut)[name], grad)
    assert not torch.equal(first, through(one, batch, seed=6))
    before = torch.get_rng_state()
    through(one, batch, seed=5)
    assert torch.equal(before, torch.get_rng_state())


def test_only_layers_that_draw_are_seeded() -> None:
    layers = Recorder(GPT(dropout=0.1), torch.ones(2, 7).long()).first.layers
    assert [layer.draws for layer in layers] == [False, True, True, True, True, False]
    layers = Recorder(GPT(), torch.ones(2, 7).long()).first.layers
    assert not any(layer.draws for layer in layers)


def test_the_digest_is_of_what_is_computed() -> None:
    batch = torch.ones(2, 7).long()
    digest = Recorder(GPT(), batch).first.digest

    assert Recorder(GPT(), batch + 1).first.digest == digest
    assert Recorder(GPT(tied="module"), batch).first.digest != digest
    assert Recorder(Bert(), (batch, batch), lambda b: b).first.digest != digest


def test_other_shapes_are_recorded_when_they_come() -> None:
    module = GPT()
    recorder = Recorder(module, torch.ones(4, 7).long())
    stages = stages_of(module, recorder, 2)
    for shape in ((4, 5), (1, 7)):
        batch = torch.randint(0, 20, shape)
        hidden = stages[0](micro=MicroBatch(batch))
        assert torch.equal(stages[1](*hidden, micro=MicroBatch(batch)), module(batch))


def test_numbers_in_the_batch_are_not_baked_in() -> None:
    class Scaled(Dicts):
        def forward(self, given: dict[str, Any]) -> Tensor:
            return self.parts[1](self.parts[0](given["x"]) * given["beta"])

    module = Scaled()
    batch = {"x": torch.randn(2, WIDTH), "beta": 0.5}
    recorder = Recorder(module, batch, lambda b: (b,))
    stages = stages_of(module, recorder, 1)
    later = {**batch, "beta": 2.0}

    assert torch.equal(through(stages, later), module(later))
