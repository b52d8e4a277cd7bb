"""A step of the runtime against the shortest script in plain PyTorch for the same layout.

    PYTHONPATH=$PWD python benchmarks/runtime_overhead.py [-o benchmarks/results] [--runs 4]

Two ranks of one core each on this machine, fp32.  The scripts below use torch's own DDP,
fully_shard, parallelize_module and Schedule1F1B on the same layers, with AdamW and clipping.  Both
trainings are in the same two processes and take steps in turn, A B B A; what is measured are CPU
seconds of the two ranks, since other programs move these little, and a slow minute meets both.
Where tensors lie in memory stays as it is while processes live and moves the ratio by some percent:
so there are several runs, each in new processes, which keep what they free as ranks of a launch do.
Reported is the median of all pairs' ratios, with the standard error of the runs' medians, and the
peak of live tensors in a step of its own.  Writes runtime_overhead.json and
docs/results/overhead.md.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from meshwright.planner.architectures.parameters import graph_of
from meshwright.planner.documents.document import write_text
from meshwright.planner.documents.model import Architecture, ModelGraph
from meshwright.planner.documents.plan import Mesh, PlacedLayer, Plan, PlannedModel, Stage, Training
from meshwright.planner.system.gc_pause import keep_freed, pause_collector
from meshwright.profiler.start_ranks import result_of
from meshwright.runtime.core.head import Head
from meshwright.runtime.core.memory_tracker import LiveMemory
from meshwright.runtime.core.mesh import WHOLE
from meshwright.runtime.launch.training_loop import token_engine
from meshwright.runtime.models import reference_decoder as reference

DOCUMENT = Path(__file__).parents[1] / "docs" / "results" / "overhead.md"
CPU = torch.device("cpu")
SEQ_LEN, GLOBAL_BATCH, VOCABULARY, LAYERS = 128, 8, 2048, 4
ARCHITECTURE = Architecture(
    family="reference",
    hidden_size=512,
    layers=LAYERS,
    heads=8,
    kv_heads=8,
    head_dim=64,
    ffn_size=1536,
    vocab_size=VOCABULARY,
    gated_mlp=True,
)
WARM_UP = 3
"""Steps before; the last of them is watched for its memory."""
Step = Callable[[Tensor], float]
"""Trains on tokens [sample of this rank's data, position + 1]; returns the loss it saw."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"mesh": {"data_replicate": 2}, "micro_batches": 2},
    "zero 3": {"mesh": {"data_shard": 2}, "zero": 3, "micro_batches": 2},
    "tensor": {"mesh": {"tensor": 2}, "micro_batches": 2},
    "pipeline": {"mesh": {"pipeline": 2}, "micro_batches": 4},
}


def plan_of(model: ModelGraph, layout: dict[str, Any]) -> Plan:
    mesh = Mesh(**layout["mesh"])
    names = [name for name, _ in model.chain]
    half = len(names) // mesh.pipeline
    data = mesh.data_shard * mesh.data_replicate
    return Plan(
        model=PlannedModel(name=model.name, source=model.name, digest=model.digest),
        cluster="local:2",
        seq_len=SEQ_LEN,
        global_batch=GLOBAL_BATCH,
        precision="fp32",
        mesh=mesh,
        zero=layout.get("zero", 0),
        schedule="1f1b",
        micro_batch=GLOBAL_BATCH // data // layout["micro_batches"],
        micro_batches=layout["micro_batches"],
        training=Training(weight_decay=0.1),
        stages=tuple(
            Stage(layers=tuple(PlacedLayer(layer=n) for n in names[at : at + half]))
            for at in range(0, len(names), half)
        ),
    )


# --- plain PyTorch -----------------------------------------------------------------------------


def layers() -> list[nn.Module]:
    rotary = reference.rotary_tables(64, torch.arange(SEQ_LEN), torch.float32, CPU)
    blocks = [reference.Block(ARCHITECTURE, rotary, WHOLE, experts=None) for _ in range(LAYERS)]
    output = nn.Linear(ARCHITECTURE.hidden_size, VOCABULARY, bias=False)
    return [
        reference.Embedding(ARCHITECTURE),
        *blocks,
        Head(reference.norm(ARCHITECTURE), output),
    ]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def optimized(model: nn.Module, forward_backward: Callable[[Tensor], Tensor]) -> Step:
    """Return a step: passes, clipping, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def step(tokens: Tensor) -> float:
        loss = forward_backward(tokens)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def in_turn(model: nn.Module, before: Callable[[bool], Any], count: int) -> Step:
    """Return a step without a pipeline; `before` is told of each micro-batch if it is the last."""

    def forward_backward(tokens: Tensor) -> Tensor:
        total = torch.zeros(())
        for index, part in enumerate(tokens.chunk(count)):
            with before(index == count - 1):
                loss = loss_of(model(part[:, :-1]), part[:, 1:]) / count
                loss.backward()
            total += loss.detach()
        return total

    return optimized(model, forward_backward)


def plain_data(count: int) -> Step:
    model = DistributedDataParallel(nn.Sequential(*layers()), gradient_as_bucket_view=True)
    return in_turn(model, lambda last: torch.enable_grad() if last else model.no_sync(), count)


def plain_zero_3(count: int) -> Step:
    model = nn.Sequential(*layers())
    for layer in (*model, model):
        fully_shard(layer)
    return in_turn(model, lambda last: torch.enable_grad(), count)


def plain_tensor(count: int) -> Step:
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(*layers())
    whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    scattered = RowwiseParallel(output_layouts=Shard(1))
    for layer in model:
        if isinstance(layer, reference.Block):
            local = SequenceParallel(use_local_output=True)
            plan = {
                "attention_norm": local,
                "attention": whole,
                **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
                "attention.output": scattered,
                "mlp_norm": local,
                "mlp": whole,
                "mlp.gate": ColwiseParallel(),
                "mlp.up": ColwiseParallel(),
                "mlp.down": scattered,
            }
        elif isinstance(layer, Head):
            plan = {
                "norm": SequenceParallel(),
                "output": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            }
        else:
            plan = {"tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))}
        parallelize_module(layer, mesh, plan)
    norms = [p for p in model.parameters() if p.ndim == 1]
    matrices = [p for p in model.parameters() if p.ndim > 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": norms}], lr=3e-4, fused=True)

    def step(tokens: Tensor) -> float:
        total = torch.zeros(())
        with loss_parallel():
            for part in tokens.chunk(count):
                loss = loss_of(model(part[:, :-1]), part[:, 1:]) / count
                loss.backward()
                total += loss.detach().full_tensor()
        for parameter in model.parameters():
            # torch leaves sums over ranks to be done, which the optimizer would do once each time.
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total.item()

    return step


def plain_pipeline(count: int) -> Step:
    rank = dist.get_rank()
    half = (LAYERS + 2) // 2
    model = nn.Sequential(*layers()[rank * half : (rank + 1) * half])
    samples = GLOBAL_BATCH // count
    tokens = torch.empty(samples, SEQ_LEN, dtype=torch.int64, device="meta")
    hidden = torch.empty(samples, SEQ_LEN, ARCHITECTURE.hidden_size, device="meta")
    hidden.requires_grad_()
    logits = torch.empty(samples, SEQ_LEN, VOCABULARY, device="meta", requires_grad=True)
    stage = PipelineStage(
        model,
        rank,
        2,
        CPU,
        input_args=hidden if rank else tokens,
        output_args=logits if rank else hidden,
    )
    schedule = Schedule1F1B(stage, count, loss_fn=loss_of)

    def forward_backward(tokens: Tensor) -> Tensor:
        if rank == 0:
            schedule.step(tokens[:, :-1].contiguous(), return_outputs=False)
            return torch.zeros(())
        losses: list[Tensor] = []
        schedule.step(target=tokens[:, 1:], losses=losses, return_outputs=False)
        return torch.stack([loss.detach() for loss in losses]).mean()

    return optimized(model, forward_backward)


PLAIN = {
    "data": plain_data,
    "zero 3": plain_zero_3,
    "tensor": plain_tensor,
    "pipeline": plain_pipeline,
}

# --- both --------------------------------------------------------------------------------------


def work(arguments: dict[str, Any], tell: Callable[[str, float], None]) -> dict[str, Any]:
    """Return what `compared` does by layout; every rank calls it."""
    torch.set_num_threads(1)
    keep_freed()  # as ranks of a launch do
    results = {}
    for index, name in enumerate(arguments["layouts"]):
        tell(name, index / len(arguments["layouts"]))
        results[name] = compared(name, LAYOUTS[name], pairs=arguments["pairs"])
    return results


def compared(name: str, layout: dict[str, Any], *, pairs: int) -> dict[str, list[Any]]:
    """Return CPU seconds [pair] of (runtime, plain) and their peak bytes [rank]."""
    model = graph_of(ARCHITECTURE, name="overhead")
    plan = plan_of(model, layout)
    degree = plan.mesh.data_shard * plan.mesh.data_replicate
    own = dist.get_rank() if degree > 1 else 0

    def tokens(index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        shape = (GLOBAL_BATCH, SEQ_LEN + 1)
        return torch.randint(VOCABULARY, shape, generator=generator).chunk(degree)[own]

    def runtime() -> Step:
        engine = token_engine(plan, model, device=CPU)
        return lambda tokens: engine.step(tokens).loss

    both = [
        warmed(make, tokens) for make in (runtime, lambda: PLAIN[name](layout["micro_batches"]))
    ]
    seconds = []
    with pause_collector():
        for index in range(pairs):
            batch, pair = tokens(WARM_UP + index), [0.0, 0.0]
            for at in (0, 1) if index % 2 == 0 else (1, 0):
                pair[at] = cpu_s(both[at][0], batch)
            seconds.append(pair)
            gc.collect()
    return {"seconds": seconds, "peak_bytes": [peaks for _, peaks in both]}


def warmed(make: Callable[[], Step], tokens: Callable[[int], Tensor]) -> tuple[Step, list[int]]:
    """Make a training, take its first steps, and return the peak bytes of the last one [rank]."""
    with LiveMemory() as live:
        step = make()
        for index in range(WARM_UP):
            gc.collect()
            dist.barrier()
            live.reset_peak()
            step(tokens(index))
    peaks = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    peaks[dist.get_rank()] = live.peak_bytes
    dist.all_reduce(peaks)
    return step, peaks.tolist()


def cpu_s(step: Step, tokens: Tensor) -> float:
    """Return the CPU seconds of both ranks in one step, those of all their threads."""
    dist.barrier()
    begin = time.process_time()
    step(tokens)
    seconds = torch.tensor(time.process_time() - begin, dtype=torch.float64)
    dist.all_reduce(seconds)
    return seconds.item()


def middle(runs: list[list[float]]) -> tuple[float, float]:
    """Return the median of all values, and the standard error of the runs' own medians.

    >>> [round(one, 2) for one in middle([[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]])]
    [3.0, 1.0]
    """
    own = [statistics.median(run) for run in runs]
    median = statistics.median(value for run in runs for value in run)
    return median, statistics.stdev(own) / math.sqrt(len(own)) if len(own) > 1 else math.nan


def markdown(result: dict[str, Any]) -> str:
    """Return docs/results/overhead.md."""
    lines = [
        "# What the runtime costs beside plain PyTorch",
        "",
        "A step of the runtime's engine beside a step of the shortest script with torch's own DDP, "
        "fully_shard, parallelize_module or Schedule1F1B on the same layers: two ranks of one core "
        f"each, fp32, {LAYERS} blocks of width {ARCHITECTURE.hidden_size}, sequence {SEQ_LEN}, "
        f"global batch {GLOBAL_BATCH}. Both trainings are in the same two processes and take steps "
        'in turn. CPU seconds are those of both ranks, the median step; "over plain" is the '
        f"median ratio of {result['runs']} runs of {result['pairs']} pairs, each run in new "
        "processes, with the standard error of the runs' medians. Memory is the peak of live "
        "tensors in a step, on the rank that has most.",
        "",
        f"`PYTHONPATH=$PWD {result['command']}`, {result['date']}, torch {torch.__version__}, "
        f"{os.cpu_count()} cores, load average {result['load'][0]:.0f} before and "
        f"{result['load'][1]:.0f} after.",
        "",
        "| layout | runtime, CPU s | plain PyTorch | over plain "
        "| runtime, memory | plain PyTorch | over plain |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in result["layouts"].items():
        columns = zip(*(pair for run in found["seconds"] for pair in run), strict=True)
        ours, theirs = (statistics.median(column) for column in columns)
        ratio, error = middle([[a / b - 1 for a, b in run] for run in found["seconds"]])
        peak, plain_peak = (max(peaks) / 2**20 for peaks in found["peak_bytes"])
        lines.append(
            f"| {name} | {ours:.2f} s | {theirs:.2f} s | {100 * ratio:+.1f} ± {100 * error:.1f} % "
            f"| {peak:.1f} MiB | {plain_peak:.1f} MiB | {100 * (peak / plain_peak - 1):+.1f} % |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", default="benchmarks/results")
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    options = parser.parse_args()
    before = os.getloadavg()[0]
    os.environ["OMP_NUM_THREADS"] = "1"
    runs = [
        result_of(
            "benchmarks.runtime_overhead:work",
            {"pairs": options.pairs, "layouts": options.layouts},
            ranks=2,
            device="cpu",
            title="overhead",
        )
        for _ in range(options.runs)
    ]
    layouts = {
        name: {
            "seconds": [run[name]["seconds"] for run in runs],
            "peak_bytes": runs[0][name]["peak_bytes"],
        }
        for name in options.layouts
    }
    result = {
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/runtime_overhead.py "
        f"--runs {options.runs} --pairs {options.pairs}",
        "load": [before, os.getloadavg()[0]],
        "runs": options.runs,
        "pairs": options.pairs,
        "layouts": layouts,
    }
    print(markdown(result))
    if layouts.keys() == LAYOUTS.keys():
        text = json.dumps(result, indent=1) + "\n"
        write_text(text, Path(options.output) / "runtime_overhead.json")
        write_text(markdown(result), DOCUMENT)


if __name__ == "__main__":
    main()
