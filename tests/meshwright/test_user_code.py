"""A document that names a Python file runs none of it, but where it is launched or profiled."""

from __future__ import annotations

import hashlib
import json
import os
import py_compile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright import cli
from meshwright.api import commands
from meshwright.planner.documents import document
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan, PlannedModel
from meshwright.planner.errors import DocumentError

MODEL = """
import torch
from torch import nn
from parts.middle import middle

def factory():
    return nn.Sequential(nn.Embedding(257, 16), middle(), nn.Linear(16, 257))
"""
MIDDLE = "from torch import nn\ndef middle():\n    return nn.Linear(16, 16)\n"
MARK = "\nimport os, pathlib\npathlib.Path(os.environ['RAN']).touch()\n"
LOCAL = ["--cluster", "local:1", "--seq-len", "16", "--global-batch", "2"]


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], bool]]:
    """Say whether a marked file was run since the last time."""
    mark = tmp_path / "ran"
    monkeypatch.setenv("RAN", str(mark))
    monkeypatch.chdir(tmp_path)

    def said() -> bool:
        was = mark.exists()
        mark.unlink(missing_ok=True)
        return was

    yield said


def write_files(folder: Path) -> None:
    """Write a user's file and one that it imports; both leave a mark when they are run."""
    (folder / "parts").mkdir()
    (folder / "parts" / "__init__.py").touch()
    (folder / "parts" / "middle.py").write_text(MIDDLE + MARK)
    (folder / "mine.py").write_text(MODEL + MARK)


@pytest.fixture(scope="module")
def plan_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a plan of those files, which is the same in every folder."""
    folder = tmp_path_factory.mktemp("planned")
    write_files(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAN", str(folder / "ran"))
        patch.setenv("MESHWRIGHT_DEFAULTS", "")
        patch.chdir(folder)
        assert cli.main(["plan", "mine.py:factory", *LOCAL, "-o", "plan.yaml"]) == 0
    assert (folder / "ran").exists(), "the user named the file"
    return (folder / "plan.yaml").read_text()


@pytest.fixture
def planned(ran: Callable[[], bool], plan_text: str, tmp_path: Path) -> Callable[[], bool]:
    write_files(tmp_path)
    (tmp_path / "plan.yaml").write_text(plan_text)
    return ran


def error(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    capfd.readouterr()
    assert cli.main(list(arguments)) == 1
    return capfd.readouterr().err


def changed(change: Callable[[dict[str, Any]], object]) -> None:
    data = yaml.safe_load(Path("plan.yaml").read_text())
    change(data)
    Path("plan.yaml").write_text(json.dumps(data))


READ_ONLY = {
    "show": ["show", "plan.yaml", "--html", "page.html", "--trace", "trace.json"],
    "predict": ["predict", "plan.yaml"],
    "export": ["export", "plan.yaml", "--to", "accelerate"],
    "launch --dry-run": ["launch", "plan.yaml", "--dry-run"],
    "slurm": ["launch", "plan.yaml", "--dry-run", "--on", "slurm"],
    "kubernetes": ["launch", "plan.yaml", "--dry-run", "--on", "kubernetes", "--job", "image=x"],
}


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", READ_ONLY)
def test_what_does_not_train_works_from_the_figures_in_the_plan(
    name: str, planned: Callable[[], bool], capfd: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(READ_ONLY[name])

    assert code == (name == "kubernetes"), capfd.readouterr().err  # a ConfigMap has no subfolders
    assert not planned()


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", READ_ONLY)
def test_a_received_plan_without_figures_is_refused_and_nothing_run(
    name: str, planned: Callable[[], bool], capfd: pytest.CaptureFixture[str]
) -> None:
    changed(lambda data: data["model"].pop("graph"))

    assert "is code, which only launch and profile run" in error(capfd, *READ_ONLY[name])
    assert not planned()


def test_figures_are_predicted_where_the_file_is_not(
    planned: Callable[[], bool], tmp_path: Path
) -> None:
    before = commands.predict("plan.yaml", "1xrtx-4090")
    (tmp_path / "mine.py").unlink()

    assert commands.predict("plan.yaml", "1xrtx-4090") == before


def test_figures_that_are_not_those_of_the_digest_are_refused(
    planned: Callable[[], bool], capfd: pytest.CaptureFixture[str]
) -> None:
    changed(lambda data: data["model"]["graph"]["layers"][0].update(parameters=1))

    assert "model: its graph has sha256:" in error(capfd, "show", "plan.yaml")


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", READ_ONLY)
def test_a_file_of_a_name_that_none_can_have_is_not_there(
    name: str, planned: Callable[[], bool], capfd: pytest.CaptureFixture[str]
) -> None:
    plan = document.read(Plan, "plan.yaml")
    assert plan.model.graph is not None
    long = plan.model.graph.model_copy(update={"source": f"{'x' * 300}.py:factory"})
    document.write(plan.model_copy(update={"model": PlannedModel.of(long)}), "plan.yaml")
    capfd.readouterr()

    code = cli.main(READ_ONLY[name])

    assert code == (name not in ("show", "predict", "export"))
    assert code == 0 or "there is no file" in capfd.readouterr().err
    if READ_ONLY[name][0] == "launch":
        cli.main([*READ_ONLY[name], "--trust-code"])


def test_figures_of_another_file_are_refused(
    planned: Callable[[], bool], capfd: pytest.CaptureFixture[str]
) -> None:
    changed(lambda data: data["model"].update(source="other.py:factory"))

    assert "its graph is of 'mine.py:factory'" in error(capfd, "show", "plan.yaml")


def test_nodes_with_other_files_have_other_plans(planned: Callable[[], bool]) -> None:
    plan = document.read(Plan, "plan.yaml")
    assert plan.model.graph is not None and plan.model.graph.files is not None
    files = {**plan.model.graph.files, "mine.py": "sha256:" + 64 * "0"}
    graph = plan.model.graph.model_copy(update={"files": files})
    model = plan.model.model_copy(update={"graph": graph})

    assert plan.model_copy(update={"model": model}).digest != plan.digest


def test_a_plan_says_which_files_made_its_model(planned: Callable[[], bool]) -> None:
    graph = document.read(Plan, "plan.yaml").model.graph

    assert graph is not None
    assert graph.files == {
        name: "sha256:" + hashlib.sha256(Path(name).read_bytes()).hexdigest()
        for name in ("mine.py", "parts/__init__.py", "parts/middle.py")
    }


def test_a_comment_changes_the_files_digest_and_not_the_models(
    planned: Callable[[], bool],
) -> None:
    before = document.read(Plan, "plan.yaml").model.graph
    Path("mine.py").write_text("# another\n" + Path("mine.py").read_text())

    after = commands.model_of("mine.py:factory", seq_len=16)

    assert before is not None
    assert after.digest == before.digest
    assert after.files != before.files


@pytest.mark.parametrize("file", ["mine.py", "parts/middle.py"])
@pytest.mark.long("parts/middle.py")
def test_a_file_that_changed_is_launched_only_if_it_is_trusted(
    file: str, planned: Callable[[], bool], capfd: pytest.CaptureFixture[str]
) -> None:
    Path(file).write_text("# another\n" + Path(file).read_text())

    said = error(capfd, "launch", "plan.yaml", "--steps", "1")

    assert f"{file} is not the file that was planned" in said
    assert "add --trust-code" in said
    assert not planned()
    for dry in (["--dry-run"], ["--dry-run", "--on", "slurm"]):
        assert file in error(capfd, "launch", "plan.yaml", *dry)
        assert cli.main(["launch", "plan.yaml", *dry, "--trust-code"]) == 0
    assert not planned()


@pytest.mark.matrix
def test_files_that_are_trusted_are_what_the_run_says_it_ran(planned: Callable[[], bool]) -> None:
    file = "parts/middle.py"
    Path(file).write_text("# another\n" + Path(file).read_text())
    Path("text.txt").write_text("a text to train on. " * 100)
    trusted = ["--trust-code", "--steps", "1", "--data", "text.txt", "--output", "out"]
    assert cli.main(["launch", "plan.yaml", *trusted]) == 0
    assert planned()
    ran_with = document.read(Plan, Path("out", "plan.yaml")).model.graph
    assert ran_with is not None and ran_with.files is not None
    assert ran_with.files[file] == "sha256:" + hashlib.sha256(Path(file).read_bytes()).hexdigest()


def test_bytecode_beside_a_file_that_is_as_planned_is_not_run(
    planned: Callable[[], bool], capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("mine.py", "parts/middle.py"):
        file = Path(name)
        text, stat = file.read_bytes(), file.stat()
        evil = b"import os; open(os.environ['RAN'] + '-evil', 'w'); raise SystemExit\n"
        file.write_bytes(evil + b"#" * (len(text) - len(evil)))
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        py_compile.compile(name, doraise=True)
        file.write_bytes(text)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    commands.own_code(document.read(Plan, "plan.yaml").model.graph, "plan.yaml", seq_len=16)

    assert planned()
    assert not Path("ran-evil").exists()


def test_what_a_file_imports_later_than_when_it_was_planned_is_refused(
    ran: Callable[[], bool], tmp_path: Path
) -> None:
    text = MODEL.replace("from parts.middle import middle\n", "") + (
        "\ntry:\n    from later import middle\nexcept ImportError:\n    middle = nn.Identity\n"
    )
    (tmp_path / "mine.py").write_text(text)
    graph = commands.model_of("mine.py:factory", seq_len=16)
    assert list(graph.files or ()) == ["mine.py"]
    (tmp_path / "later.py").write_text(MIDDLE + MARK)

    with pytest.raises(DocumentError, match=r"imports later\.py, which it did not when"):
        commands.own_code(graph, "", seq_len=16)

    assert not ran()


def test_a_compiled_file_of_the_folder_is_not_imported(
    ran: Callable[[], bool], tmp_path: Path
) -> None:
    (tmp_path / "middle.py").write_text(MIDDLE)
    py_compile.compile("middle.py", cfile="middle.pyc")
    (tmp_path / "middle.py").unlink()
    (tmp_path / "mine.py").write_text(MODEL.replace("parts.middle", "middle"))

    with pytest.raises(DocumentError, match=r"only \.py files are imported"):
        commands.model_of("mine.py:factory", seq_len=16)


def test_ranks_refuse_a_file_that_is_not_the_planned_one(planned: Callable[[], bool]) -> None:
    import torch

    from meshwright.runtime.engine.factory_module import FactoryModel

    plan = document.read(Plan, "plan.yaml")
    graph = plan.model.graph
    assert graph is not None

    def build(model: Any) -> None:
        FactoryModel(plan, model, device=torch.device("cpu"))

    build(graph)
    assert planned()
    with pytest.raises(DocumentError, match="has no digest of it"):
        build(graph.model_copy(update={"files": None}))
    Path("mine.py").write_text(Path("mine.py").read_text() + "# another")
    with pytest.raises(DocumentError, match="is not the file that was planned"):
        build(graph)
    assert not planned()


def test_a_model_document_is_profiled_if_its_files_match_or_are_trusted(
    planned: Callable[[], bool],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Reached(Exception):  # noqa: N818 - reads as the sentence that it is
        """Measuring would begin."""

    def measure(graph: ModelGraph, *_: Any, **__: Any) -> None:
        raise Reached(graph.files)

    monkeypatch.setattr("meshwright.profiler.profile.profile", measure)
    graph = document.read(Plan, "plan.yaml").model.graph
    assert graph is not None
    document.write(graph, "model.yaml")

    with pytest.raises(Reached):
        commands.profile("model.yaml", "local:1", seq_len=16)
    Path("mine.py").write_text("# another\n" + Path("mine.py").read_text())
    assert "mine.py is not the file" in error(capfd, "profile", "model.yaml", *LOCAL)
    assert not planned()

    with pytest.raises(Reached) as reached:
        commands.profile("model.yaml", "local:1", seq_len=16, trust_code=True)
    assert reached.value.args[0] not in (None, graph.files)
    assert planned()


OTHERS: dict[str, tuple[dict[str, str], list[str]]] = {
    "model": (
        {
            "model.yaml": "{name: m, source: 'evil.py:f', "
            "layers: [{name: a, kind: a, parameters: 9}]}"
        },
        ["profile", "model.yaml", *LOCAL],
    ),
    "model, planned": (
        {
            "model.yaml": "{name: m, source: 'evil.py:f', "
            "layers: [{name: a, kind: a, parameters: 9}]}"
        },
        ["plan", "model.yaml", *LOCAL],
    ),
    "study": (
        {"study.yaml": "{name: s, models: ['evil.py:f'], offers: [{cluster: 8xa10g}]}"},
        ["whatif", "study.yaml"],
    ),
    "cluster of a study": (
        {"study.yaml": "{name: s, models: [gpt2], offers: [{cluster: 'evil.py:f'}]}"},
        ["whatif", "study.yaml"],
    ),
    "problem": ({"problem.yaml": "{layers: ['evil.py:f']}"}, ["solve", "problem.yaml"]),
    "configuration": (
        {
            "config.json": json.dumps(
                {
                    "model_type": "evil",
                    "auto_map": {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"},
                    "trust_remote_code": True,
                }
            )
        },
        ["plan", "config.json", *LOCAL],
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_no_other_document_runs_the_file_it_names(
    name: str, ran: Callable[[], bool], tmp_path: Path
) -> None:
    files, arguments = OTHERS[name]
    (tmp_path / "evil.py").write_text(MARK)
    for file, text in files.items():
        (tmp_path / file).write_text(text)

    cli.main(arguments)

    assert not ran()


def test_a_configuration_of_a_known_family_runs_nothing_either(
    ran: Callable[[], bool], tmp_path: Path
) -> None:
    from meshwright.runtime.models.families import configuration  # torch

    figures = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "evil.py").write_text(MARK)
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "intermediate_size": 128,
                "vocab_size": 256,
                "max_position_embeddings": 512,
                "auto_map": {"AutoConfig": "evil.Evil"},
                "trust_remote_code": True,
                "_attn_implementation": "evil/kernel",
                **figures,
            }
        )
    )
    model = commands.model_of("config.json")
    assert model.architecture is not None

    config = configuration(model.architecture, tmp_path)

    assert type(config).__module__.startswith("transformers.")
    assert config._attn_implementation == "sdpa"
    assert not ran()


def test_an_exported_configuration_names_no_code(tmp_path: Path) -> None:
    from meshwright.runtime.checkpoint.weight_export import _configuration  # torch

    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "config.json").write_text(
        json.dumps({"model_type": "llama", "auto_map": {"AutoModel": "evil.Evil"}})
    )

    file = _configuration(tmp_path / "saved", tmp_path, "bf16")

    assert json.loads(file.read_text()) == {"model_type": "llama", "dtype": "bfloat16"}


def test_weights_are_read_from_safetensors_alone(ran: Callable[[], bool], tmp_path: Path) -> None:
    from meshwright.planner.errors import LaunchError
    from meshwright.runtime.models.safetensors_weights import Weights  # torch

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (open, (os.environ["RAN"], "w"))

    import pickle

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "pytorch_model.bin"}})
    )

    with pytest.raises(LaunchError, match=r"pytorch_model\.bin"):
        Weights(tmp_path)

    assert not ran()
