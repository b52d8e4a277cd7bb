"""Divided layers and whole stages hold what autograd saves; seconds come from passes of them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.planner.documents.model import Experts, ModelGraph
from meshwright.planner.documents.profile import LayerMeasurement, StageMeasurement
from meshwright.profiler import layer_bytes, layers
from meshwright.profiler.chain import Case, Chain, Division
from meshwright.profiler.stages import stages
from tests.runtime import cases
from tests.runtime.ranks import on_ranks

CPU = torch.device("cpu")
SEQ_LEN = 16
NAMES = ("embedding", "block.0", "block.1", "block.2")


def with_experts() -> ModelGraph:
    return cases.transformer("mixtral", experts=Experts(count=4, per_token=2, ffn_size=24))


def chain(model: ModelGraph, **division: int) -> Chain:
    return Chain(model, seq_len=SEQ_LEN, precision="fp32", device=CPU, **division)


def saved_by_autograd(run: Iterable[torch.nn.Module], x: Tensor) -> int:
    """Return the bytes of what is saved while layers run, and was not there before."""
    there = [t for t in gc.get_objects() if issubclass(type(t), Tensor)]
    there = [t for t in there if t.device.type == "cpu"]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in there]
    outside = {t.untyped_storage()._cdata for t in local}
    packed: list[weakref.ref[Packed]] = []

    def pack(tensor: Tensor) -> Packed:
        result = Packed(tensor)
        packed.append(weakref.ref(result))
        return result

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda p: p.tensor):
        for layer in run:
            x = layer(x)
    # Of what no gradient comes from, the graph is gone already.
    alive = [p.tensor.untyped_storage() for ref in packed if (p := ref()) is not None]
    sizes = {storage._cdata: storage.nbytes() for storage in alive}
    return sum(size for storage, size in sizes.items() if storage not in outside)


@dataclass(eq=False)
class Packed:
    tensor: Tensor


def test_a_stage_stores_what_autograd_saves_of_all_its_layers() -> None:
    model = cases.transformer()
    order = (Case(tensor=1, micro_batch=2, recompute="none"), NAMES)

    (found,) = stages([order], model, seq_len=SEQ_LEN, precision="fp32", device=CPU, budget_s=0.0)

    whole = Chain(model, seq_len=SEQ_LEN, precision="fp32", device=CPU, layers=NAMES)
    tokens, _ = whole.batch(2)
    saved = saved_by_autograd(
        whole.layers(Case(tensor=1, micro_batch=1, recompute="none")).values(), tokens
    )
    assert found.layers == NAMES
    assert found.stored_bytes == saved
    assert found.resident_bytes >= 4 * sum(layer.parameters for _, layer in model.chain[:4])
    assert found.forward_s > 0
    assert found.backward_s > 0


def test_full_recompute_of_a_stage_keeps_inputs_of_its_layers() -> None:
    order = (Case(tensor=1, micro_batch=2, recompute="full"), NAMES)

    (found,) = stages(
        [order], cases.transformer(), seq_len=SEQ_LEN, precision="fp32", device=CPU, budget_s=0.0
    )

    blocks = len(NAMES) - 1  # token numbers are the batch's
    assert found.stored_bytes == blocks * 2 * SEQ_LEN * 32 * 4


def divided(experts: bool) -> tuple[list[LayerMeasurement], list[StageMeasurement], int, int]:
    model = with_experts() if experts else cases.transformer()
    division = {"expert": 2} if experts else {"context": 2}
    short = chain(model, **division)
    case = Case(tensor=1, micro_batch=2, recompute="none", **division)
    held = layer_bytes.layer_bytes(short, case)["block.1"]
    tokens, _ = short.batch(2)
    embedding, before, block, _ = short.layers(
        Case(tensor=1, micro_batch=1, recompute="none")
    ).values()
    with torch.no_grad():
        x = before(embedding(tokens))  # what experts keep depends on the tokens that come to them
    saved = saved_by_autograd([block], x.requires_grad_() + 0) + x.untyped_storage().nbytes()
    measured = layers.measurements(
        [short], [case, Case(tensor=1, micro_batch=2, recompute="full", **division)], budget_s=0.0
    )
    order = (case, NAMES)
    found = stages([order], model, seq_len=SEQ_LEN, precision="fp32", device=CPU, budget_s=0.0)
    return measured, found, held.stored, saved


@pytest.mark.long("True")
@pytest.mark.ranks
@pytest.mark.parametrize("experts", [False, True])
def test_layers_over_context_and_expert_ranks_are_measured(experts: bool) -> None:
    first, second = on_ranks(2, divided, experts)

    assert first[:2] == second[:2]
    for measured, found, stored, saved in (first, second):
        degrees = (2, 1) if not experts else (1, 2)
        assert {(m.context, m.expert) for m in measured} == {degrees}
        assert {(s.context, s.expert) for s in found} == {degrees}
        assert stored == saved
        blocks = {m.recompute: m for m in measured if "block" in m.kind}
        assert blocks["none"].recompute_s == 0
        assert 0 < (blocks["full"].recompute_s or 0) < blocks["full"].backward_s


def test_experts_take_the_ranks_of_tensor_and_context_first() -> None:
    assert Division(tensor=2, expert=4).mesh.data_shard == 2
    assert Division(tensor=2, context=2, expert=2).ranks == 4
    assert Division(context=2).mesh.devices == 2


def test_a_table_of_tokens_is_looked_at_more_than_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []
    again = layers.looked_at_again

    def counted(chain: Chain, case: Case, clock: object, name: str, first: object) -> object:
        looks.append(name)
        return again(chain, case, clock, name, first)

    monkeypatch.setattr(layers, "SHORT", 1.0)
    monkeypatch.setattr(layers, "looked_at_again", counted)
    case = Case(tensor=1, micro_batch=1, recompute="none")

    found = layers.measurements([chain(cases.transformer())], [case], budget_s=0.0)

    assert looks == ["embedding"] * layers.LEAST_ROUNDS
    assert {m.samples for m in found if m.kind == "embedding"} == {layers.LEAST_ROUNDS}
