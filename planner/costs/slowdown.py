"""A machine on which everything takes several times as long as predicted: its pace.

Runs tell the pace (`Calibration.pace`), whatever a prediction rests on.  Rates of a data sheet are
divided by it in `planner.calibration.fitting.fitted_constants.calibrated`; measured layers,
collectives and seconds of the host under a stack are multiplied by it here.
"""

from __future__ import annotations

from meshwright.planner.documents.profile import (
    CollectiveCurve,
    LayerMeasurement,
    LinkFit,
    Overheads,
    Profile,
    StageMeasurement,
)
from meshwright.planner.documents.stack import PerPass, Stack


def pace_of(profile: Profile | None) -> float:
    """Return the pace that a profile has; 1 where it has none."""
    found = profile.calibration if profile else None
    return 1.0 if found is None or found.pace is None else found.pace


def slower_profile(profile: Profile | None) -> Profile | None:
    """Return measurements as they are at a profile's pace."""
    pace = pace_of(profile)
    if profile is None or pace == 1:
        return profile
    return profile.model_copy(
        update={
            "layers": tuple(_layer(one, pace) for one in profile.layers),
            "stages": tuple(_stage(one, pace) for one in profile.stages),
            "collectives": tuple(_curve(one, pace) for one in profile.collectives),
            "overheads": _overheads(profile.overheads, pace),
        }
    )


def slower_stack(stack: Stack, pace: float) -> Stack:
    """Return a stack whose host takes `pace` times as long."""
    if pace == 1:
        return stack
    host = stack.host
    return stack.model_copy(
        update={
            "host": host.model_copy(
                update={
                    "layer_s": _each_pass(host.layer_s, pace),
                    "kernel_s": _each_pass(host.kernel_s, pace),
                    "compiled_s": _each_pass(host.compiled_s, pace),
                    "checkpoint_s": _each_pass(host.checkpoint_s, pace),
                    "selective_s": pace * host.selective_s,
                    "experts_s": pace * host.experts_s,
                    "rank_s": pace * host.rank_s,
                    "checked_s": pace * host.checked_s,
                    "action_s": pace * host.action_s,
                    "step_s": pace * host.step_s,
                }
            ),
            "sharding": stack.sharding.model_copy(
                update={
                    "unit_s": pace * stack.sharding.unit_s,
                    "listed_s": pace * stack.sharding.listed_s,
                }
            ),
            "pipeline": stack.pipeline.model_copy(
                update={"polled_s": pace * stack.pipeline.polled_s}
            ),
        }
    )


def _each_pass(seconds: PerPass, pace: float) -> PerPass:
    return PerPass(forward=pace * seconds.forward, backward=pace * seconds.backward)


def _layer(one: LayerMeasurement, pace: float) -> LayerMeasurement:
    again_s = one.recompute_s
    return one.model_copy(
        update={
            "forward_s": pace * one.forward_s,
            "backward_s": pace * one.backward_s,
            "recompute_s": None if again_s is None else pace * again_s,
        }
    )


def _stage(one: StageMeasurement, pace: float) -> StageMeasurement:
    seconds = {"forward_s": pace * one.forward_s, "backward_s": pace * one.backward_s}
    return one.model_copy(update=seconds)


def _curve(one: CollectiveCurve, pace: float) -> CollectiveCurve:
    points = tuple(
        point.model_copy(update={"seconds": pace * point.seconds}) for point in one.points
    )
    fit = None if one.fit is None else _fit(one.fit, pace)
    return one.model_copy(update={"points": points, "fit": fit})


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


def _overheads(found: Overheads | None, pace: float) -> Overheads | None:
    """Return them all but the share that is hidden, which has no seconds."""
    if found is None:
        return None
    gather, reduce = found.gather_copy_s_per_byte, found.reduce_copy_s_per_byte
    return found.model_copy(
        update={
            "step_s": pace * found.step_s,
            "optimizer_s_per_parameter": pace * found.optimizer_s_per_parameter,
            "pipeline_action_s": pace * found.pipeline_action_s,
            "shard_unit_s": pace * found.shard_unit_s,
            "gather_copy_s_per_byte": None if gather is None else pace * gather,
            "reduce_copy_s_per_byte": None if reduce is None else pace * reduce,
        }
    )
