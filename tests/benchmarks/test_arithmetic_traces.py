"""The arithmetic of each model family is held against a trace of its real modules."""

import pytest

from benchmarks import arithmetic_traces as traces
from planner.catalog import models
from planner.expressions import resolve_model


def families() -> dict[str, list[str]]:
    """Return the models of the catalogue by family, the narrowest first."""
    found: dict[str, list[tuple[int, str]]] = {}
    for name in models():
        a = resolve_model(name).architecture
        assert a is not None
        found.setdefault(a.family, []).append((a.hidden_size, name))
    return {family: [name for _, name in sorted(named)] for family, named in found.items()}


FIRST = [(names[0], 1) for names in families().values()]
DIVIDED = [(names[0], 2) for names in families().values()]
REST = [(name, tensor) for names in families().values() for name in names[1:] for tensor in (1, 2)]


def agree(name: str, tensor: int) -> None:
    for row in traces.compared(resolve_model(name), tensor):
        where = f"{row.model} {row.kind} tp={row.tensor} {row.recompute}"
        assert row.told.parameters == row.traced.parameters, where
        for figure, error in row.errors.items():
            assert abs(error) <= traces.TOLERANCE, f"{where}: {figure} {error:+.2%}"


@pytest.mark.parametrize(("name", "tensor"), FIRST)
def test_every_family_does_what_the_arithmetic_says(name: str, tensor: int) -> None:
    agree(name, tensor)


@pytest.mark.parametrize(("name", "tensor"), DIVIDED)
def test_so_it_does_where_tensor_parallelism_divides_it(name: str, tensor: int) -> None:
    agree(name, tensor)


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "tensor"), REST)
def test_every_model_of_the_catalogue_does(name: str, tensor: int) -> None:
    agree(name, tensor)
