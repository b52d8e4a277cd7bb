"""A machine on which everything takes several times as long as predicted, or its host does: pace.

Runs tell the pace (`Calibration.pace`), whatever a prediction rests on.  Rates of a data sheet are
divided by it in `planner.calibration.fitting.fitted_constants`; measured layers,
collectives and seconds of the host under a framework are multiplied by it here.  Where a cluster
says how fast its hosts run Python, seconds of the host follow that pace as well.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from meshwright.planner.documents.framework import Framework, PerPass

if TYPE_CHECKING:
    from meshwright.planner.documents.cluster import ClusterSpec
    from meshwright.planner.documents.profile import (
        CollectiveCurve,
        LayerMeasurement,
        LinkFit,
        Overheads,
        Profile,
        StageMeasurement,
    )


def pace_of(profile: Profile | None) -> float:
    """Return the pace that a profile has; 1 where it has none."""
    calibration = profile.calibration if profile else None
    return 1.0 if calibration is None or calibration.pace is None else calibration.pace


def slower_profile(profile: Profile | None) -> Profile | None:
    """Return measurements as they are at a profile's pace."""
    pace = pace_of(profile)
    if profile is None or pace == 1:
        return profile
    return profile.model_copy(
        update={
            "layers": tuple(_layer(layer, pace) for layer in profile.layers),
            "stages": tuple(_stage(stage, pace) for stage in profile.stages),
            "collectives": tuple(_curve(curve, pace) for curve in profile.collectives),
            "overheads": _overheads(profile.overheads, pace),
        }
    )


def host_pace(framework: Framework, cluster: ClusterSpec) -> float | None:
    """Return how many times a framework's seconds of the host the slowest host of a cluster takes.

        sqrt(c / c' l / l')

    c and l are seconds of a call and of a launch there, c' and l' on the host on which the
    framework's seconds were measured: a pass is made of both.  None where either host is unknown.
    """
    host = framework.host
    speeds = [group.host_speed for group in cluster.groups]
    if not (host.call_s and host.launch_s):
        return None
    paces = [
        math.sqrt(speed.call_s / host.call_s * speed.launch_s / host.launch_s)
        for speed in speeds
        if speed is not None
    ]
    return max(paces) if len(paces) == len(speeds) else None


def paced_framework(framework: Framework, cluster: ClusterSpec) -> Framework:
    """Return a framework as it is on the hosts of a cluster.

    The slowest host that a range reaches to stays where it was, or is this one.
    """
    pace = host_pace(framework, cluster)
    if pace is None:
        return framework
    slower = slower_framework(framework, pace)
    slowest = max(1.0, framework.host.slowest / pace)
    return slower.model_copy(update={"host": slower.host.model_copy(update={"slowest": slowest})})


def slower_framework(framework: Framework, pace: float) -> Framework:
    """Return a framework whose host takes `pace` times as long."""
    if pace == 1:
        return framework
    host = framework.host
    return framework.model_copy(
        update={
            "host": host.model_copy(
                update={
                    "layer_s": _each_pass(host.layer_s, pace),
                    "kernel_s": _each_pass(host.kernel_s, pace),
                    "adapter_s": _each_pass(host.adapter_s, pace),
                    "compiled_s": _each_pass(host.compiled_s, pace),
                    "checkpoint_s": _each_pass(host.checkpoint_s, pace),
                    "replay_s": pace * host.replay_s,
                    "selective_s": pace * host.selective_s,
                    "experts_s": pace * host.experts_s,
                    "rank_s": pace * host.rank_s,
                    "checked_s": pace * host.checked_s,
                    "action_s": pace * host.action_s,
                    "step_s": pace * host.step_s,
                }
            ),
            "sharding": framework.sharding.model_copy(
                update={
                    "unit_s": pace * framework.sharding.unit_s,
                    "listed_s": pace * framework.sharding.listed_s,
                }
            ),
            "pipeline": framework.pipeline.model_copy(
                update={"polled_s": pace * framework.pipeline.polled_s}
            ),
        }
    )


def _each_pass(seconds: PerPass, pace: float) -> PerPass:
    return PerPass(forward=pace * seconds.forward, backward=pace * seconds.backward)


def _layer(layer: LayerMeasurement, pace: float) -> LayerMeasurement:
    again_s = layer.recompute_s
    return layer.model_copy(
        update={
            "forward_s": pace * layer.forward_s,
            "backward_s": pace * layer.backward_s,
            "recompute_s": None if again_s is None else pace * again_s,
        }
    )


def _stage(stage: StageMeasurement, pace: float) -> StageMeasurement:
    seconds = {"forward_s": pace * stage.forward_s, "backward_s": pace * stage.backward_s}
    return stage.model_copy(update=seconds)


def _curve(curve: CollectiveCurve, pace: float) -> CollectiveCurve:
    points = tuple(
        point.model_copy(update={"seconds": pace * point.seconds}) for point in curve.points
    )
    fit = None if curve.fit is None else _fit(curve.fit, pace)
    return curve.model_copy(update={"points": points, "fit": fit})


def _fit(fit: LinkFit, pace: float) -> LinkFit:
    pieces = tuple(
        piece.model_copy(
            update={
                "latency_s": pace * piece.latency_s,
                "bytes_per_s": None if piece.bytes_per_s is None else piece.bytes_per_s / pace,
            }
        )
        for piece in fit.pieces
    )
    return fit.model_copy(update={"pieces": pieces})


def _overheads(overheads: Overheads | None, pace: float) -> Overheads | None:
    """Return them all but the share that is hidden, which has no seconds."""
    if overheads is None:
        return None
    gather, reduce = overheads.gather_copy_s_per_byte, overheads.reduce_copy_s_per_byte
    return overheads.model_copy(
        update={
            "step_s": pace * overheads.step_s,
            "optimizer_s_per_parameter": pace * overheads.optimizer_s_per_parameter,
            "pipeline_action_s": pace * overheads.pipeline_action_s,
            "shard_unit_s": pace * overheads.shard_unit_s,
            "gather_copy_s_per_byte": None if gather is None else pace * gather,
            "reduce_copy_s_per_byte": None if reduce is None else pace * reduce,
        }
    )
