"""Clusters with one figure changed."""

from __future__ import annotations

import pytest

from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.whatif.study import USUAL
from meshwright.planner.whatif.what_if_changes import changed_cluster


def test_each_change_multiplies_its_figure_alone() -> None:
    cluster = resolve_cluster("4x8xh100-sxm-80gb")
    more = changed_cluster(cluster, "memory", 1.5)
    assert more is not None
    assert more.groups[0].accelerator.memory_bytes == round(
        1.5 * cluster.groups[0].accelerator.memory_bytes
    )
    assert more.tiers == cluster.tiers
    faster = changed_cluster(cluster, "network", 2.0)
    assert faster is not None
    assert [t.bytes_per_s for t in faster.tiers] == [450e9, 2 * cluster.tiers[1].bytes_per_s]
    assert faster.groups == cluster.groups
    inside = changed_cluster(cluster, "node_links", 2.0)
    assert inside is not None
    assert [t.bytes_per_s for t in inside.tiers] == [900e9, cluster.tiers[1].bytes_per_s]


def test_a_wider_domain_joins_nodes_by_the_fast_tier() -> None:
    cluster = resolve_cluster("9x8xh100-sxm-80gb")
    wide = changed_cluster(cluster, "domain", 9.0)
    assert wide is not None
    assert wide.devices == 72
    assert [tier.name for tier in wide.tiers] == [cluster.tiers[0].name]
    assert wide.tiers[0].devices == 72
    assert changed_cluster(cluster, "domain", 2.0) is None  # 72 devices have no 16-device domains


@pytest.mark.parametrize("name", USUAL)
def test_a_factor_of_one_changes_nothing(name: str) -> None:
    cluster = resolve_cluster("4xp5.48xlarge")
    same = changed_cluster(cluster, name, 1.0)  # type: ignore[arg-type]
    assert same is None or same == cluster
