"""Rows of several documents train as each document alone, in the library's own plain loop.

Attention stays within documents, positions begin anew in each, and only targets that count are in
the loss: under every plan the gradient is that of the mean over all of them.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional

from meshwright.planner.catalog.expressions import resolve_model
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import LaunchError
from meshwright.runtime.engine.unsupported import unsupported_reason
from meshwright.runtime.launch.training_loop import token_engine
from meshwright.runtime.parallel import document_attention
from tests.runtime import cases, families
from tests.runtime.ranks import Crew

CPU = torch.device("cpu")
LENGTH, SAMPLES = cases.SEQ_LEN, cases.GLOBAL_BATCH
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"data_shard": 2, "zero": 3, "recompute": "selective"},
    "pipeline": {"pipeline": 2, "recompute": "full"},
    "split backward": {"pipeline": 2, "schedule": "zbv", "virtual_stages": 2},
    "context": {"context": 2},
    "tensor": {"tensor": 2},
}
COVER = [
    ("llama", "data"),
    ("gpt2", "pipeline"),
    ("gpt_oss", "context"),
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def _home() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="documents-")


@functools.cache
def published(family: str) -> Path:
    folder = Path(_home().name) / family
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(families.FAMILIES[family]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@functools.cache
def graph_of(family: str) -> ModelGraph:
    return resolve_model(str(published(family)))


def plan_of(family: str, layout: str | None) -> Plan:
    return cases.plan(graph_of(family), clip_norm=0.0, **(LAYOUTS[layout] if layout else {}))


@functools.cache
def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, counts, starts of rows with 1 to 4 documents; one row counts nothing."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(256, (SAMPLES, LENGTH + 1), generator=generator)
    starts = torch.zeros(SAMPLES, LENGTH + 1, dtype=torch.int64)
    for row, cuts in enumerate([(), (5,), (1, 9), (3, 4, 16), (8,), (15,), (2, 7, 11), (10,)]):
        for cut in cuts:
            starts[row, cut:] = cut
    counts = torch.rand(SAMPLES, LENGTH, generator=generator) < 0.4
    counts &= starts[:, 1:] == starts[:, :-1]  # no first token of a document is a target
    counts[4] = False
    return tokens, counts, starts[:, :-1]


@functools.cache
def oracle(family: str) -> tuple[float, float]:
    """Return loss and gradient norm of the library's model, each document a batch of its own."""
    tokens, counts, starts = batch()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        published(family), attn_implementation="eager", experts_implementation="eager"
    )
    model.eval()
    total = torch.zeros(())
    for row, kept, begins in zip(tokens, counts, starts, strict=True):
        for begin in begins.unique().tolist():
            (place,) = torch.where(begins == begin)
            end = int(place[-1]) + 1
            logits = model(row[None, begin:end]).logits[0]
            each = functional.cross_entropy(logits, row[begin + 1 : end + 1], reduction="none")
            total = total + (each * kept[begin:end]).sum()
    loss = total / counts.sum()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    return loss.item(), norm.item()


def step(plan: Plan, graph: ModelGraph, folder: Path) -> tuple[float, float, float]:
    """Return loss and norm of this rank's part of a step, and the loss of an evaluation before."""
    engine = token_engine(plan, graph, device=CPU, weights=folder, documents=True)
    own = plan.samples_of(engine.slice_rank)
    part = tuple(whole[own.start : own.stop] for whole in batch())
    before = engine.evaluate(part).loss
    result = engine.step(part)
    return result.loss, result.grad_norm, before


def check(family: str, found: tuple[float, float, float]) -> None:
    loss, norm = oracle(family)
    assert found[0] == pytest.approx(loss, rel=1e-6), family
    assert found[1] == pytest.approx(norm, rel=1e-5), family
    assert found[2] == pytest.approx(loss, rel=1e-6), family


@pytest.mark.spread(2)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_documents_of_a_row_do_not_see_each_other(family: str) -> None:
    check(family, step(plan_of(family, None), graph_of(family), published(family)))


def saved_by(family: str) -> tuple[list[Tensor], int]:
    """Return what a step of one micro-batch saves for backward, and how many blocks there are."""
    tokens, counts, starts = batch()
    plan = cases.plan(graph_of(family), micro_batches=1, clip_norm=0.0)
    engine = token_engine(
        plan, graph_of(family), device=CPU, weights=published(family), documents=True
    )
    saved: list[Tensor] = []

    def note(one: Tensor) -> Tensor:
        saved.append(one)
        return one

    with torch.autograd.graph.saved_tensors_hooks(note, lambda one: one):
        engine.step((tokens, counts, starts))
    return saved, len(engine.units) - 2


def masks_of(saved: list[Tensor]) -> list[Tensor]:
    return [one for one in saved if one.shape[-2:] == (LENGTH, LENGTH)]


def test_layers_that_see_a_window_save_one_mask() -> None:
    saved, blocks = saved_by("mistral")

    assert len(masks_of(saved)) >= blocks > 1
    assert len({one.untyped_storage().data_ptr() for one in masks_of(saved)}) == 1


def test_layers_that_see_whole_documents_save_where_they_end() -> None:
    saved, blocks = saved_by("llama")

    assert masks_of(saved) == []
    ends = [one for one in saved if one.dtype == torch.int32]
    assert len(ends) == blocks > 1
    # 1 to 4 documents in each of 8 rows: at most 4 x 8, and the end of the last.
    assert {one.shape for one in ends} == {(33,)}


def test_kernels_get_each_document_and_give_what_a_mask_would() -> None:
    starts = torch.tensor([[0] * 3 + [3] * 5, [0] * 8])
    query, key, value = (torch.randn(2, heads, 8, 16) for heads in (4, 2, 2))
    ends = document_attention.ends_of(starts, 4)
    found = document_attention.attention(query, key, value, ends)

    places = [(row, one.stop - one.start) for row, one in document_attention._places(ends, 8)]
    assert places == [(0, 3), (0, 5), (1, 8)]  # work is that of their squares
    hidden = (starts[:, :, None] != starts[:, None, :]) | torch.ones(8, 8).triu(1).bool()
    scores = query @ key.repeat_interleave(2, 1).mT / 4
    weights = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
    torch.testing.assert_close(found, weights @ value.repeat_interleave(2, 1), rtol=1e-5, atol=1e-5)


def on_two_ranks(rows: list[tuple[str, str]]) -> None:
    for family, _ in rows:
        oracle(family)
    with Crew(2) as crew:
        for family, layout in rows:
            for found in crew.do(
                step, plan_of(family, layout), graph_of(family), published(family)
            ):
                check(family, found)


@pytest.mark.ranks
def test_ranks_keep_documents_and_counts_apart() -> None:
    on_two_ranks(COVER)


@pytest.mark.ranks
@pytest.mark.matrix
def test_every_family_keeps_documents_apart_under_every_layout() -> None:
    on_two_ranks(
        [
            (family, layout)
            for family in families.FAMILIES
            for layout in LAYOUTS
            if unsupported_reason(plan_of(family, layout), graph_of(family)) is None
        ]
    )


def test_documents_are_refused_where_attention_is_not_kept_within_them() -> None:
    graph = cases.transformer("reference")

    with pytest.raises(LaunchError, match="is no model of transformers"):
        token_engine(cases.plan(graph), graph, device=CPU, documents=True)


def test_starts_are_given_if_and_only_if_documents_are_declared() -> None:
    tokens, counts, starts = batch()
    whole, apart = (
        token_engine(
            plan_of("llama", None),
            graph_of("llama"),
            device=CPU,
            weights=published("llama"),
            documents=documents,
        )
        for documents in (False, True)
    )

    with pytest.raises(LaunchError, match="no other takes them"):
        whole.step((tokens, counts, starts))
    with pytest.raises(LaunchError, match="no other takes them"):
        apart.step((tokens, counts))
