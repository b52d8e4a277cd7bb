"""A causal language model as transformers builds, reads and writes it, from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.planner.documents.document import refuse_irregular
from meshwright.planner.errors import LaunchError
from meshwright.runtime.parallel.attention_api import library_attention

_NAMED_ATTENTION = "meshwright_named"
"""Library name of the attention that can be divided and restricted to documents."""


def save_pretrained(
    config: Path, named: Mapping[str, Tensor], folder: Path, *, dtype: torch.dtype
) -> None:
    """Write a folder as the library's `save_pretrained` does, of weights by module names."""
    from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

    module: Any = build_library_model(library_config(config))
    lacking, unknown = module.load_state_dict(named, strict=False)
    assert not unknown, unknown
    tied = set(dict(module.named_parameters(remove_duplicate=False))) - set(
        dict(module.named_parameters())
    )
    absent = [name for name in lacking if name not in tied]
    if absent:
        raise LaunchError(
            f"{config.parent}: has no {absent[0]}, which the model has; "
            "restore it, or plan again from the folder as it is"
        )
    disable_progress_bar()
    module.to(dtype).save_pretrained(folder)


def library_config(file: Path) -> Any:
    """Return the library's configuration that a file has; LaunchError where the library refuses."""
    from transformers import AutoConfig  # noqa: PLC0415 - takes seconds to import

    folder = file.parent if file.suffix == ".json" else file
    refuse_irregular(folder)
    try:
        config = AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # its checks of fields raise several kinds
        raise LaunchError(f"{file}: transformers refuses the config.json: {error}") from error
    config.use_cache = False
    return config


def build_library_model(
    config: Any, weights: Path | None = None, *, named: bool = False
) -> nn.Module:
    """Return the library's own model; `named` gives it attention that can be divided."""
    from transformers import (  # noqa: PLC0415 - takes seconds to import
        AttentionInterface,
        AutoModelForCausalLM,
    )

    settings = {}
    if named:
        AttentionInterface.register(_NAMED_ATTENTION, library_attention)
        settings = {"attn_implementation": _NAMED_ATTENTION}
    if weights is not None:
        refuse_irregular(weights)
        model = AutoModelForCausalLM.from_pretrained(
            weights,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            **settings,
        )
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **settings)
    module: nn.Module = model.train()
    return module
