"""Twenty-five families of transformers launch from published folders and train like the library.

The oracle is the library's own class in a plain loop (tests/runtime/library_runs.py).  `make test`
holds each family's first step in one process and a cover of launches against it, `make matrix`
every family under every layout of LAYOUTS that it takes.  docs/results/models.md lists them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from meshwright.planner.catalog.expressions import resolve_model
from meshwright.planner.costs.lora import adapter_parameters
from meshwright.planner.documents.document import write
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.training import Lora
from meshwright.planner.errors import DocumentError
from meshwright.planner.frameworks import native_limits as native
from meshwright.planner.frameworks.native_limits import obstacle
from meshwright.runtime.checkpoint.weight_export import to_huggingface
from meshwright.runtime.engine.unsupported import unsupported_reason
from meshwright.runtime.launch import launch as launching
from meshwright.runtime.launch.launch_config import Launch
from meshwright.runtime.launch.training_loop import token_engine
from meshwright.runtime.run import run_folder as run
from meshwright.runtime.run.launch_options import LaunchRun
from tests.limits import PATIENCE_S
from tests.runtime import cases, families, family_table, library_runs
from tests.runtime.library_rows import SETTINGS, TEXT, TRAINING, OnCrew, apart, batches
from tests.runtime.ranks import Crew

CPU = torch.device("cpu")
STEPS = 3
LOSS, NORM = 1e-6, 2e-5
"""The largest relative distance from the library's run.  Gradient norms magnify rounding."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2, "recompute": "full"},
    "split backward": {"pipeline": 2, "schedule": "interleaved-zb", "virtual_stages": 2},
    "ZeRO-3": {"data_shard": 2, "zero": 3, "recompute": "selective"},
    "context": {"context": 2},
    "experts": {"data_shard": 2, "expert": 2, "zero": 1},
    "experts and tensor": {"tensor": 2, "expert": 2},
}
"""Of two ranks."""
COVER = [
    ("deepseek_v3", "experts and tensor"),
    ("gemma3_text", "context"),
    ("gpt_oss", "experts"),
    ("olmo3", "ZeRO-3"),
    ("phi", "tensor"),
    ("qwen2_moe", "tensor"),
]


@functools.cache
def _home() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="families-")


@functools.cache
def published(family: str) -> Path:
    """Return the folder of a model of random weights, none of which is as it begins."""
    folder = Path(_home().name) / family
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(families.FAMILIES[family]())
    with torch.no_grad():
        for _, tensor in (*model.named_parameters(), *_buffers(model)):
            tensor.add_(0.03 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    return folder


def _buffers(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, b) for name, b in model.named_buffers() if name in model.state_dict()]


@functools.cache
def graph_of(family: str) -> ModelGraph:
    return resolve_model(str(published(family)))


def plan_of(family: str, layout: str | None) -> Plan:
    plan = cases.plan(graph_of(family), **(LAYOUTS[layout] if layout else {}))
    return plan.model_copy(update={"training": TRAINING, "timeout_s": PATIENCE_S})


@functools.cache
def oracle(family: str) -> library_runs.LibraryRun:
    return library_runs.train(published(family), batches(cases.GLOBAL_BATCH)[:STEPS], SETTINGS)


@pytest.fixture(autouse=True)
def _one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- in one process ---------------------------------------------------------------------------


@pytest.mark.spread(5)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_family_trains_like_the_library(family: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(published(family))
    named = {name for name, _ in (*model.named_parameters(), *_buffers(model))}
    expected = oracle(family)
    engine = token_engine(
        plan_of(family, None), graph_of(family), device=CPU, weights=published(family)
    )

    found = [engine.step(batch) for batch in batches(cases.GLOBAL_BATCH)[:STEPS]]

    assert apart([one.loss for one in found], expected.losses) < LOSS
    assert apart([one.grad_norm for one in found], expected.norms) < NORM
    names = {n.removeprefix("model.") for n in engine.state() if n.startswith("model.")}
    assert names == named


def test_every_family_that_launches_is_tried() -> None:
    assert {"reference", *families.FAMILIES} == set(native.FAMILIES)
    assert len(families.FAMILIES) >= 25


@pytest.mark.parametrize("family", families.FAMILIES)
def test_planned_parameters_are_the_library_s(family: str) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(families.FAMILIES[family]())

    assert graph_of(family).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("family", families.FAMILIES)
def test_planned_adapters_are_those_that_train(family: str) -> None:
    adapters = Lora(rank=2)
    plan = plan_of(family, None)
    plan = plan.model_copy(update={"training": plan.training.model_copy(update={"lora": adapters})})

    state = token_engine(plan, graph_of(family), device=CPU, weights=published(family)).state()

    trained = sum(value.numel() for name, value in state.items() if name.startswith("model."))
    graph = graph_of(family)
    planned = sum(adapter_parameters(graph, layer.kind, adapters) for _, layer in graph.chain)
    assert trained == planned


# --- launched ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    losses: list[float]
    norms: list[float]

    def text(self, family: str, layout: str) -> str:
        wanted = oracle(family)
        loss, norm = apart(self.losses, wanted.losses), apart(self.norms, wanted.norms)
        return f"{family}, {layout}: loss {loss:.1e}, norm {norm:.1e}"

    def within(self, family: str) -> bool:
        wanted = oracle(family)
        return apart(self.losses, wanted.losses) < LOSS and apart(self.norms, wanted.norms) < NORM


def launched(family: str, layout: str, output: Path, **options: Any) -> Found:
    """Launch as the command does, with --weights."""
    output.mkdir(parents=True)
    write(plan_of(family, layout), output / "plan.yaml")
    launching.launch(
        Launch(
            output / "plan.yaml",
            LaunchRun(
                data=TEXT, weights=published(family), steps=STEPS, output=output / "run", **options
            ),
            device="cpu",
            quiet=True,
        )
    )
    records = list(run.read_records(run.metrics_file(output / "run")))
    return Found([r.loss for r in records], [r.grad_norm for r in records])


@contextlib.contextmanager
def ranks(names: Iterable[str], patch: pytest.MonkeyPatch) -> Iterator[None]:
    for family in names:
        oracle(family)  # so that ranks are forked from a process that has loaded the library
    with Crew(2) as crew:
        patch.setattr(launching, "supervise", OnCrew(crew))
        yield


def far_off(rows: Sequence[tuple[str, str]], folder: Path) -> list[str]:
    bad = []
    for number, (family, layout) in enumerate(rows):
        found = launched(family, layout, folder / str(number))
        print(found.text(family, layout), flush=True)
        if not found.within(family):
            bad.append(found.text(family, layout))
    return bad


@pytest.mark.matrix
@pytest.mark.ranks
def test_launches_train_and_export_like_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among what is exported: DeepSeek-V3 chooses experts with a bias that is no parameter."""
    saved = tmp_path / "saved"
    with ranks([family for family, _ in COVER], monkeypatch):
        assert far_off(COVER, tmp_path) == []
        launched("deepseek_v3", "pipeline", tmp_path / "out", checkpoint=saved)
    to_huggingface(saved, tmp_path / "exported")

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    first = transformers.AutoModelForCausalLM.from_pretrained(published("deepseek_v3"))
    trained = oracle("deepseek_v3").weights
    for name, value in model.state_dict().items():
        if name in trained:
            distance = (value - trained[name]).norm() / trained[name].norm()
            assert float(distance) < 1e-5, name
    for (name, one), (_, other) in zip(_buffers(model), _buffers(first), strict=True):
        assert torch.equal(one, other), name
        assert one.any()


@pytest.mark.ranks
@pytest.mark.matrix
def test_every_family_launches_under_every_layout_that_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        (family, layout)
        for family in families.FAMILIES
        for layout in LAYOUTS
        if unsupported_reason(plan_of(family, layout), graph_of(family)) is None
    ]

    with ranks({family for family, _ in rows}, monkeypatch):
        assert far_off(rows, tmp_path) == []


# --- refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["BertConfig", "ViTConfig", "T5Config", "MambaConfig"])
def test_other_models_are_refused_by_name_with_the_way_out(name: str, tmp_path: Path) -> None:
    config = getattr(transformers, name)()
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))

    try:
        graph = resolve_model(str(tmp_path))
        reason = unsupported_reason(cases.plan(graph), graph)
    except DocumentError as error:
        reason = str(error)

    assert reason is not None
    assert f"'{config.model_type}'" in reason
    assert "your own script with meshwright.Engine" in reason


def test_what_a_family_cannot_be_divided_by_is_refused_by_its_name() -> None:
    for family in ("gpt2", "gpt_bigcode", "gpt_oss", "olmo2", "olmo3", "phi3"):
        found = obstacle(graph_of(family), *_job_and_layout(family, "tensor"))
        assert found is not None
        assert family in found.text


def _job_and_layout(family: str, layout: str) -> tuple[Any, Any]:
    plan = plan_of(family, layout)
    return plan.job, plan.layout


def test_the_page_of_models_is_what_the_tests_know() -> None:
    assert family_table.PAGE.read_text(encoding="utf-8") == family_table.text()
