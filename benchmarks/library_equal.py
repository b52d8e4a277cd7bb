"""Which recorded models of transformers train as the library's own class does, by `model_type`.

    python -m benchmarks.library_equal [model_type ...] [--json FILE]

Each is a small random model of the type: two layers, narrow where its configuration takes that.
Three steps of AdamW by `launch`'s engine are compared with the library's class in a plain loop.
A line says the largest relative difference of losses and gradient norms, or why there is none.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import resource
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from planner.errors import MeshwrightError
from runtime.library_model import graph_of_library
from runtime.train import token_engine
from tests.runtime import cases

NARROW: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "encoder_ffn_dim"), 96),
    **dict.fromkeys(("decoder_ffn_dim", "ffn_hidden_size", "moe_intermediate_size"), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_key_value_heads", "n_heads"), 4),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "top_k", "moe_top_k"), 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "rotary_dim"), 16),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    "shared_expert_intermediate_size": 48,
    "vocab_size": 64,
}
STEPS = 3
SECONDS = 120
MOST_BYTES = 4 << 30
"""A type that takes more of either is named so."""


def narrowed(kind: str) -> Any:
    """Return a small configuration of a type: as many fields narrow as it takes together."""
    whole = transformers.AutoConfig.for_model(kind)
    wanted = {
        name: value for name, value in NARROW.items() if isinstance(getattr(whole, name, None), int)
    }
    wanted |= {name: 0 for name in ("pad_token_id",) if getattr(whole, name, None) is not None}
    quiet: dict[str, Any] = {"use_cache": False} if hasattr(whole, "use_cache") else {}
    quiet |= {name: 0.0 for name in vars(whole) if "drop" in name or name.endswith("_pdrop")}
    for left_out in ((), ("head_dim",), ("num_key_value_heads",), ("rotary_dim",)):
        fields = {name: value for name, value in wanted.items() if name not in left_out}
        try:
            config = transformers.AutoConfig.for_model(kind, **fields, **quiet)
            with torch.device("meta"):
                transformers.AutoModelForCausalLM.from_config(config)
        except Exception:
            continue
        return config
    raise ValueError("no small configuration of it was found")


def difference(kind: str) -> float:
    """Return the largest relative difference of losses and norms between engine and plain loop."""
    with tempfile.TemporaryDirectory() as folder:
        narrowed(kind).save_pretrained(folder)
        graph = graph_of_library(f"{folder}:recorded", seq_len=cases.SEQ_LEN)
        plan = cases.plan(graph)
        training = plan.training
        config = transformers.AutoConfig.from_pretrained(folder)
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
        engine = token_engine(plan, graph, device=torch.device("cpu"))
        worst = 0.0
        for step in range(STEPS):
            tokens = cases.global_tokens(step)
            logits = model(tokens[:, :-1]).logits
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            for group in optimizer.param_groups:
                group["lr"] = training.learning_rate * min(1.0, (step + 1) / training.warmup_steps)
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm))
            optimizer.step()
            optimizer.zero_grad()
            found = engine.step(tokens)
            for mine, theirs in ((found.loss, loss.item()), (found.grad_norm, norm)):
                worst = max(worst, abs(mine - theirs) / abs(theirs))
        return worst


def line(kind: str) -> dict[str, Any]:
    """Return what became of one type: a difference, or why there is none."""
    try:
        return {"model_type": kind, "difference": difference(kind)}
    except MeshwrightError as error:
        return {"model_type": kind, "refused": " ".join(str(error).split())[-240:]}
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        return {"model_type": kind, "failed": " ".join(said.split())[:240]}


def _quiet() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))


def main() -> None:
    """Print a line for each type that was named, or for all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--json")
    asked = parser.parse_args()
    rows = []
    for kind in asked.kinds or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        with multiprocessing.get_context("fork").Pool(1, initializer=_quiet) as one:
            try:
                row = one.apply_async(line, (kind,)).get(timeout=SECONDS)
            except multiprocessing.TimeoutError:
                row = {"model_type": kind, "failed": f"took more than {SECONDS} s"}
        rows.append(row)
        print(*row.values(), sep="  ", flush=True)
    if asked.json:
        Path(asked.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
