"""Agreement: what several ranks hold alike, declared at the start and compared in training.

    agreed = Agreement(state, place, declared=declared)   # refuses what ranks hold unalike
    agreed.words(device)             # two numbers; where their sums over all ranks are not 0,
    agreed.refuse_drift()            # a replica has drifted: which, and on which rank

A tensor that several ranks hold (parameters and buffers of data, tensor and context ranks, parts
that ZeRO replicates, ties between stages) has one value.  Each rank multiplies the digest of its
tensors with a factor, and the factors of all holders of a tensor sum to 0.  So one sum over all
ranks, which rides in the all-reduce of a step, tells whether any replica has drifted.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from meshwright.planner.documents.plan import Axis
from meshwright.planner.errors import LaunchError
from meshwright.runtime.core.local_parts import to_local
from meshwright.runtime.core.mesh import Place
from meshwright.runtime.core.object_collectives import all_gather_json

COMPARED_EVERY = 16
"""Steps between two comparisons of replicas; the first are in steps 1, 2, 4 and 8."""
_ROW = 4096
"""Words of 8 bytes that are summed before they are weighted."""
_HALF_BITS = 32
"""A digest travels as two numbers, whose sums over 2**20 ranks are exact in fp64."""
_ODD = 0x1E3779B97F4A7C15


class RankSuspected(LaunchError):  # noqa: N818 - reads as the sentence that it is
    """Memory or arithmetic of a rank is damaged."""

    def __init__(self, message: str, suspect: int | None) -> None:
        super().__init__(message)
        self.suspect = suspect
        """The only rank that differs from the others; None where that is none or several."""


class ReplicaDrifted(RankSuspected):
    """A replica of a parameter has another value than the others."""


@dataclass(frozen=True, slots=True)
class Declared:
    """A parameter whose gradient several ranks sum."""

    name: str
    ranks: tuple[int, ...]
    """Who sums it, by number in the whole job."""
    text: str
    """Shape, type and division, which all of them must have."""


def is_due(step: int, every: int) -> bool:
    """Tell whether something is compared in step number `step`, of which the first is 1.

    >>> [step for step in range(1, 50) if is_due(step, 16)]
    [1, 2, 4, 8, 16, 32, 48]
    """
    doubling = step < every and step & (step - 1) == 0
    return every > 0 and (step % every == 0 or doubling)


class Agreement:
    """The values that this rank has in common with others."""

    def __init__(
        self,
        state: Callable[[], Mapping[str, Tensor]],
        place: Place,
        *,
        declared: Sequence[Declared] = (),
        tied: Collection[str] = (),
        every: int = COMPARED_EVERY,
    ) -> None:
        """`state` returns parameters and buffers by name; parts are DTensors.

        `declared` are the sums of gradients in which this rank takes part, beside those over data;
        `tied` the parameters whose copies on several stages have one gradient.  All ranks call it
        together.  With `every` 0 replicas are compared only when asked.

        Raises LaunchError, on all ranks, where what they hold does not go together.
        """
        self.every = every
        self._state = state
        self._place = place
        self._factors: dict[str, float] = {}
        self._homes: dict[str, str] = {}
        """The places along pipelines that hold a tensor, where several do, in words."""
        if not self._has_peers:
            return
        tensors = dict(state())
        self._homes = self._shared_homes(tensors, tied)
        held: dict[str, list[tuple[str, str]]] = {}
        for name, tensor in tensors.items():
            held.setdefault(self._key(name, tensor), []).append((name, description(tensor)))
        for key, ranks in _ranks_by_key(held).items():
            if key in held and len(ranks) > 1:
                # No subset of 1, 1, ..., 1 and what takes them back sums to 0 but all of it.
                self._factors[key] = 1.0 if dist.get_rank() != ranks[-1] else 1.0 - len(ranks)
        sums: dict[str, list[tuple[str, str]]] = {}
        for axis in declared:
            key = f"summed by ranks {', '.join(map(str, axis.ranks))}"
            sums.setdefault(key, []).append((axis.name, axis.text))
        _ranks_by_key(sums)

    @property
    def _has_peers(self) -> bool:
        """True if there are other ranks; those of a rehearsal say nothing."""
        several = self._place.mesh is not None and dist.get_world_size() > 1
        return several and dist.get_backend() != "fake"

    def due(self, step: int) -> bool:
        """Tell whether replicas are compared in step number `step`, of which the first is 1."""
        return is_due(step, self.every)

    @torch.no_grad()
    def words(self, device: torch.device) -> Tensor:
        """Return two numbers in fp64 whose sums over all ranks are 0 if no replica has drifted."""
        shared: dict[str, list[tuple[str, Tensor]]] = {}
        for name, tensor in self._state().items():
            key = self._key(name, tensor)
            if key in self._factors:
                shared.setdefault(key, []).append((name, tensor))
        digest = torch.zeros(2, dtype=torch.float64, device=device)
        for key, tensors in shared.items():
            digest += self._factors[key] * _halves(_digest(tensors, device))
        return digest

    def refuse_drifted(self) -> None:
        """Compare replicas now; all ranks call it together.

        Raises LaunchError, on all ranks, with a tensor that has drifted and the rank.
        """
        if self._has_peers:
            assert self._place.mesh is not None
            words = self.words(torch.device(self._place.mesh.device_type))
            dist.all_reduce(words)
            if bool(words.any()):
                self.refuse_drift()

    @torch.no_grad()
    def refuse_drift(self) -> None:
        """Raise LaunchError with a tensor that has drifted; all ranks call it together."""
        if not self._has_peers:
            return  # tensors of a rehearsal have no values
        own = {}
        for name, tensor in self._state().items():
            key = self._key(name, tensor)
            if key in self._factors:
                own[f"{key}: {name}"] = [
                    name, tensor.requires_grad, int(_digest([(name, tensor)], tensor.device))
                ]  # fmt: skip
        every = all_gather_json(own)
        for label in dict.fromkeys(label for digests_of_rank in every for label in digests_of_rank):
            holders = {
                rank: digests_of_rank[label]
                for rank, digests_of_rank in enumerate(every)
                if label in digests_of_rank
            }
            digests = {rank: digest for rank, (_, _, digest) in holders.items()}
            if len(set(digests.values())) > 1:
                name, trained, _ = next(iter(holders.values()))
                text = _drift_text(name, digests, trained=trained)
                raise ReplicaDrifted(text, _odd(digests)) if trained else LaunchError(text)
        raise LaunchError(
            "replicas of parameters and buffers: their digests differed, and do not any more; a "
            "message or memory was damaged: resume from the last checkpoint"
        )

    def _shared_homes(self, tensors: Mapping[str, Tensor], tied: Collection[str]) -> dict[str, str]:
        """Return where tensors are that several stages hold; refuse what they would train apart.

        Pipelines of another kind have other stages, which hold what these do.
        """
        place = self._place
        if not place.is_cut:
            return {}
        inside: tuple[Axis, ...] = ("data_replicate", "data_shard", "context", "tensor")
        leads = all(place.along(axis) == 0 for axis in inside)
        flags = [[name, t.requires_grad and name not in tied] for name, t in tensors.items()]
        stages_by_kind: dict[str, dict[int, list[int]]] = {}
        apart: set[str] = set()
        for kind, stage, names in all_gather_json(
            [place.kind, place.stage, flags if leads else []]
        ):
            for name, alone in names:
                stages_by_kind.setdefault(name, {}).setdefault(kind, []).append(stage)
                apart |= {name} if alone else set()
        for name in sorted(apart):
            for stages in stages_by_kind[name].values():
                if len(stages) > 1:
                    raise LaunchError(
                        f"{name}: is on the ranks of stages {_list_text(sorted(stages))}, and each "
                        "would train a copy; a parameter has one owner, or is tied"
                    )
        return {
            name: _homes_text({kind: sorted(stages) for kind, stages in of_name.items()})
            for name, of_name in stages_by_kind.items()
            if len(of_name) > 1 or any(len(stages) > 1 for stages in of_name.values())
        }

    def _key(self, name: str, tensor: Tensor) -> str:
        """Return what the ranks have in common that hold the same part of a tensor."""
        homes = self._homes.get(name)
        return f"{homes or _homes_text({0: [self._place.stage]})}, {_part(tensor)}"


def _homes_text(stages_by_kind: Mapping[int, Sequence[int]]) -> str:
    """Return the stages that hold a tensor in words, of each kind of pipelines.

    >>> _homes_text({0: [1]}), _homes_text({0: [0, 3], 1: [0]})
    ('stage 1', 'pipelines 0 stage 0 and 3, pipelines 1 stage 0')
    """
    if len(stages_by_kind) == 1:
        return f"stage {_list_text(*stages_by_kind.values())}"
    return ", ".join(
        f"pipelines {kind} stage {_list_text(stages)}"
        for kind, stages in sorted(stages_by_kind.items())
    )


def description(tensor: Tensor) -> str:
    """Return shape, type and division of a parameter or buffer."""
    placed = f" {tensor.placements}" if isinstance(tensor, DTensor) else ""
    shape = list(tensor.shape) if tensor.requires_grad else "buffer"
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape}{placed}"


def _part(tensor: Tensor) -> str:
    """Return which part of a tensor this is."""
    if not isinstance(tensor, DTensor):
        return "whole"
    mesh = tensor.device_mesh
    return ", ".join(
        f"{placement} {mesh.get_local_rank(dim)} of {mesh.size(dim)}"
        for dim, placement in enumerate(tensor.placements)
        if not isinstance(placement, Replicate)
    )


def _ranks_by_key(lines: Mapping[str, Sequence[tuple[str, str]]]) -> dict[str, list[int]]:
    """Return the ranks that have each key; all ranks call it together.

    Raises LaunchError, on all, where ranks have other lines (name, text) under the same key.
    """
    hashes = {key: _hash(sorted(pairs)) for key, pairs in lines.items()}
    every = all_gather_json(hashes)
    holders: dict[str, list[int]] = {}
    for rank, digests in enumerate(every):
        for key in digests:
            holders.setdefault(key, []).append(rank)
    for key, ranks in sorted(holders.items()):
        if len({every[rank][key] for rank in ranks}) > 1:
            _refuse_unlike(ranks, all_gather_json(dict(lines.get(key, ()))))
    return holders


def _refuse_unlike(ranks: Sequence[int], lines: Sequence[Mapping[str, str]]) -> None:
    first = ranks[0]
    for rank in ranks[1:]:
        for name in sorted({*lines[first], *lines[rank]}):
            first_line, other = (lines[at].get(name, "nothing") for at in (first, rank))
            if first_line != other:
                raise LaunchError(
                    f"{name}: is {first_line} on rank {first} and {other} on rank {rank}, which "
                    "train it together; build() must return the same module on every rank"
                )


def _odd(digests: Mapping[int, int]) -> int | None:
    """Return the one rank whose digest is not that of all others, which agree."""
    (common, most), *_ = Counter(digests.values()).most_common()
    odd = [rank for rank, digest in digests.items() if digest != common]
    return odd[0] if len(odd) == 1 and most > 1 else None


def _drift_text(name: str, digests: Mapping[int, int], *, trained: bool) -> str:
    """Return in words which of the ranks that hold a tensor has another value."""
    counts = Counter(digests.values())
    (common, most), *others = counts.most_common()
    odd = [rank for rank, digest in digests.items() if digest != common]
    rest = [rank for rank, digest in digests.items() if digest == common]
    if others[0][1] == most:  # no majority
        who = f"ranks {_list_text(sorted((rest[0], odd[0])))} have different values"
    else:
        who = f"rank {odd[0]} has another value than ranks {_list_text(rest[:8])}"
    if trained:
        return (
            f"{name}: {who} of this parameter, which must be equal; a forward that changes it "
            "(Embedding(max_norm=...)), code that differs between ranks, or damaged memory does "
            "that: resume from the last checkpoint without it"
        )
    return (
        f"{name}: {who} of this buffer or frozen parameter, and the model has one; make "
        "it of what all ranks have (sum over ranks in its forward), leave it out with "
        "register_buffer(persistent=False), or save it as state of your own with save(extra=...)"
    )


def _digest(tensors: Sequence[tuple[str, Tensor]], device: torch.device) -> Tensor:
    """Return 64 bits that follow from names and values, after one pass through memory."""
    sums: list[Tensor] = []
    total = 0
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        total ^= int(_hash(name)[:15], 16)
        words, rest = _as_words(tensor)
        rows = words.numel() // _ROW
        sums.append(words[: rows * _ROW].view(rows, _ROW).sum(1).to(device))
        sums.append(words[rows * _ROW :].sum(0, keepdim=True).to(device))
        sums.append(rest.to(device, torch.int64))
    found = torch.cat(sums)
    at = torch.arange(1, 1 + found.numel(), dtype=torch.int64, device=device)
    mixed: Tensor = (found * (at * _ODD | 1)).sum() + total
    return mixed


def _as_words(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return a tensor's memory as whole words of 8 bytes, and the bytes behind them."""
    local = tensor.detach()
    local = to_local(local)
    if local.is_complex():
        local = torch.view_as_real(local)
    if not local.is_contiguous() or local.storage_offset() * local.element_size() % 8:
        local = local.clone(memory_format=torch.contiguous_format)
    numbers = local.reshape(-1).view(torch.uint8)
    whole = numbers.numel() // 8 * 8
    return numbers[:whole].view(torch.int64), numbers[whole:]


def _halves(digest: Tensor) -> Tensor:
    low = digest & (2**_HALF_BITS - 1)
    high = (digest >> _HALF_BITS) & (2**_HALF_BITS - 1)
    return torch.stack((low, high)).double()


def _hash(data: object) -> str:
    return hashlib.sha256(repr(data).encode()).hexdigest()


def _list_text(numbers: Sequence[int]) -> str:
    words = [str(number) for number in numbers]
    return " and ".join((", ".join(words[:-1]), words[-1]) if len(words) > 1 else words)
