"""Published weights: a folder of safetensors files, read by name and part, and written in shards.

Names are those of the library's modules.  There a mixture keeps its experts in one parameter each
for gate and up, [expert, 2 ffn, hidden], and for down, [expert, hidden, ffn]; published files have
a matrix for every expert, under one of the names in EXPERTS.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.planner.documents.document import json_data, read_text
from meshwright.planner.errors import DocumentError, LaunchError
from meshwright.runtime.core.layer_names import Region

EXPERTS = {
    "mixtral": {
        "mlp.experts.gate_up_proj": (
            "block_sparse_moe.experts.{}.w1.weight",
            "block_sparse_moe.experts.{}.w3.weight",
        ),
        "mlp.experts.down_proj": ("block_sparse_moe.experts.{}.w2.weight",),
        "mlp.gate.weight": ("block_sparse_moe.gate.weight",),
    },
} | {
    family: {
        "mlp.experts.gate_up_proj": (
            "mlp.experts.{}.gate_proj.weight",
            "mlp.experts.{}.up_proj.weight",
        ),
        "mlp.experts.down_proj": ("mlp.experts.{}.down_proj.weight",),
    }
    for family in ("deepseek_v2", "deepseek_v3", "qwen2_moe", "qwen3_moe")
}
"""By family and the end of the library's name: the ends of the names of its matrices in files."""

QUANTISED = {
    "_blocks": "4 bits (MXFP4), blocks beside their scales",
    ".weight_scale_inv": "8 bits beside the scales of blocks",
    ".weight_scale": "8 bits beside scales",
    ".weight_packed": "packed integers",
    ".qweight": "packed integers",
    ".absmax": "4 or 8 bits (bitsandbytes)",
}
"""Ends of names that only files of quantised weights have, and what these are in."""

MOST_NAMES = 2_000_000
"""Keys and values of a list of tensors; 384 experts in 60 layers have 300,000."""
ROWS = 4096
"""Rows of two tensors that are compared at once."""

Cut = tuple[int, int, int]
"""A part of a tensor: (dim, index, parts)."""


class Weights:
    """Tensors of a local folder of safetensors files, read by name and by slice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: dict[str, Path] = {}
        index = folder / "model.safetensors.index.json"
        try:
            if index.exists():
                for name, file in _weight_map(index).items():
                    if Path(file).name != file or not file.endswith(".safetensors"):
                        raise ValueError(f"{index.name} names {file[:80]!a}, no *.safetensors here")
                    self._file[name] = folder / file
                for path in set(self._file.values()):
                    _refuse_device(path)
            else:
                for path in sorted(folder.glob("*.safetensors")):
                    with _open_safetensors(path) as opened:
                        self._file.update(dict.fromkeys(opened.keys(), path))
        except (DocumentError, OSError, ValueError) as error:
            raise LaunchError(f"{folder}: the weights cannot be read: {error}") from error
        if not self._file:
            raise LaunchError(
                f"{folder}: has no *.safetensors file; "
                "give the folder of published weights, converted by transformers' save_pretrained"
            )
        for name in self._file:
            kind = next((what for end, what in QUANTISED.items() if name.endswith(end)), None)
            if kind is not None:
                raise LaunchError(
                    f"{folder}: '{name:.80}' says that weights are in {kind}; training needs them "
                    "in 16 or 32 bits. Load them with transformers in bf16 first, with a "
                    "quantization_config that dequantizes (Mxfp4Config(dequantize=True)), and "
                    "save_pretrained them to another folder"
                )

    def read(
        self,
        name: str,
        shape: torch.Size,
        cut: Cut | None,
        *,
        pieces: int = 1,
        keep: Region | None = None,
    ) -> Tensor:
        """Return a tensor in fp32, or its part `cut`, or the region `keep` of that part.

        Nothing else of it is read.  Where dim 1 has several `pieces` one above the other, each of
        them is cut.  The result is contiguous and has memory of its own.
        """
        tensor = self._tensor_in_file(name, shape, cut, pieces=pieces, keep=keep)
        # A slice has the strides of the whole, and what the file is mapped to changes with it.
        return tensor.to(torch.float32, memory_format=torch.contiguous_format, copy=True)

    def refuse_untied(self, first: str, second: str) -> None:
        """Refuse files that have two tensors with different values where the model has one."""
        names = [self._name_in_file(name) for name in (first, second)]
        if None in names or names[0] == names[1]:
            return
        with contextlib.ExitStack() as files:
            first_rows, other = (
                files.enter_context(_open_safetensors(self._file[name])).get_slice(name)
                for name in names
                if name is not None
            )
            rows, *_ = first_rows.get_shape()
            alike = first_rows.get_shape() == other.get_shape() and all(
                torch.equal(first_rows[row : row + ROWS], other[row : row + ROWS])
                for row in range(0, rows, ROWS)
            )
        if not alike:
            raise LaunchError(
                f"{self.folder}: tie_word_embeddings is true, and '{names[0]}' and '{names[1]}' "
                "have different values; set it to false, or leave one of them out of the files"
            )

    def _tensor_in_file(
        self,
        name: str,
        shape: torch.Size,
        cut: Cut | None,
        *,
        pieces: int = 1,
        keep: Region | None = None,
    ) -> Tensor:
        """Return the same in the type and memory of the file."""
        name_in_file = self._name_in_file(name)
        if name_in_file is not None:
            return self._matrix(name_in_file, shape, cut, pieces=pieces, keep=keep)
        ends = self._experts(name)
        if ends is None:
            raise LaunchError(
                f"{self.folder}: has no tensor '{name}'; give weights of the plan's model"
            )
        prefix, patterns = ends
        if "{}" not in patterns[0]:
            return self._matrix(
                self._name_in_file(prefix + patterns[0]) or "", shape, cut, keep=keep
            )
        first, count = 0, shape[0]
        if cut is not None and cut[0] == 0:
            count //= cut[2]
            first, cut = cut[1] * count, None
        if keep is not None and keep[0] == 0:
            first, count, keep = first + keep[1], keep[2] - keep[1], None
        if cut is not None:
            cut = (cut[0] - 1, *cut[1:])
        if keep is not None and keep[0] == 1 and len(patterns) > 1:
            dim, begin, end = keep  # the region goes over several matrices' borders
            whole = self._tensor_in_file(name, shape, cut and (cut[0] + 1, *cut[1:]))
            return whole.narrow(dim, begin, end - begin)
        if keep is not None:
            keep = (keep[0] - 1, *keep[1:])
        if count == 0:
            return torch.empty((0, *shape[1:]))
        matrix_shape = torch.Size((shape[1] // len(patterns), *shape[2:]))
        return torch.stack(
            [
                torch.cat(
                    [
                        self._matrix(
                            self._required_name(prefix + p.format(expert)),
                            matrix_shape,
                            cut,
                            keep=keep,
                        )
                        for p in patterns
                    ]
                )
                for expert in range(first, first + count)
            ]
        )

    def _name_in_file(self, name: str) -> str | None:
        # Some published models leave out the outermost module's name.
        return next((n for n in (name, name.partition(".")[2]) if n in self._file), None)

    def _required_name(self, name: str) -> str:
        name_in_file = self._name_in_file(name)
        if name_in_file is None:
            raise LaunchError(
                f"{self.folder}: has no tensor '{name}'; give weights of the plan's model"
            )
        return name_in_file

    def _experts(self, name: str) -> tuple[str, tuple[str, ...]] | None:
        """Return prefix and ends of the matrices that files have in place of a tensor."""
        for names in EXPERTS.values():
            for end, patterns in names.items():
                prefix = name.removesuffix(end)
                if name.endswith(end) and self._name_in_file(prefix + patterns[0].format(0)):
                    return prefix, patterns
        return None

    def _matrix(
        self,
        name: str,
        shape: torch.Size,
        cut: Cut | None,
        *,
        pieces: int = 1,
        keep: Region | None = None,
    ) -> Tensor:
        with _open_safetensors(self._file[name]) as opened:
            whole = opened.get_slice(name)
            if tuple(whole.get_shape()) != tuple(shape):
                raise LaunchError(
                    f"{self.folder}: '{name}' has shape {whole.get_shape()}, "
                    f"and the model needs {list(shape)}"
                )
            if cut is None and keep is None:
                return whole[...]
            dim, spans = _spans(shape, cut, pieces)
            if keep is not None and keep[0] == dim:
                spans = spans_between(spans, *keep[1:])
            others = [slice(None)] * len(shape)
            if keep is not None and keep[0] != dim:
                others[keep[0]] = slice(*keep[1:])
            taken = [whole[(*others[:dim], slice(*span), *others[dim + 1 :])] for span in spans]
            return torch.cat(taken, dim) if len(taken) > 1 else taken[0]


@contextlib.contextmanager
def _open_safetensors(path: Path) -> Iterator[Any]:
    """Open a file of safetensors; LaunchError for what is none, damaged, or lacks what is read."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - only where needed

    try:
        _refuse_device(path)
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise LaunchError(
            f"{path.parent}: the weights cannot be read: {path.name}: {error}"
        ) from error


def _weight_map(index: Path) -> dict[str, str]:
    """Return of each tensor the file that has it."""
    index_data = json_data(read_text(index), most_values=MOST_NAMES)
    files = index_data.get("weight_map") if isinstance(index_data, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"{index.name} has no weight_map of names to files")
    return files


def _refuse_device(path: Path) -> None:
    """Refuse what the library would wait for; what is missing it tells itself."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path.name} is no regular file")


def _spans(shape: torch.Size, cut: Cut | None, pieces: int) -> tuple[int, list[tuple[int, int]]]:
    """Return a dim and the spans along it that a part is made of, each from and to."""
    if cut is None:
        return 0, [(0, shape[0])]
    dim, index, parts = cut
    pieces = pieces if dim == 1 else 1
    piece = shape[dim] // pieces
    length = piece // parts
    begins = [number * piece + index * length for number in range(pieces)]
    return dim, [(begin, begin + length) for begin in begins]


def spans_between(spans: Sequence[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """Return what is from `begin` to before `end` of spans laid one behind the other.

    >>> spans_between([(0, 4), (10, 14)], 2, 6), spans_between([(0, 4)], 4, 4)
    ([(2, 4), (10, 12)], [(0, 0)])
    """
    result, passed = [], 0
    for low, high in spans:
        first, last = max(begin - passed, 0), min(end - passed, high - low)
        if first < last:
            result.append((low + first, low + last))
        passed += high - low
    return result or [(0, 0)]


def in_files(
    family: str, name: str, tensor: Tensor, *, pieces: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that files have for one of the library's, by name.

    `tensor` has a dim of its own, dim 1, for its `pieces` if there are several.
    """
    for end, patterns in EXPERTS.get(family, {}).items():
        if not name.endswith(end):
            continue
        prefix = name.removesuffix(end)
        if "{}" not in patterns[0]:
            yield prefix + patterns[0], tensor
            return
        for expert, matrices in enumerate(tensor if pieces > 1 else tensor.unsqueeze(1)):
            for pattern, matrix in zip(patterns, matrices, strict=True):
                yield prefix + pattern.format(expert), matrix
        return
    yield name, tensor.flatten(1, 2) if pieces > 1 else tensor


def write_shards(
    shards: Iterator[Mapping[str, Tensor]], folder: Path, *, count: int, metadata: dict[str, Any]
) -> list[Path]:
    """Write `count` files of tensors, and their index if there are several."""
    from safetensors.torch import save_file  # noqa: PLC0415 - only where needed

    files: list[Path] = []
    where: dict[str, str] = {}
    for number, tensors in enumerate(shards, start=1):
        name = "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
        save_file(
            {key: tensor.contiguous().clone() for key, tensor in tensors.items()},
            folder / name,
            metadata={"format": "pt"},
        )
        files.append(folder / name)
        where.update(dict.fromkeys(tensors, name))
    if count > 1:
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": metadata, "weight_map": where}, indent=2) + "\n")
        files.append(index)
    return files
