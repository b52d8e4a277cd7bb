"""A causal language model of transformers without rules of ours: its own class, recorded.

    MODEL is config.json:recorded, or a config.json whose `model_type` the planner has no figures of

What is known of it is what its forward does with tokens, so that it trains as a script's module
does: under data parallelism, ZeRO and pipelines.  First values are the library's own, under the
plan's seed, or those of a folder of safetensors files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from planner.documents.document import refuse_irregular
from planner.documents.model import ModelGraph, recorded_file
from planner.documents.plan import Plan
from planner.documents.units import name_of
from planner.errors import DocumentError, LaunchError, MeshwrightError
from runtime.adapter import next_token_loss
from runtime.export import DType
from runtime.gradients import Slot
from runtime.language_model import inputs_and_targets
from runtime.learning_rate import learning_rate
from runtime.optimizer import adamw
from runtime.own_model import OwnModel
from runtime.script_model import MOST_CHECKED, SAMPLES, script_model
from runtime.torch_optimizers import ParameterGroup
from runtime.trial import copied


def graph_of_library(source: str, *, seq_len: int) -> ModelGraph:
    """Return the ModelGraph of a library's model, recorded without data on samples of `seq_len`.

    `source` is `PATH:recorded`.  Raises DocumentError where the library or the recording refuses.
    """
    tokens = torch.empty(SAMPLES, seq_len, dtype=torch.int64, device="meta")
    try:
        with torch.device("meta"):
            module = _built(_configuration(source))
        name = name_of(recorded_file(source))
        made = script_model(module, (tokens, tokens), _inputs, loss=_loss, name=name)
    except DocumentError:
        raise
    except MeshwrightError as error:
        raise DocumentError("", str(error), file=source) from error
    except Exception as error:  # whatever the library's own code says of these settings
        raise DocumentError(
            "", f"transformers cannot run it: {type(error).__name__}: {error}", file=source
        ) from error
    return made.model_copy(update={"source": source})


class LibraryModel(OwnModel):
    """What an Engine trains, on tokens, of a model that only the library knows."""

    by_plan = True

    def __init__(
        self,
        plan: Plan,
        *,
        device: torch.device,
        weights: Path | None = None,
        documents: bool = False,
    ) -> None:
        """`weights` is a local folder of safetensors files; None draws first values."""
        if documents:
            raise LaunchError(
                f"documents: {plan.model.name} is recorded, and its attention is not kept within "
                "documents; train on text"
            )
        self._config = _configuration(plan.model.source)
        shape = (plan.global_batch, plan.seq_len)
        tokens = torch.randint(
            self._config.vocab_size, shape, generator=torch.Generator().manual_seed(0)
        )
        self.example = (tokens, tokens)
        super().__init__(
            lambda: _built(self._config, weights),
            plan,
            loss=self.loss,
            optimizer=torch.optim.AdamW,
            batch=self.example,
            inputs=_inputs,
            groups=None,
            units=None,
            tensor=None,
            device=device,
        )
        self.counts = plan.seq_len
        _refuse_sight_of_targets(self._module, self._config, tokens[:1])

    @staticmethod
    def loss(outputs: Any, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of next tokens, and how many count."""
        return _loss(outputs, batch)

    def groups(self, slots: Sequence[Slot]) -> list[ParameterGroup]:
        """Return what this rank trains by the settings of the plan's training."""
        return adamw(slots, self.plan.training, device=self._device, offload=self.plan.offload)

    def batch(self, given: Any) -> tuple[Tensor, ...]:
        """Return inputs and targets of a row of tokens; see LanguageModel.batch."""
        inputs, targets, starts = inputs_and_targets(
            given, self.plan, self.place, device=self._device
        )
        assert starts is None, "documents are refused"
        return inputs, targets

    def learning_rate(self, steps: int) -> float | None:
        """Return that of the update behind so many."""
        return learning_rate(self.plan.training, steps)

    def configuration(self) -> str | None:
        """Return the config.json of the model as the library has it."""
        text: str = self._config.to_json_string(use_diff=False)
        return text


def saved_by_library(
    config: Path, named: Mapping[str, Tensor], folder: Path, *, dtype: DType
) -> None:
    """Write a folder as the library's `save_pretrained` does, of weights by module names."""
    from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

    module: Any = _built(_config_at(config))
    lacking, unknown = module.load_state_dict(named, strict=False)
    assert not unknown, unknown
    tied = set(dict(module.named_parameters(remove_duplicate=False))) - set(
        dict(module.named_parameters())
    )
    absent = [name for name in lacking if name not in tied]
    if absent:
        raise LaunchError(f"{config.parent}: has no {absent[0]}, which the model has")
    disable_progress_bar()
    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    module.to(types[dtype]).save_pretrained(folder)


def _configuration(source: str) -> Any:
    return _config_at(Path(recorded_file(source)))


def _config_at(file: Path) -> Any:
    from transformers import AutoConfig  # noqa: PLC0415 - takes seconds to import

    folder = file.parent if file.suffix == ".json" else file
    refuse_irregular(folder)
    try:
        config = AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # its checks of fields raise several kinds
        raise LaunchError(f"{file}: transformers refuses the config.json: {error}") from error
    config.use_cache = False
    return config


def _built(config: Any, weights: Path | None = None) -> nn.Module:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes seconds to import

    if weights is not None:
        refuse_irregular(weights)
        made = AutoModelForCausalLM.from_pretrained(
            weights,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
    else:
        made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    module: nn.Module = made.train()
    return module


@torch.no_grad()
def _refuse_sight_of_targets(module: nn.Module, config: Any, tokens: Tensor) -> None:
    """Refuse a model whose results change with later tokens: it would see what it is to predict.

    A module that is too large for a trial is not tried.
    """
    if sum(parameter.numel() for parameter in module.parameters()) > MOST_CHECKED:
        return
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % config.vocab_size
    tried = copied(module).eval()
    first, second = (tried(**_inputs((one,))).logits[:, :-1] for one in (tokens, other))
    if not torch.allclose(first, second, rtol=1e-4, atol=1e-5):
        raise LaunchError(
            f"{config.model_type}: its results change with the tokens behind them, which it is to "
            "predict; set what makes it causal in its config.json (is_decoder: true)"
        )


def _inputs(batch: tuple[Tensor, ...]) -> dict[str, Any]:
    return {"input_ids": batch[0], "use_cache": False}


def _loss(outputs: Any, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    return next_token_loss(outputs.logits, batch[1])
