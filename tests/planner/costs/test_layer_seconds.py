"""Seconds of a layer by hand: what is seen of collectives, which pass has them, what hosts take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.planner.catalog import framework, frameworks, native
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.layer_seconds import (
    HostPasses,
    KernelSeconds,
    LinkRule,
    collectives,
    host_passes,
    in_pieces,
    passes,
    seen_links,
    with_host,
)
from meshwright.planner.costs.layout_costs import CostTables
from meshwright.planner.documents.framework import Framework, PerPass, with_figures
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.documents.profile import Recompute
from meshwright.planner.operators.kernels import KernelSettings
from meshwright.planner.operators.layer_operators import table
from meshwright.planner.operators.operator_table import GroupAxis, Operator, OperatorTable, Setting
from meshwright.planner.requests.request import Request
from tests.planner.costs.test_compute import GPU

LLAMA = resolve_model("llama-3.1-8b")
MB = 2.0 * 1024 * 4096 / 1e6
"""Of the residual stream of 1,024 tokens."""


def setting(**changes: object) -> Setting:
    figures = {"micro_batch": 1, "seq_len": 1024}
    return Setting(**{**figures, **changes})


def layer(kind: str, **changes: object) -> OperatorTable:
    found = next(layer for layer in LLAMA.layers if layer.kind == kind)
    return table(LLAMA, found, setting(**changes))


def a_second_a_megabyte(
    operation: str, size_bytes: float, axis: str, routing: object = None
) -> float:
    return size_bytes / 1e6 * (2 if operation == "all_reduce" else 1)


def both_passes(
    found: OperatorTable, rule: LinkRule, recompute: str = "none"
) -> tuple[float, float]:
    again = found.recomputed_operators(recompute)  # type: ignore[arg-type]
    each = list(collectives(found, again, a_second_a_megabyte, rule, GPU))
    return sum(there for _, there, _ in each), sum(back for _, _, back in each)


def test_heads_that_are_gathered_wait_in_both_passes() -> None:
    # 32 heads and 2 x 8 of keys and values, of 128: 6,144 features, 1.5 of the stream's 4,096.
    # Neither hidden with other collectives of the group, nor gathered again, nor in 8 bits.
    found = layer("block", tensor=16, gathers_heads=True)

    seen = both_passes(found, LinkRule(tensor=0.5, second_gather=0.5, gathered=0.5))

    without = layer("block", tensor=16)
    there_s, back_s = both_passes(without, LinkRule(tensor=0.5, second_gather=0.5, gathered=0.5))
    assert seen == pytest.approx((there_s + 1.5 * MB, back_s + 1.5 * MB))


def test_what_is_gathered_in_eight_bits_is_half_as_large() -> None:
    # Of two gathers and two sums in each pass, a sum's backward being a gather.
    found = layer("block", tensor=4)

    assert both_passes(found, LinkRule(gathered=0.5)) == pytest.approx((3 * MB, 3 * MB))
    # Adapters read what attention gathers in 16 bits.
    adapted = layer("block", tensor=4, kernels=KernelSettings(frozen="attention", scores="fused"))
    assert both_passes(adapted, LinkRule(gathered=0.5)) == pytest.approx((3.5 * MB, 3 * MB))
    head = layer("head", tensor=4)
    assert both_passes(head, LinkRule(gathered=0.5)) == both_passes(head, LinkRule())


def test_without_sequence_parallelism_ends_sum_in_one_pass_alone() -> None:
    # The embedding's shares are added going forward, the head's gradients going back.
    whole = {"tensor": 4, "sequence_parallel": False}

    assert both_passes(layer("embedding", **whole), LinkRule()) == pytest.approx((2 * MB, 0.0))
    assert both_passes(
        layer("head", **whole, kernels=KernelSettings(peak_logit_bytes=6.5)), LinkRule()
    ) == pytest.approx((0.0, 2 * MB))


def test_a_ring_of_keys_and_values_goes_round_once_and_twice() -> None:
    found = layer("block", context=4, kernels=KernelSettings(scores="fused", context="ring"))

    there_s, back_s = both_passes(found, LinkRule())

    keys_and_values = 2 * MB / 4  # a quarter as many heads
    assert (there_s, back_s) == pytest.approx((keys_and_values, 2 * keys_and_values))


def sent(axis: GroupAxis, **changes: bool) -> Operator:
    kind = "all_gather" if axis == "context" else "all_to_all"
    return Operator(name="sent", kind=kind, inputs=(), outputs={}, axis=axis, **changes)


def test_tokens_hide_behind_the_experts_that_all_share_and_come_back_seen() -> None:
    """Of 2 s there and 4 s back a tenth is seen beside long products, else what is left."""
    links = [(sent("expert", beside_shared=True), 2.0, 4.0), (sent("expert"), 2.0, 4.0)]
    found = KernelSeconds(
        forward_s=9.0, backward_s=9.0, recompute_s=0.0, kernels=0, kernels_again=0
    )
    ample, short = (replace(found, shared_s=window) for window in ((8.0, 8.0), (0.5, 1.0)))

    assert seen_links(links, ample, LinkRule(shared=0.9)) == pytest.approx((2.2, 4.4))
    assert seen_links(links, short, LinkRule(shared=0.9)) == pytest.approx((3.5, 7.0))
    assert seen_links(links, ample, LinkRule()) == (4.0, 8.0)


@pytest.mark.parametrize(("name", "hides"), [("deepseek-v3", True), ("mixtral-8x7b", False)])
def test_only_mixtures_with_shared_experts_compute_them_meanwhile(name: str, hides: bool) -> None:
    model = resolve_model(name)
    found = table(model, model.layers[-2], setting(expert=8))
    [arrived] = [op for op in found.operators if op.name == "arrived"]

    assert arrived.beside_shared == hides
    assert (passes(found, "none", GPU).shared_s[0] > 0) == hides


def test_a_ring_hides_behind_attention_alone() -> None:
    """Of 2 and 4 s three tenths are seen beside long attention, beside a short one what is left."""
    links = [(sent("context"), 2.0, 4.0), (sent("tensor"), 1.0, 1.0)]
    found = KernelSeconds(
        forward_s=9.0, backward_s=9.0, recompute_s=0.0, kernels=0, kernels_again=0
    )
    hides = LinkRule(context=0.7)
    ample, short = (replace(found, attention_s=window) for window in ((8.0, 8.0), (0.5, 1.5)))

    assert seen_links(links, ample, hides) == pytest.approx((1 + 0.6, 1 + 1.2))
    assert seen_links(links, short, hides) == pytest.approx((1 + 1.5, 1 + 2.5))
    assert seen_links(links, ample, LinkRule()) == (3.0, 5.0)


def test_recomputing_a_block_whole_takes_its_forward_again() -> None:
    found = passes(layer("block", kernels=KernelSettings(early_stop=False)), "full", GPU)

    assert found.recompute_s == pytest.approx(found.forward_s)
    assert found.kernels_again == found.kernels


def host(framework: Framework, kind: str, **changes: object) -> tuple[float, float, float]:
    found = layer(kind, **changes)
    took = host_passes(
        framework,
        found,
        setting(**changes),
        passes(found, "full", GPU),
        recompute="full" if found.recomputed_operators("full") else "none",
        devices_per_node=8,
    )
    return took.forward_s, took.backward_s, took.recompute_s


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_recomputation_asks_the_host_in_eager_layers_alone(
    recompute: Recompute, compiled: bool
) -> None:
    hooks = {"host.checkpoint_s": PerPass(forward=1.0, backward=2.0), "host.selective_s": 0.1}
    none = {"host.checkpoint_s": PerPass(), "host.selective_s": 0.0}
    found = layer("block")
    seconds = passes(found, recompute, GPU)

    def took(framework: Framework) -> HostPasses:
        at = setting(compiled=compiled)
        return host_passes(framework, found, at, seconds, recompute=recompute, devices_per_node=8)

    plain, hooked = (took(with_figures(native(), figures)) for figures in (none, hooks))

    asked = 0.1 * seconds.kernels * (recompute == "selective")
    more = (0.0, 0.0) if compiled or recompute == "none" else (1.0 + asked, 2.0 + asked)
    assert hooked.forward_s - plain.forward_s == pytest.approx(more[0])
    assert hooked.recompute_s - plain.recompute_s == pytest.approx(more[1])
    assert hooked.backward_s == plain.backward_s


def test_python_of_a_block_and_of_tensor_parallelism_by_hand() -> None:
    framework = with_figures(frameworks()["nanotron"], {"host.rank_s": 0.1e-3})

    there, back = framework.host.layer_s.forward, framework.host.layer_s.backward
    assert host(framework, "block") == pytest.approx((there, back, there))
    # Three further ranks at each of ten gathers and scatters, or of four sums.
    for divided, count in ((True, 10), (False, 4)):
        more = count * 3 * 0.1e-3 / 2
        found = host(framework, "block", tensor=4, sequence_parallel=divided)
        assert found == pytest.approx((there + more, back + more, there))
    assert host(framework, "head") == (0.0, 0.0, 0.0)


def test_a_recomputed_block_starts_the_kernels_of_its_experts_again() -> None:
    mixture, framework = resolve_model("mixtral-8x7b"), frameworks()["megatron"]
    each = framework.host
    block = next(layer for layer in mixture.layers if layer.kind == "moe_block")
    operators = table(mixture, block, setting())

    took = host_passes(
        framework,
        operators,
        setting(),
        passes(operators, "full", GPU),
        recompute="full",
        devices_per_node=8,
    )

    assert took.forward_s == pytest.approx(each.layer_s.forward + each.experts_s / 2)
    assert took.recompute_s == pytest.approx(took.forward_s)


def test_checks_of_collectives_add_to_each_of_a_divided_blocks_collectives_by_hand() -> None:
    plain, checked = frameworks()["nanotron"], framework("nanotron+checked-collectives")
    each = checked.host.checked_s
    assert plain.host.checked_s == 0.0 < each

    def more(tensor: int) -> float:
        return sum(host(checked, "block", tensor=tensor)) - sum(host(plain, "block", tensor=tensor))

    # Ten collectives, of which each rank takes its share; 16 ranks are on two nodes of 8.
    assert more(1) == 0.0
    assert more(2) == pytest.approx(10 * 2 * each)
    assert more(8) == pytest.approx(10 * 8 * each)
    assert more(16) == pytest.approx(10 * 16 * 1.25 * each)


def test_a_layer_waits_for_its_host_behind_all_that_its_device_does() -> None:
    found = KernelSeconds(
        forward_s=1.0, backward_s=2.0, recompute_s=0.5, kernels=0, kernels_again=0
    )
    least = HostPasses(forward_s=2.0, backward_s=3.0, recompute_s=0.5)

    together = with_host(found, least, 1.0, "layer")
    apart = with_host(found, least, 1.0, "kernels")

    # 5.5 of the host, 3.5 of kernels and 1 of collectives.
    assert (together.forward_s, together.backward_s, together.recompute_s) == (1.5, 2.5, 0.5)
    assert together.waits_s == 1.0
    assert (apart.forward_s, apart.backward_s, apart.recompute_s) == (2.0, 3.0, 0.5)
    assert apart.waits_s == 0.0


def test_exchanges_hide_behind_the_passes_of_another_micro_batch() -> None:
    """Of 6 s a fifth keeps multiprocessors busy; behind 2 s of computation 4 s are left."""
    links = [(sent("expert"), 2.0, 4.0), (sent("tensor"), 1.0, 1.0)]
    ample = KernelSeconds(
        forward_s=20.0, backward_s=40.0, recompute_s=0.0, kernels=0, kernels_again=0
    )
    short = KernelSeconds(
        forward_s=0.5, backward_s=1.5, recompute_s=0.0, kernels=0, kernels_again=0
    )
    hides = LinkRule(experts=0.8)
    assert seen_links(links, ample, hides) == pytest.approx((1 + 0.4, 1 + 0.8))
    assert seen_links(links, short, hides) == pytest.approx((1 + 4 / 3, 1 + 8 / 3))
    assert seen_links(links, ample, LinkRule()) == (3.0, 5.0)


@pytest.mark.parametrize("window", ["layer", "kernels"])
def test_a_host_that_reads_counts_starts_nothing_ahead(window: str) -> None:
    """A queue stepped through: a hundred small kernels, then products, and the next layer's host
    waits for those; backwards start all at once."""
    found = KernelSeconds(
        forward_s=1.0, backward_s=2.0, recompute_s=0.0, kernels=0, kernels_again=0
    )
    least = HostPasses(forward_s=0.8, backward_s=0.5, recompute_s=0.0)
    host_s = device_s = 0.0
    for _ in range(50):
        host_s = max(host_s, device_s)  # reads the counts
        for _ in range(100):
            host_s += 0.8 / 100
            device_s = max(device_s, host_s)
        device_s += 1.0

    seen = with_host(found, least, 0.0, window, counted=True)  # type: ignore[arg-type]

    assert 50 * seen.forward_s == pytest.approx(device_s)
    assert seen.backward_s == 2.0
    ahead = with_host(found, least, 0.0, window)  # type: ignore[arg-type]
    assert (ahead.forward_s, ahead.backward_s) == (1.0, 2.0)


def test_counts_are_read_in_blocks_that_have_experts_alone() -> None:
    model, machine = resolve_model("deepseek-v3"), resolve_cluster("8xh100-sxm-80gb")
    job, layout = Job(seq_len=4096, global_batch=8), Layout(data_shard=8, expert=8)

    def forward_s(name: str) -> dict[str, float]:
        tables = CostTables(Request(model, machine, job, framework=framework(name)))
        return {k: p[0].figures.forward_s for k, p in tables.costs_of(layout).parts.items()}

    plain, counted = forward_s("megatron"), forward_s("megatron+host-counts")

    later = {kind for kind in plain if counted[kind] > plain[kind]}
    assert later == {"moe_block"}
    assert counted["moe_block"] - plain["moe_block"] > 1e-3


def test_beside_products_of_no_time_nothing_is_hidden() -> None:
    found = layer("block", tensor=4)
    fast = replace(GPU, peak_flops=1e30, memory_bytes_per_s=1e30)
    fast = replace(fast, curve=fast.curve.model_copy(update={"launch_s": 0.0}))

    each = list(collectives(found, (), a_second_a_megabyte, LinkRule(beside=0.5), fast))

    assert sum(there for _, there, _ in each) == pytest.approx(4 * MB)


def test_pieces_are_a_kernel_of_each_product_and_a_copy_for_each_rank() -> None:
    found = layer("block", tensor=4)
    whole = passes(found, "none", GPU)

    # Queries, keys, values, gate and up behind gathers, two products in front of scatters.
    more = in_pieces(found, (), 4, whole).kernels - whole.kernels
    assert more == (4 - 1) * 7 + 4 * 4
