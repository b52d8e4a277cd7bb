"""Thirteen questions of people who fine-tune, and published runs beside predictions.

    PYTHONPATH=$PWD python benchmarks/fine_tuning.py [-o docs/results/fine-tuning.md]

The first table has what `plan` answers.  The second predicts published runs whose layout is known:
the tables of Qwen's and of torchtune's README.  Writes one page.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.api import commands
from meshwright.planner.documents.cluster import Precision
from meshwright.planner.documents.document import write_text
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.documents.units import bytes_text, seconds_text
from meshwright.planner.errors import NoPlanFits

PAGE = Path(__file__).parents[1] / "docs" / "results" / "fine-tuning.md"
GB, GIB = 1e9, 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked, and what somebody published."""

    words: str
    model: str
    cluster: str
    options: dict[str, Any] = field(default_factory=dict)
    published: str = ""
    fits: bool = True
    """What the published run, or arithmetic, says."""

    @property
    def command(self) -> str:
        """The question as it is typed."""
        flags = []
        for name, value in self.options.items():
            values = value if isinstance(value, list) else [value]
            flags += [f"--{name.replace('_', '-')} {each}" for each in values]
        return " ".join(["plan", self.model, "--cluster", self.cluster, *flags])


LORA = ["rank=16"]
QUESTIONS = (
    Question(
        words="7B, LoRA, one card of 24 GB",
        model="llama-2-7b",
        cluster="1xrtx-3090",
        options={"lora": LORA, "seq_len": 2048},
        published="Qwen's README: 7B, LoRA, 2,048 tokens, 23.8 GB on an A100",
    ),
    Question(
        words="8B, LoRA, one card of 24 GB",
        model="llama-3.1-8b",
        cluster="1xrtx-4090",
        options={"lora": LORA, "seq_len": 2048},
        published="torchtune's README: Llama 3.1 8B, LoRA, RTX 4090, 16.2 GiB, 3,083 tokens/s",
    ),
    Question(
        words="13B, LoRA, one card of 24 GB",
        model="llama-2-13b",
        cluster="1xrtx-4090",
        options={"lora": LORA, "seq_len": 2048},
        published="Qwen's README: 14B, LoRA takes 37.4 GB at 2,048 tokens",
        fits=False,
    ),
    Question(
        words="13B, LoRA, two cards of 24 GB",
        model="llama-2-13b",
        cluster="2xrtx-4090",
        options={"lora": LORA, "seq_len": 2048},
        published="Qwen's README: 14B, LoRA takes 37.4 GB at 2,048 tokens, of 48 here",
    ),
    Question(
        words="70B, QLoRA, two cards of 24 GB",
        model="llama-2-70b",
        cluster="2xrtx-3090",
        options={
            "lora": ["rank=16,weights=nf4"],
            "seq_len": 512,
            "allow": "offload",
            "framework": "transformers",
        },
        published="Answer.AI, fsdp_qlora, benchmarks_03_2024.md: 14.9 GiB a card, two RTX 3090",
    ),
    Question(
        words="70B, QLoRA, one card of 48 GB",
        model="llama-2-70b",
        cluster="1xrtx-6000-ada",
        options={"lora": ["rank=16,weights=nf4"], "seq_len": 512},
        published="Unsloth's requirements: 70B, QLoRA, 41 GB at least",
    ),
    Question(
        words="70B, QLoRA, one card of 80 GB",
        model="llama-2-70b",
        cluster="1xa100-sxm-80gb",
        options={"lora": ["rank=16,weights=nf4"], "seq_len": 2048},
        published="Qwen's README: 72B, Q-LoRA, A100, 64.1 GB and 59.5 s for 8 such samples",
    ),
    Question(
        words="32B, all weights, four cards of 48 GB and host memory",
        model="qwen2.5-32b",
        cluster="4xl40s",
        options={"seq_len": 2048, "global_batch": 32, "allow": "offload"},
        published="none of this size found; 16 bytes a parameter are 488 GiB of host memory",
    ),
    Question(
        words="70B, all weights, 8 A100 of 80 GB, 8-bit AdamW",
        model="llama-3.1-70b",
        cluster="8xa100-sxm-80gb",
        options={
            "seq_len": 2048,
            "global_batch": 64,
            "optimizer": "adamw-8bit-paged",
            "masters": "none",
            "framework": "torchtune",
        },
        published="51 GB a card with paged 8-bit AdamW; torchtune's README: 13.9 GiB with all "
        "states on the host",
    ),
    Question(
        words="gpt-oss-20b, LoRA, one card of 24 GB",
        model="gpt-oss-20b",
        cluster="1xrtx-4090",
        options={"lora": LORA, "seq_len": 2048, "allow": "quantized"},
        published="Unsloth's documentation: gpt-oss-20b, LoRA beside 4 bits, 14 GB",
    ),
    Question(
        words="0.5B, all weights, one card of 8 GB",
        model="qwen2.5-0.5b",
        cluster="1xrtx-3070",
        options={"seq_len": 1024, "global_batch": 16, "masters": "none"},
        published="LLaMA-Factory's README: 8 bytes a parameter in pure bf16, 4 GB",
    ),
    Question(
        words="8B, DPO with a reference, 8 A100 of 80 GB",
        model="llama-3.1-8b",
        cluster="8xa100-sxm-80gb",
        options={
            "seq_len": 1024,
            "global_batch": 64,
            "objective": "dpo",
            "framework": "transformers",
        },
        published="alignment-handbook: zephyr-7b-dpo-full, 8 A100 of 80 GB, ZeRO-3, 8 pairs a "
        "device",
    ),
    Question(
        words="8B, LoRA, 32,768 packed tokens, 8 H100",
        model="llama-3.1-8b",
        cluster="8xh100-sxm-80gb",
        options={"lora": LORA, "seq_len": 32768, "document_len": 2000},
        published="prime-rl: 8B, LoRA, 32,768 tokens a sample on H100",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A published run whose layout is known."""

    source: str
    what: str
    model: str
    cluster: str
    seq_len: int
    samples: int
    micro_batch: int
    layout: str
    framework: str
    lora: tuple[str, ...] = ()
    precision: Precision = "bf16"
    kind: str = "device"
    """Of memory: what a device reports, or what PyTorch has allocated."""
    memory_bytes: float
    step_s: float


def qwen(name: str) -> dict[str, Any]:
    """Return the figures of Qwen (2023) as a configuration: heads as many as of keys."""
    layers, hidden, heads, ffn, vocabulary = {
        "1.8B": (24, 2048, 16, 5504, 151936),
        "7B": (32, 4096, 32, 11008, 151936),
        "14B": (40, 5120, 40, 13696, 152064),
        "72B": (80, 8192, 64, 24576, 152064),
    }[name]
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": ffn,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
    }


QWEN_LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
QWEN_LORA: dict[str, tuple[tuple[float, float], ...]] = {
    "1.8B": ((6.7, 1.0), (7.4, 1.0), (8.4, 1.1), (11.0, 1.7), (16.2, 3.3), (21.8, 6.8)),
    "7B": ((20.1, 1.2), (20.4, 1.5), (21.5, 2.8), (23.8, 5.2), (29.7, 10.1), (36.6, 21.3)),
    "14B": ((34.6, 1.6), (35.1, 2.4), (35.3, 4.4), (37.4, 8.4), (42.5, 17.0), (55.2, 36.0)),
}
QWEN_QLORA: dict[str, tuple[tuple[float, float], ...]] = {
    "7B": ((11.5, 3.0), (11.5, 3.0), (12.3, 3.5), (13.9, 7.0), (16.9, 11.6), (23.5, 22.3)),
    "14B": ((18.7, 5.3), (18.4, 6.3), (18.9, 8.2), (19.9, 11.8), (23.0, 20.1), (27.9, 38.3)),
    "72B": ((61.4, 27.4), (61.4, 31.5), (62.9, 41.4), (64.1, 59.5), (68.0, 97.7), (75.6, 179.8)),
}
"""GB and seconds of a step of 8 samples, one at a time, on an A100 (QwenLM/Qwen, README.md, at
03cd81f, Profiling of Memory and Speed); adapters of rank 64 beside all products.  Weights in 4 bits
are those of AutoGPTQ, which peft leaves as they are beside 16-bit ends, and train in fp16 under
DeepSpeed (finetune/finetune_qlora_single_gpu.sh), where Qwen's own loss stays in 16 bits."""
QWEN_4_BITS = "transformers+narrow-frozen+narrow-loss+adapter-dropout+unfused-dequantization"


def published_runs(folder: Path) -> Iterator[Published]:
    """Yield the published runs; configurations of models are written to `folder`."""
    for weights, table in (("", QWEN_LORA), (",weights=nf4", QWEN_QLORA)):
        for name, rows in table.items():
            path = folder / f"qwen-{name}"
            path.mkdir(exist_ok=True)
            write_text(json.dumps(qwen(name)), path / "config.json")
            for seq_len, (size, step_s) in zip(QWEN_LENGTHS, rows, strict=True):
                yield Published(
                    source="Qwen",
                    what=f"{name}, {'QLoRA' if weights else 'LoRA'}, {seq_len:,} tokens",
                    model=str(path / "config.json"),
                    cluster="1xa100-sxm-80gb",
                    seq_len=seq_len,
                    samples=8,
                    micro_batch=1,
                    layout="recompute=full",
                    framework=QWEN_4_BITS if weights else "transformers+adapter-dropout",
                    precision="fp16" if weights else "bf16",
                    lora=(f"rank=64{weights}",),
                    memory_bytes=size * GB,
                    step_s=step_s,
                )
    attention = "targets=[q_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]"
    for what, cluster, model, layout, lora, samples, size, rate in (
        ("8B, LoRA", "1xrtx-4090", "llama-3.1-8b", "", f"rank=8,{attention}", 2, 16.2, 3083),
        ("8B, QLoRA", "1xrtx-4090", "llama-3.1-8b", "", f"rank=8,weights=nf4,{attention}", 2,
         7.4, 2413),
        ("70B, LoRA", "8xa100-sxm-80gb", "llama-3.1-70b", ",zero=3", "rank=16,targets=[q_proj,"
         "k_proj,v_proj]", 16, 27.6, 3497),
        ("70B, all weights on the host", "8xa100-sxm-80gb", "llama-3.1-70b",
         ",zero=3,offload=parameters", "", 16, 13.9, 1568),
    ):  # fmt: skip
        yield Published(
            source="torchtune",
            what=what,
            model=model,
            cluster=cluster,
            seq_len=2048,
            samples=samples,
            micro_batch=2,
            layout=f"recompute=full{layout}",
            framework="torchtune",
            lora=(lora,) if lora else (),
            kind="allocated",
            memory_bytes=size * GIB,
            step_s=samples * 2048 / rate,
        )


def predicted(run: Published) -> Prediction:
    """Return the prediction of a published run."""
    return commands.predict(
        run.model,
        run.cluster,
        layout=f"{run.layout},micro_batch={run.micro_batch}",
        seq_len=run.seq_len,
        global_batch=run.samples,
        precision=run.precision,
        lora=run.lora,
        framework=run.framework,
    )


def answer_row(question: Question) -> tuple[str, bool]:
    """Return a row of the first table, and whether the answer is right."""
    try:
        answer = commands.plan(question.model, question.cluster, **_options(question))
    except NoPlanFits as error:
        text, fits = f"nothing fits. {str(error).partition('It would fit')[2][:120]}", False
        text = text.replace("nothing fits.  ", "nothing fits; it would ")
    else:
        prediction = answer.prediction
        peak = max(stage.peak_memory_bytes for stage in prediction.stages)
        hosts = [stage.host_bytes for stage in prediction.stages]
        host = f", {bytes_text(sum(hosts))} of host memory" if any(hosts) else ""
        text = (
            f"`{prediction.layout}`: {bytes_text(peak)}{host}, "
            f"{seconds_text(prediction.step_time_s)} a step"
        )
        fits = True
    row = f"| {question.words} | `{question.command}` | {text} | {question.published} |"
    return row, fits == question.fits


def _options(question: Question) -> dict[str, Any]:
    lists = {"lora", "allow", "fix"}
    return {
        name: [value] if name in lists and isinstance(value, str) else value
        for name, value in question.options.items()
    }


def page() -> str:
    """Return the page."""
    rows = [answer_row(question) for question in QUESTIONS]
    right = sum(is_right for _, is_right in rows)
    lines = [
        "# Fine-tuning as people ask for it",
        "",
        f"`python benchmarks/fine_tuning.py`, {datetime.date.today():%Y-%m-%d}, on no device: "
        "figures are predictions beside what others published.",
        "",
        f"## Questions: {right} of {len(rows)} answered as published runs or arithmetic say",
        "",
        "| question | command | answer | published |",
        "|---|---|---|---|",
        *(row for row, _ in rows),
        "",
        "## Published runs whose layout is known",
        "",
        "Qwen's are sizes that a device reports, torchtune's the peak that PyTorch allocated. "
        "Qwen's weights in 4 bits are restored by AutoGPTQ, in several operators of PyTorch for "
        "each product (`--framework transformers+unfused-dequantization`); the default is "
        "bitsandbytes' one kernel. Qwen's queries, keys and values are one product with one "
        "adapter, three here. torchtune's LoRA on one RTX 4090 needs 135 TFLOP/s through the whole "
        "step, 82 % of the peak; products are priced at 83 %, and all else beside them.",
        "",
        "| run | GiB | published | off | seconds of a step | published | off |",
        "|---|---|---|---|---|---|---|",
    ]
    memory: list[float] = []
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for run in published_runs(Path(folder)):
            prediction = predicted(run)
            peak = prediction.memory_bytes(run.kind, "fullest")
            off_bytes = peak / run.memory_bytes - 1
            off_s = prediction.step_time_s / run.step_s - 1
            memory.append(abs(off_bytes))
            times.append(abs(off_s))
            lines.append(
                f"| {run.source}: {run.what} | {peak / GIB:.1f} | {run.memory_bytes / GIB:.1f} | "
                f"{off_bytes:+.0%} | {prediction.step_time_s:.2f} | {run.step_s:.2f} | "
                f"{off_s:+.0%} |"
            )
    lines += [
        "",
        f"Median error of memory {statistics.median(memory):.0%}, of time "
        f"{statistics.median(times):.0%}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page; 1 if a question is answered wrongly."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=PAGE)
    output: Path = parser.parse_args().output
    text = page()
    write_text(text, output)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
