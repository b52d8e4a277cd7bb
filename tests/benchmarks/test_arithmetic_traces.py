"""The arithmetic of each model family is held against a trace of its real modules."""

import pytest

from benchmarks import arithmetic_traces as traces
from meshwright.planner.catalog import models
from meshwright.planner.catalog.expressions import resolve_model


def families() -> dict[str, list[str]]:
    """Return the models of the catalogue by family, the narrowest first."""
    found: dict[str, list[tuple[int, str]]] = {}
    for name in models():
        a = resolve_model(name).architecture
        assert a is not None
        found.setdefault(a.family, []).append((a.hidden_size, name))
    return {family: [name for _, name in sorted(named)] for family, named in found.items()}


QUICK = [("llama", 1), ("llama", 2), ("opt", 1), ("qwen3_moe", 2), ("gpt_neox", 2)]
"""Families and tensor degrees that every run of the tests traces, a few seconds in all."""
ALL = [
    (name, tensor)
    for names in families().values()
    for name in names
    for tensor in traces.tensors_of(resolve_model(name))
]


def agree(name: str, tensor: int) -> None:
    for row in traces.compared(resolve_model(name), tensor):
        where = f"{row.model} {row.kind} tp={row.tensor} {row.recompute}"
        assert row.told.parameters == row.traced.parameters, where
        for figure, error in row.errors.items():
            assert abs(error) <= traces.TOLERANCE, f"{where}: {figure} {error:+.2%}"


@pytest.mark.spread(1)
@pytest.mark.long("qwen3_moe-2", "llama-2")
@pytest.mark.parametrize(("family", "tensor"), QUICK)
def test_families_do_what_the_arithmetic_says(family: str, tensor: int) -> None:
    agree(families()[family][0], tensor)


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "tensor"), ALL)
def test_every_model_of_the_catalogue_does(name: str, tensor: int) -> None:
    agree(name, tensor)
