"""The cases of suite.py in one process, each a generator of rows: a key, and what finds the row."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# As many as a launch of one rank gives it: updates of what lies on the host take them all.
os.environ["OMP_NUM_THREADS"] = str(os.cpu_count() or 1)

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from benchmarks.gpu.single_device import LEFT_OUT, TINY, Case, most_bytes
from meshwright.planner.architectures.parameters import graph_of
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.model import Architecture, ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.profile import LOSS_WORDS, ChunkedLoss
from meshwright.runtime.launch.training_loop import token_engine

Row = dict[str, Any]
Rows = Iterator[tuple[str, Callable[[], Row]]]
"""Keys, and what finds their rows out."""


class Setting:
    """What a case is told: on which devices, how large."""

    def __init__(self, *, device: str, devices: int, tiny: bool, out: Path) -> None:
        self.kind, self.devices = device, devices
        self.device = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
        self.tiny, self.out = tiny, out

    def wait(self) -> None:
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def seconds(
        self, work: Callable[[], object], *, rounds: int = 5, calls: int = 1
    ) -> list[float]:
        """Return seconds of a call, in rounds of some calls, behind one that is not counted."""
        work()
        taken = []
        for _ in range(2 if self.tiny else rounds):
            self.wait()
            begin = time.perf_counter()
            for _ in range(calls):
                work()
            self.wait()
            taken.append((time.perf_counter() - begin) / calls)
        return taken

    @property
    def small(self) -> Architecture:
        """A model for equality: as many parts as a large one, and quick on the host too."""
        return TINY.model_copy(update={"layers": 2, "hidden_size": 128, "heads": 4, "kv_heads": 2})


def machine(at: Setting) -> Rows:
    """Yield what the machine is, and which kernels it has."""

    def versions() -> Row:
        found: Row = {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "date": time.strftime("%Y-%m-%d"),
        }
        if at.kind == "cuda":
            free, total = torch.cuda.mem_get_info()
            found |= {
                "device": torch.cuda.get_device_name(),
                "devices": torch.cuda.device_count(),
                "capability": torch.cuda.get_device_capability(),
                "memory_bytes": total,
                "free_bytes": free,
            }
        else:
            found["device"] = f"CPU {platform.machine()}"
        return found

    yield "versions", versions
    if at.kind == "cuda":
        yield "nvidia-smi", lambda: {"text": _said(["nvidia-smi", "-q", "-d", "CLOCK,POWER,ECC"])}
        yield "links", lambda: {"text": _said(["nvidia-smi", "topo", "-m"])}
    for dtype, grouped in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        yield (
            f"fused attention {dtype} grouped {grouped}",
            lambda d=dtype, g=grouped: {"works": _works(lambda: _fused_attention(at, d, g))},
        )
    yield "grouped products", lambda: {"works": _works(lambda: _grouped(at))}
    yield "float8 products", lambda: {"works": _works(lambda: _float8(at))}


def _said(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout


def _works(call: Callable[[], object]) -> bool | str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return True


def _fused_attention(at: Setting, dtype: torch.dtype, grouped: bool) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: PLC0415

    query = torch.randn(1, 8, 256, 64, device=at.device, dtype=dtype, requires_grad=True)
    key, value = (
        torch.randn(1, 2 if grouped else 8, 256, 64, device=at.device, dtype=dtype)
        for _ in range(2)
    )
    kinds = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    with sdpa_kernel(kinds):
        functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        ).sum().backward()
    at.wait()


def _grouped(at: Setting) -> None:
    x = torch.randn(64, 64, device=at.device, dtype=torch.bfloat16)
    weights = torch.randn(2, 64, 64, device=at.device, dtype=torch.bfloat16)
    ends = torch.tensor([16, 64], device=at.device, dtype=torch.int32)
    functional.grouped_mm(x, weights, offs=ends)
    at.wait()


def _float8(at: Setting) -> None:
    eight = torch.float8_e4m3fn
    x = torch.randn(64, 64, device=at.device).to(eight)
    y = torch.randn(64, 64, device=at.device).to(eight).t()
    one = torch.ones((), device=at.device)
    torch._scaled_mm(x, y, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    at.wait()


# --- plans ------------------------------------------------------------------------------------


def losses(
    plan: Plan,
    model: ModelGraph,
    device: torch.device,
    steps: int = 3,
    weights: dict[str, Tensor] | None = None,
) -> list[float]:
    """Return the losses of a plan's first steps on the same tokens, from given first weights.

    Random numbers of a device are others than the host's, so that its own first weights are too.
    """
    engine = token_engine(plan, model, device=device)
    for name, value in (weights or {}).items():
        here = engine.state()[name]
        (here.to_local() if isinstance(here, DTensor) else here).copy_(value)
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.architecture.vocab_size if model.architecture else 256
    shape = (plan.global_batch, plan.seq_len + 1)
    own = plan.samples_of(engine.slice_rank)
    found = []
    for _ in range(steps):
        tokens = torch.randint(vocabulary, shape, generator=generator)
        found.append(engine.step(tokens[own.start : own.stop]).loss)
    return found


def gradients(
    plan: Plan, model: ModelGraph, device: torch.device, weights: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the gradients of a plan's first step on the host, by name, from given weights."""
    engine = token_engine(plan, model, device=device)
    for name, value in weights.items():
        engine.state()[name].copy_(value)
    vocabulary = model.architecture.vocab_size if model.architecture else 256
    shape = (plan.global_batch, plan.seq_len + 1)
    engine.forward_backward(
        torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0))
    )
    return {name: grad.detach().float().cpu() for name, grad in engine.gradients().items()}


def alone(call: Callable[[], Any]) -> Any:
    """Call, and leave no process group and no memory behind."""
    try:
        return call()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def _weights(plan: Plan, model: ModelGraph) -> dict[str, Tensor]:
    """Return a plan's first weights on the host."""
    state = token_engine(plan, model, device=torch.device("cpu")).state()
    return {
        name: (value.to_local() if isinstance(value, DTensor) else value).clone()
        for name, value in state.items()
        if name.startswith("model.")
    }


EQUAL = (
    Case(precision="fp32"),
    Case(precision="fp32", recompute=("none", "selective", "full")),
    Case(precision="fp32", activations="offload"),
    Case(precision="fp32", activations="compress"),
    Case(precision="fp32", offload="optimizer"),
    Case(precision="fp32", offload="parameters"),
    Case(precision="bf16"),
    Case(precision="fp16"),
    Case(precision="tf32"),
)


ODD_VOCABULARY = 8209
"""Its rows are off the grid of kernels, and its head is large enough to be multiplied in parts."""
CHUNKS = ChunkedLoss(rows=64, gradients="precomputed")


def equality(at: Setting) -> Rows:
    """Yield losses of plans on the device against the same plan on the host."""
    small = graph_of(at.small, name="small")
    odd = graph_of(at.small.model_copy(update={"vocab_size": ODD_VOCABULARY}), name="odd")
    cases = [(small, case, None) for case in EQUAL]
    for precision, loss in itertools.product(("fp32", "bf16", "tf32"), (None, CHUNKS)):
        cases.append((odd, Case(precision=precision), loss))
    for model, case, loss in cases:

        def row(
            model: ModelGraph = model, case: Case = case, loss: ChunkedLoss | None = loss
        ) -> Row:
            plan = case.plan(model, "device", 128).model_copy(update={"loss": loss})
            on_host = plan.model_copy(update={"precision": "fp32"})
            weights = alone(lambda: _weights(on_host, model))
            here = alone(lambda: losses(on_host, model, torch.device("cpu"), weights=weights))
            there = alone(lambda: losses(plan, model, at.device, weights=weights))
            worst = max(abs(a / b - 1) for a, b in zip(there, here, strict=True))
            found: Row = {"host": here, "device": there, "worst": worst}
            if model is odd:  # where the head is multiplied in parts
                of_host = alone(lambda: gradients(on_host, model, torch.device("cpu"), weights))
                of_device = alone(lambda: gradients(plan, model, at.device, weights))
                differs = {
                    name: float((of_device[name] - grad).norm() / grad.norm())
                    for name, grad in of_host.items()
                }
                name = max(differs, key=lambda at: differs[at])
                found |= {"worst_gradient": differs[name], "worst_gradient_of": name}
            return found

        named = case.text + ", odd vocabulary" * (model is odd)
        yield named + ", loss in chunks" * (loss is not None), row


MEASURED = (
    ("gpt2", 1024, Case(micro_batches=8)),
    ("llama-3.2-1b", 2048, Case(micro_batch=2, micro_batches=2)),
    ("llama-3.2-1b", 2048, Case(micro_batch=4, micro_batches=1, recompute=("selective",))),
    ("llama-3.2-1b", 2048, Case(micro_batch=8, micro_batches=1, recompute=("full",))),
    ("llama-3.2-3b", 2048, Case(micro_batch=1, micro_batches=4, recompute=("full",))),
    ("llama-3.2-1b", 2048, Case(micro_batch=2, micro_batches=2, activations="offload")),
    ("llama-3.2-1b", 2048, Case(offload="optimizer")),
    ("llama-3.2-1b", 2048, Case(offload="parameters", recompute=("full",))),
    ("gpt2", 1024, Case(micro_batch=16, micro_batches=1)),
    ("llama-3.2-1b", 2048, Case(precision="tf32", recompute=("selective",))),
)
"""From plans that launches bound to a full memory."""


def plans(at: Setting) -> Rows:
    """Yield step time and memory of plans, as predicted and as measured."""
    for name, seq_len, case in MEASURED[: 2 if at.tiny else None]:
        model = graph_of(TINY, name="tiny") if at.tiny else resolve_model(name)
        length = 128 if at.tiny else seq_len

        def row(model: ModelGraph = model, length: int = length, case: Case = case) -> Row:
            plan = case.plan(model, "local:1", length)
            cluster = resolve_cluster("1xh100-sxm-80gb" if at.tiny else "local:1")
            prediction = predict(plan, model, cluster)
            parts = prediction.stages[0].memory_parts
            found = alone(lambda: _steps(plan, model, at))
            return {
                "predicted_s": prediction.step_time_s,
                "predicted_bytes": sum(v for k, v in parts.items() if k not in LEFT_OUT),
                "predicted_device_bytes": prediction.stages[0].peak_memory_bytes,
                **found,
            }

        yield f"{'tiny' if at.tiny else name} {case.text}", row


def _steps(plan: Plan, model: ModelGraph, at: Setting) -> Row:
    engine = token_engine(plan, model, device=at.device)
    vocabulary = model.architecture.vocab_size if model.architecture else 256
    tokens = torch.randint(vocabulary, (plan.global_batch, plan.seq_len + 1))
    seconds = at.seconds(lambda: engine.step(tokens))
    peak_bytes = most_bytes(engine, lambda: engine.step(tokens))
    found: Row = {"measured_s": seconds, "allocated_bytes": peak_bytes}
    if at.kind == "cuda":
        free, total = torch.cuda.mem_get_info()
        found |= {"reserved_bytes": torch.cuda.max_memory_reserved(), "device_bytes": total - free}
    return found


def edge(at: Setting) -> Rows:
    """Yield the largest micro-batch that fits, as predicted and as found."""
    if at.kind != "cuda":
        return
    model = resolve_model("llama-3.2-1b")
    cluster = resolve_cluster("local:1")
    capacity = torch.cuda.mem_get_info()[1]
    for recompute in ("none", "selective", "full"):

        def row(recompute: str = recompute) -> Row:
            def plan(size: int) -> Plan:
                case = Case(micro_batch=size, micro_batches=1, recompute=(recompute,))
                return case.plan(model, "local:1", 2048)

            def fits(size: int) -> bool:
                try:
                    alone(
                        lambda: token_engine(plan(size), model, device=at.device).step(
                            torch.zeros(size, 2049, dtype=torch.int64)
                        )
                    )
                except torch.OutOfMemoryError:
                    return False
                return True

            def predicted(size: int) -> bool:
                stage = predict(plan(size), model, cluster).stages[0]
                return stage.peak_memory_bytes <= capacity

            told = max((size for size in range(1, 129) if predicted(size)), default=0)
            low, high = 0, 2 * told + 2
            size = max(1, told)
            while high - low > 1 and size < high:
                low, high = (size, high) if fits(size) else (low, size)
                size = (low + high) // 2 if high - low > 2 or size != low else high - 1
                if size in (low, high):
                    break
            return {"predicted": told, "found": low, "too_large": high}

        yield recompute, row


# --- kernels ----------------------------------------------------------------------------------

HEADS = (50257, 50304)
"""Columns of gpt2's head, and the next multiple of 64: rows of the first are not aligned."""


def products(at: Setting) -> Rows:
    """Yield rates of matrix products by size and type."""
    sides = (64, 128) if at.tiny else (256, 512, 1024, 2048, 4096, 8192, 16384)
    types = (torch.float32,) if at.kind == "cpu" else (torch.bfloat16, torch.float16, torch.float32)
    for dtype in types:
        for side, thin in itertools.product(sides, (1, 4)):

            def row(dtype: torch.dtype = dtype, side: int = side, thin: int = thin) -> Row:
                # Random, since equal bits use less power and let clocks rise.
                left = torch.randn(side // thin, side, device=at.device).to(dtype)
                right = torch.randn(side, side, device=at.device).to(dtype)
                out = torch.empty(side // thin, side, device=at.device, dtype=dtype)
                taken = at.seconds(lambda: torch.matmul(left, right, out=out), calls=10)
                flops = 2.0 * side**3 / thin
                return {
                    "flops": flops,
                    "bytes": (2 * side * side // thin + side * side) * dtype.itemsize,
                    "seconds": taken,
                    "flops_per_s": flops / statistics.median(taken),
                }

            yield f"{dtype} {side // thin} x {side} x {side}".replace("torch.", ""), row
    for columns in HEADS[: 1 if at.tiny else None]:

        def head(columns: int = columns) -> Row:
            rows, width = (64, 32) if at.tiny else (16384, 768)
            dtype = torch.float32 if at.kind == "cpu" else torch.bfloat16
            x = torch.randn(rows, width, device=at.device, dtype=dtype, requires_grad=True)
            weight = torch.randn(columns, width, device=at.device, dtype=dtype, requires_grad=True)
            grad = torch.randn(rows, columns, device=at.device, dtype=dtype)
            taken = at.seconds(lambda: functional.linear(x, weight).backward(grad))
            flops = 6.0 * rows * width * columns
            return {
                "flops": flops,
                "seconds": taken,
                "flops_per_s": flops / statistics.median(taken),
            }

        yield f"head of {columns} columns", head


def kernels(at: Setting) -> Rows:
    """Yield attention, norms, casts, the optimizer, copies, and launches."""
    dtype = torch.float32 if at.kind == "cpu" else torch.bfloat16
    lengths = (64,) if at.tiny else (512, 2048, 8192, 16384)
    for length, head in itertools.product(lengths, (64, 128)):
        for backward in (False, True):

            def row(length: int = length, head: int = head, backward: bool = backward) -> Row:
                samples = 1 if at.tiny else max(1, 16384 // length)
                shape = (samples, 16, length, head)
                q, k, v = (
                    torch.randn(shape, device=at.device, dtype=dtype, requires_grad=backward)
                    for _ in range(3)
                )

                def call() -> None:
                    made = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                    if backward:
                        made.backward(made.detach())

                taken = at.seconds(call, calls=3)
                # Causal: half of the scores; backward has 2.5 times the products of forward.
                flops = 2.0 * samples * 16 * length**2 * head * (3.5 if backward else 1.0)
                return {"flops": flops, "seconds": taken}

            passes = "forward and backward" if backward else "forward"
            yield f"attention {passes} {length} x {head}", row
    rows, width = (64, 256) if at.tiny else (16384, 4096)
    x = torch.randn(rows, width, device=at.device, dtype=dtype)
    norm = nn.RMSNorm(width, device=at.device, dtype=dtype)
    size = x.numel() * x.element_size()
    yield "norm", lambda: {"bytes": 2 * size, "seconds": at.seconds(lambda: norm(x), calls=10)}
    yield (
        "cast",
        lambda: {
            "bytes": size + 4 * x.numel(),
            "seconds": at.seconds(x.float, calls=10) if dtype != torch.float32 else [],
        },
    )
    yield "add", lambda: {"bytes": 3 * size, "seconds": at.seconds(lambda: x + x, calls=10)}
    one = torch.ones(1, device=at.device)
    yield "launch", lambda: {"seconds": at.seconds(lambda: one.add_(1.0), calls=200)}

    def update() -> Row:
        count = 2**14 if at.tiny else 2**26
        parameter = nn.Parameter(torch.randn(count, device=at.device))
        parameter.grad = torch.randn(count, device=at.device)
        optimizer = torch.optim.AdamW([parameter], fused=True)
        return {"bytes": 28 * count, "seconds": at.seconds(optimizer.step, calls=3)}

    yield "optimizer", update
    if at.kind == "cuda":
        yield "copies", lambda: _copies(at)


def _copies(at: Setting) -> Row:
    count = 2**20 if at.tiny else 2**29
    host = [torch.empty(count, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    here = [torch.empty(count, dtype=torch.uint8, device=at.device) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def both() -> None:
        with torch.cuda.stream(streams[0]):
            here[0].copy_(host[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            host[1].copy_(here[1], non_blocking=True)
        for stream in streams:
            stream.synchronize()

    return {
        "bytes": count,
        "to_device_s": at.seconds(lambda: here[0].copy_(host[0], non_blocking=True)),
        "to_host_s": at.seconds(lambda: host[0].copy_(here[0], non_blocking=True)),
        "both_s": at.seconds(both),
    }


def compiled(at: Setting) -> Rows:
    """Yield a step with blocks compiled beside the same step eager."""
    model = graph_of(at.small, name="small") if at.tiny else resolve_model("llama-3.2-1b")
    length = 128 if at.tiny else 2048
    for recompute in ("none",) if at.tiny else ("none", "selective", "full"):

        def row(recompute: str = recompute) -> Row:
            case = Case(
                micro_batches=1, recompute=(recompute,), precision="fp32" if at.tiny else "bf16"
            )
            plan = case.plan(model, "local:1", length)

            def step(compiles: bool) -> Row:
                how = {"compile": "block" if compiles else "none"}
                chosen = plan.model_copy(update=how)
                engine = token_engine(chosen, model, device=at.device)
                tokens = torch.zeros(plan.global_batch, plan.seq_len + 1, dtype=torch.int64)
                begin = time.perf_counter()
                engine.step(tokens)
                first = time.perf_counter() - begin
                found: Row = {"first_s": first, "seconds": at.seconds(lambda: engine.step(tokens))}
                cluster = resolve_cluster("1xh100-sxm-80gb" if at.tiny else "local:1")
                found["predicted_s"] = predict(chosen, model, cluster).step_time_s
                if at.kind == "cuda":
                    found["allocated_bytes"] = torch.cuda.max_memory_allocated()
                return found

            return {"eager": alone(lambda: step(False)), "compiled": alone(lambda: step(True))}

        yield recompute, row


def loss(at: Setting) -> Rows:
    """Yield the head and its loss, with logits and in chunks of rows."""
    rows, hidden, vocabulary = (64, 32, 128) if at.tiny else (8192, 4096, 128256)
    dtype = torch.float32 if at.kind == "cpu" else torch.bfloat16
    x = torch.randn(rows, hidden, device=at.device, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, hidden, device=at.device).mul_(0.02).to(dtype)
    weight.requires_grad_()
    targets = torch.randint(vocabulary, (rows,), device=at.device)

    def plain() -> Tensor:
        return functional.cross_entropy((x @ weight.t()).float(), targets)

    yield "full", lambda: _passed(at, plain)
    with contextlib.suppress(ImportError):
        from meshwright.runtime.techniques.chunked_cross_entropy import chunked_loss  # noqa: PLC0415

        for size, (kept, word) in itertools.product((256, 1024, 4096), LOSS_WORDS.items()):
            chosen = 16 if at.tiny else size

            def call(chosen: int = chosen, kept: str = kept) -> Tensor:
                total, count = chunked_loss(x, weight, targets, rows=chosen, gradients=kept)
                return total / count

            yield f"{word}/{size}", lambda call=call: _passed(at, call)


def _passed(at: Setting, call: Callable[[], Tensor]) -> Row:
    def both() -> None:
        call().backward()

    both()
    found: Row = {"seconds": at.seconds(both), "loss": float(call())}
    if at.kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        both()
        found["bytes"] = torch.cuda.max_memory_allocated() - before
    return found


def launches(at: Setting) -> Rows:
    """Yield kernels of one step, by name, with their time on the device."""
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415

    model = graph_of(at.small, name="small") if at.tiny else resolve_model("llama-3.2-1b")
    for compiles in (False,) if at.tiny else (False, True):

        def row(compiles: bool = compiles) -> Row:
            case = Case(micro_batches=1, precision="fp32" if at.tiny else "bf16")
            plan = case.plan(model, "local:1", 128 if at.tiny else 2048)

            def traced() -> Row:
                how = {"compile": "block" if compiles else "none"}
                engine = token_engine(plan.model_copy(update=how), model, device=at.device)
                tokens = torch.zeros(plan.global_batch, plan.seq_len + 1, dtype=torch.int64)
                engine.step(tokens)
                kinds = [ProfilerActivity.CPU]
                kinds += [ProfilerActivity.CUDA] if at.kind == "cuda" else []
                with profile(activities=kinds) as trace:
                    engine.step(tokens)
                    at.wait()
                every = trace.key_averages()
                time_of = "self_device_time_total" if at.kind == "cuda" else "self_cpu_time_total"
                top = sorted(every, key=lambda event: -getattr(event, time_of))[:40]
                return {
                    "kernels": sum(
                        e.count for e in every if "launchkernel" in e.key.lower().replace("_", "")
                    ),
                    "top": [[e.key[:80], e.count, getattr(e, time_of)] for e in top],
                }

            return alone(traced)

        yield "compiled" if compiles else "eager", row


def profiled(at: Setting) -> Rows:
    """Yield how a profile of this machine ends, and what it found of its overheads."""

    def row() -> Row:
        file = at.out / "profile.yaml"
        model, length = ("demo-4m", "128") if at.tiny else ("llama-3.2-1b", "2048")
        command = [sys.executable, "-m", "meshwright", "profile", model, "--cluster"]
        there = at.devices if at.kind == "cuda" else 1
        command += [f"local:{there}", "--seq-len", length, "--global-batch", str(4 * there)]
        command += ["--budget", "15s" if at.tiny else "2min", "-o", str(file)]
        command += ["--precision", "fp32" if at.kind == "cpu" else "bf16"]
        begin = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return {
            "seconds": time.monotonic() - begin,
            "code": done.returncode,
            "said": (done.stdout + done.stderr)[-2000:],
        }

    yield "profile", row


def walk(at: Setting) -> Rows:
    """Yield what a user's first commands say: a plan of this machine, its launch, its memory."""
    folder = at.out / "walk"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text("All happy families are alike. " * 20000)
    model, length, batch = ("demo-4m", "128", "8") if at.tiny else ("llama-3.2-1b", "2048", "16")
    commands = {
        "plan": [
            *("plan", model, "--cluster", "local:1", "--seq-len", length),
            *("--global-batch", batch, "-o", "plan.yaml"),
        ],
        "launch": ["launch", "plan.yaml", "--steps", "8", "--data", "text.txt", "--output", "run"],
        "show": ["show", "plan.yaml"],
    }
    for name, command in commands.items():

        def row(command: Sequence[str] = command) -> Row:
            done = subprocess.run(
                [sys.executable, "-m", "meshwright", *command],
                capture_output=True,
                text=True,
                check=False,
                cwd=folder,
            )
            said = done.stdout + done.stderr
            return {"code": done.returncode, "said": said[-6000:]}

        yield name, row
    steps = folder / "run" / "metrics.jsonl"
    if steps.exists():
        yield "steps", lambda: {"lines": steps.read_text().splitlines()[-8:]}
