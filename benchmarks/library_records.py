"""Which causal language models of transformers are recorded without rules, by `model_type`.

    python -m benchmarks.library_records [model_type ...]

Each is the library's default configuration with few layers, without data.  A line says how many
layers a pipeline may cut between, or why there are none.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from typing import Any

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from meshwright.planner.errors import DocumentError
from meshwright.runtime.engine.traced_transformer import graph_of_library

DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
SEQ_LEN = 64


def configuration(kind: str) -> Any:
    """Return the default configuration of a type, with two layers where it takes them."""
    whole = transformers.AutoConfig.for_model(kind)
    chosen = {name: 2 for name in ("num_experts_per_tok",) if getattr(whole, name, 0) is None}
    for depth in (2, 4, 8):
        fewer = {name: depth for name in DEPTHS if getattr(whole, name, None) is not None}
        try:
            return transformers.AutoConfig.for_model(kind, **fewer, **chosen)
        except Exception:
            continue
    return whole


def line(kind: str) -> str:
    """Return what became of one type."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            configuration(kind).save_pretrained(folder)
            model = graph_of_library(f"{folder}:recorded", seq_len=SEQ_LEN)
        except Exception as error:
            said = error.message if isinstance(error, DocumentError) else str(error)
            return f"{kind}: no: {' '.join(said.split())[-200:]}"
    layers = len(model.chain)
    return f"{kind}: {layers} layers" if layers > 1 else f"{kind}: one layer"


def main() -> None:
    """Print a line for each type that was named, or for all."""
    logging.disable(logging.ERROR)
    transformers.logging.set_verbosity_error()
    for kind in sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        print(line(kind), flush=True)


if __name__ == "__main__":
    main()
