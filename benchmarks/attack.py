"""An attack on answers: plans that the search did not make, held against its proof and its plan.

    python -m benchmarks.attack [REQUEST ...] [--plans N] [--seed S] [--usual] [--parts]
                                [--json] [--markdown] [--read FILE ...]

Every request is planned.  Then random plans and neighbours of good ones (cuts, recomputation,
schedules, micro-batches, degrees, ZeRO levels, orders of axes, experts, offload, compiled blocks,
the loss, how ZeRO-3 gathers, scales, how tokens are dispatched) are written as documents, read as
documents and predicted.  A plan is a hit if it fits and

    closed form   it lies in the space that the certificate speaks of, and its closed form is below
                  the least that the search found
    simulation    it lies in that space, laid out as the space has it, and its simulated step is
                  below the proven bound; or it is there, or on a part of the cluster, and more
                  than TOLERANCE faster than the answer or, with --parts, than what `plan` answers
                  of all parts; or it is anywhere and faster by TOLERANCE_OUTSIDE
    parts         with --parts: it lies in that space but for idle devices, and its simulated step
                  is below what is proven of all parts

The last is a measure of quality, not of truth, of plans that the space does not have.  Answers are
those of `plan --gap 0`, so that bounds are as high as they get; with --usual those of
`plan`.  Exit code 1 says that there was a hit.

What the certificate's space is, as it says itself (`certificate.model`, planner/search/space.py):

    all devices are used, and what the native framework refuses is left out
    64 ranks share a sequence at most
    under 1F1B ranks run no forwards ahead of links, or those of
    planner/search/spaces/forwards_ahead.py ahead of slow ones
    1 stage on each rank; under zbv and dualpipe-v 2, under interleaved schedules 2 to 8
    ranks of several stages share the longest run of like layers evenly: what stands before it is
    on the first stage, what stands behind it on the last, the stages of a rank have equally many
    up to one, and the last stage may have fewer
    expert parallelism keeps the usual order of axes, and tokens go all to all
    the loss is of all logits or in chunks, whose gradients wait for backward or are made there;
    with LoRA they are made there.  A chunk has 1,024 to 8,192 rows: as many times 128 as have
    logits that take at most 1/40 of the smallest device's memory in 32 bits
    ZeRO-3 without pipeline or experts may gather one unit ahead, or keep parameters in a node
    4 % of an accelerator's memory is kept free, nothing of a CPU's
    activations are kept, states are on the device and gradients travel as they are, unless the
    request allows otherwise; nothing is one step old
    each pipeline stage is on devices of one kind, and of a kind all devices are used
    where devices differ, so may pipelines: those of a kind have the same stages, whole states and
    micro-batches that differ by one at most, and run no forwards ahead

Other plans are tried too, and count in simulation alone, as do all whose pipelines differ.  The
objective of a plan is worked out here from the seconds of its layers, as
meshwright.planner.search.goals has it; for the search's own optimum the two agree to 1e-9, or the
attack says so.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path

from benchmarks.attack_plans import (
    LARGEST_CONTEXT,
    AnyDraft,
    Choice,
    Draft,
    Drafts,
    homes,
    like_layers,
)
from benchmarks.attack_report import (
    EQUAL,
    TOLERANCE,
    TOLERANCE_OUTSIDE,
    Outcome,
    lines,
    page,
)
from benchmarks.attack_requests import REQUESTS, Target
from benchmarks.attack_unlike import UnlikeDraft
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.cost_cache import FigureStore
from meshwright.planner.costs.group_costs import GroupCosts
from meshwright.planner.costs.layout_costs import CostTables
from meshwright.planner.costs.memory.rank_memory import has_room
from meshwright.planner.costs.predict import (
    Placement,
    placement_prediction,
    placements_of,
    predict,
    stage_seconds,
    unlike_prediction,
)
from meshwright.planner.costs.stage_placement import StagePlacements, alike
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.plan import INSIDE_OUT, Layout, Plan
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.documents.profile import ChunkedLoss
from meshwright.planner.errors import DocumentError
from meshwright.planner.frameworks.native_limits import refusal
from meshwright.planner.operators.operator_table import RECOMPUTES
from meshwright.planner.requests.pins import Pins, read_allowances
from meshwright.planner.requests.request import Request
from meshwright.planner.schedules import schedule_of
from meshwright.planner.schedules.closed_form import pace
from meshwright.planner.search.answer import Answer
from meshwright.planner.search.cluster_parts import search_parts
from meshwright.planner.search.partition.stage_counts import shares_of
from meshwright.planner.search.proof_account import UNSEARCHED
from meshwright.planner.search.proof_budget import FULL, USUAL, Effort
from meshwright.planner.search.search import search
from meshwright.planner.search.space import relay_of
from meshwright.planner.search.spaces.forwards_ahead import ahead_choices, may_run_ahead

MOST_ACTIONS = 20_000
"""Forwards and backwards of all ranks in one simulated step."""
MOST_LAYOUTS = 1_500
"""Whose costs are kept at once."""
CLIMBS = 12
"""Layouts that are climbed from at once, of random ones and of the answer's."""
IDLE = "idle devices"
"""The words of a certificate for plans on a part of the cluster."""
BY = ("closed form", "simulated")
"""What climbers look at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A plan of the attack, predicted."""

    draft: AnyDraft
    plan: Plan
    prediction: Prediction
    objective_s: float
    """In the closed form; as simulated where pipelines differ, of which it does not speak."""
    full: frozenset[int]
    """Ranks of pipelines that have not room enough."""
    outside: str | None
    """Why it is not in the certificate's space."""
    cluster: ClusterSpec
    """What it was predicted on: the part of the cluster that it uses, if its devices are one."""

    @property
    def fits(self) -> bool:
        """Whether ranks and hosts have room."""
        return self.prediction.fits

    @property
    def text(self) -> str:
        """Return the layout, how many layers stages have, and what they recompute."""
        if isinstance(self.draft, UnlikeDraft):
            names = (
                " ".join(dict.fromkeys(stage.group or "" for stage in kind.stages))
                for kind in self.plan.kinds
            )
            return f"{self.plan.layout_text} on {' + '.join(names)}"
        recomputed = [
            sum(item.recompute != "none" for item in stage.layers) for stage in self.plan.stages
        ]
        sizes = "/".join(map(str, self.draft.sizes))
        groups = f" on {' '.join(self.draft.groups)}" if self.draft.groups else ""
        often = f", recompute in {'/'.join(map(str, recomputed))}" if any(recomputed) else ""
        return f"{self.plan.layout.text()}{groups}, layers {sizes}{often}"


class Attack:
    """One request: its answer, and plans against it."""

    def __init__(
        self,
        request: Target,
        *,
        seed: int = 0,
        effort: Effort = USUAL,
        answer: Answer | None = None,
        parts: bool = False,
    ) -> None:
        """Attack `answer`, or what the search answers; with `parts` also what `plan` answers."""
        check_phrases(UNSEARCHED)
        self.request = request
        self.model = resolve_model(request.model)
        self.cluster = resolve_cluster(request.cluster)
        self.job = request.job
        allowed = read_allowances([request.allow]) if request.allow else frozenset()
        asked = Request(self.model, self.cluster, self.job, Pins(allowed=allowed))
        self._asked = asked = replace(asked, called=request.cluster)
        store = FigureStore()
        self.answer = answer or search(asked, effort=effort, store=store)
        self.printed = search_parts(asked, None, effort=effort, store=store) if parts else None
        self.rng = random.Random(f"{request.name} {seed}")
        self.drafts = Drafts(
            self.model, self.cluster, self.job, allowed=frozenset(allowed), rng=self.rng
        )
        self.drafts.chosen["loss"] += tuple(way for way in self.losses if way is not None)
        self.drafts.layer_s = self._layer_s
        self._layouts: set[Layout] = set()
        self._forget()
        self.outcome = Outcome(
            request=request.name,
            asked=request.text,
            answer=self.answer.plan.layout.text(),
            simulated_s=self.answer.prediction.step_time_s,
            objective_s=self.answer.closed_form.objective_s,
            lower_bound_s=self.answer.closed_form_bound_s,
            simulated_bound_s=self.answer.certificate.lower_bound_s,
            own_objective_s=None,
        )
        if self.printed is not None:
            self.outcome.part = self.printed.part.request.cluster_name
            self.outcome.part_s = self.printed.answer.prediction.step_time_s
            self.outcome.part_bound_s = self.printed.answer.certificate.lower_bound_s
        self.starts = [
            self.drafts.of(plan)
            for plan in self._own_plans()
            if plan.shares is None or plan.zero == 0
        ]
        optimum = self.answer.closed_form.plan
        if optimum.shares is None and optimum.other_pipelines is None:
            judged = self.judged(self.drafts.of(optimum))
            self.outcome.own_objective_s = judged.objective_s if judged else None

    def _own_plans(self) -> list[Plan]:
        found = [self.answer.plan, *(one.plan for one in self.answer.top)]
        return list(dict.fromkeys([*found, self.answer.closed_form.plan]))

    def _forget(self) -> None:
        """Drop the costs of the layouts seen: they would fill the memory."""
        activations = self.drafts.activations
        self._priced: set[Layout] = set()
        if self.cluster.is_mixed:
            self._costs = GroupCosts(Request(self.model, self.cluster, self.job), activations)
            return
        self._tables: dict[str, CostTables] = {}

    def _layer_s(self, layout: Layout, choices: Sequence[Choice]) -> list[float]:
        """[layer] Seconds of a micro-batch, by which stages are balanced."""
        tables = (
            next(iter(self._costs.tables.values()))
            if self.cluster.is_mixed
            else self._tables_on(self.cluster)
        )
        costs = tables.costs_of(layout)
        return [
            next(
                cost.forward_s + cost.backward_s
                for cost in costs.kinds[kind]
                if (cost.recompute, cost.activations) == choice
            )
            for kind, choice in zip(self.model.chain_kinds, choices, strict=True)
        ]

    def _tables_on(self, cluster: ClusterSpec) -> CostTables:
        if cluster.name not in self._tables:
            request = Request(self.model, cluster, self.job)
            self._tables[cluster.name] = CostTables(request, self.drafts.activations)
        return self._tables[cluster.name]

    def _part_of(self, devices: int) -> ClusterSpec:
        """Return the part of the fewest nodes with so many devices; all devices if there is none.

        Of devices that differ all are returned.
        """
        if self.cluster.is_mixed or devices == self.cluster.devices:
            return self.cluster
        [group] = self.cluster.groups
        for nodes in range(1, group.nodes + 1):
            each, rest = divmod(devices, nodes)
            if not rest and each <= group.devices_per_node:
                return resolve_cluster(f"{self.request.cluster}:{nodes}x{each}")
        return self.cluster

    def _seats(self, plan: Plan, cluster: ClusterSpec) -> tuple[CostTables, StagePlacements]:
        """Return what `planner.costs.predict.place_stages` does, with costs that are kept."""
        layout = plan.layout
        self._layouts.add(layout)
        self._priced.add(layout)
        if len(self._priced) > MOST_LAYOUTS:
            self._forget()
        if plan.groups is None:
            tables = self._tables_on(cluster)
            return tables, alike(tables, layout)
        groups = [stage.group or "" for stage in plan.stages]
        return self._costs.tables[groups[0]], self._costs.seats(layout, groups, None)

    def judged(self, draft: AnyDraft) -> Judged | None:
        """Return a draft as a plan with its prediction; None if its document cannot be."""
        if draft.actions > MOST_ACTIONS:
            return None
        try:
            plan = Plan.of(self.drafts.document(draft, name=self.request.cluster))
            if isinstance(draft, UnlikeDraft):
                return self._judged_unlike(draft, plan)
            placements = placements_of(plan, self.model)
        except DocumentError:
            return None
        cluster = self._part_of(draft.devices)
        tables, seats = self._seats(plan, cluster)
        prediction = placement_prediction(tables, plan.layout, placements, seats)
        full = (
            stage
            for stage, (one, seat) in enumerate(zip(prediction.stages, seats.stages, strict=True))
            if not has_room(seat.accelerator.memory_bytes, one.memory_parts, seat.costs)
        )
        return Judged(
            draft=draft,
            plan=plan,
            prediction=prediction,
            objective_s=objective_s(plan.layout, seats, placements, self._largest_stage(plan)),
            full=frozenset(homes(draft.layout)[stage] for stage in full),
            outside=self.outside(draft),
            cluster=cluster,
        )

    def _judged_unlike(self, draft: UnlikeDraft, plan: Plan) -> Judged | None:
        """Return a plan with pipelines that differ; None if a group's own are not executed.

        The ranks that are fuller than others count as full where the plan does not fit.
        """
        for kind in plan.kinds:
            names = {stage.group for stage in kind.stages}
            devices = [group for group in self.cluster.groups if group.name in names]
            alone = self.cluster.part(devices)
            if len(names) == 1 and refusal(self.model, alone, self.job, kind.layout):
                return None
        self._layouts.add(plan.layout)
        prediction = unlike_prediction(plan, self._asked, self._costs)
        shares = [
            stage.peak_memory_bytes / stage.memory_capacity_bytes for stage in prediction.stages
        ]
        least = min(1.0, max(shares))
        of_rank: list[float] = []
        for entry in draft.entries:
            each = [shares.pop(0) for _ in range(entry.depth * len(entry.kinds))]
            of_rank += [max(each[at :: entry.depth]) for at in range(entry.depth)]
        full = (rank for rank, share in enumerate(of_rank) if share >= least)
        return Judged(
            draft=draft,
            plan=plan,
            prediction=prediction,
            objective_s=prediction.step_time_s,
            full=frozenset(() if prediction.fits else full),
            outside=self.outside(draft),
            cluster=self.cluster,
        )

    def _largest_stage(self, plan: Plan) -> float:
        """Return the share of an average rank that its largest stage has, if ranks are alike."""
        run, layout = self.drafts.run, plan.layout
        if layout.virtual_stages == 1 or run is None:
            return 1.0
        return min(1.0, -(-run.alike // layout.stages) * layout.pipeline / run.alike)

    def outside(self, draft: AnyDraft) -> str | None:
        """Return why a draft is not in the space that the certificate speaks of, None if it is."""
        return next((phrase for phrase in UNSEARCHED if OUTSIDE[phrase](self, draft)), None)

    def runs_ahead_as_the_space(self, draft: AnyDraft) -> bool:
        """Whether the space has a draft's forwards ahead of links, if there are any."""
        layout = draft.layout
        ahead = (
            schedule_of(layout.schedule).ahead
            if isinstance(draft, UnlikeDraft)
            else layout.executed_schedule.ahead
        )
        if not ahead:
            return True
        if isinstance(draft, UnlikeDraft):
            return False
        has_room = layout.micro_batches > layout.pipeline
        return (
            has_room
            and ahead in ahead_choices(self._asked, layout)
            and may_run_ahead(self._asked, layout)
        )

    @property
    def losses(self) -> tuple[ChunkedLoss | None, ...]:
        memory_bytes = min(group.accelerator.memory_bytes for group in self.cluster.groups)
        wide = self.model.architecture.vocab_size if self.model.architecture else 1
        rows = max(
            rows
            for rows in range(1024, 8192 + 1, 128)
            if rows == 1024 or 40 * 4 * rows * wide <= memory_bytes
        )
        anew = ChunkedLoss(rows=rows, gradients="recomputed")
        return (None, anew) if self.job.lora else (None, ChunkedLoss(rows=rows), anew)

    def relays_otherwise(self, layout: Layout) -> bool:
        """Whether tokens go over nodes in a way that no plan of the space has."""
        return layout.hierarchical_all_to_all != relay_of(self._asked, layout)

    def gathers_otherwise(self, layout: Layout) -> bool:
        """Whether ZeRO-3 gathers in a way that no plan of the space does."""
        if not layout.prefetch and layout.reshard_after_forward is None:
            return False
        node = self.cluster.groups[0].devices_per_node // layout.tensor
        alone = layout.pipeline == layout.expert == 1 and layout.offload != "parameters"
        kept = layout.reshard_after_forward is None or (
            layout.reshard_after_forward == node and layout.context == 1
        )
        return not (layout.zero == 3 and alone and layout.prefetch <= 1 and kept)

    def is_even(self, draft: AnyDraft) -> bool:
        """Whether ranks of several stages share the run of like layers as the space has it."""
        if isinstance(draft, UnlikeDraft) or draft.layout.virtual_stages == 1:
            return True
        layout, run, home = draft.layout, self.drafts.run, homes(draft.layout)
        if run is None or draft.sizes[0] < run.before or draft.sizes[-1] < run.behind:
            return False
        like = list(like_layers(draft.sizes, run))
        for rank in range(layout.pipeline):
            own = [like[s] for s, r in enumerate(home) if r == rank]
            if rank == home[-1] and home[0] != home[-1] and run.behind:
                *own, last = own
                if last > max(own) + 1:
                    return False
            if max(own) - min(own) > 1:
                return False
        return True

    def _laid_out(self, draft: AnyDraft) -> bool:
        """Whether ranks of several stages lay their layers out as the space does.

        The closed form knows no more than what a rank has; the simulator knows its stages.
        """
        if isinstance(draft, UnlikeDraft) or draft.layout.virtual_stages == 1:
            return True
        layout, run, home = draft.layout, self.drafts.run, homes(draft.layout)
        shares = shares_of(
            self.model.chain_kinds, layout.schedule, layout.pipeline, layout.virtual_stages
        )
        if run is None or shares is None:
            return False
        like = list(like_layers(draft.sizes, run))
        ends = [0, *accumulate(draft.sizes)]
        for rank in range(layout.pipeline):
            own = [s for s, r in enumerate(home) if r == rank]
            if shares.sizes(rank, sum(like[s] for s in own)) != [like[s] for s in own]:
                return False
            places = [at for s in own for at in range(ends[s], ends[s + 1])]
            inner = [at for at in places if run.before <= at < run.before + run.alike]
            recomputed = [RECOMPUTES.index(draft.choices[at][0]) for at in inner]
            if recomputed != sorted(recomputed, reverse=True):
                return False
        return True

    # Hunting.

    def run(self, plans: int, told: Callable[[int, int], None] | None = None) -> Outcome:
        """Judge so many plans: the answer's under other choices, random ones, what is near both."""
        started = time.process_time()
        outcome = self.outcome
        own = [judged for draft in self.starts if (judged := self.judged(draft)) is not None]
        swept = [
            mended
            for draft in self.starts
            for one in self.drafts.sweep(draft)
            if outcome.plans < plans // 2 and (mended := self.mended(one)) is not None
        ]
        pool = sorted(swept, key=lambda one: one.objective_s)[:CLIMBS]
        pool += self._scan(outcome.plans + plans // 4, plans, told)
        climbers = [Climber(self, one) for one in pool]
        climbers += [Climber(self, one, by=by) for one in own for by in BY]
        turn = idle = 0
        while climbers and outcome.plans < plans and idle < 50 * len(climbers):
            before = outcome.plans
            climbers[turn % len(climbers)].step()
            idle = 0 if outcome.plans > before else idle + 1
            turn += 1
            if told and turn % 50 == 0:
                told(min(outcome.plans, plans), plans)
        if told:
            told(plans, plans)
        outcome.layouts = len(self._layouts)
        outcome.seconds = time.process_time() - started
        return outcome

    def _scan(self, end: int, plans: int, told: Callable[[int, int], None] | None) -> list[Judged]:
        """Return the best of random plans up to number `end`; what does not fit is mended."""
        count = end - self.outcome.plans
        best: dict[Layout, Judged] = {}
        promising: list[tuple[float, int, AnyDraft]] = []
        tries = 0
        while self.outcome.plans < end and tries < 20 * count:
            tries += 1
            draft = self.drafts.some()
            judged = self.tried(draft) if draft is not None else None
            if judged is None:
                continue
            if judged.fits:
                best[judged.plan.layout] = judged
            else:
                promising.append((judged.objective_s, tries, judged.draft))
            if told and tries % 50 == 0:
                told(min(self.outcome.plans, plans), plans)
        for _, _, draft in sorted(promising, key=lambda one: one[:2])[: count // 40]:
            mended = self.mended(draft)
            if mended is not None:
                best[mended.plan.layout] = mended
        ranked = sorted(best.values(), key=lambda one: one.objective_s)
        return ranked[:CLIMBS]

    def tried(self, draft: Draft) -> Judged | None:
        """Judge a draft, and keep account of it."""
        judged = self.judged(draft)
        if judged is None:
            return None
        outcome, answer = self.outcome, self.answer
        outcome.plans += 1
        if not judged.fits:
            return judged
        outcome.fit += 1
        step_s = judged.prediction.step_time_s
        if step_s < outcome.least_simulated_s:
            left_out = f" ({judged.outside})" if judged.outside else ""
            outcome.least_simulated_s, outcome.fastest = step_s, judged.text + left_out
        if judged.outside is None:
            outcome.inside += 1
            is_unlike = isinstance(judged.draft, UnlikeDraft)
            outcome.unlike += is_unlike
            if not is_unlike:
                outcome.least_objective_s = min(outcome.least_objective_s, judged.objective_s)
            if not is_unlike and judged.objective_s < answer.closed_form_bound_s * (1 - EQUAL):
                self._confirm(judged)
                _enlist(outcome.closed_form_hits, judged, judged.objective_s)
            if step_s < answer.certificate.lower_bound_s * (1 - EQUAL) and self._laid_out(
                judged.draft
            ):
                self._confirm(judged)
                _enlist(outcome.bound_hits, judged, step_s)
        printed_s = outcome.part_s or answer.prediction.step_time_s
        is_searched = judged.outside in (None, IDLE)
        tolerance = TOLERANCE if is_searched else TOLERANCE_OUTSIDE
        if step_s < min(printed_s, answer.prediction.step_time_s) * (1 - tolerance):
            self._confirm(judged)
            _enlist(outcome.simulation_hits, judged, step_s)
        if step_s < (outcome.part_bound_s or 0.0) * (1 - EQUAL) and self._is_of_proven_part(judged):
            self._confirm(judged)
            _enlist(outcome.part_hits, judged, step_s)
        return judged

    def _is_of_proven_part(self, judged: Judged) -> bool:
        """Whether the proof of all parts speaks of a plan, idle devices aside.

        It speaks of each group alone and of sets of whole groups; of devices that are alike, of
        every part.
        """
        assert self.printed is not None
        draft, whole = judged.draft, self.cluster
        others = [phrase for phrase in UNSEARCHED if phrase != IDLE]
        if any(OUTSIDE[phrase](self, draft) for phrase in others) or not self._laid_out(draft):
            return False
        if draft.devices == whole.devices:
            return True
        if not whole.is_mixed:
            unproven = self.printed.answer.certificate.unproven_parts
            return not unproven and judged.cluster.devices == draft.devices
        used = Counter(
            stage.group
            for kind in judged.plan.kinds
            for stage in kind.stages
            for _ in range(kind.mesh.devices // kind.mesh.pipeline)
        )
        return all(used[group.name] in (0, group.devices) for group in whole.groups)

    def _confirm(self, judged: Judged) -> None:
        """Read the plan's text again, and predict it without anything that is kept."""
        again = predict(Plan.parse(judged.plan.dump()), self.model, judged.cluster)
        assert abs(again.step_time_s - judged.prediction.step_time_s) <= EQUAL * again.step_time_s
        assert again.fits

    def mended(self, draft: AnyDraft) -> Judged | None:
        """Recompute in as few layers of each rank as make the draft fit; None if none do.

        First selectively, on ranks where that is not enough fully; the earlier layers of a stage.
        """
        layers = draft.layers_of_ranks
        ranks = range(len(layers))
        activations = draft.choices[0][1]
        kinds: dict[int, str] = dict.fromkeys(ranks, "selective")
        least = dict.fromkeys(ranks, 0)
        most = {rank: len(layers[rank]) for rank in ranks}

        def chosen(counts: dict[int, int]) -> AnyDraft:
            choices: list[Choice] = [("none", activations)] * len(draft.choices)
            for rank, count in counts.items():
                for place in layers[rank][:count]:
                    choices[place] = (kinds[rank], activations)
            return replace(draft, choices=tuple(choices))

        judged = self.tried(chosen(least))
        if judged is None or judged.fits:
            return judged
        for kind in ("selective", "full"):
            judged = self.tried(chosen(most))
            if judged is None:
                return None
            full = judged.full
            if not full:
                break
            if kind == "full":
                return None
            kinds |= dict.fromkeys(full, "full")
        best = judged if judged.fits else None
        while any(least[rank] < most[rank] for rank in ranks):
            middle = {rank: (least[rank] + most[rank]) // 2 for rank in ranks}
            found = self.tried(chosen(middle))
            if found is None:
                break
            for rank in ranks:
                if rank in found.full:
                    least[rank] = middle[rank] + 1
                else:
                    most[rank] = middle[rank]
            if found.fits:
                best = found
        final = self.tried(chosen(most))
        return final if final is not None and final.fits else best


class Climber:
    """A plan that takes its neighbours' places while they are better."""

    def __init__(self, attack: Attack, start: Judged, by: str = "") -> None:
        self.attack = attack
        self.best = start
        self.by = by or attack.rng.choice(BY)
        self.start = start

    def step(self) -> None:
        """Try one neighbour, or one of a neighbour's."""
        rng, draft = self.attack.rng, self.best.draft
        if rng.random() < 0.1:
            draft = self.start.draft
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            changed = self.attack.drafts.neighbour(draft)
            draft = changed or draft
        if draft == self.best.draft:
            return
        judged = self.attack.tried(draft)
        if judged is None:
            return
        if not judged.fits and self._figure(judged) < self._figure(self.best):
            mended = self.attack.mended(draft)
            judged = mended or judged
        if judged.fits and self._figure(judged) <= self._figure(self.best):
            self.best = judged

    def _figure(self, judged: Judged) -> float:
        return judged.objective_s if self.by == "closed form" else judged.prediction.step_time_s


OUTSIDE: dict[str, Callable[[Attack, AnyDraft], bool]] = {
    IDLE: lambda attack, draft: draft.devices != attack.cluster.devices,
    "loss chunks of other lengths": lambda attack, draft: draft.layout.loss not in attack.losses,
    f"context degrees above {LARGEST_CONTEXT}": lambda _, draft: (
        draft.layout.context > LARGEST_CONTEXT
    ),
    "uneven shares of like layers among a rank's stages": lambda attack, draft: (
        not attack.is_even(draft)
    ),
    "pipelines that differ within a group of devices, over several, or with divided states": (
        lambda _, draft: isinstance(draft, UnlikeDraft) and not draft.is_by_group
    ),
    "other places of the expert axis": lambda _, draft: (
        draft.layout.expert > 1 and draft.layout.order != INSIDE_OUT
    ),
    "ZeRO-3 that gathers more than one unit ahead, or in groups other than a node": (
        lambda attack, draft: attack.gathers_otherwise(draft.layout)
    ),
    "fp8 with a scale for each row": lambda _, draft: draft.layout.scales != "tensorwise",
    "expert dispatch by all-gather": lambda _, draft: draft.layout.dispatch != "alltoall",
    "hierarchical dispatch in groups other than the fastest links": (
        lambda attack, draft: attack.relays_otherwise(draft.layout)
    ),
    "other numbers of forwards ahead of links": lambda attack, draft: (
        not attack.runs_ahead_as_the_space(draft)
    ),
}
"""By the words of the certificate, whether a draft has what the search leaves out."""


def check_phrases(unsearched: Sequence[str]) -> None:
    """Refuse to attack a certificate whose words for what it leaves out have no test here."""
    unlike = {*unsearched} ^ {*OUTSIDE}
    if unlike:
        raise LookupError(
            f"'{min(unlike)}' is in only one of UNSEARCHED (proof_account.py) and OUTSIDE "
            "(attack.py); each phrase needs a test of it"
        )


def objective_s(
    layout: Layout, seats: StagePlacements, placements: Sequence[Placement], largest_stage: float
) -> float:
    """Seconds of a step in the closed form, from the seconds of a plan's stages.

    T = steady max_r t_r + Σ_r (fill t_r - credit_r) + max_r Σ sync + step_s
    """
    home, ranks = homes(layout), range(layout.pipeline)
    forward_s, backward_s, sync_s = ([0.0] * layout.pipeline for _ in range(3))
    credits_s = 0.0
    splits = layout.executed_schedule.splits_backward
    for s, (seat, placement) in enumerate(zip(seats.stages, placements, strict=True)):
        rank, stage = home[s], stage_seconds(seat.costs, placement)
        forward_s[rank] += stage.whole_forward_s
        backward_s[rank] += stage.whole_backward_s + splits * stage.action_s
        sync_s[rank] += stage.sync_s + stage.optimizer_s + stage.stream_s
        if splits:
            for kind, _, _ in placement:
                credits_s += min(part.figures.credit_s for part in seat.costs.parts[kind])
        if s and home[s - 1] != rank:
            for end in (home[s - 1], rank):
                forward_s[end] += seats.transfer_s[s - 1] / 2
                backward_s[end] += seats.transfer_s[s - 1] / 2
    steady, fill = layout.micro_batches - 1.0, 1.0
    if layout.pipeline > 1:
        steady, fill = pace(
            layout.schedule,
            ranks=layout.pipeline,
            micro_batches=layout.micro_batches,
            largest_stage=largest_stage,
        )
    rank_s = [forward_s[rank] + backward_s[rank] for rank in ranks]
    slowest_s = max(rank_s)
    if layout.executed_schedule.forwards_first:
        slowest_s = max(forward_s) + max(backward_s)
    once_s = max(sync_s) + seats.stages[0].costs.step_s
    return steady * slowest_s + fill * (sum(rank_s) - credits_s) + once_s


def _enlist(hits: list[dict[str, object]], judged: Judged, seconds: float) -> None:
    """Keep the best few hits, with the whole plan of each."""
    if any(abs(hit["seconds"] - seconds) <= EQUAL * seconds for hit in hits):  # type: ignore[operator]
        return
    hits.append(
        {
            "seconds": seconds,
            "objective_s": judged.objective_s,
            "step_time_s": judged.prediction.step_time_s,
            "outside": judged.outside,
            "text": judged.text,
            "plan": judged.plan.model_dump(mode="json", exclude_none=True),
        }
    )
    hits.sort(key=lambda hit: hit["seconds"])  # type: ignore[arg-type,return-value]
    del hits[5:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("requests", nargs="*", metavar="REQUEST", help=", ".join(REQUESTS))
    parser.add_argument("--plans", type=int, default=2000, help="of each request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--usual", action="store_true", help="proofs as far as plan follows them")
    parser.add_argument(
        "--parts", action="store_true", help="hold plans against the answer of all parts too"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--read", nargs="+", metavar="FILE", help="outcomes that --json wrote, in place of a run"
    )
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.requests:
        if name not in REQUESTS:
            parser.error(f"no request '{name}'; there are {', '.join(REQUESTS)}")
    outcomes = [
        Outcome(**values)
        for path in arguments.read or ()
        for values in json.loads(Path(path).read_text(encoding="utf-8"))
    ]
    outcomes.sort(key=lambda outcome: [*REQUESTS].index(outcome.request))
    for name in () if arguments.read else arguments.requests or REQUESTS:
        effort = USUAL if arguments.usual else FULL
        attack = Attack(REQUESTS[name], seed=arguments.seed, effort=effort, parts=arguments.parts)
        outcomes.append(attack.run(arguments.plans, _bar(name)))
        if not arguments.json and not arguments.markdown:
            print("\n".join(lines(outcomes[-1])), flush=True)
    if arguments.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes], indent=2))
    if arguments.markdown:
        options = (
            ["--usual"] * arguments.usual
            + ["--parts"] * arguments.parts
            + ["--seed", str(arguments.seed), "--markdown"]
        )
        asked = ["python -m benchmarks.attack", *arguments.requests]
        asked += ["--plans", str(arguments.plans), *options]
        print("\n".join(page(outcomes, " ".join(asked))))
    return 0 if all(outcome.ok for outcome in outcomes) else 1


def _bar(name: str) -> Callable[[int, int], None] | None:
    """Return what shows progress on stderr, if a person is looking."""
    if not sys.stderr.isatty():
        return None

    def told(done: int, total: int) -> None:
        filled = 30 * done // max(1, total)
        end = "\n" if done >= total else ""
        bar = "#" * filled + "." * (30 - filled)
        print(f"\r{name:14} [{bar}] {done:,} of {total:,}", end=end, file=sys.stderr, flush=True)

    return told


if __name__ == "__main__":
    sys.exit(main())
