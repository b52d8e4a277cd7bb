"""The account of a search: what became of every configuration, and what that proves.

Every configuration ends in exactly one of the `OUTCOMES`.  It is refused, dominated, out of memory,
or has no plan that is faster than the answer, whose own configuration is among these; or it is not
excluded, and the least bound of such is that of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshwright.planner.documents.prediction import Certificate, Finalist, Loser, PlanProof
from meshwright.planner.documents.tolerances import EQUAL
from meshwright.planner.documents.units import percent_text, seconds_text
from meshwright.planner.search.space import LARGEST_CONTEXT

if TYPE_CHECKING:
    from meshwright.planner.documents.framework import Framework
    from meshwright.planner.documents.plan import Layout

RUNNERS_UP = 5
PROVEN = 2e-6
"""The gap up to which a plan counts as optimal: integer programs are solved to half of it."""

REFUSED = "refused by the framework"
DOMINATED = "dominated"
OUT_OF_MEMORY = "out of memory"
UNKEPT = "violates a requirement"
NO_FASTER = "solved, no split faster"
UNFINISHED = "stopped early"
LEFT = "not excluded"
BOUNDS = (
    "pruned by the compute bound",
    "pruned by compute within memory",
    "pruned by communication of the commonest layers",
    "pruned by communication of the commonest layers within memory",
    "pruned by communication",
    "pruned by communication within memory",
    "pruned by paths of all cuts",
    "pruned by the exact optimum of a bound",
    "pruned by an integer program",
)
"""In the order in which they are worked out; each is at least the one before."""
COMPUTATION, ROOM, SHARED, SHARED_ROOM, COMMUNICATION, MEMORY, CUTS, SOLVED, PROGRAM = range(
    len(BOUNDS)
)
OUTCOMES = (REFUSED, *BOUNDS, DOMINATED, OUT_OF_MEMORY, UNKEPT, NO_FASTER, LEFT)


EXACT = (
    "the bytes of a rank are the predicted ones; like layers of a stage are ordered by "
    "recomputation, the most first; n like layers on a rank of V stages are ordered by stored "
    "bytes, the fewest first, and stage c gets floor((n + c) / V) of them; the last stage gets the "
    "rest"
)


UNSEARCHED = (
    "idle devices",
    "loss chunks of other lengths",
    f"context degrees above {LARGEST_CONTEXT}",
    "uneven shares of like layers among a rank's stages",
    "pipelines that differ within a group of devices, over several, or with divided states",
    "other places of the expert axis",
    "ZeRO-3 that gathers more than one unit ahead, or in groups other than a node",
    "fp8 with a scale for each row",
    "expert dispatch by all-gather",
    "hierarchical dispatch in groups other than the fastest links",
    "other numbers of forwards ahead of links",
)
LEFT_OUT = f"{', '.join(UNSEARCHED)}, and the choices of --allow"
"""Choices that `meshwright predict` prices and no native search looks at unasked."""
LEFT_OUT_OF_PARTS = LEFT_OUT.removeprefix(f"{UNSEARCHED[0]}, ")
"""The same where all parts of a cluster are looked at."""
LEFT_OUT_OF_SOME = f"other parts of the cluster, {LEFT_OUT_OF_PARTS}"
"""The same where that is proven of some parts."""


@dataclass(slots=True)
class PruningStatistics:
    """Numbers of configurations, by outcome."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    framework: str = "native"

    def count_refused(self, reason: str, count: int = 1) -> None:
        """Count what the framework does not run; what the data of its space say, by reason."""
        framework, separator, why = reason.partition(": ")
        outcome = f"{REFUSED}: {why}" if separator and framework == self.framework else REFUSED
        self.count_settled(outcome, count)

    def count_settled(self, outcome: str, count: int) -> None:
        """Count configurations of which nothing more is said."""
        self.counts[outcome] = self.counts.get(outcome, 0) + count


def space_text(framework: Framework) -> str:
    """Return the splits and recompute choices of a framework's plans; nothing where they have any.

    >>> from meshwright.planner.catalog import frameworks
    >>> space_text(frameworks()["megatron"])
    '; of megatron, whose stages have blocks even_but_ends and whose blocks all recompute alike'
    """
    texts = []
    if framework.pipeline.stages != "any":
        texts.append(f"whose stages have blocks {framework.pipeline.stages}")
    if framework.space is not None and not framework.space.recompute_by_layer:
        texts.append("whose blocks all recompute alike")
    return f"; of {framework.name}, {' and '.join(texts)}" if texts else ""


def unlike_text(configurations: int) -> str:
    """Return what pipelines that differ are among the configurations; nothing where none are.

    >>> unlike_text(2436).split(",")[0:2], unlike_text(0)
    (['; of 2', '436 configurations pipelines differ from one group of devices to another'], '')
    """
    if not configurations:
        return ""
    return (
        f"; of {configurations:,} configurations pipelines differ from one group of devices to "
        "another, those of one group having the same stages, whole states and micro-batches that "
        "differ by one at most"
    )


def certificate_of(
    account: PruningStatistics,
    framework: Framework,
    *,
    solver: str,
    finalists: Sequence[Finalist],
    lower_bound_s: float,
    looked_at: Mapping[str, int],
    runners_up: Sequence[Loser],
    unlike: int = 0,
) -> Certificate:
    """Return the proof that no plan simulates below a bound, beside the fastest of `finalists`.

    Of `unlike` configurations pipelines differ from one group of devices to another.
    """
    fastest = finalists[0]
    step_s = fastest.step_time_s
    bound_s = min(lower_bound_s, step_s)
    total = sum(account.counts.values())
    return Certificate(
        statement=_statement(step_s, bound_s, total),
        model=f"the simulated step of plans in which {EXACT}; tensors have the device's memory, "
        "less the process's own, divided by memory.tight of the "
        f"framework{space_text(framework)}{unlike_text(unlike)}",
        solver=solver,
        optimal=bool(bound_s >= step_s * (1 - PROVEN)),  # bounds of arrays are numpy numbers
        objective_s=step_s,
        lower_bound_s=bound_s,
        gap=_gap(step_s, bound_s),
        configurations=total,
        counts={name: count for name, count in account.counts.items() if count},
        looked_at={name: count for name, count in looked_at.items() if count},
        runners_up=tuple(runners_up),
        layout=fastest.layout,
        finalists=tuple(finalists),
    )


def of_plan(
    certificate: Certificate, *, layout: Layout, step_s: float, framework: str = "native"
) -> Certificate:
    """Return the certificate with what it proves of the plan that is the answer."""
    bound_s = min(certificate.lower_bound_s, step_s)
    statement = _statement(step_s, bound_s, certificate.configurations)
    proof = PlanProof(
        layout=layout.text_with(framework),
        step_time_s=step_s,
        lower_bound_s=bound_s,
        gap=_gap(step_s, bound_s),
        statement=statement,
    )
    return certificate.model_copy(update={"plan": proof, "statement": statement})


def of_limits(
    certificate: Certificate,
    bounds_s: Sequence[float],
    *,
    searched: Sequence[float],
    excluded: Sequence[float],
    bounded: Sequence[float],
) -> Certificate:
    """Return the certificate of the answer under a power limit with what is proven of all limits.

    `bounds_s` are seconds under the answer's limit that would take as much energy as no plan under
    another takes less than.  Shares of the design power are those that were `searched`, those under
    which no plan takes less than under these (`excluded`), and those that are `bounded` by them.
    """
    claim = f" Of power limits {_shares_text(searched)} {'was' if len(searched) == 1 else 'were'}"
    claim += " searched."
    if excluded:
        claim += f" Under {_shares_text(excluded)} each plan takes as much energy or more."
    if bounded:
        claim += f" What plans take under {_shares_text(bounded)} is bounded by these proofs."
    bound_s = min(certificate.objective_s, *bounds_s)
    update: dict[str, object] = {
        "lower_bound_s": bound_s,
        "gap": _gap(certificate.objective_s, bound_s),
        "optimal": bound_s >= certificate.objective_s * (1 - PROVEN),
        "statement": certificate.statement + claim,
        "power_limits": len(searched) + len(excluded) + len(bounded),
    }
    proof = certificate.plan
    if proof is not None:
        least_s = min(bound_s, proof.step_time_s)
        gap = _gap(proof.step_time_s, least_s)
        text = proof.statement + claim
        changes = {"lower_bound_s": least_s, "gap": gap, "statement": text}
        update |= {"plan": proof.model_copy(update=changes), "statement": text}
    return certificate.model_copy(update=update)


def _shares_text(shares: Sequence[float]) -> str:
    """Return shares of the design power.

    >>> _shares_text([0.6]), _shares_text([1.0, 0.9, 0.6])
    ('60 %', '100, 90 and 60 %')
    """
    *most, last = (f"{100 * share:.0f}" for share in shares)
    return f"{', '.join(most)} and {last} %" if most else f"{last} %"


def of_parts(
    certificate: Certificate,
    bounds_s: Sequence[float],
    *,
    unproven: int,
    fewer: int | None,
    by: str | None = None,
) -> Certificate:
    """Return the certificate of a part with what is proven of the cluster and its parts.

    Where parts are compared `by` energy or cost, `bounds_s` are seconds that would take as much on
    the part.

    Nothing is proven of `unproven` others, nor, of several groups, of `fewer` parts with some
    devices of more than one, of which plans were looked for.
    """
    bound_s = min(certificate.objective_s, *bounds_s)
    claim = f" The proof covers {len(bounds_s)} parts of the cluster, the whole included"
    claim += f"; it does not cover {unproven} more" if unproven else ""
    if fewer:
        claim += f"; {fewer} with some devices of several groups were searched without a proof"
    if by is not None:
        claim += f". Seconds of other parts are those that would take as much {by} on this one"
    claim += "."
    update: dict[str, object] = {
        "lower_bound_s": bound_s,
        "gap": _gap(certificate.objective_s, bound_s),
        "optimal": bound_s >= certificate.objective_s * (1 - PROVEN),
        "parts": len(bounds_s),
        "unproven_parts": None if fewer is None and not unproven else unproven + (fewer or 0),
        "least": by,
    }
    proof = certificate.plan
    if proof is not None:
        least_s = min(bound_s, proof.step_time_s)
        text = _statement(proof.step_time_s, least_s, certificate.configurations) + claim
        gap = _gap(proof.step_time_s, least_s)
        changes = {"lower_bound_s": least_s, "gap": gap, "statement": text}
        update |= {"plan": proof.model_copy(update=changes), "statement": text}
    return certificate.model_copy(update=update)


def _gap(step_s: float, bound_s: float) -> float:
    """Return how far a step may be above the least, relatively."""
    return 1 - bound_s / step_s if step_s and bound_s < step_s * (1 - EQUAL) else 0.0


def _statement(step_s: float, bound_s: float, configurations: int) -> str:
    gap = percent_text(_gap(step_s, bound_s))
    return (
        f"The plan takes {seconds_text(step_s)} a step. None of {configurations:,} configurations "
        f"takes less than {seconds_text(bound_s)} (gap {gap})."
    )
