"""Diagnostics of a profile that a person should know: slow links, slow devices, noise.

Pure functions of what was measured.  A node's links are judged by the best that it reaches with any
other node, so that one bad cable is not blamed on all who talk over it; a pair is then judged by
what both of its nodes reach elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from meshwright.planner.documents.profile import (
    Finding,
    MeasuredDevice,
    MeasuredNode,
    NodePair,
    Profile,
)

DEGRADED = 0.8
"""Share of its peers' rate below which something is wrong with a part."""
BUSY = 0.15
"""Share of a device's time that others took, above which measurements are doubtful."""
DRIFT = 0.1
"""Relative drift of a fixed product from the first rounds to the last."""
TARGET_SPREAD = 0.15
"""Interquartile range over median that repetitions aim at."""


def findings(profile: Profile) -> tuple[Finding, ...]:
    """Return all that is worth telling, the worst first within its kind."""
    names = [node.name for node in profile.nodes]
    return (
        *slow_links(profile.pairs, names),
        *slow_devices(profile.nodes),
        *wide_spreads(profile),
        *interpolation(profile),
    )


def slow_links(pairs: Sequence[NodePair], names: Sequence[str]) -> Iterator[Finding]:
    """Yield nodes, then pairs of nodes, that are slower than their peers."""
    if len(names) < 2:
        return
    sends = {node: _best(pairs, source=node) for node in range(len(names))}
    receives = {node: _best(pairs, target=node) for node in range(len(names))}
    for what, best in (("sends", sends), ("receives", receives)):
        for node, seconds in sorted(best.items(), key=lambda item: item[1]):
            # Two nodes have one pair: then a direction is compared with the other direction.
            others = (
                [rate for other, rate in best.items() if other != node]
                if len(names) > 2
                else [best[1 - node]] * (what == "sends")
            )
            if others and seconds < DEGRADED * median(others):
                share = seconds / median(others)
                yield Finding(
                    what="link",
                    subject=names[node],
                    share=share,
                    text=f"{names[node]} {what} at {share:.0%} of its peers: "
                    f"{_rate_text(seconds)} and {_rate_text(median(others))}",
                )
    for pair in sorted(pairs, key=lambda p: p.bytes_per_s):
        usual = min(sends[pair.source], receives[pair.target])
        if len(names) > 2 and pair.bytes_per_s < DEGRADED * usual:
            share = pair.bytes_per_s / usual
            yield Finding(
                what="link",
                subject=f"{names[pair.source]} -> {names[pair.target]}",
                share=share,
                text=f"from {names[pair.source]} to {names[pair.target]} go "
                f"{_rate_text(pair.bytes_per_s)}, {share:.0%} of what both reach with others",
            )


def below_quote(
    pairs: Sequence[NodePair], names: Sequence[str], *, quoted_bytes_per_s: float
) -> Iterator[Finding]:
    """Yield pairs that are slower than in the cluster's own document."""
    for pair in pairs:
        share = pair.bytes_per_s / quoted_bytes_per_s
        if share < DEGRADED:
            yield Finding(
                what="link",
                subject=f"{names[pair.source]} -> {names[pair.target]}",
                share=share,
                text=f"from {names[pair.source]} to {names[pair.target]} go "
                f"{_rate_text(pair.bytes_per_s)}, {share:.0%} of the "
                f"{_rate_text(quoted_bytes_per_s)} that the cluster's document says",
            )


def slow_devices(nodes: Sequence[MeasuredNode]) -> Iterator[Finding]:
    """Yield devices that compute slower than the others of their kind."""
    every = [(node, device) for node in nodes for device in node.devices if device.flops]
    for node, device in sorted(every, key=lambda pair: pair[1].flops or 0.0):
        peers = [
            other.flops
            for _, other in every
            if other.rank != device.rank and other.name == device.name and other.flops
        ]
        if peers and device.flops and device.flops < DEGRADED * median(peers):
            share = device.flops / median(peers)
            yield Finding(
                what="device",
                subject=f"{node.name}, rank {device.rank}",
                share=share,
                text=f"rank {device.rank} on {node.name} computes at {share:.0%} of its peers: "
                f"{_flops_text(device)}",
            )


def wide_spreads(profile: Profile) -> Iterator[Finding]:
    """Yield the kinds of measurement that did not settle."""
    rows = [m for m in profile.layers if m.spread > TARGET_SPREAD]
    if rows:
        worst = max(rows, key=lambda m: m.spread)
        yield Finding(
            what="spread",
            subject="layers",
            share=len(rows) / len(profile.layers),
            text=f"{len(rows)} of {len(profile.layers)} layer settings spread by more than "
            f"{TARGET_SPREAD:.0%} (worst: {worst.kind}, {worst.spread:.0%}); others use the "
            "machine, or its clock changes",
        )


def disturbances(noise: Sequence[Mapping[str, float]]) -> Iterator[Finding]:
    """Yield ranks whose processor others used, and devices that became slower."""
    busy = [of_rank for of_rank in noise if of_rank["waited"] > BUSY]
    if busy:
        worst = max(busy, key=lambda of_rank: of_rank["waited"])
        yield Finding(
            what="noise",
            subject=f"rank {worst['rank']:g}",
            share=worst["waited"],
            text=f"others ran for {worst['waited']:.0%} of the time in which rank "
            f"{worst['rank']:g} had work to do ({len(busy)} of {len(noise)} ranks were disturbed); "
            "measure again when the machine is quiet",
        )
    for of_rank in noise:
        if of_rank["drift"] > DRIFT:
            yield Finding(
                what="clock",
                subject=f"rank {of_rank['rank']:g}",
                share=of_rank["drift"],
                text=f"the device of rank {of_rank['rank']:g} became {of_rank['drift']:.0%} slower "
                "while it was measured: heat, a power limit, or others",
            )


def interpolation(profile: Profile) -> Iterator[Finding]:
    """Yield the errors of interpolated seconds, by leaving out each measured one in turn.

    It does so for every micro-batch between two others, all layer kinds together.  Between measured
    ones the gaps are half as wide, so this bounds their error as long as seconds grow smoothly.
    """
    passes: dict[tuple[int, int, int, str], dict[int, float]] = {}
    for m in profile.layers:
        of_setting = passes.setdefault((m.tensor, m.context, m.expert, m.recompute), {})
        of_setting[m.micro_batch] = of_setting.get(m.micro_batch, 0.0) + m.forward_s + m.backward_s
    errors = [
        (abs(_between(of_size, low, size, high) / of_size[size] - 1.0), setting, size)
        for setting, of_size in passes.items()
        for low, size, high in _threes(sorted(of_size))
        if of_size[size] > 0
    ]
    if errors:
        error, (tensor, context, expert, recompute), size = max(errors)
        divided = f"tp {tensor}" + f" cp {context}" * (context > 1) + f" ep {expert}" * (expert > 1)
        yield Finding(
            what="layers",
            subject="interpolation",
            share=error,
            text=f"seconds between measured micro-batches are within {error:.0%}: the worst of "
            f"{len(errors)} left out in turn ({divided}, micro-batch {size}, {recompute})",
        )


def _threes(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    return list(zip(sizes, sizes[1:], sizes[2:], strict=False))


def _between(of_size: Mapping[int, float], low: int, size: int, high: int) -> float:
    share = (size - low) / (high - low)
    return of_size[low] + share * (of_size[high] - of_size[low])


def _best(
    pairs: Sequence[NodePair], *, source: int | None = None, target: int | None = None
) -> float:
    return max(
        (
            pair.bytes_per_s
            for pair in pairs
            if (source is None or pair.source == source)
            and (target is None or pair.target == target)
        ),
        default=0.0,
    )


def _rate_text(bytes_per_s: float) -> str:
    bits = 8 * bytes_per_s
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def _flops_text(device: MeasuredDevice) -> str:
    return f"{(device.flops or 0.0) / 1e9:.3g} GFLOP/s"
