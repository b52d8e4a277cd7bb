"""Which types of transformers that are no causal language models train through meshwright.Engine.

    python -m benchmarks.library_others [model_type ...]    # goes on where it stopped
    python -m tests.runtime.family_table                    # writes docs/results/models.md of it

Each is a small random model of the type, as benchmarks/library_equal.py narrows it, on random
words, pictures or sounds.  It is planned for eight accelerators, and trained for three steps on two
ranks of this machine under ZeRO-2 and in two stages; losses are compared with a plain loop of the
library's class in one process.  A row of benchmarks/results/library_others.json says what is fed,
whether it is planned, the largest relative difference of a loss by layout, or why there is none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.auto import modeling_auto as auto

import meshwright
from benchmarks import library_equal
from tests.runtime.ranks import Crew

RESULTS = library_equal.RESULTS.with_name("library_others.json")
SAMPLES, LENGTH, STEPS, RANKS = 8, 12, 3, 2
WALL_SECONDS = 600
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero": {"micro_batch": 2, "zero": 2},
    "stages": {"micro_batch": 2, "pipeline": 2},
}
TASKS: dict[str, tuple[str, type]] = {
    "masked words": ("MASKED_LM", transformers.AutoModelForMaskedLM),
    "words to words": ("SEQ_TO_SEQ_CAUSAL_LM", transformers.AutoModelForSeq2SeqLM),
    "sounds to words": ("SPEECH_SEQ_2_SEQ", transformers.AutoModelForSpeechSeq2Seq),
    "classes of pictures": ("IMAGE_CLASSIFICATION", transformers.AutoModelForImageClassification),
    "letters of sounds": ("CTC", transformers.AutoModelForCTC),
    "classes of sounds": ("AUDIO_CLASSIFICATION", transformers.AutoModelForAudioClassification),
    "classes of videos": ("VIDEO_CLASSIFICATION", transformers.AutoModelForVideoClassification),
    "classes of words": (
        "SEQUENCE_CLASSIFICATION",
        transformers.AutoModelForSequenceClassification,
    ),
}
"""What is learnt: the library's mapping and class, each type under the first that has it."""
FEATURES = "features"
"""What is learnt of types without such a class: AutoModel's first result."""
NARROW = {
    **{"image_size": 32, "patch_size": 8, "num_frames": 4, "tubelet_size": 2, "num_labels": 8},
    **{"num_mel_bins": 16, "max_source_positions": 16, "max_length": 32, "decoder_layers": 2},
    **{"dim": 64, "n_layers": 2, "num_blocks": 2, "hidden_dim": 96, "embed_dim": 64},
    **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4},
}
"""Beside those of library_equal, where a configuration has them as a whole number."""
Batch = dict[str, Tensor]


def kinds() -> dict[str, str]:
    """Return what is learnt by each type that is no causal language model, in order of tasks."""
    causal = set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    found: dict[str, str] = {}
    for task, (name, _) in TASKS.items():
        for kind in sorted(getattr(auto, f"MODEL_FOR_{name}_MAPPING_NAMES")):
            if kind not in causal or task in ("masked words", "words to words"):
                found.setdefault(kind, task)
    for kind in sorted(auto.MODEL_MAPPING_NAMES):
        if kind not in causal:
            found.setdefault(kind, FEATURES)
    return found


class Trained:
    """What is trained of one type: its configuration, a batch of a step, a loss."""

    def __init__(self, kind: str, task: str) -> None:
        self.task = task
        self.made = TASKS[task][1] if task in TASKS else transformers.AutoModel
        self.config = library_equal.narrowed(kind, self.made, NARROW)

    def build(self) -> nn.Module:
        """Return the model, with values of torch's generator."""
        model: nn.Module = self.made.from_config(self.config)
        return model.train()

    def batch(self, step: int) -> Batch:
        """Return the global batch of a step."""
        generator = torch.Generator().manual_seed(step)
        with torch.device("meta"):
            main = self.made.from_config(self.config).main_input_name
        words = torch.randint(3, 60, (SAMPLES, LENGTH + 1), generator=generator)
        drawn = {main: _drawn(main, self.config, words, generator)}
        targets = words[:, :-1] if self.task == "masked words" else words[:, 1:]
        if getattr(self.config, "is_encoder_decoder", False) and self.task != "masked words":
            drawn["decoder_input_ids"] = words[:, :-1]
        return {**drawn, "targets": targets}

    def plainly(self) -> list[float]:
        """Return the losses of one process with nothing but transformers and torch."""
        torch.manual_seed(0)
        model = self.build()
        optimizer = adamw(model.parameters())
        losses = []
        for step in range(STEPS):
            batch = self.batch(step)
            total, count = loss(model(**inputs(batch)), batch)
            (total / count).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append((total.detach() / count).item())
        return losses

    def planned(self) -> None:
        """Plan it for accelerators."""
        meshwright.plan(
            self.build,
            "8xa100-sxm-80gb",
            batch=self.batch(0),
            loss=loss,
            optimizer=adamw,
            inputs=inputs,
            global_batch=SAMPLES,
        )

    def trained(self, layout: Mapping[str, Any]) -> list[float]:
        """Return the losses under a plan; every rank calls it."""
        engine = meshwright.Engine(
            self.build, layout, loss=loss, optimizer=adamw, batch=self.batch(0), inputs=inputs
        )
        return [engine.step(engine.slice(self.batch(step))).loss for step in range(STEPS)]


def _drawn(main: str, config: Any, words: Tensor, generator: torch.Generator) -> Tensor:
    """Return what a model reads: words, pictures, videos, spectra or waves."""
    seen = getattr(config, "vision_config", config)
    channels, side = getattr(seen, "num_channels", 3), getattr(seen, "image_size", 32)
    picture = (channels, side, side) if isinstance(side, int) else (channels, *side)
    mels = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", 80)
    shapes: dict[str, tuple[int, ...]] = {
        "pixel_values": picture,
        "pixel_values_videos": (getattr(config, "num_frames", 4), *picture),
        "input_values": (1600,),
        "input_features": (mels, 2 * getattr(config, "max_source_positions", 16)),
    }
    if main == "pixel_values" and hasattr(config, "num_frames"):
        shapes[main] = shapes["pixel_values_videos"]
    if main == "input_values" and hasattr(config, "num_mel_bins"):
        shapes[main] = (config.max_length, mels)
    return (
        torch.randn(SAMPLES, *shapes[main], generator=generator)
        if main in shapes
        else words[:, :-1]
    )


def inputs(batch: Batch) -> Batch:
    """Return what the model reads of a batch."""
    return {name: value for name, value in batch.items() if name != "targets"}


def loss(outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the summed loss of words, or of a class of each sample where results are no words."""
    found, targets = outputs[0], batch["targets"]
    if found.shape[:-1] != targets.shape:
        found, targets = found.flatten(1, -2).mean(1) if found.ndim > 2 else found, targets[:, 0]
    classes = found.shape[-1]
    total = functional.cross_entropy(
        found.reshape(-1, classes).float(), targets.flatten() % classes, reduction="sum"
    )
    return total, torch.tensor(targets.numel())


def adamw(groups: Any) -> torch.optim.Optimizer:
    """Return the optimizer of some parameters."""
    return torch.optim.AdamW(groups, lr=1e-3, eps=1e-4)


def of_library(kind: str, task: str) -> list[float]:
    """Return the losses of a plain loop."""
    return Trained(kind, task).plainly() if dist.get_rank() == 0 else []


def of_plan(kind: str, task: str) -> bool:
    """Plan on the first rank."""
    if dist.get_rank() == 0:
        Trained(kind, task).planned()
    return True


def of_engine(kind: str, task: str, layout: Mapping[str, Any]) -> list[float]:
    """Return the losses under a plan."""
    return Trained(kind, task).trained(layout)


def row_of(kind: str, task: str) -> dict[str, Any]:
    """Return how far one type comes, and what stops it."""
    row: dict[str, Any] = {"model_type": kind, "task": task}
    with Crew(RANKS) as crew:

        def tried(what: str, work: Callable[..., Any], *args: Any) -> Any:
            try:
                return crew.do(_limited, work, kind, task, *args, timeout_s=WALL_SECONDS)[0]
            except (RuntimeError, TimeoutError) as error:
                row[f"why_not_{what}"] = _reason(error)
                return None

        wanted = tried("library", of_library)
        if wanted is None:
            return row
        row["planned"] = tried("planned", of_plan) is not None
        for name, layout in LAYOUTS.items():
            found = tried(name, of_engine, layout)
            if found is not None:
                apart = (abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
                row[name] = float(f"{max(apart):.2g}")
    return row


def _limited(work: Callable[..., Any], *args: Any) -> Any:
    library_equal.limit()
    return work(*args)


def _reason(error: Exception) -> str:
    """Return the last line of a rank's traceback, without paths of this machine."""
    lines = [line for line in str(error).splitlines() if line and not line[0].isspace()]
    said = re.sub(r"^[\w.]+\.(\w+: )", r"\1", lines[-1])
    said = re.sub(r"^(?:LaunchError|RecordError|BatchError|PlanError|DocumentError): ", "", said)
    return re.sub(r"\S*/(site-packages|runtime)/", "", said)[:400]


def main() -> None:
    """Make the rows of the types that were named, or of all, that have none of these versions."""
    asked, rows = library_equal.arguments(__doc__), library_equal.Rows(RESULTS)
    library_equal.quiet()
    for kind, task in kinds().items():
        if (not asked.kinds or kind in asked.kinds) and (asked.again or kind not in rows):
            rows.take(row_of(kind, task))


if __name__ == "__main__":
    main()
