"""Plans of one device, predicted and measured: step time and peak memory.

    PYTHONPATH=$PWD python benchmarks/gpu/single_device.py --cluster 1xh100-sxm-80gb
    PYTHONPATH=$PWD python benchmarks/gpu/single_device.py --tiny -o /tmp/proof

The plans differ in micro-batch, recompute, offload of optimizer, parameters and activations, and
precision.  Each is built by the runtime's own engine in a process of its own; reported are the
median of its steps and the most bytes that it held at once, as the device's allocator counts them
(on a CPU: bytes of live tensors), beside the prediction from the catalogue's figures of the device,
or from a profile of this machine.  What the planner allows for the device's context and the
allocator's slack is left out.  Writes <device>.json and <device>.md.

`--tiny` is a small model that proves the script on any machine; on a CPU only the bytes are then
worth a comparison.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import multiprocessing
import os
import platform
import re
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.planner.architectures.parameters import graph_of
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.document import read, write_text
from meshwright.planner.documents.model import Architecture, ModelGraph
from meshwright.planner.documents.plan import Mesh, PlacedLayer, Plan, PlannedModel, Stage
from meshwright.planner.documents.profile import Profile
from meshwright.planner.documents.units import bytes_text
from meshwright.planner.errors import MeshwrightError
from meshwright.runtime.core.memory_tracker import LiveMemory
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.launch.training_loop import token_engine

LEFT_OUT = ("context", "allocator overhead")
WARM_UP = 2
TINY = Architecture(
    family="llama",
    hidden_size=256,
    layers=4,
    heads=8,
    kv_heads=4,
    head_dim=32,
    ffn_size=704,
    vocab_size=2048,
    gated_mlp=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a plan of one device can say."""

    micro_batch: int = 1
    micro_batches: int = 4
    recompute: tuple[str, ...] = ("none",)
    """Choices that take turns from layer to layer."""
    activations: str = "keep"
    offload: str = "none"
    precision: str = "bf16"

    @property
    def text(self) -> str:
        """The plan in a few words."""
        parts = [self.precision, f"micro-batch {self.micro_batch} x {self.micro_batches}"]
        parts.append("recompute " + "/".join(self.recompute))
        parts += [f"activations {self.activations}"] if self.activations != "keep" else []
        parts += [f"offload {self.offload}"] if self.offload != "none" else []
        return ", ".join(parts)

    def plan(self, model: ModelGraph, cluster: str, seq_len: int) -> Plan:
        """Return the plan."""
        placed = tuple(
            PlacedLayer(layer=name, recompute=choice, activations=self.activations)
            for (name, _), choice in zip(model.chain, itertools.cycle(self.recompute), strict=False)
        )
        return Plan(
            model=PlannedModel(
                name=model.name, source=model.source or model.name, digest=model.digest
            ),
            cluster=cluster,
            seq_len=seq_len,
            global_batch=self.micro_batch * self.micro_batches,
            precision=self.precision,
            mesh=Mesh(),
            zero=0,
            schedule="1f1b",
            micro_batch=self.micro_batch,
            micro_batches=self.micro_batches,
            offload=self.offload,
            stages=(Stage(layers=placed),),
        )


CASES = (
    Case(),
    Case(micro_batch=2, micro_batches=2),
    Case(micro_batch=4, micro_batches=1),
    Case(micro_batch=2, micro_batches=2, recompute=("selective",)),
    Case(micro_batch=4, micro_batches=1, recompute=("full",)),
    Case(micro_batch=2, micro_batches=2, recompute=("none", "selective", "full")),
    Case(micro_batch=2, micro_batches=2, activations="offload"),
    Case(offload="optimizer"),
    Case(offload="parameters", recompute=("full",)),
    Case(precision="fp16"),
    Case(precision="tf32"),
    Case(precision="fp32", recompute=("selective",)),
)


def row_of(
    case: Case, model: ModelGraph, cluster: ClusterSpec, profile: Profile | None, args: Any
) -> dict[str, Any]:
    """Predict and measure one plan; a plan that fails says why."""
    plan = case.plan(model, args.cluster, args.seq_len)
    row: dict[str, Any] = {"plan": case.text}
    try:
        prediction = predict(plan, model, cluster, profile)
        parts = prediction.stages[0].memory_parts
        row |= {
            "predicted_s": prediction.step_time_s,
            "predicted_bytes": sum(v for k, v in parts.items() if k not in LEFT_OUT),
            "predicted_parts": parts,
        }
    except MeshwrightError as error:
        row["not_predicted"] = str(error)
    return row | measured(plan, model, device=args.device, steps=args.steps)


def measured(plan: Plan, model: ModelGraph, *, device: str, steps: int) -> dict[str, Any]:
    """Measure in a process of its own, so that no plan finds another's memory."""
    # CUDA does not survive a fork; a CPU needs not import torch again.
    context = multiprocessing.get_context("spawn" if device.startswith("cuda") else "fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(plan, model, device, steps, theirs))
    process.start()
    theirs.close()
    try:
        found: dict[str, Any] = ours.recv()
    except EOFError:
        found = {"failed": "the process died"}
    process.join()
    return found


def _measure(plan: Plan, model: ModelGraph, device: str, steps: int, pipe: Any) -> None:
    try:
        pipe.send(_measured(plan, model, torch.device(device), steps))
    except torch.OutOfMemoryError as error:
        pipe.send({"failed": f"out of memory: {error}"[:300]})
    except Exception:
        pipe.send({"failed": traceback.format_exc()[-2000:]})


def _measured(plan: Plan, model: ModelGraph, device: torch.device, steps: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    engine = token_engine(plan, model, device=device)
    vocabulary = model.architecture.vocab_size if model.architecture else 256
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (plan.global_batch, plan.seq_len + 1), generator=generator)

    def step_s() -> float:
        begin = time.perf_counter()
        engine.step(tokens)  # its report waits for the device
        return time.perf_counter() - begin

    for _ in range(WARM_UP):
        step_s()
    seconds = [step_s() for _ in range(steps)]
    peak_bytes = most_bytes(engine, lambda: engine.step(tokens))
    return {"measured_s": seconds, "measured_bytes": peak_bytes}


def most_bytes(engine: Engine, step: Callable[[], object]) -> int:
    """Return the most bytes at once in a step: as a GPU's allocator counts, or live tensors."""
    if engine.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(engine.device)
        step()
        return torch.cuda.max_memory_allocated(engine.device)
    with LiveMemory(_living(engine)) as live:
        step()
    return live.peak_bytes


def _living(engine: Engine) -> list[torch.Tensor]:
    """Return what lives from step to step."""
    buffers = [b for layer in engine.units.values() for b in layer.buffers()]
    return [*engine.state().values(), *buffers]


def markdown(result: dict[str, Any]) -> str:
    """Return the table."""
    rows = result["rows"]
    lines = [
        f"# {result['device']}: plans of one device",
        "",
        f"`{result['command']}`, {result['date']}, torch {result['torch']}, "
        f"{result['model']}, sequence {result['seq_len']}; predicted for {result['cluster']}.",
        "",
        "| plan | step measured | predicted | error | peak measured | predicted | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['plan']} | {row['failed'].splitlines()[-1]} | | | | | |")
            continue
        step, peak = statistics.median(row["measured_s"]), row["measured_bytes"]
        cells = [f"{step:.4g} s", "", "", bytes_text(peak), "", ""]
        if "predicted_s" in row:
            cells[1], cells[2] = f"{row['predicted_s']:.4g} s", _error(row["predicted_s"], step)
            cells[4] = bytes_text(row["predicted_bytes"])
            cells[5] = _error(row["predicted_bytes"], peak)
        lines.append(f"| {row['plan']} | {' | '.join(cells)} |")
    for what, key, found in (
        ("step time", "predicted_s", _step),
        ("peak memory", "predicted_bytes", _peak),
    ):
        errors = [abs(r[key] / found(r) - 1) for r in rows if key in r and "failed" not in r]
        if errors:
            lines += [
                "",
                f"{what.capitalize()}: median |error| {100 * statistics.median(errors):.1f} %, "
                f"worst {100 * max(errors):.1f} %.",
            ]
    return "\n".join([*lines, ""])


def _step(row: dict[str, Any]) -> float:
    return statistics.median(row["measured_s"])


def _peak(row: dict[str, Any]) -> float:
    return float(row["measured_bytes"])


def _error(predicted: float, found: float) -> str:
    return f"{100 * (predicted / found - 1):+.1f} %"


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--cluster", default="local", help="one device, as 1xh100-sxm-80gb")
    parser.add_argument("--profile", help="of this machine and model; default: the catalogue")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("-o", "--output", default="benchmarks/results/gpu")
    args = parser.parse_args(argv)
    if args.tiny:
        args.seq_len, args.steps = 128, 3
        if args.cluster == "local":
            args.cluster = "1xh100-sxm-80gb"  # which has a rate for every precision
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    model = graph_of(TINY, name="tiny-llama") if args.tiny else resolve_model(args.model)
    cluster = resolve_cluster(args.cluster)
    profile = read(Profile, args.profile) if args.profile else None
    on_cuda = args.device.startswith("cuda")
    device = torch.cuda.get_device_name() if on_cuda else f"CPU {platform.machine()}"
    rows = []
    for case in CASES:
        rows.append(row_of(case, model, cluster, profile, args))
        print(json.dumps({k: v for k, v in rows[-1].items() if k != "predicted_parts"}), flush=True)
    result = {
        "date": datetime.date.today().isoformat(),
        "device": device,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "command": "python benchmarks/gpu/single_device.py "
        + ("--tiny" if args.tiny else f"--model {args.model} --cluster {args.cluster}"),
        "model": model.name,
        "cluster": args.profile or args.cluster,
        "seq_len": args.seq_len,
        "rows": rows,
    }
    folder = Path(args.output)
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    write_text(json.dumps(result, indent=1) + "\n", folder / f"{name}.json")
    write_text(markdown(result), folder / f"{name}.md")
    print(markdown(result))


if __name__ == "__main__":
    main()
