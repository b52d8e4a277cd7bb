"""Tensor styles are found in modules that were not written for them, and train as one process."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import (  # noqa: F401 - written styles name them
    ColwiseParallel,
    RowwiseParallel,
)

import meshwright
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.engine.module_graph import few_samples
from meshwright.runtime.parallel import tensor_check
from meshwright.runtime.parallel.tensor_styles_search import (
    DerivedStyles,
    TensorStyles,
    line_of,
    style_text,
)
from meshwright.runtime.tracing.tracer import Recorder
from tests.runtime import own_modules
from tests.runtime.divisible import MODULES, SIZED, STYLES
from tests.runtime.ranks import on_ranks

SAMPLES, STEPS = 8, 2


def found(module: nn.Module, batch: Any, degree: int = 2) -> DerivedStyles:
    batch = few_samples(batch, 2)
    inputs = (lambda whole: whole) if isinstance(batch, tuple) else None
    return DerivedStyles(module, Recorder.of_units(module, batch, inputs), batch)


@pytest.mark.spread(2)
@pytest.mark.parametrize("kind", MODULES)
def test_what_can_be_divided_is_found(kind: str) -> None:
    torch.manual_seed(0)
    build, example = MODULES[kind]
    assert style_text(found(build(), example()).units_at(2)) == STYLES[kind]


def styles_of(module: nn.Module, batch: Any) -> TensorStyles:
    torch.manual_seed(0)
    return TensorStyles.for_units(found(module, batch).units_at(2), 2)


class Numbered(nn.Module):
    """A block that chooses by its number, however it has that, which of two products it uses."""

    def __init__(self, number: int, how: str) -> None:
        super().__init__()
        self.layer_idx, self.how = number, how
        self.even, self.odd, self.down = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor, layer_idx: int = 0) -> Tensor:
        number = layer_idx if self.how == "argument" else self.layer_idx
        is_odd = number in (1, 3) if self.how == "list" else number % 2 == 1
        return x + self.down((self.odd if is_odd else self.even)(x).relu())


class NumberedBlocks(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Numbered(number, how) for number in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x, layer_idx=number) if block.how == "argument" else block(x)
        return x


@pytest.mark.parametrize("how", ["attribute", "argument", "list"])
def test_blocks_that_choose_by_their_number_are_divided_where_they_compute(how: str) -> None:
    units = found(NumberedBlocks(how), torch.ones(4, 8)).units_at(2)
    names = ["even", "odd", "even", "odd"]
    assert [list(units[f"blocks.{at}"].regions[0].columns) for at in range(4)] == [
        [name] for name in names
    ]


@pytest.mark.parametrize("kind", SIZED)
@pytest.mark.long("fused", "grouped")
def test_code_with_sizes_of_the_whole_stays_whole_and_says_what_to_write(kind: str) -> None:
    build, example = SIZED[kind]
    styles = styles_of(build(), example())
    inside = {path for path in styles.whole if ".attn." in path}
    assert len(inside) == 2
    assert all("view(..., -1, head_size)" in styles.whole[path] for path in inside)
    assert not any(".attn." in path for path in styles.divided)
    assert "blocks.*.mlp.both" in styles.divided
    assert not styles.given


class Drawing(nn.Module):
    """Draws for the features between two products, without a module of Dropout."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(4) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(self.up(x).unflatten(-1, (-1, 4))).flatten(-2)
        return x + self.down(nn.functional.dropout(inner, 0.5, self.training))


class Normalised(nn.Module):
    """Is wrong on a part, in training alone, and draws outside of the products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x)
        if self.training:
            inner = inner / inner.norm(dim=-1, keepdim=True)
        return x + self.drop(self.down(inner))


def drawing(**settings: Any) -> nn.Module:
    return own_modules.Language(lambda: Drawing(**settings), width=8)


def model_of(kind: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    if kind == "draws":
        return drawing(), torch.randint(0, own_modules.WORDS, (8, 7))
    build, example = (MODULES | {f"sized {kind}": case for kind, case in SIZED.items()})[kind]
    return build(), example()


@pytest.mark.spread(2)
@pytest.mark.parametrize("kind", [*MODULES, *(f"sized {kind}" for kind in SIZED), "draws"])
def test_what_fewer_ranks_have_shown_is_not_tried_again_and_changes_nothing(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[nn.Module] = []
    run = tensor_check._run

    def counting(unit: nn.Module, *args: Any, **kwargs: Any) -> Any:
        runs.append(unit)
        return run(unit, *args, **kwargs)

    monkeypatch.setattr(tensor_check, "_run", counting)
    alone = found(*model_of(kind)).units_at(4)
    runs_alone = len(runs)
    styles = found(*model_of(kind))
    styles.units_at(2)
    before = len(runs)
    after = styles.units_at(4)

    assert len(runs) - before < runs_alone or not runs_alone
    assert not any(isinstance(unit, Drawing) for unit in runs[before:])
    assert alone.keys() == after.keys()
    for name, unit in alone.items():
        assert (unit.regions, unit.undrawn) == (after[name].regions, after[name].undrawn)
        assert unit.whole.keys() == after[name].whole.keys()
        assert (unit.partial, unit.dropouts) == (after[name].partial, after[name].dropouts)


def test_what_draws_stays_whole_and_has_styles_to_write_where_they_are_right() -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, own_modules.WORDS, (8, 7))
    wanted = {"blocks.*.up": "ColwiseParallel()", "blocks.*.down": "RowwiseParallel()"}
    styles = styles_of(drawing(), ids)
    assert styles.given == wanted
    assert "draws random numbers" in styles.whole["blocks.*.up"]
    assert str(styles).endswith(
        'tensor={"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}'
    )
    # The norm's gradient would be a part on each rank, which styles of torch do not add up.
    assert not styles_of(drawing(norm=True), ids).given
    wrong = styles_of(own_modules.Language(Normalised, width=8), ids)
    assert not wrong.given
    assert "draws random numbers" not in wrong.whole["blocks.*.up"]


def batches(kind: str) -> list[Any]:
    torch.manual_seed(1)
    return [MODULES[kind][1]() for _ in range(STEPS)]


def loss(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    target = torch.linspace(-1, 1, outputs.shape[-1])
    return (outputs - target).square().sum(), len(outputs)


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, eps=1e-4)


Run = tuple[list[float], dict[str, Tensor], list[float]]


def engine_of(kind: str, layout: dict[str, Any], optimizer: Any = adamw) -> Engine:
    build, _ = MODULES[kind]
    inputs = (lambda whole: whole) if kind in ("bert", "t5") else None
    of = batches(kind)[0]
    return Engine(
        build, layout, loss=loss, optimizer=optimizer, batch=of, inputs=inputs, clip_norm=1.0
    )


def trained(kind: str, layout: dict[str, Any], folder: Path | None = None) -> Run:
    """Return losses, weights, and losses in eval mode."""
    engine = engine_of(kind, layout)
    losses, seen = [], []
    for at, batch in enumerate(batches(kind)):
        if folder is not None and at == STEPS - 1:  # the last one behind a restart
            engine.save(folder)
            engine = engine_of(kind, {**layout, "seed": 0})
            engine.load(folder)
            whole = engine.state_dict()
            engine.load_state_dict({name: value + 1 for name, value in whole.items()})
            engine.load_state_dict(whole)
        losses.append(engine.step(engine.slice(batch)).loss)
        seen.append(engine.evaluate(engine.slice(batch)).loss)
    return losses, engine.state_dict(), seen


SOME, OTHERS = ("fused",), ("t5", "torch", "reshaped", "grouped", "convolutions")
V = {"pipeline": 2, "virtual_stages": 2, "schedule": "zbv"}
LAYOUTS: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "tensor": (2, {"tensor": 2, "micro_batches": 2}, SOME),
    "tensor, other modules": (-2, {"tensor": 2, "micro_batches": 2}, OTHERS),
    "tensor x zero 3, recompute": (
        4,
        {"tensor": 2, "zero": 3, "micro_batches": 2, "recompute": "full"},
        ("fused", "torch"),
    ),
    "tensor x two stages": (4, {"tensor": 2, "pipeline": 2, "micro_batches": 4}, ("bert",)),
    "a V x zero 3": (4, {**V, "zero": 3, "micro_batches": 2}, ("tied",)),
    "a V x zero 1, recompute": (
        4,
        {**V, "zero": 1, "micro_batches": 2, "recompute": "full"},
        ("t5",),
    ),
}


def check_written_styles() -> None:
    """Styles as they are said to be written give the losses of the module itself, without draws."""
    torch.manual_seed(0)
    module, ids = drawing(), torch.randint(0, own_modules.WORDS, (8, 7))
    written = eval(line_of(styles_of(module, ids).given).removeprefix("tensor="))
    layout = {"tensor": 2, "seed": 0}
    engine = Engine(drawing, layout, loss=loss, optimizer=adamw, batch=ids, tensor=written)
    assert engine.state()["model.blocks.0.up.weight"].to_local().shape == (8, 8)
    module.load_state_dict(engine.state_dict())
    with torch.no_grad():
        total, count = loss(module.eval()(ids), ids)
    assert engine.evaluate(ids).loss == pytest.approx(float(total) / count, rel=1e-5)
    assert engine.step(ids).grad_norm > 0


def every(part: int, folder: str) -> dict[str, Run]:
    """Train what a part of `LAYOUTS` says: so many ranks, negative in `make matrix` alone."""
    if part == 2:
        check_written_styles()
    return {
        f"{kind}: {name}": trained(
            kind, layout, Path(folder, name) if kind in ("fused", "tied") else None
        )
        for name, (count, layout, kinds) in LAYOUTS.items()
        if count == part
        for kind in kinds
    }


@functools.cache
def expected(kind: str, micro_batch: int) -> Run:
    return trained(kind, {"micro_batch": micro_batch})


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.parametrize("part", [2, -2, 4])
def test_divided_modules_train_as_one_process(part: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for results in on_ranks(abs(part), every, part, folder):
            for name, (losses, state, seen) in results.items():
                kind = name.partition(": ")[0]
                size = 4 if abs(part) == 2 else 2
                own_losses, weights, own_seen = expected(kind, size)
                assert losses == pytest.approx(own_losses, rel=1e-5), name
                assert seen == pytest.approx(own_seen, rel=1e-5), name
                assert state.keys() == weights.keys()
                for key, value in weights.items():
                    torch.testing.assert_close(
                        state[key], value, rtol=1e-5, atol=2e-5, msg=f"{name}: {key}"
                    )


def shaped_like(name: str) -> tuple[Any, dict[str, Tensor]]:
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "vocab_size": 100,
    }
    ids = torch.randint(1, 100, (4, 9))
    kinds: dict[str, Any] = {
        "llama": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, num_key_value_heads=2, use_cache=False)
        ),
        "phi3": lambda: transformers.Phi3ForCausalLM(
            transformers.Phi3Config(**sizes, num_key_value_heads=2, pad_token_id=0, use_cache=False)
        ),
        "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**sizes)),
        "bert without dropout": lambda: transformers.BertForMaskedLM(
            transformers.BertConfig(**sizes, attention_probs_dropout_prob=0.0)
        ),
    }
    return kinds[name], {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


QUERY = "bert.encoder.layer.*.attention.self.query"


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "divided", "whole"),
    [
        ("llama", ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"), {}),
        ("phi3", ("mlp.gate_up_proj", "mlp.down_proj"), {"self_attn.qkv_proj": "head_size"}),
        ("bert", ("output.dense",), {"attention.self.query": "draws random numbers"}),
        (
            "bert without dropout",
            ("attention.self.query", "attention.output.dense", "output.dense"),
            {},
        ),
    ],
)
def test_blocks_of_transformers_are_divided_or_say_what_to_write(
    name: str, divided: tuple[str, ...], whole: dict[str, str]
) -> None:
    build, batch = shaped_like(name)
    styles = meshwright.tensor_styles(build, batch=batch)
    for path in divided:
        assert any(pattern.endswith(f".*.{path}") for pattern in styles.divided), path
    for path, reason in whole.items():
        assert any(p.endswith(f".*.{path}") and reason in said for p, said in styles.whole.items())
    assert (QUERY in styles.given) == (name == "bert")
