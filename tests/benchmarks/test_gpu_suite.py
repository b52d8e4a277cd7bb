"""benchmarks/gpu/suite.py goes on where it was cut, and its report says what the lines say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import report, suite, versus
from benchmarks.gpu.suite import CASES, Case, read_lines, todo
from meshwright.planner.architectures.parameters import graph_of
from meshwright.planner.catalog import accelerators
from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.costs.predict import predict
from meshwright.planner.frameworks.native_limits import refusal

A, B, TWO = (
    Case(name="a", seconds=90),
    Case(name="b", seconds=30),
    Case(name="2", seconds=1, devices=2),
)


@pytest.mark.parametrize(
    ("lines", "devices", "left_s", "expected"),
    [
        ([], 1, 540, A),
        ([], 1, 20, B),  # a third of the first does not fit
        ([{"case": "a", "done": True}], 1, 540, B),
        ([{"case": "a", "key": "x", "failed": "a row's, not the case's"}], 1, 540, A),
        ([{"case": "a", "failed": "no"}], 1, 540, B),  # tried again behind all others
        ([{"case": "a", "failed": "no"}, {"case": "b", "done": True}], 1, 540, A),
        ([{"case": "a", "failed": "no"}] * 2 + [{"case": "b", "done": True}], 1, 540, None),
        ([{"case": "a", "cut": True}], 1, 540, A),
        ([{"case": c, "done": True} for c in "ab"], 1, 540, None),
        ([{"case": c, "done": True} for c in "ab"], 4, 540, TWO),
    ],
)
def test_the_most_valuable_case_comes_first(
    lines: list[dict[str, Any]], devices: int, left_s: float, expected: Case | None
) -> None:
    assert todo(lines, devices, left_s, (A, B, TWO)) == expected


def test_half_a_line_is_no_line(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text('{"case": "a", "done": true}\n{"case": "b", "se')

    assert read_lines(tmp_path / "lines") == [{"case": "a", "done": True}]
    assert read_lines(tmp_path / "none") == []


@pytest.mark.matrix
def test_a_dry_run_goes_on_at_the_row_that_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lines.jsonl"
    known = {"case": "products", "key": "float32 64 x 64 x 64", "flops_per_s": 1.0}
    file.write_text(json.dumps(known) + "\n")

    suite.main(["--tiny", "--seconds", "100", "--cases", "products", "--out", str(tmp_path)])

    lines = read_lines(file)
    assert lines[0] == known
    assert [line["key"] for line in lines[1:-1]] == [
        "float32 16 x 64 x 64",
        "float32 128 x 128 x 128",
        "float32 32 x 128 x 128",
    ]
    assert all(line["flops_per_s"] > 0 for line in lines[1:-1])
    assert lines[-1]["done"]
    assert "1 of 1 cases done" in capsys.readouterr().out


def seconds(value: float) -> list[float]:
    return [value * factor for factor in (0.5, 1.0, 7.0)]


def test_a_report_has_the_curve_that_was_measured() -> None:
    entry = accelerators()["h100-sxm-80gb"]
    peak, width = entry.peak_flops["bf16"], entry.memory_bytes_per_s

    def row(case: str, key: str, **found: Any) -> dict[str, Any]:
        return {"case": case, "key": key, **found}

    attention = "attention forward and backward 8192 x 128"
    lines = [
        row("machine", "versions", device=entry.driver_names[0], date="2026-01-02", torch="2"),
        row("products", "bfloat16 256 x 256 x 256", flops_per_s=0.1 * peak),
        row("products", "bfloat16 8192 x 8192 x 8192", flops_per_s=0.7 * peak),
        row("kernels", "launch", seconds=seconds(4e-6)),
        row("kernels", "norm", bytes=0.8 * width, seconds=seconds(1.0)),
        row("kernels", "attention forward 8192 x 128", flops=0.5 * peak, seconds=seconds(1.0)),
        row("kernels", attention, flops=1.3 * peak, seconds=seconds(3.0)),
        row("products", "head of 50257 columns", flops_per_s=0.05 * peak),
        row("compile", "none", eager={"seconds": seconds(2.0), "predicted_s": 2.5},
            compiled={"seconds": seconds(1.5), "first_s": 30.0, "predicted_s": 1.2}),
        row("plans", "a plan", measured_s=seconds(2.0), predicted_s=1.8, allocated_bytes=100.0,
            predicted_bytes=110.0, reserved_bytes=130.0),
        row("layouts", "ZeRO-3", measured_s=[1.0, 3.0, 2.0], predicted_s=1.0, allocated_bytes=100.0,
            predicted_bytes=150.0),
        row("collectives", "2 ranks", curves=[{"operation": "all_reduce", "points": [
            {"size_bytes": 2**10, "seconds": 1e-3, "predicted_s": 1.1e-3},
            {"size_bytes": 2**20, "seconds": 0.2, "predicted_s": 0.1}]}]),
        row("two nodes", "ZeRO-3", measured_s=[1.0], predicted_s=0.5),
        row("equality", "bad", failed="Traceback\nValueError: no"),
    ]  # fmt: skip

    text = report.page(report.Lines(lines))

    assert "launch_s: 4e-06, matmul: 0.7, attention_forward: 0.5" in text
    assert "attention_backward: 0.4, memory: 0.8" in text
    assert "| compiled / eager step, recompute none | 0.75 |" in text
    assert f"| both passes of a head of 50257 columns | {0.05 * peak:.3g} |" in text
    assert "| none | eager | 2 s | 2.5 s | +25.0 % |" in text
    assert "| none | compiled | 1.5 s | 1.2 s | -20.0 % |" in text
    assert "-10.0 %" in text
    assert "+10.0 %" in text
    assert "| ZeRO-3 | 2 s | 1 s | -50.0 % | 100 B | 150 B | +50.0 % |" in text
    assert "| 2 ranks | all_reduce | 1.0 KiB | 1 ms | 1.1 ms | +10.0 % |" in text
    assert "| 2 ranks | all_reduce | 1.0 MiB | 200 ms | 100 ms | -50.0 % |" in text
    assert "Two launchers, ZeRO-3: step, predicted, error: 1 s | 500 ms | -50.0 %" in text
    assert "- equality, bad: ValueError: no" in text
    assert f"Not done: {', '.join(case.name for case in CASES)}." in text


def test_contestants_take_turns_and_the_table_compares_with_the_fastest_other() -> None:
    work = versus.Work(model="gpt2", seq_len=100, samples=10)
    first = [name for _, turn, name in versus.turns([work], 2) if turn == 0]
    assert first == list(versus.CONTESTANTS)

    def line(case: str, **found: Any) -> dict[str, Any]:
        return {"key": work.key, "turn": 0, "case": case} | found

    measured = {"first_s": 9.0, "peak_bytes": 2**30}
    lines = [
        line("plain", seconds=[2.0, 2.0, 90.0], trained=9_000_000, **measured),
        line("trainer", seconds=[4.0], trained=8_000_000, **measured),
        line("launch", seconds=[1.0], predicted_s=0.9, predicted_bytes=2**29, mfu=0.5, **measured),
        line("torchtitan", failed="Traceback\nModuleNotFoundError: No module named 'torchtitan'"),
        line("launch eager", failed="Traceback\nOSError: no room"),
    ]

    text = versus.table(lines, [work])

    assert "| gpt2, 10 x 100 | launch | 1 s | 1,000 | 45.0 % | 2.00 | 1.0 GiB | 9 s |" in text
    # Trains other weights than the plain loop: 8 for 9 million.
    other = "trainer (trains 8 M parameters)"
    assert f"| gpt2, 10 x 100 | {other} | 4 s | 250 | 11.2 % | 0.50 | 1.0 GiB | 9 s |" in text
    assert "|  | predicted | 900 ms (-10 %) |  | 50.0 % |  | 512.0 MiB |  |" in text
    assert "| gpt2, 10 x 100 | launch eager | OSError: no room |" in text
    assert "| torchtitan | ModuleNotFoundError: No module named 'torchtitan' |" in text


@pytest.mark.matrix
def test_a_dry_run_of_several_ranks_predicts_and_measures_every_layout(tmp_path: Path) -> None:
    """Over gloo, on a CPU."""
    cases = "collectives,layouts,two nodes"
    suite.main(["--tiny", "--devices", "2", "--cases", cases, "--out", str(tmp_path)])

    lines = [line for line in read_lines(tmp_path / "lines.jsonl") if "key" in line]
    assert not [line for line in lines if "failed" in line]
    names = [line["key"] for line in lines if line["case"] == "layouts"]
    assert names == ["ZeRO-3", "tensor, async", "pipeline", "experts", "context", "tensor"]
    for line in lines:
        points = (
            [line] if "curves" not in line else [p for c in line["curves"] for p in c["points"]]
        )
        assert all(point["predicted_s"] > 0 for point in points)


@pytest.mark.matrix
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_layouts_of_a_device_are_plans_that_fit_and_that_the_runtime_executes(devices: int) -> None:
    """In full size, for as many H100 as a node has."""
    from benchmarks.gpu import suite_ranks

    cluster = resolve_cluster(f"1x{devices}xh100-sxm-80gb")
    at = suite_ranks.Setting(device="cpu", devices=devices, tiny=False, out=Path())
    for name, model_name, chosen in suite_ranks.measured_layouts(devices):
        model, layout = suite_ranks._sized(model_name, chosen, at)
        plan = suite_ranks.layout_plan(model, layout, 2048, batch=16, cluster=cluster.name)
        assert plan.mesh.devices == devices, name
        assert refusal(model, cluster, plan.job, plan.layout) is None, name
        assert predict(plan, model, cluster).fits, name
    small = graph_of(at.small, name="small")
    for layout in suite_ranks.LAYOUTS:  # which are compared with one process
        plan = suite_ranks.layout_plan(small, layout)
        if plan.mesh.devices == devices:
            assert refusal(small, cluster, plan.job, plan.layout) is None, layout


@pytest.mark.parametrize("devices", ["1", "0"])
def test_the_cases_of_several_ranks_take_two_or_more(devices: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"--devices {devices}: takes 2 or more"):
        suite.main(["--tiny", "--devices", devices, "--out", str(tmp_path)])


@pytest.mark.matrix
def test_every_contestant_trains_in_a_dry_run(tmp_path: Path) -> None:
    versus.main(["--tiny", "--steps", "1", "--rounds", "1", "--out", str(tmp_path)])

    lines = read_lines(tmp_path / "versus.jsonl")
    assert len(lines) == len(versus.TINY_WORKS) * len(versus.CONTESTANTS)
    failures = {line["case"]: line["failed"] for line in lines if "failed" in line}
    # Not among the packages that tests need; where it is installed, it trains.
    assert "No module named 'torchtitan'" in failures.pop(
        "torchtitan", "No module named 'torchtitan'"
    )
    assert not failures


@pytest.mark.matrix
def test_the_page_of_measured_devices_is_what_its_figures_say() -> None:
    """The page has figures of the present planner too: write it again where they changed."""
    from benchmarks.gpu import page

    assert page.PAGE.read_text() == page.page(json.loads(page.FIGURES.read_text()))
