"""ModelGraph: names of single layers, totals, and graphs that are refused."""

from __future__ import annotations

import pytest

from meshwright.planner.documents.model import Architecture, Experts, Layer, ModelGraph
from meshwright.planner.errors import DocumentError


def layer(name: str, repeat: int = 1, parameters: int = 10) -> Layer:
    return Layer(name=name, kind="block", repeat=repeat, parameters=parameters)


def names(*layers: Layer) -> list[str]:
    return [name for name, _ in ModelGraph(name="m", layers=layers).chain]


def test_parameters_are_those_of_all_single_layers() -> None:
    model = ModelGraph(name="m", layers=(layer("a", parameters=7), layer("b", 3, 5)))

    assert model.parameters == 7 + 3 * 5
    assert model.parameters == sum(one.parameters for _, one in model.chain)


def test_without_edges_the_graph_is_the_chain() -> None:
    model = ModelGraph(name="m", layers=(layer("a"), layer("b", 2), layer("c")))

    assert list(model.graph.edges) == [("a", "b.0"), ("b.0", "b.1"), ("b.1", "c")]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layers": []}, "at least one layer"),
        ({"layers": [{"name": "a.0", "kind": "k", "parameters": 1},
                     {"name": "a", "kind": "k", "parameters": 1, "repeat": 2}]},
         "'a.0' appears twice"),
        ({"edges": [{"source": "a", "target": "z"}]}, "there is no layer 'z'"),
        ({"edges": [{"source": "a", "target": "b"}, {"source": "b", "target": "a"}]},
         r"edges form a cycle \(a -> b\)|\(b -> a\)"),
        ({"edges": [{"source": "a", "target": "a"}]}, "edges form a cycle"),
        ({"layers": [{"name": "a", "kind": "k", "parameters": 1, "repeat": 10**12}]},
         "at most 100000"),
        ({"layers": [{"name": "a", "kind": "k", "parameters": -1}]}, r"layers\[0\]\.parameters"),
    ],
)  # fmt: skip
def test_a_graph_that_makes_no_sense_is_refused(changes: dict[str, object], says: str) -> None:
    layers = [{"name": n, "kind": "k", "parameters": 1} for n in "ab"]

    with pytest.raises(DocumentError, match=says):
        ModelGraph.of({"name": "m", "layers": layers} | changes)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "kind"), [(8, 8, "mha"), (8, 2, "gqa"), (8, 1, "mqa"), (1, 1, "mha")]
)
def test_attention_is_named_by_how_heads_share_keys(heads: int, kv_heads: int, kind: str) -> None:
    figures = Architecture(
        family="llama",
        hidden_size=64,
        layers=1,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=8,
        ffn_size=64,
        vocab_size=0,
        gated_mlp=True,
    )

    assert figures.attention == kind


def test_no_token_goes_to_more_experts_than_there_are() -> None:
    with pytest.raises(ValueError, match="per_token is 3, more than the 2 experts"):
        Experts(count=2, per_token=3, ffn_size=8)


def square(**fields: object) -> dict[str, object]:
    """a -> b -> d, a -> c -> d."""
    return {
        "name": "square",
        "layers": [{"name": name, "kind": name, "parameters": 1} for name in "abcd"],
        "edges": [{"source": a, "target": b} for a, b in ("ab", "ac", "bd", "cd")],
        **fields,
    }


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({"g": ["a", "x"]}, "colocated.g: there is no layer 'x'"),
        ({"g": ["a", "b"], "h": ["b", "c"]}, "layer 'b' is in 'g' already"),
        ({"g": ["a", "d"]}, r"colocated.g: cannot be on one stage: .*add 'b' to it"),
        ({"g": ["a"]}, "at least 2"),
    ],
)
def test_a_group_that_no_stage_can_hold_is_refused_by_name(
    groups: dict[str, list[str]], words: str
) -> None:
    with pytest.raises(DocumentError, match=words):
        ModelGraph.of(square(colocated=groups))


def test_two_groups_that_wait_for_each_other_are_named() -> None:
    edges = [{"source": a, "target": b} for a, b in ("ab", "cd")]

    with pytest.raises(DocumentError, match=r"make '(up|down)' and '(up|down)' one group"):
        ModelGraph.of(square(edges=edges, colocated={"up": ["a", "d"], "down": ["b", "c"]}))
    with pytest.raises(DocumentError, match="list the edges of this chain"):
        ModelGraph.of(square(edges=[], colocated={"g": ["a", "b"]}))
