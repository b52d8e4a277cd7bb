"""Frameworks are data: complete, told where they come from, and one file each."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.planner import catalog
from meshwright.planner.catalog import accelerators, framework, framework_name, frameworks
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.compute import WATT_BASIS, WATT_FLOPS
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.cluster import Accelerator, KernelRates
from meshwright.planner.documents.document import Part
from meshwright.planner.documents.framework import (
    OPTION_BASIS,
    OPTIONS,
    Basis,
    Framework,
    Host,
    base_of,
    figures,
    framework_of,
    resting_on,
    studies,
    usual_of_release,
    with_options,
    without_basis,
    without_sources,
)
from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import DocumentError
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.search import search

PLAIN = {"format": 1, "name": "plain", "summary": "the defaults"}


@pytest.mark.parametrize("name", frameworks())
def test_every_figure_that_is_not_neutral_says_where_it_comes_from(name: str) -> None:
    assert without_basis(frameworks()[name]) == []


def test_a_figure_without_provenance_is_found() -> None:
    framework = Framework.of({**PLAIN, "host": {"step_s": 1.0}})

    assert without_basis(framework) == ["host.step_s"]


def test_every_figure_is_read_by_some_formula() -> None:
    root = Path(__file__).parents[3] / "planner"
    code = "\n".join(file.read_text() for file in root.rglob("*.py") if file.name != "framework.py")
    by_name = {"norm", "gate", "rotary"}  # planner/operators/kernels.py

    unread = [
        path
        for path, _ in figures(Framework.of(PLAIN))
        if (name := path.rpartition(".")[2]) not in by_name and not re.search(rf"\.{name}\b", code)
    ]

    assert unread == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"host": {"step_s": -1.0}}, "host.step_s"),
        ({"host": {"stepp_s": 1.0}}, "did you mean 'step_s'"),
        ({"kernels": {"attention": "fa9"}}, "kernels.attention"),
        (
            {"basis": [{"fields": ["host.none"], "provenance": "assumed", "source": "x"}]},
            "no figure of a framework",
        ),
        (
            {"basis": [{"fields": ["host.step_s"], "provenance": "fitted", "source": "x"}]},
            "add the number of runs",
        ),
        (
            {"basis": 2 * [{"fields": ["host.step_s"], "provenance": "assumed", "source": "x"}]},
            "has two bases for host.step_s",
        ),
    ],
)
def test_a_wrong_framework_is_one_message(changes: dict[str, object], said: str) -> None:
    with pytest.raises(DocumentError, match=said):
        Framework.of({**PLAIN, **changes})


@pytest.mark.parametrize(
    ("base", "said"), [("nothing", "known: a"), ("b", "extends another"), (7, "is 7")]
)
def test_a_framework_extends_a_known_one_that_extends_none(base: object, said: str) -> None:
    known = {"a": PLAIN, "b": {**PLAIN, "extends": "a"}}

    with pytest.raises(DocumentError, match=said):
        framework_of({**PLAIN, "extends": base}, known)


def test_parts_that_are_left_out_are_what_validation_makes_of_nothing() -> None:
    parts = [
        field.default
        for cls in (Framework, Host, Accelerator, Plan)
        for field in cls.model_fields.values()
        if isinstance(field.default, Part)
    ]

    assert len(parts) > 20
    assert parts == [type(part).model_validate({}) for part in parts]
    assert parts == [type(part).model_validate(part.model_dump()) for part in parts]


def test_names_and_aliases_are_of_one_framework_each() -> None:
    names = [
        name for framework in frameworks().values() for name in (framework.name, *framework.aliases)
    ]

    assert len(names) == len(set(names))
    assert all(framework_name(name) in frameworks() for name in names)
    assert [framework_name(text) for text in ("Megatron LM", "NeMo", "FSDP2")] == [
        "megatron",
        "megatron",
        "fsdp",
    ]


def test_a_framework_is_added_by_adding_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Path(catalog.__file__).parent / "frameworks"
    for file in known.iterdir():
        (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / "mine.yaml").write_text(
        "{format: 1, name: mine, extends: fsdp, summary: mine, memory: {context_bytes: 3.0e9}, "
        "space: {zero: [3], recompute: [none, full], pipeline: 1, tensor: 1, context: 1}, "
        "basis: [{fields: [memory.context_bytes, space], provenance: assumed, source: made up}]}"
    )
    found = catalog.read_frameworks(tmp_path)
    monkeypatch.setattr(catalog, "frameworks", lambda: found)
    model, cluster = resolve_model("llama-3.1-8b"), resolve_cluster("8xh100-sxm-80gb")
    asked = Request.create(model, cluster, seq_len=2048, global_batch=64, framework="fsdp")

    mine = search(replace(asked, framework=found["mine"]))

    assert without_basis(found["mine"]) == []
    assert mine.closed_form_bound_s == pytest.approx(mine.closed_form.objective_s, rel=1e-9)
    assert (mine.plan.framework, mine.plan.zero) == ("mine", 3)
    again = predict(mine.plan, model, cluster)
    assert again == mine.prediction
    assert again.stages[0].memory_parts["context"] >= 3.0e9


def test_a_name_with_options_is_that_framework_with_other_kernels() -> None:
    plain, written = framework("fsdp"), framework("FSDP2+eager-attention+compiled")

    assert written.name == "fsdp+eager-attention+compiled"
    assert base_of(written.name) == "fsdp"
    assert not written.kernels.flash_attention
    assert (written.kernels.norm, plain.kernels.flash_attention) == ("fused", True)
    assert framework("fsdp+flash") == plain
    assert written.model_copy(update={"name": "fsdp", "kernels": plain.kernels}) == plain
    for name, said in (("megatron+flush", "did you mean"), ("native+compiled", "of its own")):
        with pytest.raises(DocumentError, match=said):
            framework(name)


def test_megatron_gathers_weights_in_8_bits_where_it_is_told_to() -> None:
    # --fp8-param-gather, which Megatron-Bridge's recipes give and the export writes.
    assert framework("megatron").eight_bit.gathered == ("activations", "parameters")
    assert framework("megatron+16-bit-gathers").eight_bit.gathered == ("activations",)


def test_megatron_hides_collectives_of_tensor_parallelism_where_it_is_told_to() -> None:
    # megatron/training/arguments.py: --tp-comm-overlap is a flag, off where it is not given.
    assert (
        framework("megatron").tensor.overlap
        == 0.0
        < framework("megatron+tp-overlap").tensor.overlap
    )


SOURCES = frozenset(
    {
        "bigscience_a100",
        "dgxc",
        "fms_acceleration",
        "fsdp_qlora",
        "hagemann2023",
        "internevo",
        "llm_foundry",
        "megatron_bridge",
        "megatron_ci",
        "megatron_sc21",
        "mlperf",
        "nanotron_usp",
        "prime_rl",
        "simumax_b200",
        "torchtitan",
        "vtrain_multi",
        "vtrain_single",
    }
)


def left_out(name: str, source: str) -> Framework:
    return without_sources(frameworks()[name], {source}, SOURCES, frameworks()["unknown"])


def test_what_rests_on_one_source_is_left_out_and_what_code_says_stays() -> None:
    found = frameworks()["nanotron"]

    without = left_out("nanotron", "nanotron_usp")

    assert found.accuracy.seen is not None
    assert without.host == found.host, "other studies support its one law"
    assert without.loss.peak_bytes == found.loss.peak_bytes
    assert without.accuracy.seen is None
    assert left_out("nanotron", "mlperf") == found


def test_a_figure_stands_without_a_source_if_two_other_studies_support_it() -> None:
    megatron, deepspeed = frameworks()["megatron"], frameworks()["megatron-deepspeed"]

    # Five sources are behind megatron's host; of the others two are tables of one paper.
    assert left_out("megatron", "mlperf") == megatron
    # Both are of one study, so that of its host's three studies two stay; of its runs one does.
    assert resting_on(deepspeed, {"vtrain_multi"}, SOURCES) == {"accuracy.seen"}
    assert resting_on(deepspeed, {"bigscience_a100"}, SOURCES) == {"accuracy.seen"}
    two = SOURCES - {"nanotron_usp"}
    assert resting_on(deepspeed, {"vtrain_multi"}, two) >= {"host.layer_s", "host.rank_s"}
    assert not resting_on(deepspeed, {"mlperf"}, SOURCES)


@pytest.mark.parametrize(
    ("release", "peak_bytes"),
    [
        ("transformers-4.45.2", 12.0),
        ("torch-2.4.1/transformers-4.48.1", 14.0),
        ("transformers-4.57", 12.0),
        ("torch-2.4.1", 12.0),
        ("", 12.0),
        ("no version at all", 12.0),
    ],
)
def test_a_release_has_the_loss_of_its_code(release: str, peak_bytes: float) -> None:
    framework = frameworks()["transformers"]

    assert (
        with_options(framework, usual_of_release(framework, release)).loss.peak_bytes == peak_bytes
    )


def test_every_release_names_options_that_there_are() -> None:
    for one in frameworks().values():
        for release in one.releases:
            assert OPTIONS.keys() >= set(release.options)


@pytest.mark.parametrize("name", frameworks())
def test_no_figure_is_fitted_to_fewer_than_three_studies(name: str) -> None:
    fitted = [entry for entry in frameworks()[name].basis if entry.provenance == "fitted"]

    assert {entry.fields: studies(entry, SOURCES) for entry in fitted} == {
        entry.fields: studies(entry, SOURCES)
        for entry in fitted
        if len(studies(entry, SOURCES)) >= 3
    }


def founded(basis: str) -> bool:
    """Whether a figure is derived, or fitted to three studies at least."""
    how, _, what = basis.partition(" to " if basis.startswith("fitted") else ": ")
    if how != "fitted":
        return how == "derived" and bool(what)
    known = Basis(fields=("memory",), provenance="fitted", source=what, runs=3)
    return len(studies(known, SOURCES)) >= 3


def test_figures_of_options_and_accelerators_rest_on_three_studies_or_are_derived() -> None:
    told = {**OPTION_BASIS, **{f"watts of {name}": basis for name, basis in WATT_BASIS.items()}}
    assert WATT_BASIS.keys() == WATT_FLOPS.keys()
    for name, values in OPTIONS.items():
        if any(isinstance(value, float) and value not in (0.0, 1.0) for value in values.values()):
            assert name in OPTION_BASIS, name
    usual = KernelRates()
    for name, entry in accelerators().items():
        kernels = entry.kernels
        own = (kernels.sustained, kernels.sustained_tuned)
        assert (kernels.sustained_basis is None) == (
            own == (usual.sustained, usual.sustained_tuned)
        ), name
        if kernels.sustained_basis is not None:
            told[name] = kernels.sustained_basis

    assert [name for name, basis in told.items() if not founded(basis)] == []
    assert not founded("fitted to mlperf, dgxc") and not founded("measured")


def test_what_native_and_common_frameworks_have_rests_on_no_single_source() -> None:
    for name in ("native", "unknown", "megatron"):
        for source in SOURCES:
            assert not resting_on(frameworks()[name], {source}, SOURCES)


def test_blocks_recompute_attention_where_it_is_written_out_and_the_framework_can() -> None:
    for name in ("megatron", "nanotron"):
        plain, written = framework(name).space, framework(f"{name}+eager-attention").space
        assert plain is not None
        assert written is not None
        assert plain.recompute == ("none", "full")
        more = ("selective",) * (name == "megatron")
        assert set(written.recompute) == {"none", "full", *more}


def test_megatron_is_planned_with_selective_recompute_of_written_out_attention() -> None:
    """Korthikanti et al., 2022: the larger model fits without a second forward of its blocks."""
    request = Request.create(
        resolve_model("gpt3-175b"),
        resolve_cluster("8x8xa100-sxm-80gb"),
        seq_len=2048,
        global_batch=64,
        precision="fp16",
        framework="megatron+eager-attention",
    )
    pins = Pins(tensor=8, pipeline=8, schedule="interleaved", virtual_stages=3, micro_batch=1)
    free, full = (
        search(replace(request, pins=replace(pins, recompute=recompute)))
        for recompute in (None, "full")
    )

    chosen = {layer.recompute for stage in free.plan.stages for layer in stage.layers}
    assert chosen == {"none", "selective"}
    assert free.prediction.step_time_s < 0.9 * full.prediction.step_time_s
