"""Models by shape, and by name where a table says no shape."""

from __future__ import annotations

import pytest

from meshwright.planner.architectures.architecture import graph_of
from meshwright.planner.calibration.tables.figures import architecture_of_row
from meshwright.planner.errors import DocumentError


def test_a_name_of_the_catalogue_gives_what_the_row_does_not_say() -> None:
    assumed: list[str] = []
    row = {"model": "Meta-Llama-3-8B-Instruct", "seq_len": "8192"}

    assert graph_of(architecture_of_row(row, assumed), name="m").parameters == 8030261248
    assert assumed == ["figures of the model as the catalogue has them"]


def test_shared_experts_and_dense_layers_come_with_the_name() -> None:
    row = {"model": "deepseek-v3", "layers": "61", "hidden_size": "7168", "seq_len": "4096"}

    graph = graph_of(architecture_of_row(row, []), name="m")

    assert graph.parameters == pytest.approx(671e9, rel=0.01)


def test_a_shape_that_the_name_does_not_have_is_taken_as_it_stands() -> None:
    row = {"model": "llama-3-8b", "layers": "4", "hidden_size": "512", "seq_len": "512"}

    assert architecture_of_row(row, []).layers == 4
    with pytest.raises(DocumentError, match="layers is not known"):
        architecture_of_row({"model": "mine", "hidden_size": "512", "seq_len": "512"}, [])
