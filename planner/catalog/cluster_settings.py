"""Settings behind a cluster's name: `4x8xh100-sxm-80gb,network=25GB/s,host_memory=1TiB`.

Each setting replaces one figure of the catalogue; one that the cluster has no use for is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.planner.documents.cluster import ClusterSpec, LinkTier
from meshwright.planner.documents.document import nearest
from meshwright.planner.errors import DocumentError

SIZES = {
    **{"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12},
    **{"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40},
}
BITS = {"Kb": 125.0, "Mb": 125e3, "Gb": 125e6, "Tb": 125e9}
NUMBER = r"(\d{1,9}(?:\.\d{1,6})?)\s*"
RATE = re.compile(rf"{NUMBER}([KMGT]i?[Bb])(?:/s|ps)")
SIZE = re.compile(rf"{NUMBER}([KMGT]i?B)")
PCIE = re.compile(r"([3-6])(?:x(1|2|4|8|16))?")
LANE_BYTES_PER_S = {"3": 1e9, "4": 1.94e9, "5": 3.94e9, "6": 7.88e9}
"""Bytes per second of a lane in one direction; 16 lanes are the catalogue's 16, 31 and 63 GB/s."""
GIVEN = "given behind the cluster's name"
FORMS = {
    "network": "a rate of each device and direction, as 25GB/s or 200Gb/s",
    "oversubscription": "a factor of at least 1, as 2",
    "host_memory": "a size of each node, as 512GiB",
    "pcie": "a generation and lanes, as 3x8",
    "power_limit": "a share of the devices' design power from 0.6 to 1, as 0.7",
}


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Figures that replace those of the catalogue."""

    network_bytes_per_s: float | None = None
    oversubscription: float | None = None
    host_memory_bytes: int | None = None
    pcie_bytes_per_s: float | None = None
    power_limit: float | None = None
    """Share of the design power."""

    @classmethod
    def parse(cls, words: str) -> ClusterSettings:
        """Read settings joined by commas.

        >>> ClusterSettings.parse("network=200Gb/s,oversubscription=2").network_bytes_per_s
        25000000000.0
        >>> ClusterSettings.parse("pcie=3x8").pcie_bytes_per_s
        8000000000.0
        """
        values: dict[str, str] = {}
        for word in words.split(","):
            name, sign, value = (part.strip() for part in word.partition("="))
            if name not in FORMS:
                raise DocumentError(
                    "",
                    f"there is no setting '{name:.40}' of a cluster; {nearest(name, list(FORMS))}",
                )
            if not sign or name in values:
                raise DocumentError("", f"'{word:.60}': give {name} once, {FORMS[name]}")
            values[name] = value
        oversubscription = values.get("oversubscription")
        memory = values.get("host_memory")
        return cls(
            network_bytes_per_s=_rate(values, "network"),
            oversubscription=None if oversubscription is None else _factor(oversubscription),
            host_memory_bytes=None if memory is None else _size(memory),
            pcie_bytes_per_s=_pcie(values),
            power_limit=_power_limit(values),
        )

    def replace_figures(self, cluster: ClusterSpec) -> ClusterSpec:
        """Return a cluster of one kind of node with these figures."""
        [group] = cluster.groups
        between = {
            "bytes_per_s": self.network_bytes_per_s,
            "oversubscription": self.oversubscription,
        }
        tiers = tuple(
            _tier_with(tier, between)
            if tier.name == "network"
            else _tier_with(tier, {"bytes_per_s": self.pcie_bytes_per_s})
            if tier.name == "pcie"
            else tier
            for tier in cluster.tiers
        )
        if any(between.values()) and all(tier.name != "network" for tier in cluster.tiers):
            raise DocumentError(
                "",
                f"network and oversubscription describe links between nodes, and {cluster.name} "
                "has "
                "none; leave them out",
            )
        changes: dict[str, object] = {}
        if self.host_memory_bytes is not None:
            changes |= {
                "host_memory_bytes": self.host_memory_bytes,
                "host_memory_range_bytes": None,
            }
        if self.pcie_bytes_per_s is not None:
            changes["host_link_bytes_per_s"] = self.pcie_bytes_per_s
        if self.power_limit is not None:
            limited = group.accelerator.model_copy(update={"power_limit": self.power_limit})
            changes["accelerator"] = limited
        return cluster.model_copy(
            update={"groups": (group.model_copy(update=changes),), "tiers": tiers}
        )


def _tier_with(tier: LinkTier, figures: Mapping[str, float | None]) -> LinkTier:
    given = {name: value for name, value in figures.items() if value is not None}
    if not given:
        return tier
    return tier.model_copy(update={**given, "provenance": "quoted", "source": GIVEN})


def _rate(values: Mapping[str, str], name: str) -> float | None:
    if name not in values:
        return None
    match = RATE.fullmatch(values[name])
    rate = match and float(match[1]) * (SIZES | BITS).get(match[2], 0.0)
    if not rate:
        raise DocumentError("", f"{name} is '{values[name]:.40}'; write {FORMS[name]}")
    return rate


def _power_limit(values: Mapping[str, str]) -> float | None:
    if "power_limit" not in values:
        return None
    text = values["power_limit"]
    share = float(text) if re.fullmatch(r"[01](\.\d{1,3})?", text) else 0.0
    if not 0.6 <= share <= 1:
        raise DocumentError("", f"power_limit is '{text:.40}'; write {FORMS['power_limit']}")
    return share


def _size(text: str) -> int:
    match = SIZE.fullmatch(text)
    size = match and round(float(match[1]) * SIZES.get(match[2], 0.0))
    if not size:
        raise DocumentError("", f"host_memory is '{text:.40}'; write {FORMS['host_memory']}")
    return size


def _factor(text: str) -> float:
    match = re.fullmatch(r"\d{1,4}(\.\d{1,3})?(:1)?", text)
    factor = float(text.removesuffix(":1")) if match else 0.0
    if not 1 <= factor <= 1000:
        raise DocumentError(
            "", f"oversubscription is '{text:.40}'; write {FORMS['oversubscription']}"
        )
    return factor


def _pcie(values: Mapping[str, str]) -> float | None:
    if "pcie" not in values:
        return None
    match = PCIE.fullmatch(values["pcie"])
    if match is None:
        raise DocumentError("", f"pcie is '{values['pcie']:.40}'; write {FORMS['pcie']}")
    return LANE_BYTES_PER_S[match[1]] * int(match[2] or 16)
