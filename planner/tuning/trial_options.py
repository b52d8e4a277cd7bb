"""Options: plans that may be tried, and how each step's logarithm depends on unknown constants.

A cause that takes a share s of a step moves the step's logarithm by s when its own seconds grow by
a factor e: the sensitivities are the shares of `Prediction.step_parts`, and no option is predicted
again.  Beside causes there are choices whose effect predictions miss in one direction for a whole
cluster (narrow products, filled pipelines), each with a slope of its own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from types import MappingProxyType

from meshwright.planner.costs.uncertainty import is_link
from meshwright.planner.documents.plan import Layout, Plan
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.documents.tolerances import ROUNDING


@dataclass(frozen=True, slots=True, kw_only=True)
class UncertainConstant:
    """Something of a cluster that no prediction knows exactly, the same for all of its plans."""

    what: str
    spread: float
    """Standard deviation of its logarithm before any trial."""


CONSTANTS: Mapping[str, UncertainConstant] = {
    "kernels": UncertainConstant(what="seconds of everything alike", spread=0.06),
    "recompute": UncertainConstant(what="seconds of recomputation beside", spread=0.02),
    "inner links": UncertainConstant(
        what="seconds of collectives inside layers, in a node", spread=0.75
    ),
    "outer links": UncertainConstant(what="the same across nodes", spread=0.75),
    "data links": UncertainConstant(what="seconds of gradients and gathered weights", spread=0.25),
    "waiting": UncertainConstant(what="idle seconds of pipelines", spread=0.27),
    "optimizer": UncertainConstant(what="seconds of the update", spread=1.0),
    "host": UncertainConstant(what="fixed seconds of steps and actions", spread=0.5),
    "narrow products": UncertainConstant(what="for each doubling of the tensor axis", spread=0.05),
    "stages": UncertainConstant(what="for each doubling of the pipeline", spread=0.035),
    "pipelined": UncertainConstant(what="of any pipeline", spread=0.05),
    "chunks": UncertainConstant(what="for each doubling of the stages of a rank", spread=0.03),
    "gathered weights": UncertainConstant(what="of ZeRO-2 and ZeRO-3", spread=0.05),
    "unseen links": UncertainConstant(
        what="seconds of gradients and gathered weights over links that trials do not have",
        spread=0.25,
    ),
    "scale": UncertainConstant(
        what="for each doubling of devices beyond those of trials", spread=0.1
    ),
}
"""Spreads are those under which the residuals of published sweeps are most likely
(`benchmarks/tune_replay.py`, docs/results/tuning.md)."""
PROFILED = ("kernels", "recompute", "inner links", "outer links", "data links", "optimizer", "host")
"""Constants that a profile of the machine measures."""

NO_FACTORS: Mapping[str, float] = MappingProxyType({})

SURE, NEVER = 1 - ROUNDING, ROUNDING
"""Probabilities beyond which a margin of memory makes no difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOption:
    """A plan with the figures that a belief uses."""

    layout: Layout
    kept: str
    """Treatment of stored tensors: the choices of its layers, as text."""
    step_s: float
    """Predicted seconds of a step."""
    parts: Mapping[str, float]
    """Predicted seconds by cause; their sum is `step_s`."""
    devices_per_node: int
    fit_probability: float = 1.0
    """Probability, before any trial, that the plan fits in memory."""
    memory_spread: float = 0.15
    """Spread of the logarithm of needed memory, from which that probability follows."""
    doublings: float = 0.0
    """Doublings of the number of devices beyond those of the trials."""
    unseen_links: bool = False
    """True if its data axis uses links that trials do not have."""

    @classmethod
    def of_plan(
        cls, plan: Plan, prediction: Prediction, *, devices_per_node: int, memory_spread: float
    ) -> TrialOption:
        """Return a plan as an option."""
        choices = {(p.recompute, p.activations) for stage in plan.stages for p in stage.layers}
        return cls(
            layout=plan.layout,
            kept=" ".join(sorted("+".join(choice) for choice in choices)),
            step_s=prediction.step_time_s,
            parts=prediction.step_parts,
            devices_per_node=devices_per_node,
            fit_probability=1.0
            if prediction.fit_probability is None
            else prediction.fit_probability,
            memory_spread=memory_spread,
        )

    @property
    def family(self) -> tuple[object, ...]:
        """Choices that neighbours share: all but the micro-batch and the finer axes."""
        layout = self.layout
        degrees = (
            layout.tensor,
            layout.pipeline,
            layout.context,
            layout.expert,
            layout.virtual_stages,
        )
        return (*degrees, layout.zero, self.kept)

    @property
    def margin(self) -> float:
        """Logarithm of the room of the fullest device over its predicted need, in memory spreads.

        >>> one = TrialOption(layout=Layout(), kept="", step_s=1.0, parts={}, devices_per_node=8,
        ...              fit_probability=0.5)
        >>> one.margin
        0.0
        """
        return NormalDist().inv_cdf(min(SURE, max(NEVER, self.fit_probability)))

    def moved_s(self, factors: Mapping[str, float]) -> float:
        """Return the step where seconds of causes grow by factors, and choices cost by theirs.

        >>> one = TrialOption(layout=Layout(data_shard=2, zero=1), kept="none", step_s=2.0,
        ...              parts={"forward": 1.5, "data communication": 0.5}, devices_per_node=8)
        >>> one.moved_s({"data links": 3.0}), one.moved_s({"kernels": 2.0})
        (3.0, 4.0)
        """
        seconds, choices = self._seconds(factors), self._choices()
        step_s: float = sum(seconds.values()) * factors.get("kernels", 1.0)
        for name, size in choices.items():
            step_s *= math.pow(factors.get(name, 1.0), size)
        narrow = factors.get("narrow products", 1.0)
        return step_s * math.pow(narrow, self._narrow(seconds))

    def sensitivities(self, factors: Mapping[str, float] = NO_FACTORS) -> dict[str, float]:
        """Return by how much each constant moves the logarithm of the step, about some of them.

        >>> one = TrialOption(layout=Layout(data_shard=2, zero=1), kept="none", step_s=2.0,
        ...              parts={"forward": 1.5, "data communication": 0.5}, devices_per_node=8)
        >>> {name: size for name, size in one.sensitivities().items() if size}
        {'kernels': 1.0, 'data links': 0.25}
        >>> one.sensitivities({"data links": 3.0})["data links"]
        0.5
        """
        seconds = self._seconds(factors)
        step_s = sum(seconds.values())
        fields = {
            **{name: each / step_s for name, each in seconds.items()},
            **self._choices(),
            "kernels": 1.0,
            "narrow products": self._narrow(seconds),
        }
        return {name: fields.get(name, 0.0) for name in CONSTANTS}

    def _seconds(self, factors: Mapping[str, float]) -> dict[str, float]:
        """Return seconds by the constant that they follow, `computing` what follows none."""
        layout, seconds = self.layout, defaultdict[str, float](float)
        far = layout.tensor * layout.context * layout.expert > self.devices_per_node
        called = {
            "layer links": "outer links" if far else "inner links",
            "data links": "unseen links" if self.unseen_links else "data links",
        }
        for cause, each in self.parts.items():
            name = _constant_of(cause)
            name = called.get(name, name)
            seconds[name] += each * factors.get(name, 1.0)
        return seconds

    def _narrow(self, seconds: Mapping[str, float]) -> float:
        computing = seconds.get("computing", 0.0) + seconds.get("recompute", 0.0)
        return computing / sum(seconds.values()) * math.log2(self.layout.tensor)

    def _choices(self) -> dict[str, float]:
        layout = self.layout
        return {
            "scale": self.doublings,
            "stages": math.log2(layout.pipeline),
            "pipelined": float(layout.pipeline > 1),
            "chunks": math.log2(layout.virtual_stages),
            "gathered weights": float(layout.zero > 1),
        }


def _constant_of(cause: str) -> str:
    """Return the constant that a cause of a step follows."""
    sensitivities = {
        "forward": "computing",
        "backward": "computing",
        "recompute": "recompute",
        "data communication": "data links",
        "pipeline": "waiting",
        "optimizer": "optimizer",
    }
    return sensitivities.get(cause, "layer links" if is_link(cause) else "host")
