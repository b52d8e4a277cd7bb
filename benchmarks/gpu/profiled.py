"""`meshwright profile` on one device, for three model sizes; then a dozen plans of it predicted.

    PYTHONPATH=$PWD python benchmarks/gpu/profiled.py
    PYTHONPATH=$PWD python benchmarks/gpu/profiled.py --proof      a small model, on any machine

Every model is profiled on this device, the same twice (the second time from the cache), and the
plans of single_device.py are predicted from that profile and measured.  Writes a folder per model
with profile.yaml and single_device.py's table, and profiled.md: how long profiles took, what the
device reaches, and the errors.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from meshwright.planner.documents import document
from meshwright.planner.documents.profile import Profile

MODELS = {"gpt2": 1024, "qwen3-0.6b": 2048, "llama-3.2-1b": 2048}
"""Tokens of a sample by model."""
PROOF = {"demo-4m": 128}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--proof", action="store_true")
    parser.add_argument("--budget", default="3min")
    parser.add_argument("-o", "--output", default="benchmarks/results/gpu")
    args = parser.parse_args()
    rows = [
        one(model, seq_len, Path(args.output, model), args)
        for model, seq_len in (PROOF if args.proof else MODELS).items()
    ]
    document.write_text(markdown(rows), Path(args.output, "profiled.md"))
    print(markdown(rows))


def one(model: str, seq_len: int, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    file = folder / "profile.yaml"
    command = [sys.executable, "-m", "meshwright", "profile", model, "--cluster", "local:1"]
    command += ["--seq-len", str(seq_len), "--global-batch", "4", "--budget", args.budget]
    command += ["--precision", "fp32" if args.proof else "bf16", "-o", str(file)]
    seconds = []
    for again in (["--fresh"], []):
        begin = time.perf_counter()
        subprocess.run([*command, *again], check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - begin)
    plans = [sys.executable, str(Path(__file__).with_name("single_device.py"))]
    plans += ["--model", model, "--cluster", "local:1", "--seq-len", str(seq_len)]
    plans += ["--profile", str(file), "-o", str(folder)]
    subprocess.run(plans, check=True, stdout=subprocess.DEVNULL)
    measured = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    errors = {
        what: [
            abs(row[key] / found(row) - 1)
            for result in measured
            for row in result["rows"]
            if key in row and "failed" not in row
        ]
        for what, key, found in (
            ("step", "predicted_s", lambda row: statistics.median(row["measured_s"])),
            ("peak", "predicted_bytes", lambda row: row["measured_bytes"]),
        )
    }
    profile = document.read(Profile, file)
    return {
        "model": model,
        "first_s": seconds[0],
        "again_s": seconds[1],
        "settings": len(profile.layers),
        "device": profile.nodes[0].devices[0],
        "errors": errors,
        "findings": [finding.text for finding in profile.findings],
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "# Profiles of one device, and plans predicted from them",
        "",
        "| model | profile | again | settings | plans | step: median error | worst | peak: median "
        "error | worst |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = [row["model"], f"{row['first_s']:.0f} s", f"{row['again_s']:.1f} s"]
        cells += [str(row["settings"]), str(len(row["errors"]["step"]))]
        for what in ("step", "peak"):
            errors = row["errors"][what] or [float("nan")]
            cells += [f"{100 * statistics.median(errors):.1f} %", f"{100 * max(errors):.1f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    for row in rows:
        device = row["device"]
        copies = (device.host_to_device_bytes_per_s, device.device_to_host_bytes_per_s)
        lines += ["", f"{row['model']}: {device.name}, {(device.flops or 0) / 1e12:.3g} TFLOP/s"]
        if all(copies):
            lines[-1] += ", host to device and back " + " and ".join(
                f"{rate / 1e9:.3g} GB/s" for rate in copies
            )
        if device.reached_bytes:
            lines[-1] += f", {device.reached_bytes / 2**30:.1f} GiB could be taken"
        lines += [f"- {text}" for text in row["findings"]]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
