"""The arithmetic of every catalogue family against a trace of its real modules; writes a document.

    PYTHONPATH=$PWD python benchmarks/arithmetic_traces.py [MODEL ...] > docs/results/arithmetic.md

A layer of each kind of each model runs forward and backward at its full width on tensors without
data.  Families that the runtime trains are the runtime's own layers, at tensor parallel 1 and at 2
in a process group without processes; of other families the modules are those of `transformers`,
divided in the runtime's styles.  Counted are parameters, floating-point operations of the products
and the attention that operators really do (half of a causal core, as it is told to skip), and bytes
that are alive between forward and backward, each storage once.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from benchmarks.library_layers import SAMPLES, layers_of, loss_of
from benchmarks.library_styles import styles_of
from benchmarks.rehearsal import _NoValues, _shapes_apart
from benchmarks.torch_internals import fake_store
from meshwright.planner import catalog
from meshwright.planner.architectures.architecture import graph_of
from meshwright.planner.catalog import models
from meshwright.planner.catalog.expressions import resolve_model
from meshwright.planner.costs import compute
from meshwright.planner.documents.model import Architecture, Layer, ModelGraph
from meshwright.planner.documents.plan import Mesh, Plan
from meshwright.planner.documents.profile import Recompute
from meshwright.planner.frameworks.native_limits import obstacle
from meshwright.planner.operators import layer_operators as arithmetic
from meshwright.planner.operators.operator_table import Setting
from meshwright.profiler.chain import plan_of, short_chain, whole_stage
from meshwright.profiler.layer_bytes import bytes_of
from meshwright.runtime.core.mesh import Place, place_of
from meshwright.runtime.engine.language_model import adapter_of
from meshwright.runtime.models import huggingface
from meshwright.runtime.models.family_adapter import next_token_loss
from meshwright.runtime.parallel import sink_attention
from meshwright.runtime.parallel import softcap_attention as capped
from meshwright.runtime.parallel.tensor_parallel import divide
from meshwright.runtime.techniques.activation_checkpointing import wrapped

CPU = torch.device("cpu")
RECOMPUTES: tuple[Recompute, ...] = ("none", "full")
TENSORS = (1, 2)
TOLERANCE = 0.01
aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What one layer has and does on one rank, one micro-batch."""

    parameters: float
    forward_flops: float
    backward_flops: float
    """Recomputation included."""
    stored_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A layer as the arithmetic has it beside its trace."""

    model: str
    family: str
    kind: str
    tensor: int
    recompute: Recompute
    told: Counted
    traced: Counted

    @property
    def errors(self) -> dict[str, float]:
        """Relative, of the arithmetic."""
        return {
            name: _error(getattr(self.told, name), getattr(self.traced, name))
            for name in Counted.__slots__
        }


def _error(told: float, traced: float) -> float:
    return told / traced - 1 if traced else float(told != 0)


WHOLE = ("gpt_bigcode", "gpt_oss", "olmo2", "olmo3", "phi3")
"""Families that no styles divide: one head of keys (StarCoder), sinks of all heads (GPT-OSS), norms
over all heads (OLMo), products that are taken apart by the figures of whole models (Phi-3)."""
LEFT_OUT = """\
Not traced at tensor parallel 2: models with an odd number of heads (Falcon-7B), StarCoder, GPT-OSS,
OLMo and Phi-3, which no styles divide, and the embedding of a ViT, whose ranks project all patches;
its blocks have one position more than they should, an even number. Families
that the runtime trains are its own layers; of others the modules are those of `transformers`,
divided in the runtime's styles: GPT-2 at tensor parallel 2 with Linears for its transposed weights,
positions of BERT, GPT-2 and OPT looked up for a rank's share. Attention whose values are narrower
than its keys (DeepSeek-V3) takes the fused kernel that torch has for CUDA. Attention of
Gemma-2 (soft-capped) runs in blocks and is an operator of its own; what it does inside is counted.
That of GPT-OSS (sinks) is counted as a device's kernel skips keys outside of a window. GPT-J,
Bloom, MPT and Falcon-7B write their scores, as `transformers` has them. A vocabulary that the
tensor degree does not divide is made larger by one.
"""
Made = tuple[dict[str, nn.Module], Callable[[Tensor, Tensor], Tensor]]
"""A layer of each kind, and the loss behind the head."""


CAPPED = {
    torch.ops.meshwright.capped_attention: capped._over_blocks._init_fn,
    torch.ops.meshwright.capped_attention_backward: capped._grads_over_blocks._init_fn,
}


WITH_SINKS = {
    torch.ops.meshwright.sink_attention: 2,
    torch.ops.meshwright.sink_attention_backward: 5,
}
"""Products of queries and keys in each, by kernels of a device that skip what windows hide."""


class Flops(TorchDispatchMode):
    """Sums the floating-point operations of products and attention on local tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        packet = func.overloadpacket
        if packet in CAPPED:
            # An operator of its own: what it does inside is counted one by one.
            with self:
                return CAPPED[packet](*args, **kwargs)
        if packet is aten.matmul:
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        if packet in WITH_SINKS:
            samples, heads, length, width = args[0].shape
            keys = sum(min(place + 1, args[-1] or length) for place in range(length))
            self.count += 2.0 * WITH_SINKS[packet] * samples * heads * keys * width
        elif packet is aten._scaled_dot_product_flash_attention_for_cpu:
            q, k, v = args[:3]
            causal = (len(args) > 4 and args[4]) or kwargs.get("is_causal", False)
            self.count += sdpa_flop_count(q.shape, k.shape, v.shape) * (0.5 if causal else 1)
        elif packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
            grad, q, k, v = args[:4]
            causal = args[7] if len(args) > 7 else kwargs.get("is_causal", False)
            self.count += sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape) * (
                0.5 if causal else 1
            )
        elif packet is aten._scaled_dot_product_efficient_attention:
            q, k, v = args[:3]
            self.count += sdpa_flop_count(q.shape, k.shape, v.shape) * (0.5 if args[6] else 1)
        elif packet is aten._scaled_dot_product_efficient_attention_backward:
            grad, q, k, v = args[:4]
            self.count += sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape) * (
                0.5 if args[11] else 1
            )
        elif packet is aten._grouped_mm:
            a, b = args[:2]
            # [rows, inner] x [expert, inner, columns], or the weights' gradient [inner, rows] x ...
            columns = b.shape[-1]
            self.count += 2.0 * a.shape[-2] * a.shape[-1] * columns
        elif packet in flop_registry:
            self.count += flop_registry[packet](*args, **kwargs, out_val=out)
        return out


def _figures(model: ModelGraph) -> Architecture:
    assert model.architecture is not None
    return model.architecture


def setting_of(model: ModelGraph, tensor: int) -> Setting:
    """Return the setting that a model is traced in."""
    a = _figures(model)
    positions = a.max_positions
    window = 2 * a.sliding_window if a.sliding_window else 0
    seq_len = min(positions, max(window, 2048))
    if a.patches is not None and seq_len % tensor:  # an odd number: one more
        seq_len += tensor - seq_len % tensor
    return Setting(micro_batch=SAMPLES, seq_len=seq_len, precision="bf16", tensor=tensor)


def tensors_of(model: ModelGraph) -> tuple[int, ...]:
    """Return the tensor degrees that a model's heads divide by."""
    a = _figures(model)
    most = 1 if a.family in WHOLE else max(TENSORS)
    return tuple(degree for degree in TENSORS if degree <= most and a.heads % degree == 0)


def trained(model: ModelGraph) -> bool:
    """Whether the runtime has layers of the model's family."""
    return _figures(model).family in huggingface.FAMILIES


def told(model: ModelGraph, layer: Layer, setting: Setting, recompute: Recompute) -> Counted:
    """Return what the arithmetic says of a layer."""
    table = arithmetic.table(model, layer, setting)
    again = sum(op.flops for op in table.recomputed_operators(recompute))
    backward = sum(
        op.flops
        * (compute.ATTENTION_BACKWARD if op.kind == "attention" else compute.MATMUL_BACKWARD)
        for op in table.operators
    )
    dense, routed = arithmetic.local_parameters(model, layer, tensor=setting.tensor)
    return Counted(
        parameters=dense + routed,
        forward_flops=table.forward_flops,
        backward_flops=backward + again,
        stored_bytes=table.stored_bytes(recompute),
    )


def compared(model: ModelGraph, tensor: int) -> list[Compared]:
    """Trace every layer kind of a model, kept and recomputed."""
    a = _figures(model)
    if a.vocab_size % tensor:
        larger = a.model_copy(update={"vocab_size": a.vocab_size + tensor - a.vocab_size % tensor})
        model = graph_of(larger, name=model.name, source=model.source)
    setting = setting_of(model, tensor)
    layers = {layer.kind: layer for layer in model.layers}
    found = {}
    with without_data(model, setting) as make:
        modules, loss = make()
        for recompute in RECOMPUTES:
            found[recompute] = traced(model, modules, setting, recompute, loss)
    return [
        Compared(
            model=model.name,
            family=a.family,
            kind=kind,
            tensor=tensor,
            recompute=recompute,
            told=told(model, layers[kind], setting, recompute),
            traced=counted,
        )
        for recompute, kinds in found.items()
        for kind, counted in kinds.items()
    ]


@contextlib.contextmanager
def without_data(model: ModelGraph, setting: Setting) -> Iterator[Any]:
    """Make layers on tensors without data, on the first of as many ranks as divide them."""
    dist.init_process_group("fake", rank=0, world_size=setting.tensor, store=fake_store())
    try:
        kinds = short_chain(model)
        plan = plan_of(
            model, [list(kinds)], seq_len=setting.seq_len, mesh=Mesh(tensor=setting.tensor)
        )
        place = place_of(plan, CPU)
        on_device = patch.object(sink_attention, "applies", lambda *_: True)
        with _shapes_apart(), FakeTensorMode(), _NoValues(), on_device:
            if trained(model) and obstacle(model, plan.job, plan.layout) is None:
                yield partial(_runtime_layers, model, plan, place, kinds)
            else:
                yield partial(_library_layers, model, kinds, setting, place)
    finally:
        dist.destroy_process_group()


def _runtime_layers(model: ModelGraph, plan: Plan, place: Place, kinds: Mapping[str, str]) -> Made:
    adapter = adapter_of(
        model,
        source=model.name,
        seq_len=plan.seq_len,
        dtype=torch.bfloat16,
        device=CPU,
        weights=None,
    )
    stage = whole_stage(plan, adapter, place, CPU)
    in_halves(stage.module)
    return {kinds[name]: layer for name, layer in stage.layers.items()}, _sum


def _sum(output: Tensor, targets: Tensor) -> Tensor:
    return next_token_loss(output, targets)[0]


def _library_layers(
    model: ModelGraph, kinds: Mapping[str, str], setting: Setting, place: Place
) -> Made:
    a = _figures(model)
    first: dict[str, int] = {}
    for name, kind in kinds.items():
        if "." in name:
            first.setdefault(kind, int(name.rpartition(".")[2]))
    modules = layers_of(
        a,
        catalog.model_config(model.name) | {"vocab_size": a.vocab_size},
        first,
        seq_len=setting.seq_len,
        tensor=setting.tensor,
    )
    in_halves(nn.ModuleDict(modules))
    if setting.tensor > 1:
        for kind in list(modules):
            divide(modules[kind], styles_of(a, kind), place.axis("tensor"))
            own_heads(modules[kind], setting.tensor)
        if a.tied_embeddings and modules.keys() >= {"embedding", "head"}:
            parts: Any = modules["embedding"]
            tokens = parts.parts["tokens"] if hasattr(parts, "parts") else parts
            modules["head"].parts["output"].weight = tokens.weight  # type: ignore[index, union-attr]
    return modules, loss_of(a)


def own_heads(module: nn.Module, tensor: int) -> None:
    """Tell attention how many heads a rank has, where it does not read it off the products."""
    for part in module.modules():
        for name in _HEADS.get(type(part).__name__, ()):
            setattr(part, name, getattr(part, name) // tensor)


_HEADS = {
    "BloomAttention": ("num_heads",),
    "FalconAttention": ("num_heads", "num_kv_heads"),
    "GPT2Attention": ("num_heads", "split_size"),
    "GPTJAttention": ("num_attention_heads",),
    "MptAttention": ("n_heads",),
    "OPTAttention": ("num_heads",),
}


def in_halves(module: nn.Module) -> None:
    """Put parameters in bf16; a fake one cannot be converted in place."""
    known: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is None or parameter.dtype != torch.float32:
                continue
            if id(parameter) not in known:
                half = parameter.detach().to(torch.bfloat16)
                known[id(parameter)] = nn.Parameter(half, requires_grad=parameter.requires_grad)
            part._parameters[name] = known[id(parameter)]


def traced(
    model: ModelGraph,
    modules: Mapping[str, nn.Module],
    setting: Setting,
    recompute: Recompute,
    loss: Callable[..., Tensor],
) -> dict[str, Counted]:
    """Count what the layers of each kind do, one after another."""
    shape = (setting.micro_batch, setting.seq_len)
    value: Tensor = torch.zeros(shape, dtype=torch.int64)
    a = _figures(model)
    if a.patches is not None:
        side = a.patches.image_size
        value = torch.zeros(shape[0], a.patches.channels, side, side, dtype=torch.bfloat16)
        if setting.tensor > 1:  # the blocks alone: all ranks project all patches
            value = torch.zeros(shape[0], shape[1] // setting.tensor, a.hidden_size).bfloat16()
    targets = torch.zeros(shape, dtype=torch.int64)
    result = {}
    # A tied projection counts in the embedding, traced or not.
    tied = a.tied_embeddings and "embedding" not in modules and "head" in modules
    seen = {id(modules["head"].parts["output"].weight)} if tied else set()  # type: ignore[index, union-attr]
    with loss_parallel() if setting.tensor > 1 else contextlib.nullcontext():
        for kind, plain in modules.items():
            if kind != "embedding" and not value.is_floating_point():  # nothing stands before it
                local = shape[1] // setting.tensor
                value = torch.zeros(shape[0], local, a.hidden_size, dtype=torch.bfloat16)
            for parameter in plain.parameters():
                parameter.grad = torch.zeros_like(parameter)
            layer = wrapped(plain, recompute)
            end = partial(loss, targets=targets) if kind == "head" else None
            forward, backward = flops_of(layer, value, end)
            # Token ids lie in the batch, which is there before and after; they count where kept.
            ids = 0
            if not value.is_floating_point() and (recompute != "none" or _keeps(layer, value)):
                ids = value.nbytes
            held, (value, *_) = bytes_of(layer, (value,), end)
            result[kind] = Counted(
                parameters=sum(_local(p).numel() for p in plain.parameters() if id(p) not in seen),
                forward_flops=forward,
                backward_flops=backward,
                stored_bytes=held.stored + ids,
            )
            seen |= {id(p) for p in plain.parameters()}
    return result


def _local(parameter: nn.Parameter) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _keeps(layer: nn.Module, value: Tensor) -> bool:
    """Whether a layer keeps its input until backward."""
    kept = False

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept |= tensor.untyped_storage()._cdata == value.untyped_storage()._cdata
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(value)
    return kept


def flops_of(layer: nn.Module, value: Tensor, loss: Any) -> tuple[float, float]:
    x = value.detach().requires_grad_() if value.is_floating_point() else value
    if x is not value:
        x = x + 0
    with Flops() as forward:
        out = layer(x)
        if loss is not None:
            out = loss(out)
    with Flops() as backward:
        out.float().sum().backward() if loss is None else out.backward()
    return forward.count, backward.count


def table(rows: Sequence[Compared]) -> str:
    """Return the largest errors of each family and tensor degree, and what was traced for them."""
    names = ("forward_flops", "backward_flops", "stored_bytes")
    lines = [
        "| family | models | tp | kinds | parameters | forward | backward | saved bytes |",
        "|---|---|---:|---|---:|---:|---:|---:|",
    ]
    for family, tensor in sorted({(row.family, row.tensor) for row in rows}):
        own = [row for row in rows if (row.family, row.tensor) == (family, tensor)]
        exact = all(row.told.parameters == row.traced.parameters for row in own)
        cells = [
            family,
            ", ".join(dict.fromkeys(row.model for row in own)),
            str(tensor),
            ", ".join(dict.fromkeys(row.kind for row in own)),
            "equal" if exact else "differ",
            *(f"{100 * max(abs(row.errors[name]) for row in own):.2f} %" for name in names),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(names: Sequence[str]) -> None:
    """Print the document, of some models or of the whole catalogue."""
    rows: list[Compared] = []
    for name in names or models():
        model = resolve_model(name)
        for tensor in tensors_of(model):
            print(f"{name} tp={tensor}", file=sys.stderr)
            rows += compared(model, tensor)
    print("# Arithmetic against traces\n")
    print(
        f"Written on {datetime.date.today().isoformat()} by "
        "`python benchmarks/arithmetic_traces.py [MODEL ...] "
        f"> docs/results/arithmetic.md`; torch {torch.__version__}, "
        f"transformers {transformers_version()}. "
        "Largest differences over every layer kind of each model named (by default of the whole "
        "catalogue, which `make matrix` traces) at full width, "
        f"bf16, {SAMPLES} samples of at least 2,048 positions (or all that a model has; twice a "
        "sliding window), recompute none and full. FLOPs are of products and attention, half of a "
        "causal core; saved bytes count each storage once.\n"
    )
    print(table(rows))
    worst = max(rows, key=lambda row: max(abs(e) for e in row.errors.values()))
    print(
        f"\n{len(rows)} layers compared; the largest difference, "
        f"{100 * max(abs(e) for e in worst.errors.values()):.2f} %, is of {worst.model}'s "
        f"{worst.kind} at tensor parallel {worst.tensor}, recompute {worst.recompute}.\n"
    )
    print(LEFT_OUT)


def transformers_version() -> str:
    """Return the version of the library whose modules were traced."""
    return importlib.metadata.version("transformers")


if __name__ == "__main__":
    main(sys.argv[1:])
