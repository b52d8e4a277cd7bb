"""The worked examples under plans/ are what the planner answers today."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.documents import document
from meshwright.planner.documents.document import Document
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.prediction import Certificate, Prediction

PLANS = Path(__file__).parent.parent / "plans"


def _make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plans_make", PLANS / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = _make()


def figures(value: object) -> object:
    """Return plain data with numbers that compare up to the last bits of a float."""
    if isinstance(value, dict):
        return {key: figures(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [figures(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", make.EXAMPLES)
def test_an_example_is_computed_again_to_the_same_documents(name: str) -> None:
    types: dict[str, type[Document]] = {
        "plan.yaml": Plan,
        "prediction.yaml": Prediction,
        "certificate.yaml": Certificate,
    }

    again = make.computed(name)

    for file, kind in types.items():
        stored = document.read(kind, PLANS / name / file)
        assert figures(again[file].model_dump()) == figures(stored.model_dump()), file


@pytest.mark.parametrize("name", make.EXAMPLES)
def test_an_example_speaks_of_the_catalogue_of_today(name: str) -> None:
    model, cluster, _, _ = make.options(name)

    assert (PLANS / name / "model.yaml").read_text() == resolve_model(model).dump()
    if not cluster.startswith("local"):
        assert (PLANS / name / "cluster.yaml").read_text() == resolve_cluster(cluster).dump()


@pytest.mark.parametrize("name", make.EXAMPLES)
def test_an_example_fits_and_is_proven(name: str) -> None:
    assert document.read(Prediction, PLANS / name / "prediction.yaml").fits
    assert document.read(Certificate, PLANS / name / "certificate.yaml").gap < 0.01
