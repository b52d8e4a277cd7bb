"""Generated plans train like one process: every pair of what the runtime can execute, and more.

`make test` runs a cover of all pairs on 2 and 4 ranks, each axis as divided or not; `make matrix`
one of all pairs with every mesh of 2, 4 and 8 ranks, and writes docs/equality.md.
"""

from __future__ import annotations

import functools
import random
from dataclasses import fields, replace
from pathlib import Path

import pytest

from planner.plan import Layout, Mesh, PlacedLayer, Plan
from tests.runtime import cases, combinations, equality_table
from tests.runtime.combinations import EXACT, Row, bound, by_axis, by_mesh, cover, pairs, reason
from tests.runtime.equality_table import Result
from tests.runtime.ranks import on_ranks
from tests.runtime.runs import Run, errors, train_all

PARTS = [(ranks, part, parts) for ranks, parts in ((2, 2), (4, 4)) for part in range(parts)]
LARGE_PARTS = [
    (ranks, part, parts) for ranks, parts in ((2, 2), (4, 6), (8, 12)) for part in range(parts)
]
"""(ranks, part, parts): rows of a part train in the same processes, one after another."""
TABLE = Path(__file__).parents[2] / "docs" / "equality.md"
MOST_ROWS = 130
"""Of the small cover: each takes a second or two of `make test`."""


@functools.cache
def small() -> tuple[Row, ...]:
    return cover((2, 4), by_axis)


@functools.cache
def large() -> tuple[Row, ...]:
    return cover((2, 4, 8), by_mesh)


Alone = tuple[tuple[str, bool, int], str, int]
"""(model, precision, global batch): what one process trains for comparison."""
_alone: dict[Alone, Run] = {}


def alone(wanted: set[Alone]) -> dict[Alone, Run]:
    """Train in one process, in one micro-batch, with nothing else that plans can say."""
    lacking = sorted(wanted - _alone.keys())
    plans = []
    for model, precision, global_batch in lacking:
        graph = combinations.graph_of(model)
        plan = cases.plan(graph, precision=precision, global_batch=global_batch, micro_batches=1)
        plans.append((graph.name, plan, graph))
    if plans:
        (runs,) = on_ranks(1, train_all, plans)
        _alone.update(zip(lacking, (run for run, _ in runs), strict=True))
    return _alone


def results_of(rows: tuple[Row, ...], ranks: int) -> list[Result]:
    """Train rows on their ranks, and compare each with one process."""
    runs = on_ranks(
        ranks, train_all, [(row.text, row.plan(), row.graph()) for row in rows], timeout_s=900.0
    )
    keys = [(row.model, row.precision, row.global_batch) for row in rows]
    expected = alone(set(keys))
    return [
        Result(
            row,
            errors([of_rank[index][0] for of_rank in runs], expected[keys[index]]),
            runs[0][index][1],
        )
        for index, row in enumerate(rows)
    ]


def check(results: list[Result]) -> None:
    for result in results:
        print(result.text, f"{result.seconds:.2f} s")
    bad = [result.text for result in results if not result.within]
    assert not bad, "\n".join(bad)


def part_of(rows: tuple[Row, ...], ranks: int, part: int, parts: int) -> tuple[Row, ...]:
    return tuple(row for row in rows if row.ranks == ranks)[part::parts]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "part", "parts"),
    [
        # Three quarters of the rows on 4 ranks take minutes: `make matrix` trains them.
        pytest.param(*part, marks=[pytest.mark.matrix] if part[0] == 4 and part[1] else [])
        for part in PARTS
    ],
)
def test_every_pair_trains_like_one_process(ranks: int, part: int, parts: int) -> None:
    check(results_of(part_of(small(), ranks, part, parts), ranks))


@pytest.fixture(scope="module")
def table() -> list[Result]:
    """Results of the parts so far."""
    return []


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("ranks", "part", "parts"), LARGE_PARTS)
def test_every_mesh_trains_like_one_process(
    ranks: int, part: int, parts: int, table: list[Result]
) -> None:
    results = results_of(part_of(large(), ranks, part, parts), ranks)

    table += results
    # A run that is stopped says how far it came, and a row beyond its bound stands there too.
    TABLE.write_text(equality_table.text(table, rows=len(large())), encoding="utf-8")
    check(results)


# --- what the covers cover -------------------------------------------------------------------


def test_the_small_cover_has_every_pair_that_chance_finds() -> None:
    """Rows drawn at random, by another way than the cover's own, have no pair that it lacks."""
    rng = random.Random(1)
    table = combinations.choices()
    every_mesh = combinations.meshes((2, 4))
    covered = {pair for row in small() for pair in pairs(by_axis(row))}
    found = 0
    for _ in range(6000):
        # Half of the fields stay plain, or hardly any row would be one that the runtime takes.
        drawn = {name: rng.choice(values) for name, values in table.items() if rng.random() < 0.5}
        row = Row(**{**rng.choice(every_mesh), **drawn})
        if reason(row) is None:
            found += 1
            assert pairs(by_axis(row)) <= covered, row.text
    assert found > 80


def test_the_small_cover_stays_small() -> None:
    assert len(small()) <= MOST_ROWS


def test_every_value_of_the_types_is_covered_or_refused() -> None:
    """A value that the runtime newly takes is in the cover; one it refuses is in no row."""
    met = {p for row in small() for p in by_axis(row)}
    for name, values in combinations.choices().items():
        for value in values:
            if (name, value) not in met:
                assert all(
                    reason(Row(**{**mesh, "zero": zero, "family": family, name: value}))
                    for mesh in combinations.meshes((2, 4))
                    for zero in ((0, 1) if name != "zero" else (value,))
                    for family in (("reference", "mixtral") if name != "family" else (value,))
                ), (name, value)


def test_every_field_of_a_plan_is_a_field_of_the_rows() -> None:
    """A field that plans get later must be enumerated too, or stand here as one that needs not."""
    rows = {field.name for field in fields(Row)}
    set_by_rows = {
        "micro_batch": "several",
        "micro_batches": "several",
        "virtual_stages": "schedule",
    }
    set_by_rows |= {"order": "outside_in", "stages": "uneven"}
    layout = {set_by_rows.get(field.name, field.name) for field in fields(Layout)}
    mesh = {set_by_rows.get(name, name) for name in Mesh.model_fields}
    placed = set(PlacedLayer.model_fields) - {"layer"}
    of_plan = {set_by_rows.get(name, name) for name in Plan.model_fields}
    no_choice = {"format", "model", "cluster", "backend", "seq_len", "global_batch", "mesh"}
    no_choice |= {"training", "timeout_s", "groups", "shares"}

    assert layout | mesh | placed | (of_plan - no_choice) <= rows


def test_what_is_not_exact_has_a_bound() -> None:
    exact = {"fp32", "tf32", "keep", "none", "full", "optimizer", "parameters", "offload"}
    for name in ("precision", "activations", "offload", "gradient_wire"):
        for value in combinations.choices()[name]:
            inexact = value not in exact and (name, value) in {
                p for row in small() for p in by_axis(row)
            }
            assert inexact == ((name, value) in combinations.BOUNDS), (name, value)


def test_a_wide_bound_hides_no_pair() -> None:
    row = Row(data_replicate=2, precision="bf16", recompute="full")

    assert bound(row).loss > EXACT.loss
    assert all(("precision", "bf16") in pair for pair in pairs(by_axis(row)))
    assert len(pairs(by_axis(replace(row, precision="fp32")))) > len(pairs(by_axis(row)))
