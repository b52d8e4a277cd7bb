"""Batches: pytrees of tensors, cut along their samples.

A leaf that is a tensor with a dim has its samples along dim 0, and all such leaves have as many.
Everything else (numbers, strings, None, tensors without dims) goes to each micro-batch whole.
"""

from __future__ import annotations

import dataclasses
import types
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.utils._pytree import (
    GetAttrKey,
    keystr,
    register_pytree_node,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
)

from meshwright.planner.errors import BatchError


def register_records(tree: Any) -> None:
    """Let torch's pytrees look into dataclasses, namespaces and distributions of a tree.

    Each class is registered once in a process, under all that uses torch's pytrees.

    >>> record = types.SimpleNamespace(loss=torch.tensor(1.0), parts=[torch.tensor(2.0)])
    >>> register_records(record)
    >>> tree_leaves(record)
    [tensor(1.), tensor(2.)]
    """
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) or not _is_record(leaf):
            continue
        register_pytree_node(
            type(leaf),
            lambda record: (list(vars(record).values()), (type(record), tuple(vars(record)))),
            _record_of,
            flatten_with_keys_fn=lambda record: (
                [(GetAttrKey(name), value) for name, value in vars(record).items()],
                (type(record), tuple(vars(record))),
            ),
        )
        register_records(list(vars(leaf).values()))


def _is_record(value: Any) -> bool:
    """Tell whether a value is no more than its attributes, and has some."""
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return False
    kinds = (types.SimpleNamespace, Distribution)
    return dataclasses.is_dataclass(value) or isinstance(value, kinds)


def _record_of(values: Any, context: tuple[type, tuple[str, ...]]) -> Any:
    cls, names = context
    record: Any = object.__new__(cls)
    record.__dict__.update(zip(names, values, strict=True))
    return record


def samples_in(batch: Any) -> int:
    """Return how many samples a batch has.

    Raises BatchError where its leaves differ in that, or none has samples.

    >>> samples_in({"x": torch.zeros(4, 2), "y": torch.zeros(4), "temperature": 0.5})
    4
    """
    sizes = {len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim}
    if len(sizes) == 1:
        return sizes.pop()
    counts: dict[int, str] = {}
    for path, leaf in tree_flatten_with_path(batch)[0]:
        if isinstance(leaf, Tensor) and leaf.ndim:
            counts.setdefault(len(leaf), keystr(path) or "it")
    if counts:
        counted = " and ".join(f"{name} has {count} samples" for count, name in counts.items())
        raise BatchError(f"batch: {counted} along dim 0; give all leaves the same samples")
    kind = type(batch).__name__
    place = "" if isinstance(batch, dict | tuple | list | Tensor) else f" in a {kind}"
    raise BatchError(
        f"batch: has no tensor with samples along dim 0{place}; give tensors of [sample, ...], "
        "alone or in dicts, tuples and lists"
    )


def part_of(batch: Any, samples: range) -> Any:
    """Return some samples of a batch, as views.

    >>> part_of((torch.arange(6), "all"), range(2, 4))
    (tensor([2, 3]), 'all')
    """
    return tree_map(
        lambda leaf: (
            leaf[samples.start : samples.stop] if isinstance(leaf, Tensor) and leaf.ndim else leaf
        ),
        batch,
    )


def micro_batches(batch: Any, *, size: int, count: int) -> list[Any]:
    """Cut this rank's slice of a batch into micro-batches.

    Raises BatchError where the slice is not of `size` x `count` samples.
    """
    samples = samples_in(batch)
    if samples != size * count:
        raise BatchError(
            f"batch: has {samples} samples, and this rank's slice of a step has {size * count} "
            f"(micro-batches of {size}); give engine.slice(batch) of the global batch, and drop "
            "the last batch of an epoch if it is smaller (drop_last=True)"
        )
    return [part_of(batch, range(at, at + size)) for at in range(0, samples, size)]


def cut_by(batch: Any, size: int) -> list[Any]:
    """Cut a batch into parts of `size` samples, the last one with what is left.

    >>> [len(part) for part in cut_by(torch.zeros(5), 2)]
    [2, 2, 1]
    """
    samples = samples_in(batch)
    return [part_of(batch, range(at, min(at + size, samples))) for at in range(0, samples, size)]


def join_samples(parts: Sequence[Any]) -> Any:
    """Put micro-batches of equal structure together along their samples.

    >>> join_samples([(torch.ones(1), "a"), (torch.zeros(1), "a")])
    (tensor([1., 0.]), 'a')
    """

    def join_leaves(*leaves: Any) -> Any:
        first = leaves[0]
        return torch.cat(leaves) if isinstance(first, Tensor) and first.ndim else first

    return tree_map(join_leaves, parts[0], *parts[1:])


def check_samples(outputs: Any, batch: Any) -> None:
    """Refuse outputs that cannot be put together along their samples.

    Raises BatchError where a leaf with dims has another number of samples than the batch.

    >>> check_samples((torch.zeros(4, 7), torch.tensor(1.0)), torch.zeros(4, 2))
    """
    samples = samples_in(batch)
    for path, leaf in tree_flatten_with_path(outputs)[0]:
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) != samples:
            raise BatchError(
                f"outputs: {keystr(path) or 'it'} has shape {list(leaf.shape)} for {samples} "
                "samples, and is put together along dim 0; return [sample, ...]: views of a sample "
                "as torch.stack(views, 1), positions behind samples, and what has no samples as a "
                "number without dims, or expanded to them"
            )


def lengths_of(example: Any) -> dict[str, tuple[int, ...]]:
    """Return the lengths of the leaves of a batch behind their samples, by their place.

    >>> lengths_of({"ids": torch.zeros(4, 7), "scale": torch.tensor(1.0)})
    {"['ids']": (7,)}
    """
    return {
        keystr(path) or "batch": tuple(leaf.shape[1:])
        for path, leaf in tree_flatten_with_path(example)[0]
        if isinstance(leaf, Tensor) and leaf.ndim
    }


def check_lengths(batch: Any, most: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a batch whose samples are longer than those of the example, `most` of `lengths_of`.

    Shorter ones are fine: memory was planned for the longest.
    """
    for name, shape in lengths_of(batch).items():
        for dim, (size, allowed) in enumerate(zip(shape, most.get(name, ())), start=1):  # noqa: B905
            if size > allowed:
                raise BatchError(
                    f"batch: {name} has length {size} along dim {dim}, and the example of "
                    f"Engine(batch=...) {allowed}; lengths vary up to the example's, for which "
                    "memory is planned: give one as long as the longest batch, also to "
                    "meshwright.plan, or cut the batch off"
                )


def on_device(batch: Any, device: torch.device) -> Any:
    """Return a batch whose tensors are on a device."""

    def leaf_on_device(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=True)
        # Graphs of libraries know how to go; of what else has a `to`, nothing is known.
        return leaf.to(device) if hasattr(leaf, "to") and hasattr(leaf, "pin_memory") else leaf

    return tree_map(leaf_on_device, batch)


def shape_print(batch: Any) -> int:
    """Return a number that two batches of other shapes or types hardly share."""
    leaves, spec = tree_flatten(batch)
    shapes = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return zlib.crc32(repr((shapes, spec)).encode())


def fingerprint(batch: Any) -> int:
    """Return a number that two batches of different values hardly share."""
    checksum = 0
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            elements = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            checksum = zlib.crc32(elements.numpy().tobytes(), checksum)
    return checksum
