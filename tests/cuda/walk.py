"""Walks paths of the runtime and the profiler on a fake CUDA device; a process of its own.

The process has loaded device.cpp before torch.  Prints a line of JSON for each path: what failed,
host synchronisations, races between streams, and the types of matrix products.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

import meshwright.profiler.clock
from benchmarks.rehearsal import fake_job
from meshwright.planner.documents.cluster import Collective
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.profile import ChunkedLoss, CollectiveCurve, LinkPoint
from meshwright.profiler import chain, devices, layers, overheads, stages
from meshwright.profiler.chain import Case, Chain
from meshwright.runtime.engine import apply_plan as transforms
from meshwright.runtime.launch.training_loop import token_engine
from meshwright.runtime.parallel import expert_parallel as experts
from meshwright.runtime.techniques import compile as compiled
from tests.cuda.fake_cuda import fake_cuda
from tests.cuda.streams import WORLD, Watch
from tests.runtime import cases

CUDA = torch.device("cuda", 0)
FIGURES = {
    "hidden_size": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "ffn_size": 96,
    "layers": 2,
}
CHOICES = ("loss", "compile", "graphs", "prefetch", "reshard_after_forward", "tensor_overlap")
Path = Callable[[], None]


def stepped(
    rank: int = 0,
    *,
    family: str = "reference",
    steps: int = 1,
    layers: int = FIGURES["layers"],
    **layout: Any,
) -> Path:
    """Return steps of one rank of a plan, of which the last one's waits count.

    A second step is for what one step leaves to the next: copies and reductions under way.
    """

    def path() -> None:
        graph = cases.transformer(family, **{**FIGURES, "layers": layers})
        chosen = {name: layout[name] for name in CHOICES if name in layout}
        others = {name: value for name, value in layout.items() if name not in chosen}
        plan = cases.plan(graph, **{"global_batch": 64, **others})
        plan = plan.model_copy(update=chosen)
        with job(plan, rank=rank, model=graph), untraced():
            engine = token_engine(plan, graph, device=CUDA)
            count = len(plan.samples_of(engine.slice_rank))
            tokens = torch.zeros(count, plan.seq_len + 1, dtype=torch.int64)
            for _ in range(steps):
                engine.state()
                WORLD.syncs.clear()
                engine.step(tokens)

    return path


def measured(doing: Callable[[], None], ranks: int = 1, rank: int = 0) -> Path:
    """Return a part of the profiler on one of some ranks."""

    def path() -> None:
        graph = cases.transformer(**FIGURES)
        kinds: list[dict[str, Any]] = [{"data_replicate": ranks}]
        if ranks > 1:
            kinds += [{"data_shard": ranks, "zero": zero} for zero in (2, 3)]
            kinds += [{"pipeline": ranks}]
        plans = [cases.plan(graph, **kind) for kind in kinds]
        with job(*plans, rank=rank), quick_profiler():
            doing()

    return path


@contextmanager
def job(*plans: Plan, rank: int, model: ModelGraph | None = None) -> Iterator[None]:
    # Places on the mesh are known by device; those of the profiler's own chains are made anew.
    chain._meshes.clear()
    with fake_job(*plans, rank=rank, device=CUDA, model=model), Watch():

        def asking(known: Callable[..., list[list[int]]]) -> Callable[..., list[list[int]]]:
            def asked(*args: Any) -> list[list[int]]:
                WORLD.synced("list", WORLD.current().clock)
                return known(*args)

            return asked

        attention = torch.nn.functional.scaled_dot_product_attention

        def attended(query: torch.Tensor, key: torch.Tensor, *more: Any, **how: Any) -> Any:
            grouped = "grouped" if query.shape[1] != key.shape[1] else "equal"
            kind = f"{grouped} {query.dtype}".replace("torch.", "")
            WORLD.products.setdefault("attention", set()).add(kind)
            return attention(query, key, *more, **how)

        with (
            mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", attended),
            mock.patch.object(experts, "_by_rank", asking(experts._by_rank)),
            mock.patch.object(experts, "_copies_by_rank", asking(experts._copies_by_rank)),
            # Messages that one side batches and the other does not take different communicators.
            mock.patch("torch.distributed.batch_isend_irecv", side_effect=AssertionError),
        ):
            yield


@contextmanager
def untraced() -> Iterator[None]:
    """Let what is compiled run as it is, with all that stands around a graph.

    torch's compiler keeps a table of the functions of torch.cuda, for which others stand here.
    """
    with (
        mock.patch.object(torch, "compile", lambda forward, **_: forward),
        mock.patch.object(transforms, "share_memory", lambda group, device: None),
        mock.patch.multiple(
            compiled,
            BACKEND="none",
            compile_failures=lambda: RuntimeError,
            compiled_graphs=lambda: 0,
            expect_graphs=lambda most: None,
            has_ordered_effect=lambda operator: None,
        ),
    ):
        yield


@contextmanager
def quick_profiler() -> Iterator[None]:
    """Let every comparison run once; ranks that are not there cannot say how long they took."""
    with (
        mock.patch.object(overheads, "WARM_UP", 0),
        mock.patch.object(overheads, "ROUNDS", 1),
        mock.patch.object(overheads, "OWN_LAYER_ROUNDS", 1),
        mock.patch.object(overheads, "MICRO_BATCHES", 4),
        mock.patch.object(overheads, "slowest", list),
        mock.patch.object(layers, "slowest", list),
        mock.patch.object(stages, "slowest", list),
        mock.patch.object(meshwright.profiler.clock, "slowest", list),
        mock.patch("torch.distributed.barrier", lambda *_, **__: None),
    ):
        yield


def curve(operation: Collective, ranks: int) -> CollectiveCurve:
    seconds = {1: 1e-5, 10**9: 1.0}
    points = tuple(LinkPoint(size_bytes=b, seconds=s, spread=0.0) for b, s in seconds.items())
    return CollectiveCurve(operation=operation, ranks=ranks, tier="links", points=points)


CURVES = [curve(o, 2) for o in ("all_gather", "reduce_scatter", "all_reduce", "send_recv")]


def a_chain(precision: str = "bf16") -> Chain:
    graph = cases.transformer(**FIGURES)
    return Chain(graph, seq_len=cases.SEQ_LEN, precision=precision, device=CUDA)


def chain_alone(precision: str) -> Callable[[], None]:
    def doing() -> None:
        case = Case(tensor=1, micro_batch=2, recompute="none")
        layers.trial(a_chain(precision), case, meshwright.profiler.clock.Clock(CUDA))

    return doing


def sharing(precision: str) -> Callable[[], None]:
    def doing() -> None:
        own = a_chain(precision)
        WORLD.products.clear()
        graph = cases.transformer(**FIGURES)
        overheads.shard_costs(own, graph, CURVES, unit_s=0.0, device=CUDA)

    return doing


def device() -> None:
    clock = meshwright.profiler.clock.Clock(CUDA)
    with mock.patch.object(devices, "PRODUCT_S", 0.0):
        assert devices._product_flops(CUDA, clock) == [2 * 4096**3 / 1e-3] * devices.LEAST_PRODUCTS
    devices._copies(CUDA, clock)


def update() -> None:
    own = overheads._optimizer_chain(a_chain("bf16"), cases.transformer(**FIGURES))
    overheads.optimizer_s_per_parameter(own, meshwright.profiler.clock.Clock(CUDA))


def unit() -> None:
    overheads.shard_unit_s(CUDA)


def step() -> None:
    overheads.step_s(CUDA)


def pipeline() -> None:
    overheads.pipeline_action_s(CURVES, CUDA)


PATHS: dict[str, Path] = {
    "one device": stepped(layers=1),
    "a library's layers": stepped(family="llama", layers=1),
    "one device, bf16": stepped(precision="bf16", steps=2, layers=1),
    "one device, fp16": stepped(precision="fp16"),
    "graphs": stepped(
        graphs="micro_batch",
        precision="bf16",
        recompute=("none", "selective"),
        steps=3,
        loss=ChunkedLoss(rows=100),
    ),
    "graphs, compiled": stepped(graphs="micro_batch", compile="block", precision="fp16", steps=3),
    "graphs, a library's layers": stepped(
        graphs="micro_batch", family="llama", layers=1, recompute="full", steps=3
    ),
    "graphs, replicas": stepped(
        graphs="micro_batch",
        data_replicate=2,
        precision="bf16",
        recompute=("none", "selective"),
        loss=ChunkedLoss(rows=100),
        steps=3,
        layers=1,
    ),
    "offloaded activations": stepped(activations="offload", precision="bf16", steps=2),
    "compressed activations": stepped(activations="compress"),
    "selective, offloaded": stepped(recompute="selective", activations="offload"),
    "offloaded optimizer": stepped(offload="optimizer", steps=2),
    "offloaded parameters": stepped(offload="parameters", precision="bf16", steps=2, layers=1),
    "zero 1": stepped(data_shard=2, zero=1, recompute="selective"),
    "zero 3": stepped(data_shard=4, zero=3, precision="bf16", recompute="full", steps=2, layers=1),
    "zero 3, two ahead": stepped(data_shard=4, zero=3, precision="bf16", prefetch=2, steps=2),
    "zero 3, within groups": stepped(
        data_shard=4, zero=3, precision="bf16", reshard_after_forward=2
    ),
    "zero 3, kept": stepped(
        data_shard=4, zero=3, precision="bf16", reshard_after_forward=1, prefetch=1
    ),
    "replicas": stepped(data_replicate=2),
    "narrow gradients": stepped(
        data_replicate=2, data_shard=2, zero=2, gradient_compression="bf16", steps=2
    ),
    "powersgd": stepped(data_replicate=2, gradient_compression="powersgd", steps=2, layers=1),
    "tensor": stepped(tensor=2),
    "loss in chunks": stepped(tensor=2, loss=ChunkedLoss(rows=100), layers=1),
    "loss in chunks, last stage": stepped(1, pipeline=2, loss=ChunkedLoss(rows=100)),
    "context": stepped(context=2, precision="bf16", zero=1, layers=1),
    "experts": stepped(
        family="mixtral", data_shard=2, expert=2, zero=1, precision="bf16", layers=1
    ),
    "compiled": stepped(compile="block", precision="bf16", activations="offload"),
    "compiled, zero 3": stepped(
        compile="block",
        data_shard=4,
        zero=3,
        precision="bf16",
        recompute="selective",
        prefetch=1,
        steps=2,
    ),
    "compiled, tensor": stepped(compile="block", tensor=2, loss=ChunkedLoss(rows=100)),
    "compiled, tensor in pieces": stepped(
        compile="block", tensor=2, tensor_overlap="async", loss=ChunkedLoss(rows=100)
    ),
    "compiled, experts": stepped(
        compile="block",
        family="qwen2_moe",
        data_shard=2,
        expert=2,
        zero=3,
        precision="bf16",
        layers=1,
    ),
    "compiled, zero bubble": stepped(1, compile="block", pipeline=2, schedule="zb-h1"),
    "gathered experts": stepped(
        family="mixtral",
        data_shard=2,
        expert=2,
        zero=1,
        precision="bf16",
        dispatch="allgather",
        layers=1,
    ),
    "relayed experts": stepped(
        family="mixtral",
        data_shard=4,
        expert=4,
        zero=1,
        precision="bf16",
        hierarchical_all_to_all=2,
        layers=1,
    ),
    "8-bit weights": stepped(
        data_shard=2, zero=3, precision="fp8", weight_gather_dtype="fp8", steps=2, layers=1
    ),
    "first stage": stepped(pipeline=2, precision="bf16"),
    "last stage": stepped(1, pipeline=2),
    "zero bubble": stepped(1, pipeline=2, schedule="zbv", virtual_stages=2, steps=2),
    "profile: layers in fp32": measured(chain_alone("fp32")),
    "profile: layers in bf16": measured(chain_alone("bf16")),
    "profile: layers in fp16": measured(chain_alone("fp16")),
    "profile: data parallelism in bf16": measured(sharing("bf16"), 2),
    "profile: data parallelism in fp32": measured(sharing("fp32"), 2),
    "profile: device": measured(device),
    "profile: units": measured(unit, 2),
    "profile: step": measured(step, 2),
    "profile: optimizer": measured(update),
    "profile: pipeline, first rank": measured(pipeline, 2),
    "profile: pipeline, last rank": measured(pipeline, 2, 1),
}

COVERED = (
    "graphs",
    "graphs, compiled",
    "graphs, a library's layers",
    "one device, fp16",
    "profile: layers in fp16",
    "profile: layers in fp32",
    "profile: data parallelism in fp32",
    "compiled, zero 3",
    "offloaded optimizer",
    "compressed activations",
    "zero 3, two ahead",
    "zero 3, kept",
    "zero 1",
    "compiled",
    "first stage",
    "loss in chunks, last stage",
    "replicas",
    "tensor",
    "compiled, tensor",
    "last stage",
    "selective, offloaded",
    "zero 3, within groups",
    "compiled, zero bubble",
    "compiled, tensor in pieces",
    "narrow gradients",
    "zero bubble",
    "profile: pipeline, first rank",
)
"""Paths whose every part is in another one: `-m matrix` walks them."""


def walked(path: Path) -> dict[str, Any]:
    WORLD.begin()
    begin_s = time.process_time()
    failed = None
    try:
        path()
    except Exception:
        failed = traceback.format_exc()
    return {
        "failed": failed,
        "syncs": dict(Counter(WORLD.syncs)),
        "races": dict(Counter(WORLD.races)),
        "crossings": WORLD.crossings,
        "replays": WORLD.replays,
        "products": {name: sorted(types) for name, types in WORLD.products.items()},
        "seconds": time.process_time() - begin_s,
    }


def main() -> None:
    torch.set_num_threads(1)
    gc.freeze()
    with fake_cuda():
        for name in sys.argv[2:]:
            print(json.dumps({"path": name, **walked(PATHS[name])}), flush=True)
    # autograd's thread of the device may still let go of the last graph: while Python ends it would
    # be ended in the middle of that, and C++ then ends the process ("terminate called").
    os._exit(0)
