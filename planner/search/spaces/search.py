"""One search over the layouts of one or several spaces, and what it answers.

A space says which layouts there are, what bounds them from below, and how one is solved.  Layouts
of a space wait in `planner.search.layout_queue`; a later space has to beat what an earlier one
found.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from planner.costs.layout_costs import LayoutCosts
from planner.errors import NoPlanFits
from planner.plan import Layout
from planner.search.answer import Answer
from planner.search.certificate import CHOSEN, REFUSED, SLOWER, Account
from planner.search.finalists import MARGIN, MOST_ALONE, MOST_SOLVED, fastest_first, told
from planner.search.layout_queue import (
    Bound,
    Bundle,
    Found,
    Lost,
    Searched,
    best_first,
    ranking,
)
from planner.search.ranked import Ranked, proven
from planner.search.space import kind

Progress = Callable[[int, int], None]
Refusals = dict[str, int]
"""Reasons why the backend runs no plan of a layout, and of how many layouts."""
Misses = list[tuple[Layout, str]]
"""Layouts that were seen not to fit, and why."""


class Proven(Protocol):
    """A split of a layout's stages."""

    @property
    def optimal(self) -> bool:
        """Whether no other split of its layout takes less."""


S = TypeVar("S", bound=Proven)


class LayoutSpace(Protocol[S]):
    """Layouts, and their best splits."""

    @property
    def groups(self) -> Sequence[str]:
        """Names of the device groups that it uses."""

    def costs_of(self, layout: Layout) -> Sequence[LayoutCosts]:
        """Return the costs of a layout on each of them."""

    @property
    def bounds(self) -> Sequence[tuple[str, Bound]]:
        """Lower bounds on a layout's seconds, the cheapest first, and what falls to each."""

    def bundles(self, refused: Refusals) -> Iterator[Bundle]:
        """Yield every layout that keeps what the user fixed, or count why it cannot run.

        Some of a bundle may be refused still.
        """

    def refusal(self, layout: Layout) -> str | None:
        """Return why no plan is made of a layout, or None if one can be."""

    def solve(self, layout: Layout, cutoff_s: float, /) -> Found[S] | Lost:
        """Return the best split of a layout; only seconds below the cutoff are of interest."""

    def ranked(self, found: Found[S], /) -> Ranked:
        """Return the plan of a split and its prediction."""


def runnable(space: LayoutSpace[Any], refused: Refusals) -> Iterator[Bundle]:
    """Yield bundles of what can run; count by reason what was looked at and cannot."""

    def within(layouts: Callable[[], Iterable[Layout]]) -> Iterator[Layout]:
        for layout in layouts():
            why = space.refusal(layout)
            if why is None:
                yield layout
            else:
                refused[why] = refused.get(why, 0) + 1

    for bundle in space.bundles(refused):
        yield replace(bundle, layouts=partial(within, bundle.layouts))


def search_spaces(
    spaces: Iterable[LayoutSpace[Any]],
    *,
    solver: str = "exact",
    refused: Refusals,
    why_nothing: Callable[[Refusals, Misses], str],
    top: int = 1,
    progress: Progress | None = None,
) -> Answer:
    """Return the fastest plan of all spaces, with its proof.

    `refused` were counted before; `why_nothing` is said if no layout has a plan.
    """
    started = time.process_time()
    account, refused = Account(), dict(refused)
    found: list[tuple[LayoutSpace[Any], Found[Any]]] = []
    near: list[tuple[LayoutSpace[Any], Searched[Any]]] = []
    misses: Misses = []
    solved = 0
    for space in spaces:
        best_s = min((one.objective_s for _, one in found), default=math.inf)
        outcome = best_first(
            runnable(space, refused),
            bounds=space.bounds,
            solve=space.solve,
            account=account,
            top=top,
            below_s=best_s if top == 1 else math.inf,
            progress=progress,
        )
        found += [(space, one) for one in outcome.best]
        near.append((space, outcome))
        misses += outcome.misses
        solved += outcome.solved
    account.counts[REFUSED] += sum(refused.values())
    if not found:
        raise NoPlanFits(why_nothing(refused, misses))
    found = [found[at] for at in ranking([one for _, one in found])]
    account.counts[CHOSEN] += 1
    for _, loser in found[1:]:
        account.lost(SLOWER, loser.layout, objective_s=loser.objective_s)
    (home, winner), every = found[0], [space.ranked(one) for space, one in found[:top]]
    closed_form = every[0]
    order = [
        one for _, one in fastest_first(_finalists(near, winner, home, closed_form), closed_form)
    ]
    chosen = order[0]
    others = [one for one in every if kind(one.plan.layout) != kind(chosen.plan.layout)]
    certificate = account.certificate(
        objective_s=winner.objective_s,
        lower_bound_s=winner.lower_bound_s,
        optimal=winner.split.optimal,
        solver=solver,
    ).model_copy(
        update={
            "layout": closed_form.plan.layout.text(),
            "simulated": told(order, closed_form),
        }
    )
    return Answer(
        plan=chosen.plan,
        prediction=chosen.prediction,
        certificate=proven(certificate, chosen),
        search_s=time.process_time() - started,
        top=(chosen, *others)[:top],
        finalists=tuple(order),
        closed_form=closed_form,
        solved=solved,
    )


def _finalists(
    near: Sequence[tuple[LayoutSpace[Any], Searched[Any]]],
    winner: Found[Any],
    home: LayoutSpace[Any],
    best: Ranked,
) -> list[tuple[LayoutSpace[Any], Ranked]]:
    """Return the plans near the best one in the closed form, each with its space.

    Where that one simulates slower, whatever the closed form has faster than that is near.
    """
    limit_s = max(winner.objective_s * (1 + MARGIN), best.prediction.step_time_s)
    every = [
        (one, number, space)
        for number, (space, outcome) in enumerate(near)
        for one in outcome.near(limit_s, MOST_ALONE)
        if one.layout != winner.layout or space is not home
    ]
    every.sort(key=lambda one: (one[0].rank, one[1]))
    return [(home, best), *((space, space.ranked(one)) for one, _, space in every[:MOST_SOLVED])]
