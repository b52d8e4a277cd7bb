"""Write docs/results/gpu.md from the figures of benchmarks/results/gpu.json.

    PYTHONPATH=$PWD python benchmarks/gpu/page.py

Each entry of the file is a machine on which suite.py ran, with its date; seconds, bytes and rates as
its report printed them, and predictions of that day.  Predictions of the present code are computed
here, for the catalogue's device and a host that nobody measured.
"""

# ruff: noqa: E501 - a paragraph of a page is one line

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.single_device import LEFT_OUT, Case
from benchmarks.gpu.suite_cases import MEASURED
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.document import write_text
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.units import bytes_text, seconds_text

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "benchmarks/results/gpu.json"
PAGE = ROOT / "docs/results/gpu.md"
Machine = dict[str, Any]

OPENING = """# Measured on one GPU

Written by `python benchmarks/gpu/page.py` from `benchmarks/results/gpu.json`. `benchmarks/gpu/suite.py` ran three times, each time for a quarter of an hour on one device of a virtual machine with 16 cores and driver 580.159, with torch 2.11.0+cu130 and CUDA 13.0. Nothing has been measured on several GPUs, and nothing beside other frameworks; the programs for both (`suite.py --devices N`, `versus.py`) have run on CPUs alone.
"""
FINDINGS = """## What was learned

- **A plan, launched.** `meshwright plan llama-3.2-1b --cluster local:1 --seq-len 2048 --global-batch 16`. On the H100 it answers in 2.3 s (one micro-batch of 16, compiled blocks, loss in chunks): 616 ms a step (552 to 678), MFU 44.2 %, 22 s of compiling; `meshwright launch` measured 583 and 578 ms in the two steps after the first one (5.5 % less), MFU 46.9 %; the first step took 18.3 s, and 39 s passed from the command to its end. On the H200 it answers in 2.1 s: 554 ms (496 to 608), 58.9 GiB; the launch took 515 to 541 ms in seven steps after the first one (526 ms; predicted 5.2 % above), MFU 51 to 53 %, 55.2 GiB (6.7 % below); the first step took 11.9 s, and 43 s passed from the command to its end.
- **The largest micro-batch** of llama-3.2-1b is predicted to one sample on both machines that looked for it.
- **Memory.** Tensors of nine of ten plans lie within 3.4 % of their prediction, seven within 0.4 %: 76 to 120 MB above it on the H100 and 81 MB in four, whatever the plan, probably workspaces of cuBLAS. What the device has beside the allocator's memory (context, kernels that were loaded) is 1.0 GB with products in tf32 and 1.4 GB in 16 bits, where 0.5 was assumed. Reserved memory lies 4 to 36 % above allocated where nothing presses.
- **Steps that wait for their host** take longer than predicted. One micro-batch of 2,048 tokens of llama-3.2-1b has 67 ms of kernels on the H200, eager or compiled, and takes 139 and 114 ms. The seconds that the planner gives a host for each kernel and unit were measured on a core without a device; these hosts take 2.5 to 3 times as long in every such row of llama, and 1.4 times in gpt2's of eight micro-batches (97 of 226 to 288 ms on the H100's device). A host that nobody measured is known to that factor alone, so the range of a step reaches to one that takes three times as long (`host.slowest` of the framework). Cores of the second H100's machine are slower than the first's: a launch takes 11.1 µs for 7.4, and a step that waits is longer by as much; its steps are predicted 24 to 68 % too short, and 14 of its 16 lie in their range with gpt2's head in parts; eager steps of one micro-batch without recompute and with full take 1 and 49 % more than the end of theirs. These runs had FSDP2 on one rank, whose hooks of 0.65 ms a unit and pass the predictions of that day include. With 1.5, 1.3 and 1.7 times all of these seconds the steps of gpt2 with eight micro-batches were predicted within 2 %, but llama's of one micro-batch stayed 27 to 57 % short with as much; in compiled blocks they took 38 to 48 ms more than predicted, whatever they recompute, so that FSDP2's 18 units are suspected rather than kernels. Whole parameters are not wrapped since: predictions of the present code are for steps without these hooks, and of steps that wait for their host no comparison with these runs. `--cluster local` measures how fast a host runs Python since, and seconds of the host follow; of these hosts nobody has. A profile replaces all of this.
- **Captured micro-batches** (`graphs: micro_batch`) are there for such steps since, and no device has run one: the case `graphs` of the suite and `launch graphs` of `versus.py` are for the day that one is there. Both ended in their dry runs on a CPU, where passes run as they are or a list of operators stands for a graph ([what was proven there](runtime-speed.md#captured-micro-batches)); so did `suite.py --devices 2` and `--devices 4` over gloo, six of six cases each (2026-11-29).
- **Recomputation by operator** (`selective`) in eager blocks asks Python about each operator: 17 µs each on the H100, 258 ms a step of four micro-batches; 7.1 ms a block and micro-batch more than none on the H200, and 2.8 ms with full, for the hooks of `torch.utils.checkpoint`. A block of negligible size on a CPU core says the same at the H200's host's pace (2.7 and 1.0 ms at pace 1), and eager layers are priced so (`host.checkpoint_s`, `host.selective_s`): with both, 14 of the 16 steps of the H200 lie in their predicted range, and without them 5. Compiled blocks do not ask.
- **Rows that begin off the grid.** gpt2 with one micro-batch of 16,384 tokens took 40 ms more than predicted on the H200 and 35 on the H100: its head has 50,257 columns, so that no row of the logits begins at a multiple of 16 bytes. Products whose output, or either operand, has such rows fall to kernels of an older kind: 124 TFLOP/s in bf16 where rows begin at multiples of 2 bytes and 265 at multiples of 4 or 8, for 720 on the grid; in tf32 125 at multiples of 4 and 8, for 272. Width and number of rows make no difference, nor does a number of rows off the grid. It is the size that counts, not only where a row begins: in a buffer whose rows lie on the grid, only one of the three products is fast (second H100).
- **gpt2's vocabulary in two parts.** Its head is multiplied as 50,256 outputs and one since (`runtime/techniques/aligned_linear.py`). Medians of five steps of 16 samples of 1,024 tokens as one micro-batch on the second H100: 88 ms for 115 in bf16 (92 for 119 with the loss in chunks) and 153 for 163 in tf32 (158 for 170), where 75, 69, 126 and 121 ms are predicted. Losses of seven steps on the same samples agree with those of whole products to 1.5e-5 in tf32 (1.8e-5 in chunks) and 3.7e-4 in bf16; in bf16 with chunks they lie up to 19 % apart, and with 8 micro-batches of one sample up to 10 % in bf16 and 0.3 % in tf32. These steps have no warmup, so losses rise in between and differences grow: on the host, where both ways agree to 1e-5 in bf16 on a smaller model, first weights that differ by 0.1 % end 2 % apart after seven steps. Gradients were not compared; the suite's `equality` has a model with such a vocabulary since, which no device has run.
- **Copies.** Activations on the host took 590 ms on the H100 and 574 on the H200 where 774 and 764 were predicted: the prediction moved what the loss saves too, a quarter of all bytes, which stays where it is, and had links at 80 % of their sheet, where 55 of 63 GB/s were measured (53 to 55 on the H100, 46 each way at once). Both are corrected.
- **Parameters on the host** took 12.0 s a step on the H100: FSDP2 copies the gradients of each micro-batch after the first into pageable memory, 14.8 GB at 2.0 GB/s (51 GB/s into pinned memory), while the host waits. The present code sums them after copies into pinned memory (`runtime/core/pinned_memory.py`, `sum_at_home`); losses equal the host's to 1.6e-8. Sums, norm and AdamW on 16 cores took 0.33, 0.39 and 0.23 s for 1.24 billion parameters: 134, 13 and 149 GB/s. On the H200 6.4 s with one thread of the host, which the suite had set; on the second H100 2.45 s with all cores, as a launch takes. Such parameters do not stay on the device between the passes of a micro-batch: 4.0 GiB are predicted without ZeRO-3, and 3.6 were measured (10.0 were predicted on the first day).
- **Attention in tf32 and fp32 with groups of heads** has no fused kernel (`torch.float32 grouped: No available kernel`, on all three). On the H100 scores were in memory: 33.8 instead of 25.7 GiB, and half of the step. Present layers of transformers repeat heads there, as the reference layers do (25.8 GiB on the H200).
- **Rates.** Products reach 0.743 of the H100's sheet where 0.735 had been fitted to published runs; attention 0.62 and 0.51 (torch chooses cuDNN's kernel), where 0.46 and 0.40 are assumed of FlashAttention 2.
- **Two ranks on one device** through gloo train like one process under ZeRO-3 and as replicas. Tensor and context groups hang there and stages end in their first send, which is gloo's: it has no such collectives for tensors on a device.
- **A profile** of llama-3.2-1b took 48 s of the two minutes it was given on the H200; a plan with it says 490 ms (422 to 557) for the launched step above.

| output projection, bf16, second H100, ms of x W^T, grad W, grad^T x | 50,257 | 50,258 | 50,260 | 50,264 | 50,304 |
|---|---|---|---|---|---|
| 16,384 rows of 768 | 13.2, 8.8, 8.2 | 5.1, 4.7, 4.6 | 5.1, 4.8, 4.7 | 2.0, 1.7, 1.7 | 2.1, 1.8, 1.8 |
| 4,096 rows of 4,096 | 17.6, 12.0, 11.5 | 5.9, 6.9, 6.2 | 5.9, 6.8, 6.1 | 2.3, 2.3, 2.6 | 2.5, 2.4, 2.5 |
| 16,384 rows of 768, tf32 | 9.8, 9.7, 10.7 | 9.7, 9.7, 10.8 | 3.8, 4.1, 6.1 | 3.7, 3.9, 6.0 | 3.7, 4.1, 6.1 |
"""


def steps(machine: Machine) -> Iterator[tuple[str, str, Plan, dict[str, float]]]:
    """Yield the measured steps of a machine: words, model, plan, figures."""
    cluster = f"1x{machine['catalog']}"
    for (model, seq_len, case), (words, row) in zip(
        MEASURED, machine["plans"].items(), strict=True
    ):
        assert words == f"{model} {case.text}", f"{words}: the suite has other plans"
        yield words, model, case.plan(resolve_model(model), cluster, seq_len), row
    for words, row in machine.get("compiled", {}).items():
        recompute, blocks = words.split(", ")
        model = "llama-3.2-1b"
        case = Case(micro_batches=1, recompute=(recompute,))
        plan = case.plan(resolve_model(model), cluster, 2048)
        plan = plan.model_copy(update={"compile": "block" if blocks == "compiled" else "none"})
        yield f"{model} {case.text}, {blocks} blocks", model, plan, row


def step_rows(machine: Machine) -> Iterator[list[str]]:
    """Yield cells: measured, predicted on that day, predicted now, whether its range has it."""
    cluster = resolve_cluster(f"1x{machine['catalog']}")
    for words, model, plan, row in steps(machine):
        prediction = predict(plan, resolve_model(model), cluster)
        measured_s, now_s = row["measured_s"], prediction.step_time_s
        covered = prediction.step_time_low_s <= measured_s <= prediction.step_time_high_s
        cells = [words, machine["machine"], seconds_text(measured_s)]
        cells.append(_with_error(row["predicted_s"], measured_s, seconds_text))
        cells.append(_with_error(now_s, measured_s, seconds_text))
        cells.append("yes" if covered else "no")
        yield cells


def memory_rows(machine: Machine) -> Iterator[list[str]]:
    """Yield cells: tensors as measured, predicted on that day and now, reserved, device."""
    cluster = resolve_cluster(f"1x{machine['catalog']}")
    for words, model, plan, row in steps(machine):
        if "tensors_bytes" not in row:
            continue
        parts = predict(plan, resolve_model(model), cluster).stages[0].memory_parts
        now_bytes = sum(size for part, size in parts.items() if part not in LEFT_OUT)
        measured_bytes = row["tensors_bytes"]
        cells = [words, machine["machine"], bytes_text(measured_bytes)]
        cells.append(_with_error(row["predicted_bytes"], measured_bytes, bytes_text))
        cells.append(_with_error(now_bytes, measured_bytes, bytes_text))
        cells += [bytes_text(row[name]) for name in ("reserved_bytes", "device_bytes")]
        yield cells


def _with_error(predicted: float, measured: float, text_of: Any) -> str:
    return f"{text_of(predicted)} ({100 * (predicted / measured - 1):+.1f} %)"


def beside(machines: Sequence[Machine], field: str, text_of: Any) -> Iterator[str]:
    """Yield a table with a column for each machine that has figures of a field."""
    there = [machine for machine in machines if machine.get(field)]
    yield f"| | {' | '.join(machine['machine'] for machine in there)} |"
    yield "|---|" + "---:|" * len(there)
    for key in dict.fromkeys(key for machine in there for key in machine[field]):
        cells = [text_of(key, m[field][key]) if key in m[field] else "" for m in there]
        yield f"| {key} | {' | '.join(cells)} |"


def page(machines: Sequence[Machine]) -> str:
    """Return the page."""
    text = [OPENING, "| | device | date | minutes |", "|---|---|---|---:|"]
    text += [f"| {m['machine']} | {m['device']} | {m['date']} | {m['minutes']} |" for m in machines]
    text += ["", FINDINGS]
    for title, headings, rows in (
        (
            "Steps, measured and predicted",
            "plan | machine | step | predicted on that day | predicted now | in its range",
            step_rows,
        ),
        (
            "Memory, measured and predicted",
            "plan | machine | tensors | predicted on that day | predicted now | reserved | device",
            memory_rows,
        ),
    ):
        columns = headings.count("|") + 1
        text += [f"## {title}", "", f"| {headings} |", "|---|---|" + "---:|" * (columns - 2)]
        text += [f"| {' | '.join(cells)} |" for machine in machines for cells in rows(machine)]
        text.append("")
    for title, field, text_of in (
        ("Largest difference of a loss, device against host", "losses", _difference),
        ("The same, two ranks on one device against one process", "shared_device_losses", _difference),
        ("Largest micro-batch, predicted and measured", "largest_micro_batch", _both),
        ("What the devices reach, per second", "rates", _rate),
        ("The framework `native`", "framework", _figure),
    ):  # fmt: skip
        text += [f"## {title}", "", *beside(machines, field, text_of), ""]
    text += ["## Failed", ""]
    text += [f"- {m['machine']}: {words}" for m in machines for words in m.get("failed", [])]
    return "\n".join([*text, ""])


def _difference(_: str, value: float) -> str:
    return f"{value:.1e}"


def _both(_: str, value: dict[str, int]) -> str:
    return f"{value['predicted']}, {value['measured']}"


def _rate(key: str, value: float) -> str:
    return seconds_text(value) if key == "launch_s" else f"{value:.3g}"


def _figure(_: str, value: float) -> str:
    return f"{value:.3g}"


if __name__ == "__main__":
    write_text(page(json.loads(FIGURES.read_text())), PAGE)
