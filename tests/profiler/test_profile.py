"""A whole profile of a tiny model by real ranks, and what becomes of it in the planner."""

import contextlib
import doctest
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from meshwright.planner.architectures.architecture import graph_of
from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.costs.predict import layout_prediction
from meshwright.planner.documents import document
from meshwright.planner.documents.model import Edge, Layer, ModelGraph
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.documents.profile import Overheads, Profile
from meshwright.planner.errors import DocumentError, LaunchError
from meshwright.planner.requests.request import Request
from meshwright.profiler import devices, overheads
from meshwright.profiler import profile as profiles
from meshwright.profiler import rank_main as rank
from meshwright.profiler import start_ranks as ranks
from meshwright.profiler.machine import joint_cluster
from meshwright.profiler.overheads import tiny_model
from meshwright.runtime.launch.rank_processes import BadEnd, supervise
from tests.runtime import cases
from tests.runtime.forked_zygote import ForkedZygote

JOB = Job(seq_len=8, global_batch=4, precision="fp32")


def tiny() -> ModelGraph:
    return graph_of(cases.architecture(), name="tiny-reference")


@contextlib.contextmanager
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let ranks be forked from this process, which has imported what they import; few rounds."""

    def main(arguments: Sequence[str]) -> int:
        monkeypatch.setattr("sys.argv", ["rank", *arguments])
        return rank.main()

    def supervised_here(command: Sequence[str], *args: Any, **options: Any) -> BadEnd | None:
        words = [
            word.replace("meshwright.profiler.rank_main", "meshwright.runtime.launch.rank_main")
            for word in command
        ]
        return supervise(words, *args, **options, zygote=zygote)

    with monkeypatch.context() as patch:
        patch.setattr("meshwright.runtime.launch.rank_main.main", main)
        patch.setattr(ranks, "supervise", supervised_here)
        patch.setattr(overheads, "ROUNDS", 4)
        patch.setattr(overheads, "OWN_LAYER_ROUNDS", 2)
        patch.setattr(overheads, "MICRO_BATCHES", 4)
        patch.setattr(devices, "PRODUCT_S", 0.05)
        patch.setattr(devices, "COPY_BYTES", 16 * 2**20)
        with ForkedZygote() as zygote:
            yield


@pytest.mark.ranks
def test_a_profile_of_this_machine_serves_the_planner_and_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    model = tiny()
    with forked(monkeypatch):
        first = profiles.profile(model, "local:2", JOB, budget_s=0.1, quiet=True)

    kept = [file.name for file in cache.rglob("profile*.json")]
    monkeypatch.setattr(profiles, "result_of", lambda *_, **__: pytest.fail("ranks start"))
    second = profiles.profile(model, "local:2", JOB, budget_s=0.1, quiet=True)
    assert kept == ["profile.json"]
    assert (first.cached, second.cached) == (False, True)
    assert (second.profile, second.cluster) == (first.profile, first.cluster)
    with pytest.raises(pytest.fail.Exception, match="ranks start"):
        profiles.profile(model, "local:2", JOB, budget_s=0.2, quiet=True)

    found = first.profile

    assert found.model_digest == model.digest
    assert found.birth.ranks == 2
    assert {m.kind for m in found.layers} == {"embedding", "block", "head"}
    assert {(m.tensor, m.context) for m in found.layers} >= {(1, 1), (2, 1)}
    assert all(m.resident_bytes for m in found.layers if m.kind == "block")
    assert all(set(stage.layers) <= {name for name, _ in model.chain} for stage in found.stages)
    assert found.stages
    assert {curve.tier for curve in found.collectives} == {"memory"}
    assert found.overheads is not None
    document.write(found, tmp_path / "profile.yaml")
    assert document.read(Profile, tmp_path / "profile.yaml") == found

    machine = resolve_cluster("local:2")
    layout = Layout(data_replicate=2, micro_batches=2)
    step_s = layout_prediction(Request(model, machine, JOB, profile=found), layout).step_time_s
    micro_batch_s = sum(
        (m.forward_s + m.backward_s) * (3 if m.kind == "block" else 1)
        for m in found.layers
        if m.tensor == m.context == m.micro_batch == 1 and m.recompute == "none"
    )
    assert 2 * micro_batch_s <= step_s < 2 * micro_batch_s + 1.0


def test_another_machine_cannot_be_profiled_from_here() -> None:
    with pytest.raises(LaunchError, match="--cluster local"):
        profiles.profile(tiny(), "2x8xh100-sxm-80gb", JOB, quiet=True)


def test_degrees_divide_what_they_must() -> None:
    machine = resolve_cluster("local:4")

    found = profiles.divisions(tiny(), machine, JOB, [4])

    # Two key/value heads; a sequence of 8 in two chunks for each of up to 4 ranks; no experts.
    assert found == [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 4, 1)]
    assert profiles.divisions(tiny_model(2), machine, JOB, [2, 2])[:2] == [(1, 1, 1), (2, 1, 1)]


def test_pairs_and_all_ranks_of_a_node_of_nodes_and_of_both_are_measured() -> None:
    def measured(ranks: int, counts: list[int]) -> list[tuple[str, int, int, int]]:
        machine = resolve_cluster(f"local:{ranks}")
        whole = machine if len(counts) == 1 else joint_cluster([machine] * len(counts))
        return [(g.tier, g.ranks, g.stride, g.inner) for g in profiles.groups(whole, counts)]

    assert measured(4, [4]) == [("memory", 2, 1, 1), ("memory", 4, 1, 1)]
    assert measured(2, [2]) == [("memory", 2, 1, 1)]
    assert measured(1, [1]) == []
    assert measured(1, [1, 1]) == [("network", 2, 1, 1)]
    assert measured(2, [2, 2]) == [
        ("memory", 2, 1, 1),
        ("network", 2, 2, 1),
        ("network", 4, 1, 2),
    ]


def failing(arguments: dict[str, Any], tell: ranks.Tell) -> None:
    tell("failing", 0.5)
    raise LaunchError(f"no {arguments['what']} here")


@pytest.mark.ranks
def test_what_a_rank_refuses_is_the_error_of_the_whole() -> None:
    with pytest.raises(LaunchError, match="no luck here"):
        ranks.result_of(
            "tests.profiler.test_profile:failing",
            {"what": "luck"},
            ranks=1,
            device="cpu",
            title="test",
            quiet=True,
        )


@pytest.mark.parametrize("name", ["clock", "links", "layers", "overheads", "profile"])
def test_examples_in_docstrings_hold(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"profiler.{name}")).failed == 0


@pytest.mark.parametrize(
    ("field", "counted"),
    [
        ("shard_unit_s", lambda units, size: 3 * 2 * units),  # three micro-batches, two passes
        ("gather_copy_s_per_byte", lambda units, size: 3 * 2 * size),
        ("reduce_copy_s_per_byte", lambda units, size: 3 * size),
    ],
)
def test_measured_overheads_of_sharding_are_in_the_prediction(field: str, counted: Any) -> None:
    model, machine = tiny(), resolve_cluster("local:2")
    layout = Layout(data_shard=2, zero=3, micro_batches=3)
    job = Job(seq_len=8, global_batch=6, precision="fp32")

    def step_s(value: float) -> float:
        figures = dict.fromkeys(Overheads.model_fields, 0.0) | {field: value}
        measured = Profile.of(
            {
                "model": model.name,
                "model_digest": model.digest,
                "birth": {
                    "command": "none",
                    "date": "none",
                    "host": "none",
                    "device": "none",
                    "ranks": 2,
                    "threads_per_rank": 1,
                    "software": {},
                },
                "layers": [],
                "overheads": figures,
            }
        )
        return layout_prediction(Request(model, machine, job, profile=measured), layout).step_time_s

    units, size = len(model.chain), 4 * model.parameters
    assert step_s(1e-3) - step_s(0.0) == pytest.approx(1e-3 * counted(units, size), rel=1e-6)


def test_a_graph_without_its_modules_is_refused() -> None:
    layers = tuple(Layer(name=name, kind=name, parameters=1) for name in "ab")
    graph = ModelGraph(name="graph", layers=layers, edges=(Edge(source="a", target="b"),))

    with pytest.raises(DocumentError, match=r"file\.py:factory"):
        profiles.profile(graph, "local:1", JOB)
