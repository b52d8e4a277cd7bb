"""CPU seconds and memory of `plan FOLDER:recorded`, for model types at the size of their release.

    python -m benchmarks.recorded_sizes [model_type ...]          # lines, one a type
    python -m benchmarks.recorded_sizes --page > docs/results/recorded.md

Configurations have the sizes of a checkpoint in `recorded_sizes.yaml`, or are the
defaults of transformers' own class, which names the checkpoint that they are of.  Each is planned
in a process of its own without weights and without a network, on samples of 4,096 tokens or as many
as it has positions; its peak of resident bytes and its CPU seconds are those that the system
counted for the process.  Lines are kept in `benchmarks/results/recorded_sizes.csv`, so that it may
run in pieces.
"""

from __future__ import annotations

import csv
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

LINES = Path(__file__).parent / "results" / "recorded_sizes.csv"
MOST_CPU_S = 60
MOST_BYTES = 1.5e9
STOPPED_S = 200
"""CPU seconds after which a process is ended."""
RELEASED: Mapping[str, Mapping[str, Any]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text()
)
"""Checkpoint and figures of the types whose defaults are other ones."""
TYPES = (
    "nemotron_h qwen3_5_text jamba falcon_h1 olmo_hybrid kimi_linear zamba2 longcat_flash "
    "gemma3n_text xlstm qwen3_5_moe_text bamba falcon_mamba recurrent_gemma deepseek_v32 "
    "qwen3_next olmoe minimax_m2 minimax granitemoehybrid mamba gemma4_text glm_moe_dsa "
    "mimo_v2_flash lfm2_moe dbrx jetmoe modernbert-decoder lfm2 smollm3 exaone4 falcon bloom "
    "opt mpt gptj gpt_neox gpt_neo codegen stablelm persimmon starcoder2 olmo apertus arcee "
    "bitnet cohere cohere2 ctrl cwm diffllama doge dots1 ernie4_5 ernie4_5_moe exaone_moe "
    "flex_olmo glm glm4 granitemoe granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe "
    "minicpm3 nanochat phimoe seed_oss solar_open vaultgemma xglm afmoe "
    "jais2 ministral internlm3 "
)
LARGE = (
    "deepseek_v32 dots1 exaone_moe glm_moe_dsa longcat_flash mimo_v2_flash minimax minimax_m2 "
    "solar_open"
)
CLUSTERS = ("8x8xh100-sxm-80gb", "64x8xh100-sxm-80gb")
"""Clusters of all types, and of those that are too large for it."""
COLUMNS = ("type", "checkpoint", "billions", "layers", "cpu_s", "peak_gb", "answer")


def _line(kind: str) -> dict[str, str]:
    """Plan one type in a process of its own, and return what it took."""
    import transformers  # noqa: PLC0415 - not for the page

    released = RELEASED.get(kind, {})
    whole = transformers.AutoConfig.for_model(kind, **released.get("config", {}))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / kind
        whole.save_pretrained(folder)
        command = (sys.executable, "-m", "meshwright", "plan", f"{folder}:recorded")
        asked = (
            f"--cluster {CLUSTERS[kind in LARGE.split()]} --seq-len {_positions(whole)} "
            "--global-batch 512 --json"
        )
        out, errors = Path(place) / "out", Path(place) / "errors"
        with out.open("w") as answer, errors.open("w") as said:
            process = subprocess.Popen(
                (*command, *asked.split()),
                stdout=answer,
                stderr=said,
                cwd=place,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
            )
            resource.prlimit(process.pid, resource.RLIMIT_CPU, (STOPPED_S, STOPPED_S))
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        layers, billions, words = _answer(out.read_text(), errors.read_text(), place)
    return {
        "type": kind,
        "checkpoint": released.get("checkpoint") or f"defaults, {_checkpoint(type(whole))}",
        "billions": billions,
        "layers": layers,
        "cpu_s": f"{usage.ru_utime + usage.ru_stime:.0f}",
        "peak_gb": f"{usage.ru_maxrss * 1024 / 1e9:.2f}",
        "answer": words,
    }


def _positions(config: Any) -> int:
    """Return the tokens of a sample: 4,096, or as many as the model has positions."""
    names = ("max_position_embeddings", "max_seq_len")
    most = [getattr(config, name, None) for name in names]
    return min([4096, *(number for number in most if isinstance(number, int) and number > 0)])


def _checkpoint(config_class: type) -> str:
    import inspect  # noqa: PLC0415 - not for the page

    found = re.search(r'checkpoint="([^"]+)"', inspect.getsource(config_class))
    return found.group(1) if found else ""


def _answer(text: str, said: str, place: str) -> tuple[str, str, str]:
    """Return layers, billions of parameters, and the layout or the reason that there is none."""
    try:
        answer = json.loads(text)
    except ValueError:
        reason = " ".join((text + said).split()).replace(f"{place}/", "")
        return "", "", f"no answer: {reason[-160:]}"
    if "plan" not in answer:
        return "", "", " ".join(str(answer.get("message", answer)).split()).replace(place, "")[:300]
    layers = answer["plan"]["model"]["graph"]["layers"]
    parameters = sum(layer["parameters"] * layer.get("repeat", 1) for layer in layers)
    return str(len(layers)), f"{parameters / 1e9:.1f}", answer["layout"]


def _kept() -> dict[str, dict[str, str]]:
    if not LINES.exists():
        return {}
    with LINES.open() as file:
        return {row["type"]: row for row in csv.DictReader(file)}


def _keep(row: dict[str, str]) -> None:
    rows = _kept() | {row["type"]: row}
    with LINES.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[kind] for kind in sorted(rows))


def page() -> str:
    """Return the page of all lines that are kept."""
    rows = list(_kept().values())
    over = [
        row
        for row in rows
        if float(row["cpu_s"]) > MOST_CPU_S
        or float(row["peak_gb"]) * 1e9 > MOST_BYTES
        or not row["layers"]
    ]
    lines = [
        "# Models that are recorded, at the size of their release",
        "",
        f"`meshwright plan FOLDER:recorded` of {len(rows)} types of transformers, each in a "
        f"process of its own, without weights. {len(rows) - len(over)} are planned in at most "
        f"{MOST_CPU_S} CPU seconds and {MOST_BYTES / 1e9:g} GB; {len(TYPES.split()) - len(rows)} "
        "types of the list were not measured. The machine did other work meanwhile, on which "
        "CPU seconds depend. "
        "`python -m benchmarks.recorded_sizes --page` writes this page; configurations have "
        "the sizes of a checkpoint (`benchmarks/recorded_sizes.yaml`; two were compared with a "
        "published page, the others are not verified), or are the "
        "defaults of the library's class, with the checkpoint that it names.",
        "",
        "| type | checkpoint | billions | layers | CPU s | peak GB | answer |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        "| " + " | ".join(row[name].replace("|", "/") for name in COLUMNS) + " |" for row in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Plan the types that were named, or those that have no line; or print the page."""
    if "--page" in sys.argv:
        sys.stdout.write(page())
        return
    for kind in sys.argv[1:] or [kind for kind in TYPES.split() if kind not in _kept()]:
        row = _line(kind)
        _keep(row)
        print(*row.values(), flush=True)


if __name__ == "__main__":
    main()
