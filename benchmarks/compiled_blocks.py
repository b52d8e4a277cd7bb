"""Compiled blocks against eager ones on this machine: kernels, bytes, compilation, steps.

    PYTHONPATH=$PWD python benchmarks/compiled_blocks.py [-o benchmarks/results]

Kernels are counted, not timed: of an eager block each operator that computes something, of a
compiled one each call in the code that inductor wrote.  Bytes are those that autograd keeps of a
micro-batch, against the planner's table.  The host's seconds are of a block of negligible size.
The step is one of a model of 100M parameters, eager and compiled steps in turn: products rule a
CPU, so their ratio says only that nothing is lost.  Writes compiled_blocks.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.torch_internals import compiled_code
from meshwright.planner.architectures.parameters import graph_of
from meshwright.planner.documents.cluster import EIGHT_BITS, Precision
from meshwright.planner.documents.document import write_text
from meshwright.planner.documents.model import Architecture, ModelGraph
from meshwright.planner.documents.plan import Mesh, PlacedLayer, Plan, PlannedModel, Stage, Training
from meshwright.planner.documents.profile import Recompute
from meshwright.planner.operators.layer_operators import table
from meshwright.planner.operators.operator_table import Setting
from meshwright.runtime.core.mesh import WHOLE
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.engine.language_model import adapter_of
from meshwright.runtime.launch.training_loop import token_engine
from meshwright.runtime.models.family_adapter import materialize
from meshwright.runtime.techniques import activation_checkpointing as recompute
from meshwright.runtime.techniques.activation_offload import _constants, _storage
from meshwright.runtime.techniques.compile import Compiler
from meshwright.runtime.techniques.float8 import products_of
from meshwright.runtime.techniques.split_backward import defer
from meshwright.runtime.tracing.replayed_stage import RecordedStage
from meshwright.runtime.tracing.stage import MicroBatch
from meshwright.runtime.tracing.tracer import Recorder

CPU = torch.device("cpu")
BLOCK = "block.0"
SAMPLES, POSITIONS = 2, 128
SEQUENCE = 16
"""Positions of the micro-batch by which stages are compared."""
VIEWS = re.compile(
    r"view|reshape|transpose|permute|expand|squeeze|slice|select|split|chunk|detach|alias|\bt\b"
    r"|as_strided|empty|narrow|unflatten|unbind|lift|sym_|is_same_size|_local_scalar"
)
CALLED = re.compile(
    r"^\s+(?:extern_kernels\.\w+|cpp_fused_\w+|\w+ = torch\.ops\.aten\._scaled\w*)\b.*\("
)


def architecture(**figures: Any) -> Architecture:
    """Return a Llama-like model of `transformers`."""
    return Architecture(
        **{
            "family": "llama",
            "hidden_size": 256,
            "layers": 2,
            "heads": 8,
            "kv_heads": 4,
            "head_dim": 32,
            "ffn_size": 704,
            "vocab_size": 512,
            "gated_mlp": True,
            "norm": "rms",
            "positions": "rotary",
            "max_positions": 1024,
            **figures,
        }
    )


def block(
    model: ModelGraph, choice: Recompute, precision: Precision, positions: int = POSITIONS
) -> nn.Module:
    """Return the model's first block with its values, eager."""
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    adapter = adapter_of(
        model,
        source=model.name,
        seq_len=positions,
        dtype=dtype,
        device=CPU,
        weights=None,
        context=WHOLE,
    )
    layer = adapter.layer(BLOCK)
    materialize(BLOCK, layer, adapter, seed=0, device=CPU, weights=None, done={}, keeps={})
    layer = layer.to(dtype)
    if precision in EIGHT_BITS:
        defer(layer, None, products_of(precision, "tensorwise"))
    return recompute.wrapped(layer, choice)


def saved_and_planned(
    model: ModelGraph, choice: Recompute, precision: Precision, positions: int = POSITIONS
) -> tuple[int, float]:
    """Return the bytes that a compiled block saves of a micro-batch, and those of the table."""
    layer = block(model, choice, precision, positions)
    own = {_storage(tensor) for tensor in (*_constants(layer), *layer.parameters())}
    Compiler(CPU).compile(BLOCK, layer)
    saved: dict[int, torch.UntypedStorage] = {}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage
        return tensor

    a = model.architecture
    assert a is not None
    dtype = next(layer.parameters()).dtype
    x = torch.randn(SAMPLES, positions, a.hidden_size, dtype=dtype, requires_grad=True)
    with saved_tensors_hooks(save, lambda tensor: tensor):
        layer(x)
    setting = Setting(micro_batch=SAMPLES, seq_len=positions, precision=precision, compiled=True)
    planned = table(model, dict(model.chain)[BLOCK], setting).stored_bytes(choice)
    return sum(storage.nbytes() for storage in saved.values()), planned


class _Operators(TorchDispatchMode):
    """Counts operators that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not VIEWS.search(str(func))
        return func(*args, **(kwargs or {}))


def kernels(model: ModelGraph) -> dict[str, list[int]]:
    """Return the kernels of a block's forward and backward, eager and compiled."""
    x = torch.randn(SAMPLES, POSITIONS, 256, requires_grad=True)
    layer = block(model, "none", "fp32")
    with _Operators() as forward:
        made = layer(x)
    grad = torch.randn_like(made)
    with _Operators() as backward:
        made.backward(grad)
    Compiler(CPU).compile(BLOCK, layer)

    def step() -> None:
        layer(x).backward(grad)

    codes = compiled_code(step)
    called = [sum(bool(CALLED.match(line)) for line in code.splitlines()) for code in codes]
    return {"eager": [forward.count, backward.count], "compiled": called}


def kept(model: ModelGraph) -> list[dict[str, Any]]:
    """Return what compiled blocks keep of a micro-batch, measured and by the planner's table."""
    rows: list[dict[str, Any]] = []
    for precision in ("fp32", "bf16"):
        for choice in ("none", "selective", "full"):
            measured, planned = saved_and_planned(model, choice, precision)
            row = {"precision": precision, "recompute": choice}
            rows.append({**row, "measured": measured, "planned": planned})
    return rows


def host_s() -> dict[str, list[float]]:
    """Return the seconds of both passes of a block of negligible size, eager and compiled."""
    model = graph_of(
        architecture(hidden_size=16, heads=2, kv_heads=1, head_dim=8, ffn_size=32), name="tiny"
    )
    x = torch.randn(1, POSITIONS, 16, requires_grad=True)
    found = {}
    for compiles in (False, True):
        layer = block(model, "none", "fp32")
        if compiles:
            Compiler(CPU).compile(BLOCK, layer)
        passes = [_timed(layer, x) for _ in range(300)][100:]
        found["compiled" if compiles else "eager"] = [
            min(seconds)
            for seconds in zip(*passes, strict=True)  # others use the cores too
        ]
    return found


def _timed(layer: nn.Module, x: Tensor) -> tuple[float, float]:
    begin = time.perf_counter()
    made = layer(x).sum()
    between = time.perf_counter()
    made.backward()
    return between - begin, time.perf_counter() - between


LAYERS = 8
"""Blocks of the model whose micro-batch the host is measured by."""


def stage_host(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return what the host does for a micro-batch of each kind of stage, and of a plain loop.

    By stage and precision: operators of a layer, Python calls of a layer, and CPU seconds over
    those of the loop, the median of rounds in which both take turns.  Tensors are of negligible
    size.  `launch` runs a language model's layers; `script` a user's module by its own forward;
    `replayed` the same module from its recording, as a pipeline's stages are.
    """
    found = {}
    for precision in ("fp32", "bf16"):
        passes = _passes(precision)
        counts = {name: _counts(run) for name, run in passes.items()}
        taken: dict[str, list[float]] = {name: [] for name in passes}
        for _ in range(rounds):
            for name, run in passes.items():
                taken[name].append(_cpu_s(run))
        for name, (operators, calls) in counts.items():
            pairs = zip(taken[name], taken["plain"], strict=True)
            ratio = statistics.median(own / plain for own, plain in pairs)
            each = [operators / LAYERS, calls / LAYERS, ratio]
            found.setdefault(name, {})[precision] = each
    return found


def _passes(precision: Precision) -> dict[str, Callable[[], None]]:
    """Return forwards and backwards of one micro-batch, gradients added to what is there."""
    model = graph_of(
        architecture(
            family="reference", hidden_size=16, heads=2, kv_heads=1, head_dim=8, ffn_size=32,
            layers=LAYERS, vocab_size=32,
        ),
        name="tiny",
    )  # fmt: skip
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    batch = torch.randint(32, (1, SEQUENCE)), torch.randint(32, (1, SEQUENCE))
    training = Training(master_weights="fp32" if precision == "fp32" else "none")

    def layers() -> nn.Sequential:
        adapter = adapter_of(
            model, source=model.name, seq_len=SEQUENCE, dtype=dtype, device=CPU, weights=None
        )
        made = {name: adapter.layer(name) for name, _ in model.chain}
        adapter.tie(made)
        for name, layer in made.items():
            materialize(name, layer, adapter, seed=0, device=CPU, weights=None, done={}, keeps={})
        return nn.Sequential(*made.values()).to(dtype)

    def total(logits: Tensor, targets: Tensor) -> Tensor:
        flat = logits.flatten(0, 1).float()
        return functional.cross_entropy(flat, targets.flatten(), reduction="sum")

    loop = layers()

    def plain() -> None:
        (total(loop(batch[0]), batch[1]) / SEQUENCE).backward()

    plan = Plan(
        model=PlannedModel(name=model.name, source=model.name, digest=model.digest),
        cluster="local", seq_len=SEQUENCE, global_batch=1, precision=precision, mesh=Mesh(),
        zero=0, schedule="1f1b", micro_batch=1, micro_batches=1, training=training,
        stages=(Stage(layers=tuple(PlacedLayer(layer=name) for name, _ in model.chain)),),
    )  # fmt: skip
    launched = token_engine(plan, model, device=CPU)._passes

    def loss(outputs: Any, given: Any) -> tuple[Tensor, int]:
        return total(outputs, given[1]), SEQUENCE

    scripted = Engine(
        layers, {}, loss=loss, optimizer=torch.optim.AdamW, batch=batch, device=CPU
    )._passes
    module = layers()
    recorder = Recorder(module, batch)
    stage = RecordedStage(module, recorder, 0, len(recorder.first.layers)).train()

    def replayed() -> None:
        (total(stage(micro=MicroBatch(batch)), batch[1]) / SEQUENCE).backward()

    return {
        "plain": plain,
        "launch": lambda: launched._pass(MicroBatch(batch)),
        "script": lambda: scripted._pass(MicroBatch(batch)),
        "replayed": replayed,
    }


def _counts(run: Callable[[], None]) -> tuple[int, int]:
    """Return operators and Python calls of a pass."""
    run()
    with _Operators() as operators:
        run()
    calls = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return operators.count, calls


def _cpu_s(run: Callable[[], None]) -> float:
    begin_s = time.thread_time()
    for _ in range(4):
        run()
    return time.thread_time() - begin_s


def steps(rounds: int) -> dict[str, Any]:
    """Return seconds of steps of a model of 100M parameters, taken in turn, and of compilation."""
    model = graph_of(
        architecture(
            hidden_size=768,
            layers=12,
            heads=12,
            kv_heads=12,
            head_dim=64,
            ffn_size=2048,
            vocab_size=8192,
        ),
        name="100m",
    )
    layers = tuple(PlacedLayer(layer=name) for name, _ in model.chain)
    plan = Plan(
        model=PlannedModel(name=model.name, source=model.name, digest=model.digest),
        cluster="local",
        seq_len=POSITIONS,
        global_batch=1,
        precision="fp32",
        mesh=Mesh(),
        zero=0,
        schedule="1f1b",
        micro_batch=1,
        micro_batches=1,
        stages=(Stage(layers=layers),),
    )
    tokens = torch.randint(8192, (1, POSITIONS + 1))
    engines = {
        choice: token_engine(plan.model_copy(update={"compile": choice}), model, device=CPU)
        for choice in ("none", "block")
    }
    taken: dict[str, list[float]] = {choice: [] for choice in engines}
    losses: dict[str, list[float]] = {choice: [] for choice in engines}
    for _ in range(rounds + 1):
        for choice, engine in engines.items():
            begin = time.perf_counter()
            losses[choice].append(engine.step(tokens).loss)
            taken[choice].append(time.perf_counter() - begin)
    compiler = engines["block"].compiler
    assert compiler is not None
    assert not compiler.fallbacks
    ratios = [b / a for a, b in zip(taken["none"][1:], taken["block"][1:], strict=True)]
    return {
        "parameters": sum(layer.parameters * layer.repeat for layer in model.layers),
        "step_s": {choice: statistics.median(each[1:]) for choice, each in taken.items()},
        "ratio": statistics.median(ratios),
        "first_step_s": taken["block"][0],
        "compile_s": compiler.seconds,
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = graph_of(architecture(), name="block")
    parts: dict[str, Callable[[], Any]] = {
        "kernels": lambda: kernels(model),
        "kept": lambda: kept(model),
        "host_s": host_s,
        "stage_host": lambda: stage_host(25 * args.rounds),
        "steps": lambda: steps(args.rounds),
    }
    found: dict[str, Any] = {"date": datetime.date.today().isoformat(), "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as cache:  # else graphs of the run before are found again
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        for name, part in parts.items():
            found[name] = part()
            print(name, json.dumps(found[name]), flush=True)
    write_text(json.dumps(found, indent=1) + "\n", args.out / "compiled_blocks.json")


if __name__ == "__main__":
    main()
