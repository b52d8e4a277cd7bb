"""Names of torch that are not public, for both versions that this project runs on.

The only file that imports them.  Names that torch 2.11 and 2.13 share are passed on; where the two
differ, one function here does the work with either.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import ReplicateModule, replicate
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, TrainingState
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils.checkpoint import _CachedTorchDispatchMode as ReadingMode
from torch.utils.checkpoint import _CachingTorchDispatchMode as KeepingMode
from torch.utils.checkpoint import _VersionWrapper as VersionWrapper

from meshwright.planner.errors import LaunchError

__all__ = [
    "AsyncCollectiveTensor",
    "DTensorSpec",
    "KeptByCall",
    "ReduceScatter",
    "StridedShard",
    "TensorMeta",
    "VersionWrapper",
    "act_around",
    "attention_draws_nothing",
    "before_reduction",
    "begin_backward",
    "compile_failures",
    "compiled_graphs",
    "compiler_lack",
    "compute_local_shape_and_global_offset",
    "end_backward",
    "end_backwards",
    "expect_graphs",
    "extend_gather",
    "forget_forward_order",
    "fsdp_parameters",
    "has_ordered_effect",
    "in_backward",
    "is_traced",
    "let_go_of_reduced",
    "numbers_are_of_the_whole",
    "pass_by",
    "reduce_scatter",
    "refuse_graph",
    "replicate",
    "saved_tensors_hooks_outside",
    "share_memory",
    "staying_near",
    "sum_gradients",
    "take_plain_as_whole",
    "unseen_by_recompute",
]

T = TypeVar("T")


# torch's compiler takes a second to import, so only who compiles does.


def saved_tensors_hooks_outside() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return the pair of hooks that autograd's saved tensors go through here, if there is one."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def compile_failures() -> tuple[type[Exception], ...]:
    """Return what the compiler raises where it cannot make one graph of a function."""
    import torch._dynamo.exc  # noqa: PLC0415
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # noqa: PLC0415

    return torch._dynamo.exc.TorchDynamoException, GuardOnDataDependentSymNode


def compiled_graphs() -> int:
    """Return how many graphs this process has made."""
    import torch._dynamo.utils  # noqa: PLC0415

    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def numbers_are_of_the_whole() -> None:
    """Let numbers of a DTensor (`float(x.norm())`, `.item()`, `if x.any()`) be those of the whole.

    torch gives each rank that of its own part.  All ranks that have parts ask together.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = _number_of


def take_plain_as_whole(taken: bool) -> None:
    """Take a plain tensor beside a DTensor for the whole, as a training loop means it.

    Inside of passes it may be a part, and torch refuses it.
    """
    DTensor._op_dispatcher._allow_implicit_replication = taken


def _number_of(op_call: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    return op_call(cast(DTensor, args[0]).full_tensor())


def expect_graphs(most: int) -> None:
    """Let one function's code have a number of graphs; torch gives up behind 8."""
    import torch._dynamo.config  # noqa: PLC0415

    torch._dynamo.config.capture_scalar_outputs = True  # sizes of an exchange between experts
    # What enters a divided region is noted in a list, once: the graph that recomputes it has the
    # note already.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(most, limit)


def compiler_lack(device: torch.device) -> str | None:
    """Return what is missing beside torch to compile for a device, or None."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton  # noqa: PLC0415

        return None if has_triton() else "Triton is not installed, or does not know this GPU"
    from torch._inductor import cpp_builder, exc  # noqa: PLC0415

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return "there is no C++ compiler; install g++ or set CXX"
    return None


def share_memory(group: dist.ProcessGroup, device: torch.device) -> None:
    """Let ranks read each other's memory, as asynchronous tensor parallelism does.

    LaunchError where they cannot, found by trying: all ranks of the group must call it.
    """
    from torch.distributed import _symmetric_memory as symmetric  # noqa: PLC0415

    place = "tensor_overlap: is async"
    if device.type != "cuda":
        raise LaunchError(
            f"{place}, which needs memory that devices share; a {device.type} has none: use none"
        )
    with warnings.catch_warnings():
        # 2.13 says that it is no longer needed, and its compiler still asks whether it was called.
        warnings.simplefilter("ignore", FutureWarning)
        symmetric.enable_symm_mem_for_group(group.group_name)
    try:
        symmetric.get_symm_mem_workspace(group.group_name, min_size=1)
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise LaunchError(
            f"{place}, and the tensor ranks cannot read each other's memory ({reason}); use none"
        ) from error


def has_ordered_effect(operator: Any) -> None:
    """Let a graph keep an operator without outputs, and call it in its place."""
    from torch._higher_order_ops import effects  # noqa: PLC0415

    effects._register_effectful_op(operator, effects._EffectType.ORDERED)


def attention_draws_nothing() -> None:
    """Let graphs recompute fused attention of CPUs without the random generator's state.

    torch marks it as random and keeps 5,056 bytes of state for each call that is recomputed, though
    the kernel takes no dropout (it raises).  On CUDA graphs keep no such bytes: they hold the
    generator itself (`torch._functorch.config.graphsafe_rng_functionalization`).
    """
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    operator._tags = [tag for tag in operator.tags if tag != torch.Tag.nondeterministic_seeded]


def is_traced() -> bool:
    """Tell whether what is called now is being written down as a graph, and not run."""
    return torch._guards.TracingContext.try_get() is not None


def refuse_graph() -> None:
    """Let no graph hold the caller: the compiler gives up where it comes by, and it runs eager."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()


def in_backward() -> bool:
    """Tell whether autograd runs on this thread: what is called then is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


def reduce_scatter(output: Tensor, source: Tensor, *, group: dist.ProcessGroup) -> None:
    """Put this rank's part of the sum over a group into `output`."""
    # 2.13 warns of the older name, which is the only one of 2.11.
    named = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    named(output, source, group=group)


def fsdp_parameters(module: FSDPModule, *, below: bool = False) -> Iterator[Any]:
    """Yield FSDP's records of the parameters of a module, and of all modules below it if asked."""
    own = _fsdp_state(module)
    for state in own._state_ctx.all_states if below else (own,):
        for group in _groups_of(state):
            yield from group.fsdp_params


def _fsdp_state(module: FSDPModule) -> Any:
    """Return FSDP's record of a module, set on its function by torch's `contract`."""
    wrapper = replicate if isinstance(module, ReplicateModule) else fully_shard
    return cast(Any, wrapper).state(module)


def _groups_of(state: Any) -> Sequence[Any]:
    groups: Sequence[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # 2.11: one group, or none
        group = state._fsdp_param_group
        groups = () if group is None else (group,)
    return groups


def before_reduction(module: FSDPModule, act: Callable[[Sequence[Any]], None]) -> None:
    """Call `act` with FSDP's records of a module's parameters whenever it is about to reduce them.

    FSDP may come by twice after one backward: the second time nothing is left to reduce.
    """
    for group in _groups_of(_fsdp_state(module)):
        group.post_backward = _acting_before(group, act, group.post_backward)


def _acting_before(
    group: Any, act: Callable[[Sequence[Any]], None], reduce: Callable[..., None]
) -> Callable[..., None]:
    def post_backward(*unused: Any) -> None:
        if _is_behind_backward(group):
            return
        if group.reduce_grads:
            act(group.fsdp_params)
        reduce(*unused)

    return post_backward


def sum_gradients(module: nn.Module) -> None:
    """Let FSDP sum the gradients of a module's ranks, and divide them by nothing."""
    for group in _groups_of(_fsdp_state(cast(FSDPModule, module))):
        group.gradient_divide_factor, group.force_sum_reduction_for_comms = 1.0, True


def begin_backward(module: FSDPModule) -> None:
    """Let FSDP gather a module for its backward, if it has not yet."""
    _fsdp_state(module)._pre_backward(None)


def end_backward(module: FSDPModule) -> None:
    """Let FSDP reduce the gradients of a module after its backward, if it has not yet."""
    for group in reversed(_groups_of(_fsdp_state(module))):
        if not _is_behind_backward(group):
            group.post_backward()


def pass_by(module: FSDPModule, *, begun: bool) -> None:
    """Let FSDP do what a forward of a module, or the rest of one that failed, would have done."""
    state = _fsdp_state(module)
    if not begun:
        state._pre_forward(module, (), {})
    state._post_forward(module, (), ())


def end_backwards(module: FSDPModule) -> None:
    """Let FSDP reduce all that the backwards of a step have added, which it was told to keep."""
    module.set_is_last_backward(True)
    module.set_reshard_after_backward(True)
    module.set_requires_gradient_sync(True)
    own = _fsdp_state(module)
    for state in own._state_ctx.all_states:
        for group in _groups_of(state):
            group.post_backward()
    own._root_post_backward_final_callback()


def _is_behind_backward(group: Any) -> bool:
    return bool(group._training_state == TrainingState.POST_BACKWARD)


def let_go_of_reduced(module: FSDPModule) -> None:
    """Wait for the reduction of gradients that began last, and free what it read.

    FSDP itself does so before its next reduction.  Between micro-batches that is a forward and a
    loss later, beside which the widest unit would lie in the type of the reduction.
    """
    context = _fsdp_state(module)._comm_ctx
    if hasattr(context, "reduce_scatter_states"):
        begun = list(context.reduce_scatter_states)
        context.reduce_scatter_states.clear()
    else:  # 2.11: one, or none
        begun = [state for state in (context.reduce_scatter_state,) if state is not None]
        context.reduce_scatter_state = None
    for one in begun:
        if one.event is not None:
            context.device_handle.current_stream().wait_event(one.event)


def forget_forward_order(module: FSDPModule) -> None:
    """Let the backward of the next micro-batch ask ahead for its own units alone.

    FSDP gathers in backward the unit that ran before in forward, and keeps the order of all
    forwards until the last backward: before the first unit of a micro-batch stands the output
    projection of the one before, whose copy would lie there from then until it is used again.
    """
    context = _fsdp_state(module)._comm_ctx
    getattr(context, "post_forward_order", []).clear()  # made in the first forward


def act_around(outer: nn.Module, inner: FSDPModule) -> None:
    """Let FSDP gather and free the parameters of an inner module around the calls of an outer one.

    Its hooks end a graph, so none may stand inside of what is compiled.
    """
    state = _fsdp_state(inner)
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    state._pre_forward_hook_handle = outer.register_forward_pre_hook(
        state._pre_forward, prepend=True, with_kwargs=True
    )
    state._post_forward_hook_handle = outer.register_forward_hook(state._post_forward)


def extend_gather(record: Any, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Let FSDP gather a parameter as `before` brings its shard, and take it as `after` makes it.

    FSDP looks for both on the shard itself.
    """
    shard = record._sharded_local_tensor
    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = before, after
    record._init_extensions()


@contextmanager
def staying_near(mesh: DeviceMesh | None) -> Iterator[None]:
    """Let a `fully_shard` that is given a number leave parameters on ranks [group, rank] of a mesh.

    It would make that mesh itself, for each module.
    """
    plain = _fully_shard._get_post_forward_mesh_info

    def mesh_of_neighbours(reshard: bool | int, mesh_info: Any) -> Any:
        if isinstance(reshard, bool):
            return plain(reshard, mesh_info)
        assert mesh is not None
        return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)

    _fully_shard._get_post_forward_mesh_info = mesh_of_neighbours  # type: ignore[assignment]
    try:
        yield
    finally:
        _fully_shard._get_post_forward_mesh_info = plain


def unseen_by_recompute(make: Callable[[], T]) -> T:
    """Return what a function makes by operators that selective recompute does not see.

    It refuses a recomputation that runs other operators than the forward did (what layers share is
    made by the first that asks, in backward another one), and results that are changed in place.
    """
    if torch.compiler.is_compiling():
        return make()
    if not isinstance(_get_current_dispatch_mode(), KeepingMode | ReadingMode):
        return make()
    with _pop_mode_temporarily():
        return make()


class KeptByCall(dict[int, Any]):
    """Results of one operator, by call, as selective recompute stores them.

    torch 2.13 sets and gets them by number.  2.11 has a list: it appends, and takes the first.
    """

    _appended = 0

    def append(self, kept: Any) -> None:
        """Set the result of the next call."""
        self[self._appended] = kept
        self._appended += 1

    def pop(self, place: int) -> Any:  # type: ignore[override]
        """Take the first result that is left."""
        assert place == 0, place
        first = min(self)
        kept = self.get(first)
        del self[first]
        return kept
