"""docs/results/models.md: the families that launch, and what became of every type of transformers.

`python -m tests.runtime.family_table` writes it from the tests' own list, the runtime's refusals,
and benchmarks/results/library_models.json and library_others.json (`python -m
benchmarks.library_equal` and `benchmarks.library_others`, which are long).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.library_others import LAYOUTS, kinds
from meshwright.planner.architectures.architecture import SUPPORTED, architecture_of
from meshwright.planner.architectures.parameters import graph_of
from meshwright.planner.documents.plan import Layout
from meshwright.planner.documents.training import Lora
from meshwright.planner.frameworks.native_limits import FAMILIES as LAUNCHED
from meshwright.planner.frameworks.native_limits import obstacle
from tests.runtime import cases, families

PAGE = Path(__file__).parents[2] / "docs" / "results" / "models.md"
RESULTS = PAGE.parents[2] / "benchmarks" / "results" / "library_models.json"
OTHER_RESULTS = RESULTS.with_name("library_others.json")
EQUAL = 1e-6
"""A larger relative difference of a loss or norm, in fp32, is none of rounding."""
PUBLISHED = {
    "deepseek_v2": "DeepSeek-V2, V2-Lite",
    "deepseek_v3": "DeepSeek-V3, R1",
    "gemma": "Gemma 1",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3, its text models",
    "glm4_moe": "GLM 4.5 and 4.6 with experts",
    "gpt2": "GPT-2",
    "gpt_bigcode": "StarCoder, SantaCoder",
    "gpt_oss": "GPT-OSS, its weights as bf16",
    "granite": "Granite 3",
    "llama": "Llama 1 to 3, and models with its architecture",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "nemotron": "Nemotron 3 and 4, Minitron",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "phi": "Phi-1, 1.5 and 2",
    "phi3": "Phi-3, Phi-4",
    "qwen2": "Qwen 2, 2.5",
    "qwen2_moe": "Qwen 1.5 and 2 with experts",
    "qwen3": "Qwen 3",
    "qwen3_moe": "Qwen 3 with experts",
    "seed_oss": "Seed-OSS",
    "smollm3": "SmolLM 3",
    "starcoder2": "StarCoder 2",
}
HEAD = """# Models

The model families that `launch --weights FOLDER` trains.  `tests/runtime/test_families.py` trains
each for three steps, in one process and on 2 ranks under tensor parallelism, pipelines, split
backward, ZeRO-3, context and expert parallelism where they are supported: losses are those of the
transformers class in a plain loop, within 1e-6 in fp32.  `python -m tests.runtime.family_table`
writes this page from the list of that test.

| model_type | models | tensor | context | experts | LoRA |
|---|---|---|---|---|---|
"""
TAIL = """
All of them train under data parallelism, ZeRO and pipelines.  Files may store the
experts of a layer one by one, as they are published, or merged.

Notes:
- DeepSeek: the router's correction bias is read, saved and exported, and not trained, as in
  transformers.
- Files of quantised weights (GPT-OSS in MXFP4, DeepSeek-V3 in fp8) are refused; convert them with
  transformers to bf16 first.
- What a configuration draws at random (dropout, `router_jitter_noise`) is off, and a launch says
  so.  Every other field of a configuration is executed as in transformers or refused by its name
  (`runtime/models/config_fields.py`): the loss of routers (`output_router_logits`), bidirectional
  attention, settings of single layers.  Factors that depend on a sequence's length (longrope) are
  those of each document.
- Gemma 3: text models (`gemma3_text`) only; models with image inputs are trained with
  `meshwright.Engine`.

## Recorded models

Any other causal language model of transformers is launched as it is recorded: its own class runs
once without data, and a plan cuts what its forward did.  `meshwright plan FOLDER:recorded` (with a
config.json, or that file) makes such a plan; of a `model_type` without figures of ours the plain
name does too.  It trains under data parallelism, ZeRO, pipelines, every recompute choice and
schedule, in fp32, bf16, fp16 and 8 bits, with LoRA, from published weights (`--weights`), is
measured by `meshwright profile`, and is exported for transformers.  Over a tensor axis the layers
are divided whose parts were seen to add up, on short samples of random numbers: attention and MLP
of Llama, GPT-NeoX, GLM-4, Cohere and ERNIE 4.5 for example, the MLP alone of Falcon, BLOOM, OPT and
StableLM (whose attention counts heads by a fixed number), the shared experts of DeepSeek-V2.
Blocks that are alike are tried once, and copies share their weights: a StableLM of 7 B parameters
is planned in 0.8 GB of memory and 39 s of CPU.  A
plan that says so by hand divides positions (`context`) and experts (`expert`) too, and samples may
hold several documents, where the class takes other attention and positions by name and its own
attention does the same (Falcon and Mamba do not).  Not recorded are models that branch on the
values of tensors between layers.  Where a class itself raises an error while it is recorded, on
samples of `--seq-len` tokens without data, the refusal quotes it (`its own code raised ValueError
while it was recorded: ...`): BigBird, for one, takes sequences of whole blocks alone, so give such
a `--seq-len`, or `attention_type: original_full` in its config.json.  Experts that read how many
tokens each of them has (JetMoE, LongCat-Flash) are recorded as if all had equally many.  First
values are the library's own; dropout
draws by sample.  `test_traced_transformer.py` trains GPT-NeoX, Falcon, GLM-4, DeepSeek-V2,
Mamba, JetMoE and LongCat-Flash so, equal to the library's class in a plain loop.  A model that sees
the tokens that it is to predict (BERT without `is_decoder`) is refused;
[BERT and ViT](../how-to/train-encoders.md),
[T5 and Whisper](../how-to/train-encoder-decoders.md) and [Mamba-2](../how-to/train-mamba2.md)
train from a script.  What becomes of each type is [below](#every-causal-type).

The figures of these can be planned, and are launched only as recorded: {planned}.
`plan` records them by itself for our own runtime where torch and transformers are installed and no
layer has more than 67 million parameters; else `next` says what launch needs.
Without figures, with the reason (`unsupported.py`), are models with a recurrent
state (Mamba, Jamba, Qwen3-Next, Qwen3.5), encoder-decoders (T5, Whisper), sparse attention by an
indexer (DeepSeek-V3.2), and models with an image encoder, of which the language model alone can be
planned.  What is no causal language model is trained from your own script with
`meshwright.Engine`, or given as `file.py:factory`.

## Every causal type

`python -m benchmarks.library_equal` makes a small random model of each of the {types} causal
`model_type`s of transformers {transformers} (torch {torch}, {date}), and trains it for three steps
by a plan and in a plain loop of the library's class, each in a process with 60 CPU seconds and
4 GiB.  {plans} plan, {launches} launch, {equal} of these with losses and gradient norms within
1e-6.  Of the others the last column has the reason.  Small sizes that the library refuses say
nothing of the sizes that are published: give a config.json of those.  The script goes on where it
stopped.

| model_type | plans | launches | largest difference | why not, and what to do |
|---|---|---|---|---|
"""
OTHERS = """
## Other types

`python -m benchmarks.library_others` makes a small random model of a type of transformers
{transformers} (torch {torch}, {date}) that is no causal language model, or has another class
for masked words or for a translation, and trains it through `meshwright.Engine` on random words,
pictures or sounds: planned for eight accelerators, then three steps on two ranks under ZeRO-2 and
in two stages.  Columns are the largest relative difference of a loss to a plain loop of the
library's class.  Of {kinds} such types {tried} were tried: the library runs the small sizes of
{run}, of which {planned} are planned, {zero} train under ZeRO and {stages} in stages, {equal} of
these within 1e-5 wherever they train.  BatchNorm (ResNet) takes the statistics of each micro-batch,
as under DDP, and so has other losses than a loop over whole batches; `batch_norm="synchronised"`
takes those of all.  The script goes on where it stopped.

| model_type | learns | plans | ZeRO-2 | two stages | why not |
|---|---|---|---|---|---|
"""
OTHERS_EQUAL = 1e-5
"""A larger relative difference of a loss, of sums in another order, is none of rounding."""
TRIED = {
    "by the library": "transformers does not run our small sizes: ",
    "before a plan": "not recorded: ",
    "before a launch": "",
    "by time": "takes longer than ",
}
"""By where a type stopped, how its reason begins."""


def text() -> str:
    """Return the page."""
    rows = "\n".join(_row(family) for family in families.FAMILIES)
    planned = ", ".join(sorted(set(SUPPORTED) - set(LAUNCHED)))
    tried = json.loads(RESULTS.read_text(encoding="utf-8"))
    by_type = {row["model_type"]: row for row in tried["rows"]}
    found = [row["difference"] for row in by_type.values() if "difference" in row]
    tail = TAIL.format(
        planned=planned,
        types=len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        plans=sum("layers" in row or "difference" in row for row in by_type.values()),
        launches=len(found),
        equal=sum(difference < EQUAL for difference in found),
        **{key: tried[key] for key in ("date", "transformers", "torch")},
    )
    every = (_tried(kind, by_type.get(kind)) for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    return HEAD + rows + "\n" + tail + "\n".join(every) + "\n" + _others()


def _others() -> str:
    """Return the section of types that are no causal language models."""
    tried = json.loads(OTHER_RESULTS.read_text(encoding="utf-8"))
    run = [row for row in tried["rows"] if "why_not_library" not in row]
    found = [[row[name] for name in LAYOUTS if name in row] for row in run]
    head = OTHERS.format(
        kinds=len(kinds()),
        tried=len(tried["rows"]),
        run=len(run),
        planned=sum(row["planned"] for row in run),
        zero=sum("zero" in row for row in run),
        stages=sum("stages" in row for row in run),
        equal=sum(bool(far) and max(far) < OTHERS_EQUAL for far in found),
        **{key: tried[key] for key in ("date", "transformers", "torch")},
    )
    return head + "\n".join(map(_other, tried["rows"])) + "\n"


def _other(row: Mapping[str, Any]) -> str:
    """Return the line of a type, from what became of it."""
    if "why_not_library" in row:
        why = TRIED["by the library"] + row["why_not_library"]
        return f"| `{row['model_type']}` | {row['task']} | | | | {_in_cell(why)} |"
    cells = [f"{row[name]:.1e}" if name in row else "no" for name in LAYOUTS]
    whys = dict.fromkeys(value for key, value in row.items() if key.startswith("why_not_"))
    return (
        f"| `{row['model_type']}` | {row['task']} | {_cell(row['planned'])} | "
        f"{' | '.join(cells)} | {_in_cell('; '.join(whys))} |"
    )


def _in_cell(text: str) -> str:
    return text.replace("|", "\\|")


def _tried(kind: str, row: Mapping[str, Any] | None) -> str:
    """Return the line of a causal type, from what became of it."""
    if row is None:
        return f"| `{kind}` | | | | not tried on these versions |"
    difference = row.get("difference")
    planned = "layers" in row or difference is not None
    plans = "in one layer" if row.get("layers") == 1 else _cell(planned)
    why = TRIED[row["stopped"]] + _in_cell(row["why"]) if "why" in row else ""
    shown = "" if difference is None else f"{difference:.1e}"
    return f"| `{kind}` | {plans} | {_cell(difference is not None)} | {shown} | {why} |"


def _row(family: str) -> str:
    config = families.FAMILIES[family]().to_dict()
    graph = graph_of(architecture_of(config, name=family), name=family)
    job = cases.plan(graph).job
    layouts = {
        "tensor": Layout(tensor=2, micro_batches=2),
        "context": Layout(context=2, micro_batches=2),
        "experts": Layout(data_shard=2, expert=2, zero=1, micro_batches=2),
    }
    with_lora = replace(job, lora=Lora(rank=4))
    cells = [_cell(obstacle(graph, job, layout) is None) for layout in layouts.values()]
    if graph.architecture is not None and graph.architecture.experts is None:
        cells[-1] = ""
    cells.append(_cell(obstacle(graph, with_lora, Layout()) is None))
    return f"| `{family}` | {PUBLISHED[family]} | " + " | ".join(cells) + " |"


def _cell(taken: bool) -> str:
    return "yes" if taken else "no"


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
