"""Names and values that would be commands, lines or paths stay names and values, or are refused."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright import cli
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.document import Document
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import DocumentError
from tests.meshwright.test_malformed import CLUSTER, CONFIG, MODEL, PLAN, changed

LINES = "gpt2\n#SBATCH --uid=0\ntouch PWNED\n#"
NAMES = {
    "lines": LINES,
    "carriage return": "a\rb",
    "another end of lines": "a\u2028b",
    "terminal codes": "\x1b[2J",
    "text that runs backwards": "a\u202eb",
    "path": "../../x",
    "absolute path": "/etc/x",
    "path of Windows": "..\\x",
    "parent": "..",
    "nothing": "",
    "long": "x" * 201,
}
PLACES: dict[str, tuple[type[Document], dict[str, Any], str]] = {
    "plan": (Plan, PLAN, "model.name"),
    "layer of a plan": (Plan, PLAN, "stages.0.layers.0.layer"),
    "model": (ModelGraph, MODEL, "name"),
    "layer": (ModelGraph, MODEL, "layers.0.name"),
    "kind": (ModelGraph, MODEL, "layers.0.kind"),
    "tier": (ClusterSpec, CLUSTER, "tiers.0.name"),
}
VALUES = (
    "a b",
    "$(touch PWNED)",
    "`touch PWNED`",
    "; touch PWNED #",
    "a' ; touch PWNED ; '",
    'a" ; touch PWNED ; "',
    "\\",
    "a\\ b\\\\",
    "#SBATCH --uid=0",
    "{a: [b, *c], !!d e: &f |}",
    "- --- %YAML ?",
    "é ✓ 漢字",
    "~/*?[a-z]{x,y}",
    "&& touch PWNED || touch PWNED",
    "$(NNODES) $$(NNODES) $ $$",
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "it's #1 \\ $(touch PWNED) é"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_a_documents_names_are_one_printable_part_of_a_path(place: str, name: str) -> None:
    cls, right, path = PLACES[place]

    with pytest.raises(DocumentError) as refused:
        cls.parse(changed(right, path, NAMES[name]))

    assert refused.value.path.endswith(path.rpartition(".")[2])
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("path", ["cluster", "model.source"])
def test_a_documents_paths_are_one_printable_line(path: str) -> None:
    with pytest.raises(DocumentError, match="one line of printable characters"):
        Plan.parse(changed(PLAN, path, LINES))


@pytest.mark.parametrize("name", ["lines", "path", "parent"])
def test_a_received_plan_writes_no_script(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    Path("plan.yaml").write_text(changed(PLAN, "model.name", NAMES[name]))

    for on in (["slurm"], ["kubernetes", "--job", "image=x"]):
        assert cli.main(["launch", "plan.yaml", "--dry-run", "--on", *on]) == 1
        output = capfd.readouterr()
        assert output.out == ""
        assert "plan.yaml: model.name is" in output.err


@pytest.mark.parametrize("name", [LINES.replace("/", "-"), "x" * 201, "\x1b[2J"])
def test_a_configurations_folder_and_file_are_named_as_models_are(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    text = json.dumps(CONFIG)
    Path(name).mkdir()
    Path(name, "config.json").write_text(text)
    Path(f"{name}.json").write_text(text)
    Path(f"{name}.py").write_text("def f(): pass")

    for model in (name, f"{name}/config.json", f"{name}.json", f"{name}.py:f"):
        assert cli.main(["plan", model, "--cluster", "8xh100-sxm-80gb"]) == 1
        output = capfd.readouterr()
        assert output.err.count("\n") == 1 and output.err[:-1].isprintable()


def stub(name: str, script: str) -> None:
    Path("bin").mkdir(exist_ok=True)
    file = Path("bin", name)
    file.write_text(f"#!/bin/bash\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def asked(script: str) -> list[str]:
    """Return the options of a script's #SBATCH lines, each with its value."""
    said = [line for line in script.splitlines() if line.startswith("#SBATCH ")]
    options = [shlex.split(line.removeprefix("#SBATCH "), comments=True) for line in said]
    assert all(len(option) == 1 for option in options), options
    return [option[0] for option in options]


def test_a_batch_script_holds_values_as_values(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ["plan", "gpt2", "--cluster", "2x4xa100-sxm-80gb", "--seq-len", "512"]
    assert cli.main([*plan, "--global-batch", "32", "-o", "a plan; touch PWNED.yaml"]) == 0
    stub("srun", 'printf "%s\\0" "$@" > argv')
    stub("sbatch", 'bash -n "$1" && bash "$1"')
    monkeypatch.setenv("PATH", f"{here}/bin:{os.environ['PATH']}")
    for value in VALUES:
        command = ["launch", "a plan; touch PWNED.yaml", "--on", "slurm", "--output", value]
        command += ["--data", value, "--job", f"comment={value}", "--job", f"account={value}"]
        capfd.readouterr()

        assert cli.main([*command, "--dry-run"]) == 0
        assert cli.main(command) == 0

        script = capfd.readouterr().out.partition("\njob ")[0]
        options = asked(script)
        assert f"--comment={value}" in options and f"--account={value}" in options
        assert f"--chdir={here}" in options
        assert f"--output={value}/slurm-%j.log" in options
        assert "--uid=0" not in options
        argv = Path("argv").read_text().split("\0")
        assert argv[argv.index("launch") + 1] == "a plan; touch PWNED.yaml"
        assert argv[argv.index("--data") + 1] == value
        assert argv[argv.index("--output") + 1] == value
    assert not list(here.parent.rglob("PWNED"))


@pytest.mark.spread(1)
@pytest.mark.parametrize("flag", ["--data", "--output", "--job"])
def test_no_value_of_a_batch_script_is_several_lines(
    flag: str, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = ["plan", "gpt2", "--cluster", "2x4xa100-sxm-80gb", "--seq-len", "512"]
    assert cli.main([*plan, "--global-batch", "32", "-o", "plan.yaml"]) == 0
    value = f"comment={LINES}" if flag == "--job" else LINES
    capfd.readouterr()

    assert cli.main(["launch", "plan.yaml", "--on", "slurm", "--dry-run", flag, value]) == 1

    output = capfd.readouterr()
    assert output.out == "" and output.err[:-1].isprintable()


CODE = (
    "# a comment\x85import os; os.system('touch PWNED')\n# \u2028 \x0c\t \r\n"
    "  # leading\nx = '''\n---\n%TAG !\na: &b *c'''   \n"
    "import torch\ndef f():\n    return [torch.nn.Embedding(257, 8), torch.nn.Linear(8, 257)]\n\n\n"
)


def in_pod(text: str) -> str:
    """Return what a pod's container is given: `$$` is `$`, and `$(NAME)` is a variable's value."""
    assert not re.search(r"(?<!\$)(\$\$)*\$\(", text), "a variable would be put here"
    return text.replace("$$", "$")


def test_a_manifest_holds_values_and_files_as_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_bytes(CODE.encode())
    local = ["--cluster", "cluster.yaml", "--seq-len", "16", "--global-batch", "4"]
    Path("cluster.yaml").write_text("# \u2028\n" + yaml.safe_dump(CLUSTER))
    assert cli.main(["plan", "mine.py:f", *local, "-o", "plan.yaml"]) == 0
    for value in VALUES:
        claim = value.replace(":", "")
        settings = {"image": value, "namespace": value, "cpus": value, "volume": f"{claim}:/d"}
        told = [part for name in settings for part in ("--job", f"{name}={settings[name]}")]
        command = ["launch", "plan.yaml", "--on", "kubernetes", "--dry-run", "--data", value]
        capfd.readouterr()

        assert cli.main([*command, *told]) == 0

        parts = {part["kind"]: part for part in yaml.safe_load_all(capfd.readouterr().out)}
        assert set(parts) >= {"ConfigMap", "Service", "Job"}
        files = parts["ConfigMap"]["data"]
        assert files["mine.py"] == CODE
        assert files["cluster.yaml"] == Path("cluster.yaml").read_text()
        assert files["plan.yaml"] == Path("plan.yaml").read_text()
        assert parts["Job"]["metadata"]["namespace"] == value
        pod = parts["Job"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["image"] == value
        assert container["resources"]["limits"]["cpu"] == value
        argv = [in_pod(part) for part in container["command"]]
        assert argv[argv.index("--data") + 1] == value
        assert pod["volumes"][-1]["persistentVolumeClaim"]["claimName"] == claim
    assert not Path("PWNED").exists()
