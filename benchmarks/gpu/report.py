"""What the lines of suite.py say: a page, a curve for the catalogue, figures for a framework.

    python benchmarks/gpu/report.py DIR [-o FILE.md]

Everything is a median of what was measured; what no line says is left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.suite import CASES, Line, read_lines  # noqa: E402
from meshwright.planner.catalog import AcceleratorEntry, accelerators  # noqa: E402
from meshwright.planner.documents.document import write_text  # noqa: E402
from meshwright.planner.documents.units import bytes_text, seconds_text  # noqa: E402

LARGEST = 0.5
"""Curves are of the better half of the sizes measured: small ones are bound by launches."""


class Lines:
    """The rows of every case that did not fail, by key."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.every = lines
        self.rows: dict[str, dict[str, Line]] = {}
        for line in lines:
            if "key" in line and "failed" not in line:
                self.rows.setdefault(line["case"], {})[line["key"]] = line

    def of(self, case: str) -> dict[str, Line]:
        return self.rows.get(case, {})

    @property
    def failed(self) -> list[Line]:
        return [line for line in self.every if "failed" in line]


def median_s(row: Line) -> float:
    return float(statistics.median(row["seconds"]))


def accelerator(lines: Lines) -> tuple[str, AcceleratorEntry] | None:
    """Return the catalogue's entry of the device, if it has one."""
    name = lines.of("machine").get("versions", {}).get("device")
    for key, entry in accelerators().items():
        if name in entry.driver_names:
            return key, entry
    return None


def curve(lines: Lines) -> dict[str, float]:
    """Return rates that the device reaches, and seconds of a launch.

    FLOPs and bytes are per second; `launch_s` is of kernels that wait for the host.
    """
    found: dict[str, float] = {}
    rates: dict[str, list[float]] = {}
    squares = {k: row for k, row in lines.of("products").items() if not k.startswith("head")}
    for key, row in squares.items():
        rates.setdefault(key.split()[0], []).append(row["flops_per_s"])
    for dtype, values in rates.items():
        best = sorted(values)[int(len(values) * LARGEST) :]
        found[f"matmul {dtype}"] = statistics.median(best)
    for key, row in lines.of("products").items():
        if key not in squares:
            found[f"both passes of a {key}"] = row["flops_per_s"]
    kernels = lines.of("kernels")
    if "launch" in kernels:
        found["launch_s"] = median_s(kernels["launch"])
    forward = [r for key, r in kernels.items() if key.startswith("attention forward ")]
    both = {key: r for key, r in kernels.items() if "and backward" in key}
    forward = [r for r in forward if r["key"] not in both]
    if forward:
        found["attention forward"] = max(r["flops"] / median_s(r) for r in forward)
    backwards = []
    for key, row in both.items():
        alone = kernels.get(key.replace("forward and backward", "forward"))
        if alone is not None and median_s(row) > median_s(alone):
            flops = row["flops"] - alone["flops"]
            backwards.append(flops / (median_s(row) - median_s(alone)))
    if backwards:
        found["attention backward"] = max(backwards)
    moved = [kernels[key] for key in ("norm", "add", "cast", "optimizer") if key in kernels]
    moved = [row for row in moved if row["seconds"]]
    if moved:
        found["memory"] = statistics.median(row["bytes"] / median_s(row) for row in moved)
    if "copies" in kernels:
        row = kernels["copies"]
        for way in ("to_device", "to_host"):
            found[way.replace("_", " ")] = row["bytes"] / statistics.median(row[f"{way}_s"])
        found["both ways"] = 2 * row["bytes"] / statistics.median(row["both_s"])
    return found


def entry_text(lines: Lines) -> Iterator[str]:
    """Yield the curve as the catalogue writes it, in fractions of the device's sheet."""
    known, rates = accelerator(lines), curve(lines)
    if known is None or "matmul bfloat16" not in rates or "memory" not in rates:
        return
    name, entry = known
    peak = entry.peak_flops["bf16"]
    date = lines.of("machine")["versions"]["date"]
    fractions = {
        "launch_s": rates["launch_s"],
        "matmul": rates["matmul bfloat16"] / peak,
        "attention_forward": rates["attention forward"] / peak,
        "attention_backward": rates["attention backward"] / peak,
        "memory": rates["memory"] / entry.memory_bytes_per_s,
    }
    figures = ", ".join(f"{key}: {value:.3g}" for key, value in fractions.items())
    yield f"  {name}:"
    yield f"    curve: {{{figures}, spread: 0.1,"
    yield f"      provenance: measured, source: 'benchmarks/gpu/suite.py, {date}'}}"
    if "to device" in rates:
        yield f"    host_link_bytes_per_s: {min(rates['to device'], rates['to host']):.3g}"


def framework_figures(lines: Lines) -> dict[str, float]:
    """Return what the framework `native` is described by: ratios of steps, kernels of a step."""
    found: dict[str, float] = {}
    for key, row in lines.of("compile").items():
        eager, made = median_s(row["eager"]), median_s(row["compiled"])
        found[f"compiled / eager step, recompute {key}"] = made / eager
        found[f"seconds of a compile, recompute {key}"] = row["compiled"]["first_s"]
    for key, row in lines.of("launches").items():
        if row["kernels"]:
            found[f"kernels of a step, {key}"] = row["kernels"]
    full = lines.of("loss").get("full")
    for key, row in lines.of("loss").items():
        if full is not None and key != "full":
            found[f"loss {key} / full, time"] = median_s(row) / median_s(full)
            if "bytes" in row:
                found[f"loss {key} / full, memory"] = row["bytes"] / full["bytes"]
    return found


def page(lines: Lines) -> str:
    """Return all of it as Markdown."""
    versions = lines.of("machine").get("versions", {})
    text = [
        f"# {versions.get('device', 'A device')}, {versions.get('date', '')}",
        "",
        f"`python benchmarks/gpu/suite.py`, torch {versions.get('torch')}, CUDA "
        f"{versions.get('cuda')}, {versions.get('devices', 1)} devices.",
        "",
    ]
    for key, row in lines.of("machine").items():
        if "works" in row and row["works"] is not True:
            text.append(f"- {key}: {row['works']}")
    text += _equality_tables(lines)
    text += [*_graphs_tables(lines), *_backends_table(lines)]
    for title, case in (
        ("Plans, predicted and measured", "plans"),
        ("Layouts of several devices, predicted and measured", "layouts"),
    ):
        if lines.of(case):
            text += ["", f"## {title}", ""]
            text += [
                "| plan | step | predicted | error | tensors | predicted | error | reserved "
                "| device |"
            ]
            text += ["|---|---|---|---|---|---|---|---|---|"]
            text += [_plan_row(key, row) for key, row in lines.of(case).items()]
    text += _several_tables(lines)
    if lines.of("edge"):
        text += [
            "",
            "## Largest micro-batch",
            "",
            "| recompute | predicted | found |",
            "|---|---|---|",
        ]
        text += [f"| {k} | {r['predicted']} | {r['found']} |" for k, r in lines.of("edge").items()]
    text += [*_compiled_table(lines), *_curve_table(curve(lines))]
    entry = list(entry_text(lines))
    if entry:
        text += ["", "For planner/catalog/accelerators.yaml:", "", "```yaml", *entry, "```"]
    figures = framework_figures(lines)
    if figures:
        text += ["", "## The framework `native`", "", "| figure | value |", "|---|---|"]
        text += [f"| {key} | {value:.3g} |" for key, value in figures.items()]
    for key, row in lines.of("ends").items():
        last = " ".join(row["said"].split())[-300:]
        text += ["", f"A rank {key}: the launch ended after {row['seconds']:.0f} s: {last}"]
    if lines.failed:
        text += ["", "## Failed", ""]
        text += [
            f"- {line['case']}, {line.get('key', 'as a whole')}: "
            f"{(line['failed'].strip().splitlines() or ['no words'])[-1][:200]}"
            for line in lines.failed
        ]
    done = {line["case"] for line in lines.every if line.get("done")}
    lacking = [case.name for case in CASES if case.name not in done]
    if lacking:
        text += ["", f"Not done: {', '.join(lacking)}."]
    return "\n".join([*text, ""])


def _equality_tables(lines: Lines) -> Iterator[str]:
    """Yield how far losses are from those of a host or one process, and gradients of a head."""
    for title, case in (
        ("Losses on the device against the host", "equality"),
        ("Ranks on devices of their own against one process", "ranks"),
        ("Two ranks on one device against one process", "shared device"),
    ):
        rows = lines.of(case)
        if rows:
            yield from (
                "",
                f"## {title}",
                "",
                "| plan | largest difference of a loss |",
                "|---|---|",
            )
            yield from (f"| {key} | {row['worst']:.1e} |" for key, row in rows.items())
    odd = {k: r for k, r in lines.of("equality").items() if "worst_gradient" in r}
    if odd:
        yield from (
            "",
            "| plan | largest difference of a gradient, of its norm | of |",
            "|---|---|---|",
        )
        yield from (
            f"| {key} | {row['worst_gradient']:.1e} | {row['worst_gradient_of']} |"
            for key, row in odd.items()
        )


def _graphs_tables(lines: Lines) -> Iterator[str]:
    """Yield whether captured micro-batches train to the same bits, and what they take."""
    rows = lines.of("graphs")
    if not rows:
        return
    yield from ("", "## Captured micro-batches", "", "| plan | same bits | replays | obstacle |")
    yield "|---|---|---:|---|"
    for key, row in rows.items():
        if "equal" in row:
            same = "yes" if row["equal"] else "NO"
            yield f"| {key} | {same} | {row['replays']} | {row['obstacle'] or ''} |"
    yield from ("", "| plan | step | predicted | error | obstacle |", "|---|---|---|---|---|")
    for key, row in rows.items():
        if "seconds" in row:
            yield f"| {key} | {_seconds_cells(median_s(row), row)} | {row['obstacle'] or ''} |"


def _backends_table(lines: Lines) -> Iterator[str]:
    """Yield the seconds and the rate of each backend, or why there is none."""
    rows = lines.of("backends")
    if rows:
        yield from ("", "## Backends", "", "| operator | both passes | rate |", "|---|---|---|")
    for key, row in rows.items():
        if "lacks" in row:
            yield f"| {key} | {row['lacks']} | |"
        else:
            rate = row["flops"] / median_s(row)
            yield f"| {key} | {seconds_text(median_s(row))} | {rate / 1e12:.3g} TFLOP/s |"


def _several_tables(lines: Lines) -> Iterator[str]:
    """Yield two launchers' step, and the smallest and largest message of each collective."""
    for key, row in lines.of("two nodes").items():
        cells = _seconds_cells(float(statistics.median(row["measured_s"])), row)
        yield from ("", f"Two launchers, {key}: step, predicted, error: {cells}")
    rows = lines.of("collectives")
    if rows:
        yield from ("", "## Collectives, measured and predicted", "")
        yield "| ranks | operation | size | seconds | predicted | error |"
        yield "|---|---|---|---|---|---|"
    for key, row in rows.items():
        for curve in row["curves"]:
            ends = (curve["points"][0], curve["points"][-1])
            for point in ends[: len(curve["points"])]:
                cells = _seconds_cells(point["seconds"], point)
                size = bytes_text(point["size_bytes"])
                yield f"| {key} | {curve['operation']} | {size} | {cells} |"


def _compiled_table(lines: Lines) -> Iterator[str]:
    rows = lines.of("compile")
    if rows:
        yield from ("", "## One micro-batch of llama-3.2-1b, eager and in compiled blocks", "")
        yield from ("| recompute | blocks | step | predicted | error |", "|---|---|---|---|---|")
    for key, row in rows.items():
        for blocks in ("eager", "compiled"):
            yield f"| {key} | {blocks} | {_seconds_cells(median_s(row[blocks]), row[blocks])} |"


def _curve_table(rates: Mapping[str, float]) -> Iterator[str]:
    if rates:
        yield from ("", "## What the device reaches", "", "| what | per second |", "|---|---|")
    for key, value in rates.items():
        yield f"| {key} | {seconds_text(value) if key == 'launch_s' else f'{value:.3g}'} |"


def _seconds_cells(measured_s: float, row: Line) -> str:
    """Return the cells of a step: as measured, as predicted, and what lies between."""
    predicted_s = row["predicted_s"]
    error = f"{100 * (predicted_s / measured_s - 1):+.1f} %"
    return f"{seconds_text(measured_s)} | {seconds_text(predicted_s)} | {error}"


def _plan_row(key: str, row: Line) -> str:
    step = float(statistics.median(row["measured_s"]))
    held = row["allocated_bytes"]
    cells = [
        key,
        _seconds_cells(step, row),
        bytes_text(held),
        bytes_text(row["predicted_bytes"]),
        f"{100 * (row['predicted_bytes'] / held - 1):+.1f} %",
    ]
    cells += [bytes_text(row[k]) if k in row else "" for k in ("reserved_bytes", "device_bytes")]
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args(argv)
    text = page(Lines(read_lines(args.folder / "lines.jsonl")))
    write_text(text, args.output or args.folder / "report.md")
    print(text)


if __name__ == "__main__":
    main()
