"""Which recorded models of transformers train as the library's own class does, by `model_type`.

    python -m benchmarks.library_equal [model_type ...]     # goes on where it stopped
    python -m tests.runtime.family_table                    # writes docs/results/models.md of it

Each is a small random model of the type: two layers, narrow where its configuration takes that.
Three steps of AdamW by `launch`'s engine are compared with the library's class in a plain loop.  A
row of benchmarks/results/library_models.json says how many layers a plan may cut, whether it
launches, the largest relative difference of losses and gradient norms, or why there is none.  Rows
of the versions that are installed stay unless `--again`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import logging
import multiprocessing
import re
import resource
import signal
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from meshwright.planner.documents.plan import Training
from meshwright.planner.errors import MeshwrightError
from meshwright.runtime.engine.traced_transformer import graph_of_library
from meshwright.runtime.launch.training_loop import token_engine
from tests.runtime import cases

RESULTS = Path(__file__).parent / "results" / "library_models.json"
NARROW: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "dim_model"), 64),
    **dict.fromkeys(("embedding_size", "mamba_d_ssm", "lru_width"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "encoder_ffn_dim"), 96),
    **dict.fromkeys(("ffn_hidden_size", "expert_ffn_hidden_size", "moe_intermediate_size"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "shared_intermediate_size", "dim_ff"), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_key_value_heads", "n_heads"), 4),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "top_k", "moe_top_k", "moe_topk"), 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "rotary_dim", "rotary_ndims"), 16),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("mamba_d_head", "mamba_headdim", "linear_key_head_dim"), 16),
    **dict.fromkeys(("linear_value_head_dim", "mamba_head_dim", "dim_head"), 16),
    **dict.fromkeys(("mamba_n_heads", "n_mamba_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_state", "state_size", "mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_groups"), 1),
    **dict.fromkeys(("vocab_size_per_layer_input", "emb_dim", "hidden_size_per_layer_input"), 64),
    "shared_expert_intermediate_size": 48,
    "vocab_size": 64,
}
SPECIAL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_expert_group": 1, "num_experts_per_token": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {
        **{"intermediate_size": [96, 96], "num_kv_shared_layers": 0},
        **{"activation_sparsity_pattern": [0.0, 0.0], "layer_types": ["full_attention"] * 2},
    },
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "ministral": {"head_dim": 16},
}
"""What a default configuration lacks, or what does not follow from its narrow width."""
LEFT_OUT: tuple[tuple[str, ...], ...] = (
    (),
    ("head_dim",),
    ("num_key_value_heads",),
    ("rotary_dim",),
    ("num_hidden_layers",),
    ("num_hidden_layers", "head_dim"),
)
"""Fields that stay as they are, tried one row after the other."""
STEPS = 3
CPU_SECONDS = 60
MOST_BYTES = 4 << 30
"""A type that takes more of either is named so."""
WALL_SECONDS = 20 * CPU_SECONDS
"""Behind which a process that waits is given up."""


def narrowed(
    kind: str,
    made: Any = transformers.AutoModelForCausalLM,
    more: Mapping[str, int] | None = None,
) -> Any:
    """Return a small configuration of a type: as many fields narrow as it takes together.

    `made` is the class that must take it, `more` further fields.
    """
    narrow = {**NARROW, **(more or {})}
    whole = transformers.AutoConfig.for_model(kind)
    first: Exception | None = None
    for left_out in LEFT_OUT:
        try:
            config = transformers.AutoConfig.for_model(
                kind, **{**_narrow_fields(whole, left_out, narrow), **SPECIAL.get(kind, {})}
            )
            with torch.device("meta"):
                made.from_config(config)
        except Exception as error:
            first = first or error
            continue
        return config
    assert first is not None
    raise first


def _narrow_fields(
    whole: Any, left_out: tuple[str, ...], narrow: Mapping[str, int]
) -> dict[str, Any]:
    """Return fields of a configuration, and of those inside of it."""
    fields: dict[str, Any] = {
        name: value
        for name, value in narrow.items()
        if isinstance(vars(whole).get(name), int) and name not in left_out
    }
    fields |= {name: 0 for name in ("pad_token_id",) if getattr(whole, name, None) is not None}
    fields |= {"use_cache": False} if hasattr(whole, "use_cache") else {}
    fields |= {name: 0.0 for name in vars(whole) if "drop" in name or name.endswith("_pdrop")}
    for name in getattr(whole, "sub_configs", {}):
        part = getattr(whole, name, None)
        if isinstance(part, transformers.PretrainedConfig):
            fields[name] = {"model_type": part.model_type, **_narrow_fields(part, left_out, narrow)}
    return fields


def plainly(config: Any, training: Training) -> Iterator[tuple[float, float]]:
    """Yield loss and norm of each step of the library's class in a loop of torch alone."""
    torch.manual_seed(training.seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.train()
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [p for p in model.parameters() if (p.ndim > 1) == matrices],
                "weight_decay": training.weight_decay if matrices else 0.0,
            }
            for matrices in (True, False)
        ],
        betas=(training.beta1, training.beta2),
        eps=training.epsilon,
    )
    for step in range(STEPS):
        tokens = cases.global_tokens(step)
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = training.learning_rate * min(1.0, (step + 1) / training.warmup_steps)
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm))
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item(), norm


def row_of(kind: str) -> dict[str, Any]:
    """Return how far one type comes, and what stops it: the library, or a refusal of ours."""
    row: dict[str, Any] = {"model_type": kind}
    with tempfile.TemporaryDirectory() as folder, _said(row, folder):
        row["stopped"] = "by the library"
        narrowed(kind).save_pretrained(folder)
        config = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_config(config)
        assert model(input_ids=cases.global_tokens(0)[:, :-1], use_cache=False).logits.ndim == 3
        row["stopped"] = "before a plan"
        graph = graph_of_library(f"{folder}:recorded", seq_len=cases.SEQ_LEN)
        row["layers"] = len(graph.chain)
        row["stopped"] = "before a launch"
        plan = cases.plan(graph)
        engine = token_engine(plan, graph, device=torch.device("cpu"))
        worst = 0.0
        for step, (loss, norm) in enumerate(plainly(config, plan.training)):
            found = engine.step(cases.global_tokens(step))
            for mine, theirs in ((found.loss, loss), (found.grad_norm, norm)):
                worst = max(worst, abs(mine - theirs) / abs(theirs))
        row["difference"] = float(f"{worst:.2g}")
        del row["stopped"]
    return row


@contextlib.contextmanager
def _said(row: dict[str, Any], folder: str) -> Iterator[None]:
    """Put what stops a type into its row, without paths of this machine."""
    try:
        yield
    except Exception as refused:
        late = isinstance(refused.__cause__, TimeoutError)  # ours, in the midst of its own code
        error = refused.__cause__ if late else refused
        said = str(error) if isinstance(error, MeshwrightError) else f"{type(error).__name__}: "
        said += "" if isinstance(error, MeshwrightError) else str(error)
        said = said.replace(f"{folder}:recorded: ", "").replace(folder, "FOLDER")
        row["why"] = re.sub(r"\S*/(site-packages|runtime)/", "", " ".join(said.split()))[:400]


def quiet() -> None:
    """Leave out what the library says beside its results."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)


def limit() -> None:
    """Let this process take so much memory and processor time, and no more."""
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    signal.signal(signal.SIGXCPU, _out_of_time)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, most))


def _quiet_and_limited() -> None:
    quiet()
    limit()


def _out_of_time(*_: Any) -> None:
    raise TimeoutError(f"takes more than {CPU_SECONDS} CPU s")


class Rows:
    """The rows of a file by type, made with the versions of now; others are made anew."""

    def __init__(self, file: Path) -> None:
        self._file = file
        torch_version = torch.__version__.split("+")[0]
        self._versions = {"transformers": transformers.__version__, "torch": torch_version}
        stored = json.loads(file.read_text()) if file.exists() else {}
        same = {key: stored.get(key) for key in self._versions} == self._versions
        self._rows = {row["model_type"]: row for row in stored["rows"]} if same else {}

    def __contains__(self, kind: str) -> bool:
        return kind in self._rows

    def take(self, row: dict[str, Any]) -> None:
        """Print a row and write all of them down."""
        self._rows[row["model_type"]] = row
        print(*row.values(), sep="  ", flush=True)
        today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        rows = [self._rows[name] for name in sorted(self._rows)]
        made = {"date": today, **self._versions, "rows": rows}
        self._file.write_text(json.dumps(made, indent=1) + "\n")


def arguments(about: str | None) -> argparse.Namespace:
    """Return which types were named, and whether rows are made again."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--again", action="store_true", help="make rows anew that are there")
    return parser.parse_args()


def main() -> None:
    """Make the rows of the types that were named, or of all, that have none of these versions."""
    asked, rows = arguments(__doc__), Rows(RESULTS)
    kinds = asked.kinds or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    for kind in [one for one in kinds if asked.again or one not in rows]:
        with multiprocessing.get_context("fork").Pool(1, initializer=_quiet_and_limited) as one:
            try:
                row = one.apply_async(row_of, (kind,)).get(timeout=WALL_SECONDS)
            except multiprocessing.TimeoutError:
                row = {"model_type": kind, "stopped": "by time", "why": f"{WALL_SECONDS} s"}
        rows.take(row)


if __name__ == "__main__":
    main()
