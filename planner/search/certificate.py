"""The account of a search: what became of every configuration, and what that proves.

Every configuration ends in exactly one of the `OUTCOMES`.  All but the chosen one are refused,
dominated, out of memory, or cannot take less than the objective: their counts are the proof.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from planner.documents.plan import Layout
from planner.documents.prediction import Certificate, Loser, PlanProof
from planner.documents.profile import CHUNK_ROWS
from planner.documents.stack import Stack
from planner.documents.tolerances import EQUAL
from planner.schedules import SCHEDULES
from planner.search.space import LARGEST_CONTEXT, LARGEST_MICRO_BATCH

RUNNERS_UP = 5

CHOSEN = "chosen"
REFUSED = "refused by the backend"
DOMINATED = "dominated"
OUT_OF_MEMORY = "out of memory"
UNKEPT = "violates a requirement"
SLOWER = "solved, slower"
NO_FASTER = "solved, no split faster"
UNFINISHED = "stopped early"
BOUNDS = (
    "pruned by the compute bound",
    "pruned by compute within memory",
    "pruned by communication of the commonest layers",
    "pruned by communication",
    "pruned by communication within memory",
)
"""In the order in which they are worked out; each is at least the one before."""
COMPUTATION, ROOM, SHARED, COMMUNICATION, MEMORY = range(len(BOUNDS))
OUTCOMES = (
    CHOSEN,
    REFUSED,
    *BOUNDS,
    DOMINATED,
    OUT_OF_MEMORY,
    UNKEPT,
    NO_FASTER,
    SLOWER,
    UNFINISHED,
)


EXACT = (
    "a rank's bytes are those that its prediction counts; of like layers on a stage those that are "
    "recomputed more come first; of the n like layers on a rank of V stages, those that store less "
    "first, its c-th stage holds floor((n + c) / V), and on a rank with the last stage alone that "
    "one holds what is left of stages as large as other ranks'"
)


UNSEARCHED = (
    "idle devices",
    f"losses in chunks of other than {CHUNK_ROWS:,} rows",
    f"micro-batches of more than {LARGEST_MICRO_BATCH} samples",
    f"sequences on more than {LARGEST_CONTEXT} ranks",
    "stages of a rank that share like layers unevenly",
    "experts in another order of axes",
    "ZeRO-3 that gathers more than one unit ahead, or within other groups than a node",
    "fp8 with a scale for each row",
    "tokens gathered by all experts' ranks",
)
LEFT_OUT = f"{', '.join(UNSEARCHED)}, and what --allow would add"
"""What `meshwright predict` prices and no search of the native backend looks at unasked."""


@dataclass(slots=True)
class Account:
    """Counts by outcome, and the layouts that came close."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    losers: list[Loser] = field(default_factory=list)
    unfinished_s: list[float] = field(default_factory=list)
    backend: str = "native"
    space: str = ""
    """What plans of the backend have in common, where that is not everything."""

    def refused(self, reason: str, count: int = 1) -> None:
        """Count what the backend does not run; what the data of its space say, by reason."""
        stack, told, why = reason.partition(": ")
        outcome = f"{REFUSED}: {why}" if told and stack == self.backend else REFUSED
        self.settled(outcome, count)

    def settled(self, outcome: str, count: int) -> None:
        """Count configurations of which nothing more is said."""
        self.counts[outcome] = self.counts.get(outcome, 0) + count

    def lost(
        self,
        outcome: str,
        layout: Layout,
        *,
        objective_s: float | None = None,
        bound_s: float | None = None,
        because: str | None = None,
        count: int = 1,
    ) -> None:
        """Count what became of a configuration, and of `count` - 1 that are like it.

        It is a possible runner-up if it has a figure.
        """
        self.settled(outcome, count)
        if outcome == UNFINISHED:
            self.unfinished_s.append(bound_s or 0.0)
        if objective_s is not None or bound_s is not None:
            self.losers.append(
                Loser(
                    layout=layout.text(),
                    objective_s=objective_s,
                    lower_bound_s=bound_s,
                    reason=because or outcome,
                )
            )

    def proven_s(self, objective_s: float, lower_bound_s: float) -> float:
        """Return what no configuration takes less than; the bound is of the chosen layout alone."""
        return min(objective_s, lower_bound_s, *self.unfinished_s)

    def certificate(
        self, *, objective_s: float, lower_bound_s: float, optimal: bool, solver: str
    ) -> Certificate:
        """Return the proof; `lower_bound_s` and `optimal` speak of the chosen layout alone."""
        proven_s = self.proven_s(objective_s, lower_bound_s)
        optimal = optimal and not self.unfinished_s
        gap = 0.0 if optimal else 1 - proven_s / objective_s
        total = sum(self.counts.values())
        ranked = sorted(self.losers, key=_figure)
        return Certificate(
            statement=f"Closed form: none of {total:,} configurations takes less than "
            f"{proven_s:.6g} s a step.",
            model=closed_form_text() + self.space,
            solver=solver,
            optimal=optimal,
            objective_s=objective_s,
            lower_bound_s=proven_s,
            gap=gap,
            configurations=total,
            counts={name: count for name, count in self.counts.items() if count},
            runners_up=tuple(ranked[:RUNNERS_UP]),
        )


def space_text(stack: Stack) -> str:
    """Return what splits and recompute choices a stack's plans have; nothing where they have any.

    >>> from planner.catalog import stacks
    >>> space_text(stacks()["megatron"])
    '; of megatron, whose stages have blocks even_but_ends and whose blocks all recompute alike'
    """
    said = []
    if stack.pipeline.stages != "any":
        said.append(f"whose stages have blocks {stack.pipeline.stages}")
    if stack.space is not None and not stack.space.recompute_by_layer:
        said.append("whose blocks all recompute alike")
    return f"; of {stack.name}, {' and '.join(said)}" if said else ""


def closed_form_text() -> str:
    """Return what is minimised, with the coefficients of every schedule."""
    coefficients = dict.fromkeys(one.coefficients.text for one in SCHEDULES.values())
    return (
        "T = steady max_r t_r + sum_r (fill t_r - credit_r) + max_r sync_r + step_s over pipeline "
        f"ranks r on m micro-batches; steady = {', '.join(coefficients)}; {EXACT}; "
        "memory less the process's own, over the stack's memory.tight, is for tensors"
    )


def of_plan(
    certificate: Certificate, *, layout: Layout, closed_form_s: float, simulated_s: float
) -> Certificate:
    """Return the certificate with what it proves of the plan that is the answer."""
    bound_s, finals = certificate.lower_bound_s, certificate.simulated
    tied = bound_s >= closed_form_s * (1 - EQUAL)
    gap = 0.0 if tied else 1 - bound_s / closed_form_s
    other = "" if certificate.layout == layout.text() else "; the optimum is another plan"
    low_s = gap_s = None
    proven = "no lower bound is proven"
    if finals is not None and finals.lower_bound_s is not None:
        low_s = min(finals.lower_bound_s, simulated_s)
        gap_s = 1 - low_s / simulated_s if simulated_s else 0.0
        proven = f"no plan in the space takes less than {low_s:.6g} s (gap {100 * gap_s:.2g} %)"
    proof = PlanProof(
        layout=layout.text(),
        closed_form_s=closed_form_s,
        closed_form_bound_s=bound_s,
        closed_form_gap=gap,
        simulated_s=simulated_s,
        simulated_bound_s=low_s,
        simulated_gap=gap_s,
        closed_form=f"Closed form: the plan takes {closed_form_s:.6g} s a step, "
        f"none of {certificate.configurations:,} configurations less than {bound_s:.6g} s "
        f"(gap {100 * gap:.2g} %{other}).",
        simulated=f"Simulated: the plan takes {simulated_s:.6g} s a step; {proven}.",
    )
    statement = f"{proof.closed_form} {proof.simulated}"
    return certificate.model_copy(update={"plan": proof, "statement": statement})


def _figure(loser: Loser) -> tuple[float, str]:
    return loser.objective_s or loser.lower_bound_s or 0.0, loser.layout
