"""Links between hosts of the rig are measured at the rate of their cables, and a bad one is named.

The hosts have real sockets and shaped cables (benchmarks.rig); every one runs the command that a
node of a cluster runs.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rig
from meshwright.planner.documents.profile import NodePair
from meshwright.profiler.diagnostics import slow_links
from tests.limits import PATIENCE_S

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(rig.refusal() is not None, reason=str(rig.refusal())),
]

PAIRS = """
import json, os, sys
from meshwright.runtime.run.node_rank import node_rank_of
from meshwright.runtime.run.rendezvous import Rendezvous
from meshwright.profiler.start_ranks import result_of
per_node = int(sys.argv[1])
with Rendezvous(node_rank_of(os.environ)) as rendezvous:
    found = result_of("tests.profiler.test_rig:between", {"per_node": per_node}, ranks=per_node,
        device="cpu", title="links", quiet=True, rendezvous=rendezvous)
print(json.dumps(found))
"""


def between(arguments: dict[str, Any], tell: Any) -> list[dict[str, Any]]:
    import torch
    import torch.distributed as dist

    from meshwright.profiler import links

    firsts = range(0, dist.get_world_size(), arguments["per_node"])
    found = links.pairs(list(firsts), device=torch.device("cpu"), budget_s=1.0)
    return [pair.model_dump() for pair in found]


def measured(hosts: rig.Rig, *, ranks: int) -> list[NodePair]:
    root = str(Path(__file__).parents[2])
    said = hosts.run(
        [sys.executable, "-c", PAIRS, str(ranks)],
        environment={"PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        timeout_s=PATIENCE_S,
        quiet=True,
    )
    every = [json.loads(text) for text in said]
    assert all(found == every[0] for found in every)
    return [NodePair.model_validate(pair) for pair in every[0]]


def measured_at(hosts: rig.Rig, bits_per_s: Sequence[float], *, ranks: int) -> list[NodePair]:
    """Measure up to thrice, until all pairs are at their rates: others on the machine disturb."""
    for _ in range(3):
        pairs = measured(hosts, ranks=ranks)
        if [pair.bytes_per_s * 8 for pair in pairs] == pytest.approx(bits_per_s, rel=0.1):
            break
    return pairs


@pytest.mark.matrix
def test_a_cable_of_half_the_rate_is_named() -> None:
    rates = [50e6 if 2 in pair else 100e6 for pair in itertools.permutations(range(3), 2)]
    with rig.rig(3, "100mbit") as hosts:
        hosts.shape("50mbit", [2])
        pairs = measured_at(hosts, rates, ranks=1)

    found = list(slow_links(pairs, ["node0", "node1", "node2"]))

    assert [pair.bytes_per_s * 8 for pair in pairs] == pytest.approx(rates, rel=0.1)
    assert {(f.subject, f.text.split(" at ")[0]) for f in found} == {
        ("node2", "node2 sends"),
        ("node2", "node2 receives"),
    }
    assert [f.share for f in found] == pytest.approx([0.5, 0.5], abs=0.2)


@pytest.mark.matrix
@pytest.mark.parametrize("rate", ["100mbit", "1gbit"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_two_hosts_measure_the_rate_of_their_cables(rate: str, ranks: int) -> None:
    rates = [rig.bits_per_s(rate)] * 2
    with rig.rig(2, rate) as hosts:
        pairs = measured_at(hosts, rates, ranks=ranks)

    assert [pair.bytes_per_s * 8 for pair in pairs] == pytest.approx(rates, rel=0.1)
