"""Export: a checkpoint's weights as other programs read them.

No process group is needed, and only one file's tensors are in memory at a time.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from meshwright.planner.documents.document import json_data, read, read_text
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import DocumentError, LaunchError
from meshwright.planner.system.safe_files import folder_beside
from meshwright.runtime.checkpoint import checkpoint, tensor_index
from meshwright.runtime.checkpoint import tokenizer_files as companions
from meshwright.runtime.checkpoint.checkpoint import CONFIG, MODEL, PLAN, Progress

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DType = Literal["fp32", "bf16", "fp16"]
FILE_BYTES = 5 * 10**9
"""The most bytes of one file, if it has more than one tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The result of an export: the files written, and their folder."""

    checkpoint: Path
    step: int
    folder: Path
    files: tuple[str, ...]
    parameters: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """One of the checkpoint's parameters, and what it weighs where it goes."""

    key: str
    shape: tuple[int, ...]
    elements: int


def to_huggingface(
    saved: Path, output: Path, *, dtype: DType = "fp32", file_bytes: int = FILE_BYTES
) -> Exported:
    """Write a checkpoint as a folder that transformers' `from_pretrained` reads.

    `saved` is a checkpoint, or a folder of them whose newest counts.  The tokenizer, its chat
    template and the generation config come along where they are known.
    """
    source, done = verified_checkpoint(saved)
    model = read(ModelGraph, source / MODEL)
    if not (source / CONFIG).is_file():
        raise LaunchError(
            f"{source}: belongs to the model {model.name}, which transformers does not have; "
            "load its checkpoint with torch.distributed.checkpoint"
        )
    if done.frozen is not None:
        raise LaunchError(
            f"{source}: has adapters without the weights that they were trained on; export them "
            "--to peft"
        )
    parameters = _parameters(source, done)
    if model.architecture is None:
        return _by_library(source, done, model, output, parameters, dtype)
    width = 4 if dtype == "fp32" else 2
    groups = list(_groups(parameters, largest=file_bytes // width))
    family = model.architecture.family
    with _new(output) as temporary:
        from meshwright.runtime.models.safetensors_weights import write_shards  # noqa: PLC0415 - needs torch

        total = sum(stored.elements for stored in parameters)
        files = write_shards(
            (_read(source, group, family, dtype) for group in groups),
            temporary,
            count=len(groups),
            metadata={"total_size": width * total},
        )
        files.append(_configuration(source, temporary, dtype))
        files += _companions(source, done, model.source, temporary)
    return Exported(
        checkpoint=source,
        step=done.step,
        folder=output,
        files=tuple(file.name for file in files),
        parameters=total,
        size_bytes=sum((output / file.name).stat().st_size for file in files),
    )


def _by_library(
    source: Path,
    done: Progress,
    model: ModelGraph,
    output: Path,
    parameters: Sequence[_Stored],
    dtype: DType,
) -> Exported:
    """Let the library write a model that it alone knows: whole, in the names of its files."""
    import torch  # noqa: PLC0415

    from meshwright.runtime.models.library_model import save_pretrained  # noqa: PLC0415 - needs torch

    state = {stored.key: torch.empty(stored.shape) for stored in parameters}
    checkpoint.load(source, state, verified=True)
    named = {key.removeprefix("model."): tensor for key, tensor in state.items()}
    with _new(output) as temporary:
        save_pretrained(source / CONFIG, named, temporary, dtype=_torch_dtypes()[dtype])
        (temporary / CONFIG).unlink()
        _configuration(source, temporary, dtype)
        _companions(source, done, model.source, temporary)
    files = sorted(output.iterdir())
    return Exported(
        checkpoint=source,
        step=done.step,
        folder=output,
        files=tuple(file.name for file in files),
        parameters=sum(stored.elements for stored in parameters),
        size_bytes=sum(file.stat().st_size for file in files),
    )


def to_peft(saved: Path, output: Path) -> Exported:
    """Write a checkpoint's adapters as a folder that the library peft reads."""
    import torch  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415

    from meshwright.runtime.techniques import lora  # noqa: PLC0415 - needs torch

    source, done = verified_checkpoint(saved)
    plan = read(Plan, source / PLAN)
    if plan.training.lora is None or not (source / CONFIG).is_file():
        raise LaunchError(
            f"{source}: has no adapters of a model of the library transformers; "
            "export without adapters, or name their checkpoint"
        )
    parameters = _parameters(source, done)
    state = {stored.key: torch.empty(stored.shape) for stored in parameters}
    checkpoint.load(source, state, verified=True)
    folder = Path(plan.model.source)
    config = _config_of(source)
    tensors, settings = lora.peft_files(
        {key.removeprefix("model."): tensor for key, tensor in state.items()},
        plan.training.lora,
        base=str(folder.resolve()) if folder.exists() else plan.model.source,
        transposed=config.get("model_type") == "gpt2",
    )
    with _new(output) as temporary:
        save_file(tensors, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
        (temporary / "adapter_config.json").write_text(settings, encoding="utf-8")
        beside = _companions(source, done, plan.model.source, temporary)
    files = ("adapter_model.safetensors", "adapter_config.json", *(file.name for file in beside))
    return Exported(
        checkpoint=source,
        step=done.step,
        folder=output,
        files=files,
        parameters=sum(stored.elements for stored in parameters),
        size_bytes=sum((output / file).stat().st_size for file in files),
    )


def verified_checkpoint(saved: Path) -> tuple[Path, Progress]:
    """Return the checkpoint that is meant, and how far it has come; refuse one that is damaged."""
    steps = checkpoint.all_steps(saved)
    named = (saved / checkpoint.META).exists() or saved in checkpoint.all_steps(saved.parent)
    if not steps and not named:
        raise LaunchError(
            f"{saved}: is no complete checkpoint, and no folder that has one; "
            "name the folder of --checkpoint, or one of its step-N"
        )
    source = steps[-1] if steps else saved
    wrong = checkpoint.verify(source)
    if wrong is not None:
        before = checkpoint.newest_beside(source)
        way = f"; {before} is complete: name that one" if before else ""
        raise LaunchError(f"{wrong}{way}")
    return source, checkpoint.progress(source)


def _parameters(source: Path, done: Progress) -> list[_Stored]:
    index = tensor_index.read(source, sizes=done.files, checksum=done.checksums[tensor_index.INDEX])
    return [
        _Stored(key=key, shape=tensor.shape, elements=tensor.elements)
        for key, tensor in index.tensors.items()
        if key.startswith("model.")
    ]


def _groups(parameters: Sequence[_Stored], *, largest: int) -> Iterator[list[_Stored]]:
    """Yield the parameters of one file after the other."""
    group: list[_Stored] = []
    for stored in parameters:
        if group and sum(s.elements for s in group) + stored.elements > largest:
            yield group
            group = []
        group.append(stored)
    if group:
        yield group


def _read(source: Path, group: Sequence[_Stored], family: str, dtype: DType) -> dict[str, Tensor]:
    """Return the tensors of one file under the names that files have."""
    import torch  # noqa: PLC0415

    from meshwright.runtime.models.safetensors_weights import in_files  # noqa: PLC0415

    types = _torch_dtypes()
    state = {stored.key: torch.empty(stored.shape) for stored in group}
    checkpoint.load(source, state, verified=True)
    result = {}
    for key, tensor in state.items():
        name = key.removeprefix("model.")
        # A state has a dim of their own for pieces, and only experts' matrices have them.
        pieces = tensor.shape[1] if tensor.ndim == 4 else 1
        for published, matrix in in_files(family, name, tensor, pieces=pieces):
            result[published] = matrix.to(types[dtype])
    return result


def _torch_dtypes() -> dict[DType, torch.dtype]:
    import torch  # noqa: PLC0415

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _configuration(source: Path, folder: Path, dtype: DType) -> Path:
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    config = _config_of(source)
    config["dtype"] = names[dtype]
    config.pop("auto_map", None)  # code of a folder that this one is not
    path = folder / CONFIG
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return path


def _config_of(source: Path) -> dict[str, Any]:
    """Return the configuration of a checkpoint's model."""
    file = source / CONFIG
    try:
        config = json_data(read_text(file))
    except DocumentError as error:
        raise error.in_file(str(file)) from error
    if not isinstance(config, dict):
        raise DocumentError("", "is no object of keys; a configuration is one", file=str(file))
    return config


def _companions(source: Path, done: Progress, model: str | None, folder: Path) -> list[Path]:
    """Copy what stands beside the weights: as it was saved, else as the model's folder has it."""
    saved = {name: source / name for name in companions.NAMES if name in done.files}
    others = saved or companions.tokenizer_files(model)
    return [Path(shutil.copyfile(file, folder / name)) for name, file in others.items()]


@contextlib.contextmanager
def _new(output: Path) -> Iterator[Path]:
    """Give a hidden folder that becomes a new one in the end, or nothing.

    The new one may not hold anything yet.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise LaunchError(f"{output}: is there already; name a new folder")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary = folder_beside(output)
        try:
            yield temporary
            temporary.rename(output)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise LaunchError(f"{output}: cannot be written: {error.strerror or error}") from error
