"""Live bytes are checked against allocations done by hand, and against torch's saved tensors."""

import functools
import gc
import itertools
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.runtime.core.memory_tracker import LiveMemory
from meshwright.runtime.launch.training_loop import token_engine
from meshwright.runtime.techniques.activation_offload import GROUP
from tests.limits import PATIENCE_S
from tests.runtime import cases
from tests.runtime.ranks import on_ranks

MIB = 2**20


def mib(count: int) -> torch.Tensor:
    return torch.zeros(count * MIB, dtype=torch.uint8)


def test_the_peak_is_the_most_that_was_alive_at_once() -> None:
    with LiveMemory() as live:
        first = mib(3).clone()
        passing = mib(5)
        del passing
        second = mib(1)

    assert live.peak_bytes == (3 + 5) * MIB
    assert live.current_bytes == (3 + 1) * MIB
    assert first.numel() + second.numel() == live.current_bytes


def test_clone_counts_its_source_until_that_dies() -> None:
    with LiveMemory() as live:
        copy = mib(3).clone()

    assert live.peak_bytes == 6 * MIB
    assert live.current_bytes == copy.numel()


def test_views_and_in_place_operators_take_no_memory() -> None:
    with LiveMemory() as live:
        base = mib(4)
        rows = base.view(4, -1)
        rows[1].add_(1)
        parts = rows.t().split(1, dim=1)

    assert live.peak_bytes == 4 * MIB
    assert len(parts) == 4


def test_a_view_keeps_its_storage_alive() -> None:
    with LiveMemory() as live:
        base = mib(4)
        view = base[:10]
        del base

    assert live.current_bytes == 4 * MIB
    del view
    assert live.current_bytes == 0


def test_tensors_from_before_count_only_when_named() -> None:
    named, unnamed = mib(2), mib(7)

    with LiveMemory(existing=[named, named.view(2, -1)]) as live:
        unnamed.view(7, -1).add_(1)
        named.add_(1)

    assert live.peak_bytes == live.current_bytes == 2 * MIB
    del named
    assert live.current_bytes == 0


def test_backward_is_watched() -> None:
    x = torch.ones(MIB, requires_grad=True)  # 4 MiB, as is each result of the same shape

    with LiveMemory(existing=[x]) as live:
        y = (x * 2).exp()
        after_forward = live.current_bytes
        total = y.sum()
        live.reset_peak()
        total.backward()

    assert after_forward == 2 * 4 * MIB  # x and y; the product is not saved
    # x, y, the gradient of the product and the product's gradient with respect to x; two scalars
    assert live.peak_bytes == 4 * 4 * MIB + 8
    del total, y
    assert live.current_bytes == 2 * 4 * MIB


def test_what_forward_leaves_is_what_autograd_saved() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 32))
    x = torch.randn(128, 64)
    outside = {p.untyped_storage()._cdata for p in [*model.parameters(), x]}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in outside:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with LiveMemory() as live, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(x)

    assert live.current_bytes == sum(saved.values()) + out.untyped_storage().nbytes()


def test_recomputing_holds_less_and_repeats_the_forward() -> None:
    block = nn.Sequential(nn.Linear(64, 512, bias=False), nn.Sigmoid(), nn.Linear(512, 64))
    x = torch.randn(256, 64, requires_grad=True)
    inner = 256 * 512 * 4

    def stored_and_peak(run: Callable[[torch.Tensor], torch.Tensor]) -> tuple[int, int]:
        block.zero_grad()
        gc.collect()
        with LiveMemory() as live:
            out = run(x)
            stored = live.current_bytes - out.untyped_storage().nbytes()
            out.sum().backward()
        return stored, live.peak_bytes

    plain, plain_peak = stored_and_peak(block)
    checkpointed, peak = stored_and_peak(
        lambda t: torch.utils.checkpoint.checkpoint(block, t, use_reentrant=False)
    )

    assert plain == inner  # of the sigmoid; the product before it is not saved
    assert checkpointed < 64 * 1024  # at most a random number generator's state
    assert peak > inner
    assert plain_peak > inner


def test_a_resized_storage_counts_its_new_size() -> None:
    with LiveMemory() as live:
        gathered = mib(4)
        gathered.untyped_storage().resize_(0)
        freed = live.current_bytes
        gathered.untyped_storage().resize_(6 * MIB)

    assert freed == 0
    assert live.current_bytes == live.peak_bytes == 6 * MIB


def test_watching_leaves_torch_as_it_was() -> None:
    before = torch.UntypedStorage.resize_

    with LiveMemory():
        pass

    assert torch.UntypedStorage.resize_ is before


def test_reset_peak_begins_at_what_is_alive() -> None:
    with LiveMemory() as live:
        kept = mib(2)
        mib(9)
        live.reset_peak()

    assert live.peak_bytes == kept.numel()


def test_what_is_left_out_never_was_there() -> None:
    with LiveMemory() as live:
        mib(2)
        live.reset_peak()
        kept = mib(1)
        gradient = mib(5)
        live.leave_out(gradient)
        passing = mib(2)
        del gradient, passing
        last = mib(4)

    assert live.peak_bytes == (1 + 5 + 2) * MIB
    assert live.peak_of_rest_bytes == kept.numel() + last.numel()


# --- several ranks ---------------------------------------------------------------------------


@pytest.mark.ranks
def test_a_distributed_tensor_counts_its_local_part() -> None:
    def work() -> None:
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = dist.init_device_mesh("cpu", (2,))
        whole = torch.ones(512, 512)  # 1 MiB
        half = distribute_tensor(whole, mesh, [Shard(0)])
        with LiveMemory(existing=[half]) as live:
            assert live.current_bytes == half.to_local().untyped_storage().nbytes()
            start = live.current_bytes
            double = half * 2
            assert live.current_bytes == start + MIB // 2
            live.reset_peak()
            full = double.full_tensor()
            assert live.current_bytes == start + MIB // 2 + MIB
            assert full.shape == (512, 512)
            # Gathering columns needs the rows as they arrive, beside the whole put together.
            # The scatter's buffers may outlive it for a moment, so what is alive is added up here.
            columns = distribute_tensor(whole, mesh, [Shard(1)])
            alive = start + MIB // 2 + MIB + MIB // 2  # double, full and columns
            live.reset_peak()
            columns.full_tensor()
            assert live.peak_bytes >= alive + 2 * MIB

    on_ranks(2, work)


@pytest.mark.ranks
def test_gathered_parameters_of_fsdp_come_and_go() -> None:
    def work() -> None:
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        side, layers = 256, 4
        unit = side * side * 4
        model = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(layers)))
        mesh = dist.init_device_mesh("cpu", (2,))
        for layer in model:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh)
        x = torch.randn(4, side)
        model(x).sum().backward()
        model.zero_grad()
        with LiveMemory(existing=model.parameters()) as live:

            def falls_below(limit_bytes: int) -> bool:
                # gloo's thread lets go of a collective's tensors some time after the wait for it
                end = time.monotonic() + PATIENCE_S
                while live.current_bytes >= limit_bytes and time.monotonic() < end:
                    time.sleep(0.005)
                return live.current_bytes < limit_bytes

            shards = live.current_bytes
            assert shards == layers * unit // 2

            def check_gone(*_: object) -> None:
                # the layer is whole no more; FSDP keeps a gather's buffer until the next one
                assert falls_below(shards + unit + unit // 2)  # activations are 4 KiB each

            for layer in model:
                layer.register_forward_hook(check_gone)
            out = model(x)
            # a gathered unit with its gather's buffer, and the buffer before it
            assert shards + unit <= live.peak_bytes < shards + 3 * unit + unit // 2
            assert falls_below(shards + unit // 2)
            out.sum().backward()
            del out
            assert falls_below(2 * shards + unit // 2)
            assert live.current_bytes >= 2 * shards  # gradients too

    on_ranks(2, work)


def bytes_at_each_forward(
    schedule: str, micro_batches: int = cases.GLOBAL_BATCH, **layout: str
) -> tuple[list[int], int]:
    """Return a rank's live bytes as each micro-batch begins, and what one leaves behind."""
    model = cases.transformer()
    engine = token_engine(
        cases.plan(model, pipeline=2, schedule=schedule, micro_batches=micro_batches, **layout),
        model,
        device=torch.device("cpu"),
    )
    tokens = cases.global_tokens(0)
    engine.step(tokens)
    gc.collect()
    begins: list[int] = []
    with LiveMemory(existing=engine.state().values()) as live:
        hook = next(iter(engine.units.values())).register_forward_pre_hook(
            lambda *_: begins.append(live.current_bytes)
        )
        engine.step(tokens)
        hook.remove()
    x = tokens[: cases.GLOBAL_BATCH // micro_batches, :-1]
    with LiveMemory() as forward:
        for layer in engine.units.values():  # stage 1 would take hidden states
            x = layer(x) if 0 in engine.stages else x
        stored = forward.current_bytes
    return begins, stored


@pytest.mark.ranks
@pytest.mark.matrix
def test_a_stage_holds_its_activations_once_per_micro_batch_in_flight() -> None:
    gpipe, stored = on_ranks(2, bytes_at_each_forward, "gpipe")[0]
    alternating, _ = on_ranks(2, bytes_at_each_forward, "1f1b")[0]

    assert [b - a for a, b in itertools.pairwise(gpipe)] == [stored] * (cases.GLOBAL_BATCH - 1)
    # Two micro-batches in flight, and gradients after the first backward; from then on no growth.
    assert alternating[1] - alternating[0] == stored
    assert len(set(alternating[2:])) == 1


@pytest.mark.spread(1)
@pytest.mark.ranks
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_what_is_packed_is_not_held_by_the_device(recompute: str) -> None:
    """The micro-batches here are two, so that activations are large enough to be packed."""
    grown = {}
    for how in ("keep", "offload", "compress"):
        work = functools.partial(bytes_at_each_forward, activations=how, recompute=recompute)
        begins, stored = on_ranks(2, work, "gpipe", 2)[0]
        grown[how] = stored
        assert {b - a for a, b in itertools.pairwise(begins)} == {stored}

    # A stage's output waits until the next stage has sent its gradient; small tensors stay.
    output = 4 * cases.SEQ_LEN * 32 * 4  # sample, position, feature, byte
    left, small = grown["keep"] - output, grown["keep"] / 25
    assert grown["offload"] <= output + small
    assert grown["compress"] <= output + small + left * (1 / 4 + 1 / GROUP)


def test_changes_tell_what_came_and_went() -> None:
    kept = torch.empty(256)

    with LiveMemory(existing=[kept]) as live:
        passing = torch.empty(512)
        more = passing + 1
        del passing
        more.untyped_storage().resize_(1024)
        del kept

    assert live.changes == [(0, 2048), (1, 2048), (0, -2048), (1, -1024), (2, -1024)]
    assert sum(size for _, size in live.changes) + 1024 == live.current_bytes == 1024
