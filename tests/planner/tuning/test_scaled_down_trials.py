"""A plan tried in small keeps what a device does, and tells nothing of what it does not have."""

import random

import pytest

from meshwright.planner.architectures.architecture import architecture_of
from meshwright.planner.architectures.parameters import graph_of
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.documents.plan import Layout
from meshwright.planner.errors import DocumentError
from meshwright.planner.requests.pins import read_pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.search import search
from meshwright.planner.tuning.candidates import trial_candidate
from meshwright.planner.tuning.next_trial import Outcome, Tuner
from meshwright.planner.tuning.scaled_down_trials import (
    AXES,
    _tier,
    check_smaller,
    in_small,
    small_layout,
)
from meshwright.planner.tuning.trial_options import TrialOption

LARGE, SMALL = resolve_cluster("64x8xh100-sxm-80gb"), resolve_cluster("2x8xh100-sxm-80gb")
KEPT = ("tensor", "context", "expert", "micro_batch", "zero", "sequence_parallel", "order")


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tensor=8, pipeline=8, data_shard=8, zero=1, schedule="1f1b", micro_batches=64),
        Layout(data_shard=512, zero=3, micro_batch=2, micro_batches=4),
        Layout(tensor=2, data_shard=8, data_replicate=32, zero=3, reshard_after_forward=8),
        Layout(expert=8, data_shard=64, pipeline=8, schedule="interleaved", virtual_stages=2),
        Layout(tensor=4, context=4, pipeline=4, data_shard=8, zero=1, schedule="zbv"),
    ],
    ids=lambda one: one.text().replace(" ", "_"),
)
def test_shapes_and_tiers_are_kept_and_the_rest_shrinks(layout: Layout) -> None:
    found = small_layout(layout, LARGE, SMALL)

    assert found is not None
    assert all(getattr(found, name) == getattr(layout, name) for name in KEPT)
    assert found.devices == SMALL.devices
    assert found.pipeline <= layout.pipeline
    assert found.data_shard * found.tensor * found.context % found.expert == 0
    assert found.micro_batches % found.pipeline == 0
    for axis in AXES:
        assert _tier(found, axis, SMALL) in (_tier(layout, axis, LARGE), None)


@pytest.mark.matrix
def test_a_stand_in_has_the_models_own_layers_but_fewer() -> None:
    request = Request.create(
        resolve_model("demo-4m"),
        resolve_cluster("4x8xh100-sxm-80gb"),
        seq_len=128,
        global_batch=64,
        pins=read_pins(
            ["compile=none,loss=full,tp=1,cp=1,pp=2,micro_batch=2,zero=1,schedule=1f1b,v=1"]
        ),
    )
    answer = search(request)
    plans = [trial_candidate(request, answer.plan, answer.prediction)]

    found = in_small(request, plans, resolve_cluster("4xh100-sxm-80gb"), "4xh100-sxm-80gb")

    (one,) = found.stand_ins
    assert one.config is not None
    name = one.request.model.name
    again = graph_of(architecture_of(one.config, name=name), name=name, source=name)
    assert again.digest == one.candidate.plan.model.digest
    kinds = {layer.kind: layer.parameters for layer in request.model.layers}
    assert {layer.kind: layer.parameters for layer in again.layers} == kinds
    assert one.candidate.plan.layout.micro_batch == 2
    assert one.candidate.plan.cluster == "4xh100-sxm-80gb"
    (told,) = found.candidates
    assert (told.option.doublings, told.option.unseen_links) == (3.0, True)
    assert found.unseen == ("network",)


@pytest.mark.parametrize(
    ("small", "why"),
    [
        ("8xa100-sxm-80gb", "has a100"),
        ("64x8xh100-sxm-80gb", "512 devices"),
        ("8xh100-sxm-80gb+8xa100-sxm-80gb", "differ"),
    ],
)
def test_a_cluster_that_tells_nothing_is_refused(small: str, why: str) -> None:
    with pytest.raises(DocumentError, match=why):
        check_smaller(resolve_cluster(small), LARGE)


def option(
    links: float, *, doublings: float = 0.0, unseen: bool = False, **layout: int
) -> TrialOption:
    return TrialOption(
        layout=Layout(**{"data_shard": 8, "zero": 1, **layout}),  # type: ignore[arg-type]
        kept="none",
        step_s=1.0,
        parts={
            "forward": 1 - links,
            "tensor communication": links / 2,
            "data communication": links / 2,
        },
        devices_per_node=8,
        doublings=doublings,
        unseen_links=unseen,
    )


@pytest.mark.parametrize("seed", range(3))
def test_eight_devices_find_what_links_do_to_many(seed: int) -> None:
    """A simulator with known constants: links inside nodes are slow here and on more devices."""
    rng = random.Random(seed)
    shares = [rng.uniform(0.1, 0.5) for _ in range(10)]

    def made(doublings: float) -> list[TrialOption]:
        return [
            option(share, doublings=doublings, tensor=2 ** (at % 3), micro_batch=1 + at % 2)
            for at, share in enumerate(shares)
        ]

    true_s = [1 + 1.5 * share / 2 for share in shares]  # of few devices and of many
    tuner = Tuner([*made(3.0), *made(0.0)], stand_ins=10)
    first_s = true_s[tuner.answer]
    for _ in range(4):
        chosen = tuner.next_trial()
        assert chosen is not None
        assert chosen >= 10
        tuner = tuner.with_outcome(Outcome(option=chosen, step_s=true_s[chosen - 10]))

    assert tuner.answer < 10
    assert true_s[tuner.answer] <= min(1.05 * min(true_s), first_s)
