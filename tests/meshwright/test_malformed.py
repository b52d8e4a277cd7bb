"""Wrong input of any kind gives one clear message with the place and the way out, and exit 1."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright import cli

MODEL = {
    "format": 1,
    "name": "toy",
    "source": "toy.py:factory",
    "layers": [
        {"name": "embedding", "kind": "embedding", "parameters": 1000},
        {"name": "block", "kind": "block", "repeat": 2, "parameters": 5000},
        {"name": "head", "kind": "head", "parameters": 1000},
    ],
}
CLUSTER = {
    "format": 1,
    "name": "two",
    "groups": [
        {
            "name": "cpus",
            "nodes": 1,
            "devices_per_node": 2,
            "accelerator": {
                "name": "cpu",
                "kind": "cpu",
                "memory_bytes": 2**30,
                "peak_flops": {"fp32": 5e10},
                "memory_bytes_per_s": 1e10,
                "curve": {
                    "launch_s": 1e-5,
                    "matmul": 0.8,
                    "attention_forward": 0.3,
                    "attention_backward": 0.3,
                    "memory": 0.7,
                    "spread": 0.3,
                    "provenance": "quoted",
                    "source": "a test",
                },
            },
        }
    ],
    "tiers": [{"name": "memory", "devices": 2, "latency_s": 1e-4, "bytes_per_s": 1e9}],
}
PLAN = {
    "format": 1,
    "model": {"name": "demo-4m", "source": "demo-4m", "digest": "sha256:0123456789abcdef"},
    "cluster": "local:2",
    "seq_len": 128,
    "global_batch": 8,
    "precision": "fp32",
    "mesh": {"pipeline": 2},
    "zero": 0,
    "schedule": "1f1b",
    "micro_batch": 1,
    "micro_batches": 8,
    "stages": [{"layers": [{"layer": "a"}]}, {"layers": [{"layer": "b"}]}],
}
BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n"


def changed(document: dict[str, Any], path: str, value: object) -> str:
    """Return the document as YAML with one place changed; `...` deletes it."""
    copy = json.loads(json.dumps(document))
    *way, last = [int(step) if step.isdecimal() else step for step in path.split(".")]
    place = copy
    for step in way:
        place = place[step]
    if value is ...:
        del place[last]
    else:
        place[last] = json.loads(json.dumps(value))  # a copy: aliases would be refused
    return yaml.safe_dump(copy)


def model_with(path: str, value: object) -> tuple[dict[str, str], list[str]]:
    files = {"model.yaml": changed(MODEL, path, value)}
    return files, ["plan", "model.yaml", "--cluster", "8xh100-sxm-80gb"]


def cluster_with(path: str, value: object) -> tuple[dict[str, str], list[str]]:
    files = {"cluster.yaml": changed(CLUSTER, path, value)}
    return files, ["plan", "demo-4m", "--cluster", "cluster.yaml"]


def plan_with(path: str, value: object) -> tuple[dict[str, str], list[str]]:
    return {"plan.yaml": changed(PLAN, path, value)}, ["predict", "plan.yaml"]


def plan_text(text: str) -> tuple[dict[str, str], list[str]]:
    return {"plan.yaml": text}, ["launch", "plan.yaml"]


def call(*arguments: str) -> tuple[dict[str, str], list[str]]:
    return {}, list(arguments)


H100 = ("--cluster", "8xh100-sxm-80gb")
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 256,
}


def config_with(**values: object) -> tuple[dict[str, str], list[str]]:
    text = json.dumps({key: v for key, v in {**CONFIG, **values}.items() if v is not ...})
    return {"config.json": text}, ["plan", "config.json", *H100]


SKYPILOT = "InstanceType,AcceleratorName,AcceleratorCount,Price,SpotPrice,Region"
IMPORT = ["catalog", "prices", "--import", "p.csv"]


def study_with(**parts: object) -> tuple[dict[str, str], list[str]]:
    study = {"name": "s", "models": ["gpt2"], "offers": [{"cluster": "8xh100-sxm-80gb"}], **parts}
    return {"study.yaml": yaml.safe_dump(study)}, ["whatif", "study.yaml"]


def quantity(value: float) -> dict[str, object]:
    return {"value": value, "low": value, "high": value, "source": "a test"}


def prices(price: str, *arguments: str) -> tuple[dict[str, str], list[str]]:
    return {"p.csv": f"{SKYPILOT}\nx,H100,8,{price},,us\n"}, [*IMPORT, *arguments]


def test_the_documents_that_the_cases_break_are_right() -> None:
    from meshwright.planner.documents.cluster import ClusterSpec
    from meshwright.planner.documents.model import ModelGraph
    from meshwright.planner.documents.plan import Plan

    assert ModelGraph.of(MODEL) and ClusterSpec.of(CLUSTER) and Plan.of(PLAN)


CASES = {
    "unknown model": (call("plan", "lama-3.1-8b", *H100), "llama-3.1-8b"),
    "unknown accelerator": (call("plan", "gpt2", "--cluster", "8xh1000-sxm"), "h100-sxm-80gb"),
    "no devices": (call("plan", "gpt2", "--cluster", "0xh100-sxm-80gb"), "0xh100"),
    "cluster of nonsense": (call("plan", "gpt2", "--cluster", "8x"), "8x"),
    "negative sequence": (call("plan", "gpt2", *H100, "--seq-len", "-5"), "seq-len"),
    "zero batch": (call("plan", "gpt2", *H100, "--global-batch", "0"), "global-batch"),
    "indivisible batch": (
        call("plan", "gpt2", *H100, "--global-batch", "3", "--fix", "tp=1,pp=1,cp=1,dp=8"),
        "global batch",
    ),
    "a batch that no framework's layout divides": (
        call("plan", "gpt2", *H100, "--global-batch", "11", "--framework", "fsdp"),
        "ask for a global batch that the devices divide, such as 8 or 16, or fix less",
    ),
    "no tokens in a sample": (
        call("plan", "gpt2", "--cluster", "8xh100-sxm-80gb+8xa100-sxm-80gb", "--seq-len", "0"),
        "seq-len is 0",
    ),
    "a folder to write to": (call("plan", "gpt2", *H100, "-o", "."), "Is a directory"),
    "more plans than anyone reads": (
        call("plan", "gpt2", *H100, "--top", "16777216"),
        "top is 16777216; it is a whole number from 1 to 1,000",
    ),
    "no processes": (
        call("whatif", "--model", "gpt2", "--clusters", "local", "--processes", "-1"),
        "processes is -1",
    ),
    "more samples than a schedule lists": (
        call("plan", "gpt2", *H100, "--global-batch", "1000003"),
        "micro_batches is 1000003",
    ),
    "more samples than anyone trains on": (
        call("plan", "gpt2", *H100, "--global-batch", "1000000000000000000"),
        "global-batch",
    ),
    "pin of 5,000 digits": (call("plan", "gpt2", *H100, "--fix", "tp=" + "9" * 5000), "tp=999"),
    "a name longer than any file's": (call("predict", "9" * 300 + ".yaml", *H100), "9999"),
    **{
        f"{flag} {value}": (
            call("whatif", "--model", "gpt2", "--clusters", "8xh100-sxm-80gb", flag, value),
            f"{flag.removeprefix('--')} is ",
        )
        for flag in ("--tokens", "--deadline-days", "--budget", "--power-cap")
        for value in ("0", "-1", "nan", "inf", "1e308")
    },
    "what-if of too many samples": (
        call(
            "whatif",
            "--model",
            "gpt2",
            "--clusters",
            "8xh100-sxm-80gb",
            "--tokens",
            "1e9",
            "--global-batch",
            str(2**64),
        ),
        "global-batch is 18446744073709551616",
    ),
    "study of too many samples": (study_with(work={"global_batch": 2**64}), "work.global_batch"),
    "every hour lost": (
        study_with(assumptions={"failures": {"other": quantity(1.0)}}),
        "assumptions.failures.other.value is 1.0",
    ),
    "a residual above the price": (
        study_with(assumptions={"owning": {"residual_by_age": [1.3]}}),
        "assumptions.owning.residual_by_age[0] is 1.3",
    ),
    "no goodput": (
        study_with(assumptions={"goodput": quantity(0.0)}),
        "assumptions.goodput.value is 0.0",
    ),
    "prices without a date": (prices("1.0", "--date", ""), "date is empty"),
    "prices of nobody": (prices("1.0", "--date", "x", "--provider", " "), "provider is empty"),
    "endless prices": (prices("inf", "--date", "2026-01"), "no row with a known accelerator"),
    "prices without cells": (
        ({"p.csv": f"{SKYPILOT}\nx,H100\n"}, [*IMPORT, "--date", "2026-01"]),
        "no row with a known accelerator",
    ),
    "a table without end": (call("validate", "/dev/zero"), "is no regular file"),
    "prices without end": (
        call("catalog", "prices", "--import", "/dev/zero", "--date", "2026-01"),
        "/dev/zero is no regular file",
    ),
    "a document without end": (call("solve", "/dev/zero"), "/dev/zero is no regular file"),
    "a folder as a table": (call("validate", "/"), "cannot be read: Is a directory"),
    "unknown pin": (call("plan", "gpt2", *H100, "--fix", "tensr=2"), "tensr"),
    "pin of nonsense": (call("plan", "gpt2", *H100, "--fix", "tp=two"), "tp=two"),
    "pin that nothing meets": (call("plan", "gpt2", *H100, "--fix", "tp=3"), "layout"),
    "ZeRO-4": (call("plan", "gpt2", *H100, "--fix", "zero=4"), "zero=4"),
    "missing cluster file": (call("plan", "gpt2", "--cluster", "no.yaml"), "no.yaml"),
    "missing profile": (call("plan", "gpt2", *H100, "--profile", "no.yaml"), "no.yaml"),
    "missing plan": (call("launch", "no.yaml"), "no.yaml"),
    "missing problem": (call("solve", "no.json"), "no.json"),
    "missing factory file": (call("plan", "no.py:factory", *H100), "no.py"),
    "config without heads": (config_with(num_attention_heads=...), "num_attention_heads"),
    "config with negative size": (config_with(hidden_size=-64), "hidden_size"),
    "config with words for numbers": (config_with(num_hidden_layers="two"), "num_hidden_layers"),
    "config of an unknown family": (config_with(model_type="rnn"), "rnn"),
    "config that is a list": (({"config.json": "[]"}, ["plan", "config.json", *H100]), "config"),
    "unknown key in a model": (model_with("layers.1.repat", 3), "layers[1].repat"),
    "model without layers": (model_with("layers", []), "layers"),
    "layer repeated 0 times": (model_with("layers.1.repeat", 0), "layers[1].repeat"),
    "negative parameters": (model_with("layers.0.parameters", -1), "layers[0].parameters"),
    "parameters in words": (model_with("layers.0.parameters", "many"), "layers[0].parameters"),
    "cyclic graph": (
        model_with(
            "edges",
            [
                {"source": "embedding", "target": "head"},
                {"source": "head", "target": "embedding"},
            ],
        ),
        "cycle",
    ),
    "edge to nowhere": (model_with("edges", [{"source": "embedding", "target": "x"}]), "'x'"),
    "negative memory": (
        cluster_with("groups.0.accelerator.memory_bytes", -1),
        "groups[0].accelerator.memory_bytes",
    ),
    "cluster without tiers": (cluster_with("tiers", []), "tier"),
    "groups of one name": (
        cluster_with(
            "groups",
            [
                CLUSTER["groups"][0] | {"devices_per_node": 1},
                CLUSTER["groups"][0]
                | {
                    "devices_per_node": 1,
                    "accelerator": CLUSTER["groups"][0]["accelerator"] | {"name": "slow"},
                },
            ],
        ),
        "give every group its own name",
    ),
    "a link of speed 0": (cluster_with("tiers.0.bytes_per_s", 0), "tiers[0].bytes_per_s"),
    "a future format": (cluster_with("format", 2), "format"),
    "plan for another model": (plan_with("seq_len", 128), "model.digest"),
    "more ranks than stages": (plan_with("mesh.pipeline", 4), "stages"),
    "batch that does not add up": (plan_with("micro_batches", 7), "global_batch"),
    "unknown schedule": (plan_with("schedule", "1f2b"), "schedule"),
    "a layer in two stages": (plan_with("stages.1.layers.0.layer", "a"), "stages[1].layers"),
    "misspelt key": (plan_with("micro_batchs", 8), "micro_batches"),
    "missing key": (plan_with("seq_len", ...), "seq_len"),
    "YAML bomb": (plan_text(BOMB), "alias"),
    "python tag": (plan_text("x: !!python/object/apply:os.system ['true']"), "tag"),
    "not YAML": (plan_text("model: ["), "not YAML"),
    "an empty file": (plan_text(""), "plan.yaml"),
    "a list": (plan_text("- 1\n- 2\n"), "mapping"),
    "a key twice": (plan_text("format: 1\nformat: 1\n"), "twice"),
    "bottomless nesting": (plan_text("a: " + "[" * 5000), "nested"),
}


@pytest.mark.spread(30)
@pytest.mark.parametrize("name", CASES)
def test_each_wrong_input_gets_one_clear_message(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (files, arguments), expected = CASES[name]
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    monkeypatch.chdir(tmp_path)

    code = cli.main(arguments)

    output = capfd.readouterr()
    assert code == 1, output
    assert output.out == ""
    assert output.err.startswith("meshwright: ") and "Traceback" not in output.err
    assert output.err.count("meshwright: ") == 1
    assert expected in output.err
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)


@pytest.fixture(scope="module")
def good_plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("plans")
    demo = ["plan", "demo-4m", "--seq-len", "64", "--global-batch", "64"]
    for file, cluster in (("good", "local:2"), ("many", "local:64"), ("h100", "2xh100-sxm-80gb")):
        assert cli.main([*demo, "--cluster", cluster, "--output", f"{folder}/{file}.yaml"]) == 0
    return {file.name: file.read_text() for file in folder.iterdir()}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["launch", "many.yaml"], "ranks"),
        (["launch", "good.yaml", "--data", "nowhere.txt"], "nowhere.txt"),
        (["launch", "good.yaml", "--on", "slurm", "--data", "/there/chat.json"], "chat.json"),
        (["launch", "good.yaml", "--on", "slurm", "--training", "beta2=1.0"], "beta2 is 1.0"),
        (["launch", "good.yaml", "--on", "slurm", "--steps", "0"], "steps is 0"),
        (["launch", "good.yaml", "--data", "empty"], "empty"),
        (["launch", "good.yaml", "--output", "/proc/nowhere"], "/proc/nowhere"),
        (["launch", "good.yaml", "--resume"], "checkpoint"),
        (["launch", "good.yaml", "--steps", "0"], "steps"),
        (["launch", "good.yaml", "--on", "moon"], "moon"),
        (["launch", "h100.yaml"], "h100-sxm-80gb"),
        (["predict", "good.yaml", "--cluster", "1xrtx-4090"], "mesh"),
        (["plan", "demo-4m", "--cluster", "local:2", "--output", "/proc/x/plan.yaml"], "/proc/x"),
        (["show", "good.yaml", "--html", "/proc/x/page.html"], "/proc/x"),
    ],
)
def test_a_good_plan_in_the_wrong_place_gets_one_clear_message(
    arguments: list[str],
    expected: str,
    good_plans: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for file, text in good_plans.items():
        (tmp_path / file).write_text(text)
    before = sorted(tmp_path.rglob("*"))
    capfd.readouterr()

    code = cli.main(arguments)

    output = capfd.readouterr()
    assert code == 1, output
    assert output.err.count("meshwright: ") == 1 and "Traceback" not in output.err
    assert expected in output.err.split("meshwright: ")[1]
    assert sorted(tmp_path.rglob("*")) == before
