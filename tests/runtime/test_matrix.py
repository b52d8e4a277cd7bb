"""Generated plans train like one process: every pair of what the runtime can execute, and more.

A cover of all pairs on 2 and 4 ranks, each axis as divided or not, is run by `make matrix`, which
runs one of all pairs with every mesh of 2, 4 and 8 ranks, and compiled ones, and writes
docs/results/equality.md.  `make test` trains few rows: finding a cover takes longer than they do.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from meshwright.planner.documents.plan import Layout, Mesh, PlacedLayer, Plan
from meshwright.runtime.launch.training_loop import token_engine
from meshwright.runtime.techniques import compile as compiled
from tests.runtime import cases, combinations, equality_table
from tests.runtime.combinations import EXACT, Row, bound, by_axis, by_mesh, cover, pairs, reason
from tests.runtime.equality_table import (
    COMPILED,
    EVERY_MESH,
    FEW_STEPS,
    INDUCTOR,
    STEPS,
    Failure,
    Records,
    Result,
)
from tests.runtime.ranks import Crew, on_ranks
from tests.runtime.runs import Run, errors, train_all

PARTS = [(ranks, part, parts) for ranks, parts in ((2, 128), (4, 32)) for part in range(parts)]
"""(ranks, part, parts) of the small cover."""
EVERYDAY = (Row(tensor=2, several=True),)
"""What `make test` trains; other tests of it train by the other axes."""
MOST_ROWS = 145
"""Of the small cover: each takes a second or two."""
ROWS_OF_A_CREW = 40
"""Rows that the same processes train: each new mesh costs them sockets until they end."""
WRITE_EVERY_S = 20.0


@functools.cache
def small() -> tuple[Row, ...]:
    return cover((2, 4), by_axis)


@functools.cache
def large() -> tuple[Row, ...]:
    return cover((2, 4, 8), by_mesh)


@functools.cache
def ready(family: str) -> None:
    """Load what training a family loads, once, before ranks are forked from this process."""
    graph = combinations.graph_of((family, family == "gpt2", 2))
    plan = cases.plan(graph, micro_batches=1)
    token_engine(plan, graph, device=torch.device("cpu")).step(cases.global_tokens(0))


Alone = tuple[tuple[str, bool, int], str, str, int | None, int]
"""(model, precision, scales, document_len, global batch): what one process trains to compare."""


@functools.cache
def alone(wanted: Alone, steps: int) -> Run:
    """Train in one process, in one micro-batch, with nothing else that plans can say."""
    model, precision, scales, document_len, global_batch = wanted
    graph = combinations.graph_of(model)
    plan = cases.plan(
        graph, precision=precision, scales=scales, global_batch=global_batch, micro_batches=1
    ).model_copy(update={"document_len": document_len})
    # In a process of its own: 16 bits need a process group.
    ((run, _),) = on_ranks(1, train_all, [(graph.name, plan, graph)], steps)[0]
    return run


def results_of(
    rows: Sequence[Row], ranks: int, steps: int = FEW_STEPS
) -> Iterator[Result | Failure]:
    """Train rows on so many ranks, one after another, and compare each with one process."""
    for family in {row.family for row in rows} & {*cases.COVERED}:
        ready(family)
    for start in range(0, len(rows), ROWS_OF_A_CREW):
        with Crew(ranks) as crew:
            for row in rows[start : start + ROWS_OF_A_CREW]:
                try:
                    yield result_of(row, crew, steps)
                except (RuntimeError, TimeoutError) as error:
                    yield Failure(row, str(error))


def result_of(row: Row, crew: Crew, steps: int) -> Result:
    runs = crew.do(train_all, [(row.text, row.plan(), row.graph())], steps)
    expected = alone(
        (row.model, row.precision, row.scales, row.document_len, row.global_batch), steps
    )
    found = errors([run for ((run, _),) in runs], expected)
    return Result(row, found, max(seconds for ((_, seconds),) in runs))


def check(results: Sequence[Result | Failure]) -> None:
    bad = [result.text for result in results if not result.within]
    assert not bad, f"{len(bad)} of {len(results)} rows:\n" + "\n".join(bad)


@pytest.mark.ranks
def test_some_rows_train_like_one_process() -> None:
    assert not [row.text for row in EVERYDAY if reason(row) is not None]

    check(list(results_of(EVERYDAY, 2)))


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.parametrize(("ranks", "part", "parts"), PARTS)
def test_every_pair_trains_like_one_process(ranks: int, part: int, parts: int) -> None:
    rows = [row for row in small() if row.ranks == ranks][part::parts]

    check(list(results_of(rows, ranks)))


def train_left(records: Records, steps: int) -> None:
    """Train rows without a result, write the page as they come, and check all."""
    written = time.monotonic()
    for ranks, rows in itertools.groupby(records.left(), key=lambda row: row.ranks):
        for result in results_of(list(rows), ranks, steps):
            records.add(result)
            if time.monotonic() - written > WRITE_EVERY_S:
                records.write(steps)
                written = time.monotonic()
    records.write(steps)

    check(list(records.results.values()))
    assert len(records.results) == len(records.rows)


@functools.cache
def compiled_rows() -> tuple[Row, ...]:
    return combinations.dear_rows((*small(), *GATHERED, *NARROW))


GATHERED = (
    Row(family="llama", data_shard=4, zero=3, prefetch=2),
    Row(family="llama", data_shard=4, zero=3, reshard_after_forward=2, recompute="full"),
    Row(data_shard=2, tensor=2, zero=3, prefetch=1, reshard_after_forward=1, precision="bf16"),
    Row(data_replicate=2, data_shard=2, zero=3, reshard_after_forward=1, offload="optimizer"),
    Row(data_shard=2, context=2, zero=3, prefetch=3, recompute="selective"),
)
"""Choices of when ZeRO-3 gathers, which go with few others."""
AHEAD = (
    Row(family="llama", pipeline=2, schedule=(combinations.AHEAD, 1)),
    Row(pipeline=2, schedule=(combinations.AHEAD, 1), recompute="full", uneven=True, tied=True),
    Row(family="llama", pipeline=4, schedule=(combinations.AHEAD, 1), activations="offload"),
    Row(family="llama", pipeline=2, data_shard=2, zero=3, schedule=(combinations.AHEAD, 1)),
    Row(family="qwen2", pipeline=2, tensor=2, schedule=(combinations.AHEAD, 1)),
)
"""A forward ahead of every link of two and four ranks."""
NARROW = (
    Row(
        family="llama",
        data_shard=2,
        zero=3,
        precision="fp8",
        weight_gather_dtype="fp8",
        documents=True,
    ),
    Row(
        data_shard=4,
        zero=3,
        precision="fp8",
        weight_gather_dtype="fp8",
        prefetch=1,
        recompute="full",
    ),
    Row(family="llama", data_shard=2, tensor=2, zero=3, precision="fp8", weight_gather_dtype="fp8"),
    Row(
        family="llama",
        data_shard=4,
        zero=3,
        precision="fp8",
        scales="rowwise",
        reshard_after_forward=2,
    ),
    Row(tensor=2, precision="fp8", scales="rowwise", recompute="selective"),
    Row(family="mixtral", data_shard=2, expert=2, zero=1, dispatch="allgather", documents=True),
    Row(family="mixtral", data_shard=2, tensor=2, expert=4, zero=1, hierarchical_all_to_all=2),
    Row(
        family="qwen3_moe",
        data_shard=4,
        expert=4,
        zero=3,
        recompute="selective",
        hierarchical_all_to_all=2,
    ),
)
"""Choices of products in 8 bits, and others that few rows can have."""


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.timeout(7200)
def test_every_row_that_can_be_compiled_trains_like_one_process(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs are traced and differentiated; inductor's are in the test below."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")

    train_left(Records(pytestconfig.cache, COMPILED, compiled_rows()), FEW_STEPS)


BY_INDUCTOR = (
    Row(family="llama", data_shard=2, zero=3, recompute="selective", compile="block"),
    Row(tensor=2, recompute="full", compile="block", loss="chunked-recompute"),
    Row(family="qwen3", context=2, compile="block"),
    Row(family="gpt2", tied=True, pipeline=2, activations="offload", compile="block"),
    Row(family="llama", data_shard=2, zero=2, precision="bf16", compile="block"),
    Row(family="llama", data_replicate=2, precision="fp8", compile="block"),
    Row(family="gemma2", tensor=2, compile="block", loss="chunked"),
    Row(family="mistral", data_replicate=2, compile="block", documents=True),
    Row(family="qwen2", pipeline=2, schedule=("zb-h1", 1), compile="block", loss="chunked"),
    Row(
        family="mixtral", data_shard=2, expert=2, zero=1, compile="block", loss="chunked-recompute"
    ),
    Row(family="qwen3_moe", data_shard=2, zero=3, recompute="full", compile="block"),
    Row(
        family="mixtral", data_shard=4, expert=4, zero=1, hierarchical_all_to_all=2, compile="block"
    ),
    Row(family=combinations.OWN, data_shard=2, zero=2, compile="block"),
)
"""One row at least of each family: dense, with shared heads, soft-capped, with experts."""


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.timeout(7200)
def test_compiled_by_inductor_each_family_and_axis_trains_like_one_process(
    pytestconfig: pytest.Config,
) -> None:
    train_left(Records(pytestconfig.cache, INDUCTOR, BY_INDUCTOR), FEW_STEPS)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_with_forwards_ahead_of_its_links_it_trains_like_one_process(ranks: int) -> None:
    rows = [row for row in AHEAD if row.ranks == ranks]
    assert rows
    assert not [row.text for row in rows if reason(row) is not None]

    check(list(results_of(rows, ranks)))


@pytest.mark.matrix
@pytest.mark.ranks
def test_whenever_zero_3_gathers_it_trains_like_one_process() -> None:
    assert not [row.text for row in GATHERED if reason(row) is not None]

    check(list(results_of(GATHERED, 4)))


@pytest.mark.matrix
def test_some_rows_of_every_axis_can_be_compiled() -> None:
    met = {p for row in compiled_rows() for p in by_axis(row)}

    assert len(compiled_rows()) > 50
    assert {(axis, True) for axis in combinations.DEGREES[1:]} <= met
    assert {("loss", how) for how in combinations.choices()["loss"]} <= met
    drawn = {p for row in compiled_rows() for p in combinations.dear(row)}
    choices = {(name, v) for name in combinations.DEAR for v in combinations.choices()[name]}
    assert choices - drawn == {("compile", "none")}
    assert {row.family for row in BY_INDUCTOR} == set(combinations.choices()["family"])
    assert not [row.text for row in BY_INDUCTOR if reason(row) is not None]


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.timeout(7200)
def test_every_mesh_trains_like_one_process(pytestconfig: pytest.Config) -> None:
    """Write the table as it goes.  A run that was stopped goes on where it was, or starts anew.

    It starts anew if any source of the training or of the rows has changed since.
    """
    train_left(Records(pytestconfig.cache, EVERY_MESH, large()), STEPS)


def test_a_run_writes_its_own_part_of_the_page(
    pytestconfig: pytest.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, row = tmp_path / "page.md", Row(family="llama", tensor=2, compile="block")
    page.write_text("# Equality\n\nfirst\n\n## Compiled by inductor\n\nold\n", encoding="utf-8")
    monkeypatch.setattr(equality_table, "TABLE", page)
    records = Records(pytestconfig.cache, INDUCTOR, (row,))
    errors = {"loss": 1e-7, "norm": 2e-7, "weights": 3e-7}
    records.results[row] = Result(row, errors, 60.0)

    records.write(2)

    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Equality\n\nfirst\n\n## Compiled by inductor\n\nEach family")
    assert "old" not in text
    assert "1 of\n1 rows on 2 ranks, 2 steps each, in 1 minutes" in text
    assert "| 1.0e-07 | 2.0e-07 | 3.0e-07 | 1e-05 |" in text
    records.write(2)
    assert page.read_text(encoding="utf-8") == text


def test_a_row_that_fails_costs_no_other_row() -> None:
    """Ranks that raise, or die, are started anew for the next job."""
    with Crew(2) as crew:
        assert crew.do(abs, -1) == [1, 1]
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            crew.do(divmod, 1, 0)
        assert crew.do(abs, -2) == [2, 2]
        with pytest.raises(RuntimeError, match="died"):
            crew.do(os._exit, 1)
        assert crew.do(abs, -3) == [3, 3]


# --- what the covers cover -------------------------------------------------------------------


@pytest.mark.matrix
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
        drawn |= {name: table[name][0] for name in combinations.DEAR}
        row = Row(**{**rng.choice(every_mesh), **drawn})
        if reason(row) is None:
            found += 1
            assert pairs(by_axis(row)) <= covered, row.text
    assert found > 80


@pytest.mark.matrix
def test_the_small_cover_stays_small() -> None:
    assert len(small()) <= MOST_ROWS


@pytest.mark.matrix
def test_every_value_of_the_types_is_covered_or_refused() -> None:
    """A value that the runtime newly takes is in the cover; one it refuses is in no row."""
    met = {p for row in small() for p in by_axis(row)}
    for name, values in combinations.choices().items():
        for value in values:
            if name not in combinations.DEAR and (name, value) not in met:
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
    set_by_rows |= {"order": "outside_in", "stages": "uneven", "document_len": "documents"}
    layout = {set_by_rows.get(field.name, field.name) for field in fields(Layout)}
    mesh = {set_by_rows.get(name, name) for name in Mesh.model_fields}
    placed = set(PlacedLayer.model_fields) - {"layer"}
    of_plan = {set_by_rows.get(name, name) for name in Plan.model_fields}
    no_choice = {"format", "model", "cluster", "framework", "seq_len", "global_batch", "mesh"}
    no_choice |= {"training", "timeout_s", "groups", "shares", "batch"}
    # Which rows go beside which: tests/runtime/test_unlike_pipelines.py.
    no_choice |= {"other_pipelines"}
    # Where an imported plan comes from, and what was not understood of it.
    no_choice |= {"read_from", "not_understood"}
    # What other frameworks alone execute; planner/frameworks/native_limits.py refuses it by name.
    no_choice |= {"expert_tensor", "sequence_parallel"}
    # Of devices that share memory: tests/runtime/test_async_tensor.py.
    no_choice |= {"tensor_overlap"}
    # On a device, and by a list of operators on CPUs: tests/runtime/techniques.
    no_choice |= {"graphs"}

    assert (layout | mesh | placed | of_plan) - no_choice <= rows


@pytest.mark.matrix
def test_what_is_not_exact_has_a_bound() -> None:
    exact = {"fp32", "tf32", "keep", "none", "full", "optimizer", "parameters", "offload"}
    for name in ("precision", "activations", "offload", "gradient_compression"):
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
