"""Drafts of plans whose data-parallel pipelines differ, and what each may be changed into.

An entry of such a draft has some pipelines with the same stages, and the micro-batches that they do
together; one of them does one more than another at most.  Entries may be as no plan of the space
has them: several on one group of devices, pipelines over several groups, devices left idle.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from meshwright.planner.costs.compute import peak_flops
from meshwright.planner.costs.predict import balanced_cuts
from meshwright.planner.documents.plan import Layout
from meshwright.planner.schedules import PLAIN
from meshwright.planner.schedules.schedule import obstacle

if TYPE_CHECKING:
    from benchmarks.attack_plans import Drafts
    from meshwright.planner.documents.plan import Plan

Choice = tuple[str, str]
"""What a layer recomputes, and what becomes of its activations."""
RECOMPUTES = ("none", "none", "selective", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelines:
    """Pipelines with the same stages."""

    number: int
    groups: tuple[str, ...]
    """[rank] Whose devices it uses."""
    micro_batches: int
    """Of all of them together."""
    sizes: tuple[int, ...]
    """[stage] Layers."""

    @property
    def depth(self) -> int:
        """Stages of each pipeline."""
        return len(self.groups)

    @property
    def kinds(self) -> tuple[tuple[int, int], ...]:
        """Numbers of pipelines with as many micro-batches each, the most first.

        >>> Pipelines(number=3, groups=("a",), micro_batches=7, sizes=(4,)).kinds
        ((1, 3), (2, 2))
        """
        each, more = divmod(self.micro_batches, self.number)
        kinds = ((more, each + 1), (self.number - more, each))
        return tuple(kind for kind in kinds if kind[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class UnlikeDraft:
    """A plan with pipelines that differ, before it is written down."""

    layout: Layout
    """What all pipelines have in common: degrees and numbers of micro-batches are 1."""
    entries: tuple[Pipelines, ...]
    """The deepest first."""
    choices: tuple[Choice, ...]
    """[layer] Of the first entry's pipelines, then of the next one's."""

    @property
    def devices(self) -> int:
        """Ranks of the whole job."""
        return self.layout.tensor * sum(entry.number * entry.depth for entry in self.entries)

    @property
    def actions(self) -> int:
        """Forwards and backwards that are simulated of one step."""
        return sum(2 * entry.depth * count for entry in self.entries for _, count in entry.kinds)

    @property
    def layers_of_ranks(self) -> list[list[int]]:
        """[rank] Places of its layers among `choices`, entry by entry."""
        sizes = [size for entry in self.entries for size in entry.sizes]
        return [list(range(first, end)) for first, end in pairwise(accumulate(sizes, initial=0))]

    @property
    def is_by_group(self) -> bool:
        """True if each group of devices has pipelines of its own, and of one entry alone."""
        names = [name for entry in self.entries for name in set(entry.groups)]
        return len(names) == len(self.entries) == len(set(names))


class UnlikeDrafts:
    """Drafts with pipelines that differ, for one request: random ones, and neighbours."""

    def __init__(self, drafts: Drafts) -> None:
        """Draw for the same request as `drafts`, of equal chances."""
        self.drafts = drafts
        self.cluster = drafts.cluster
        self.rng: random.Random = drafts.rng
        precision = drafts.job.precision
        self._rates = {
            group.name: peak_flops(group.accelerator, precision) for group in self.cluster.groups
        }

    def stages_written(self, draft: UnlikeDraft) -> dict[str, Any]:
        """Return the fields of a plan.yaml by which pipelines differ; `mesh` has what is one's."""
        layers = len(self.drafts.model.chain)
        written = []
        for at, entry in enumerate(draft.entries):
            choices = draft.choices[at * layers : (at + 1) * layers]
            stages = self.drafts.stages_written(entry.sizes, choices, entry.groups)
            for number, count in entry.kinds:
                written.append({"data": number, "micro_batches": count, "stages": stages})
        first, *others = written
        return {
            "mesh": {"data_replicate": first["data"], "pipeline": draft.entries[0].depth},
            "micro_batches": first["micro_batches"],
            "stages": first["stages"],
            "other_pipelines": others,
        }

    def of(self, plan: Plan) -> UnlikeDraft:
        """Return the draft of a plan whose pipelines differ, or whose whole states have shares."""
        if plan.shares is not None:
            return self._of_shares(plan)
        entries: list[Pipelines] = []
        choices: list[Choice] = []
        known: dict[object, int] = {}
        for kind in plan.kinds:
            treated = tuple(
                (one.recompute, one.activations) for stage in kind.stages for one in stage.layers
            )
            groups = tuple(stage.group or "" for stage in kind.stages)
            sizes = tuple(len(stage.layers) for stage in kind.stages)
            number, count = kind.data_degree, kind.data_degree * kind.micro_batches
            at = known.setdefault((groups, sizes, treated), len(entries))
            if at == len(entries):
                entries.append(
                    Pipelines(number=number, groups=groups, micro_batches=count, sizes=sizes)
                )
                choices += treated
                continue
            entries[at] = replace(
                entries[at],
                number=entries[at].number + number,
                micro_batches=entries[at].micro_batches + count,
            )
        plain = replace(plan.layout, pipeline=1, data_replicate=1, micro_batches=1)
        return UnlikeDraft(layout=plain, entries=tuple(entries), choices=tuple(choices))

    def _of_shares(self, plan: Plan) -> UnlikeDraft:
        """Return data-parallel ranks with shares of their own as pipelines of one stage."""
        counts: dict[str, list[int]] = {}
        for share in plan.shares or ():
            counts.setdefault(share.group, []).append(share.micro_batches)
        [stage] = plan.stages
        entries = tuple(
            Pipelines(
                number=len(each),
                groups=(group,),
                micro_batches=sum(each),
                sizes=(len(stage.layers),),
            )
            for group, each in counts.items()
        )
        choices = tuple((one.recompute, one.activations) for one in stage.layers) * len(entries)
        plain = replace(plan.layout, data_replicate=1, micro_batches=1)
        return UnlikeDraft(layout=plain, entries=entries, choices=choices)

    # Random drafts.

    def some(self) -> UnlikeDraft | None:
        """Return a random draft; None if what was drawn cannot be."""
        rng, cluster, job = self.rng, self.cluster, self.drafts.job
        tensor = rng.choice((1, 1, 1, 2, 4))
        devices = [self._some_devices(group.devices) // tensor for group in cluster.groups]
        if not all(devices):
            return None
        schedule, _ = self.drafts.timetable(max(devices))
        layout = Layout(
            tensor=tensor,
            micro_batch=rng.choice([d for d in self.drafts.divisors_of_batch if d <= 16]),
            schedule=schedule,
            **self.drafts.drawn(gathers=False),
        )
        shapes: list[tuple[int, tuple[str, ...]]] = []
        names = [group.name for group in cluster.groups]
        if len(names) > 1 and rng.random() < 0.1:  # some pipelines over two groups
            across = min(devices[:2]) // 2
            shapes += [(across, tuple(names[:2]))] if across else []
            devices[:2] = [count - across for count in devices[:2]]
        for name, count in zip(names, devices, strict=True):
            parts = [count]
            if count > 1 and rng.random() < 0.1:  # two kinds of pipelines on one group
                parts = [count // 2, count - count // 2]
            for part in filter(None, parts):
                depth = self.drafts.divisor(part, most=len(self.drafts.model.chain))
                shapes.append((part // depth, (name,) * depth))
        counts = self._shares(shapes, job.global_batch // layout.micro_batch)
        if counts is None:
            return None
        kind = (rng.choice(RECOMPUTES), rng.choice(self.drafts.activations))
        choices = (kind,) * len(self.drafts.model.chain)
        entries = [
            Pipelines(
                number=number,
                groups=groups,
                micro_batches=count,
                sizes=self._balanced(layout, choices, len(groups)),
            )
            for (number, groups), count in zip(shapes, counts, strict=True)
        ]
        return self._checked(UnlikeDraft(layout=layout, entries=tuple(entries), choices=()), kind)

    def _some_devices(self, devices: int) -> int:
        return devices if self.rng.random() < 0.95 else self.rng.randint(1, devices)

    def _shares(
        self, shapes: Sequence[tuple[int, tuple[str, ...]]], count: int
    ) -> list[int] | None:
        """[entry] Micro-batches in proportion to the peak rates of devices; each pipeline has one.

        Drafts are never exact: the shares are off by up to a tenth.
        """
        weights = [
            number * sum(self._rates[name] for name in groups) * self.rng.uniform(0.9, 1.1)
            for number, groups in shapes
        ]
        least = [number for number, _ in shapes]
        if sum(least) > count:
            return None
        shares = [
            max(number, int(count * weight / sum(weights)))
            for number, weight in zip(least, weights, strict=True)
        ]
        while sum(shares) != count:
            step = 1 if sum(shares) < count else -1
            free = [at for at, share in enumerate(shares) if share + step >= least[at]]
            shares[self.rng.choice(free)] += step
        return shares

    def _balanced(self, layout: Layout, choices: Sequence[Choice], depth: int) -> tuple[int, ...]:
        cuts = balanced_cuts(self.drafts.layer_s(layout, tuple(choices)), depth)
        return tuple(end - first for first, end in pairwise(cuts))

    def _checked(self, draft: UnlikeDraft, kind: Choice | None = None) -> UnlikeDraft | None:
        """Return a draft with the deepest pipelines first; None if a schedule cannot be run.

        Every layer is treated as `kind` says, if it does.
        """
        layers = len(self.drafts.model.chain)
        treated = draft.choices if kind is None else (kind,) * (layers * len(draft.entries))
        order = sorted(range(len(draft.entries)), key=lambda at: -draft.entries[at].depth)
        entries = tuple(draft.entries[at] for at in order)
        choices = tuple(
            choice for at in order for choice in treated[at * layers : (at + 1) * layers]
        )
        layout = draft.layout
        if entries[0].depth == 1:
            layout = replace(layout, schedule=PLAIN)
        for entry in entries:
            if min(entry.sizes) < 1 or entry.micro_batches < entry.number:
                return None
            for _, count in entry.kinds:
                if entry.depth > 1 and obstacle(
                    layout.schedule, stages=entry.depth, micro_batches=count
                ):
                    return None
        return replace(draft, layout=layout, entries=entries, choices=choices)

    # Neighbours.

    def sweep(self, draft: UnlikeDraft) -> Iterator[UnlikeDraft]:
        """Yield a draft under other schedules, micro-batches and ways to train, not recomputed."""
        kind = ("none", draft.choices[0][1])
        batch, size = self.drafts.job.global_batch, draft.layout.micro_batch
        changes: list[dict[str, Any]] = [
            {"schedule": name} for name in self.drafts.single_stage_schedules
        ]
        changes += [{name: value} for name, every in self.drafts.chosen.items() for value in every]
        changes += [{"micro_batch": other} for other in (size // 2, 2 * size) if other]
        for change in changes:
            layout, entries = replace(draft.layout, **change), draft.entries
            if layout.micro_batch != size:
                if batch % layout.micro_batch:
                    continue
                shapes = [(entry.number, entry.groups) for entry in entries]
                counts = self._shares(shapes, batch // layout.micro_batch)
                if counts is None:
                    continue
                entries = tuple(
                    replace(entry, micro_batches=count)
                    for entry, count in zip(entries, counts, strict=True)
                )
            found = self._checked(replace(draft, layout=layout, entries=entries), kind)
            if found is not None:
                yield found

    def neighbour(self, draft: UnlikeDraft) -> UnlikeDraft | None:
        """Return a draft that differs in one thing; None if it cannot be."""
        moves = (
            (4, self._pass_on),
            (4, self._shift),
            (3, self._treat),
            (2, self._deepen),
            (1, self._change),
        )
        weights, every = zip(*moves, strict=True)
        return self.rng.choices(every, weights)[0](draft)

    def _pass_on(self, draft: UnlikeDraft) -> UnlikeDraft | None:
        """Give micro-batches of one entry to another."""
        entries = list(draft.entries)
        one, other = self.rng.sample(range(len(entries)), 2) if len(entries) > 1 else (0, 0)
        number = self.rng.choice((1, 1, 2, entries[one].number, entries[other].number))
        for at, more in ((one, -number), (other, number)):
            count = entries[at].micro_batches + more
            entries[at] = replace(entries[at], micro_batches=count)
        return self._checked(replace(draft, entries=tuple(entries)))

    def _shift(self, draft: UnlikeDraft) -> UnlikeDraft | None:
        """Move a layer across a cut of one entry."""
        entries = list(draft.entries)
        deep = [at for at, entry in enumerate(entries) if entry.depth > 1]
        if not deep:
            return None
        entry = entries[at := self.rng.choice(deep)]
        sizes = list(entry.sizes)
        cut = self.rng.randrange(len(sizes) - 1)
        one, other = self.rng.choice(((cut, cut + 1), (cut + 1, cut)))
        sizes[one] -= 1
        sizes[other] += 1
        entries[at] = replace(entry, sizes=tuple(sizes))
        return self._checked(replace(draft, entries=tuple(entries)))

    def _treat(self, draft: UnlikeDraft) -> UnlikeDraft:
        """Change what some consecutive layers recompute, or what becomes of their activations."""
        choices, rng = list(draft.choices), self.rng
        first = rng.randrange(len(choices))
        count = rng.choice((1, 1, 2, 4, len(self.drafts.model.chain)))
        kind = (rng.choice(RECOMPUTES), rng.choice(self.drafts.activations))
        for at in range(first, min(first + count, len(choices))):
            choices[at] = kind
        return replace(draft, choices=tuple(choices))

    def _deepen(self, draft: UnlikeDraft) -> UnlikeDraft | None:
        """Give pipelines of one group another depth."""
        entries, layers = list(draft.entries), len(self.drafts.model.chain)
        entry = entries[at := self.rng.randrange(len(entries))]
        if len(set(entry.groups)) > 1:
            return None
        depth = self.drafts.divisor(entry.number * entry.depth, most=layers)
        treated = draft.choices[at * layers : (at + 1) * layers]
        entries[at] = replace(
            entry,
            number=entry.number * entry.depth // depth,
            groups=entry.groups[:1] * depth,
            sizes=self._balanced(draft.layout, treated, depth),
        )
        layout = draft.layout
        if layout.schedule == PLAIN:
            layout = replace(layout, schedule=self.rng.choice(self.drafts.single_stage_schedules))
        return self._checked(replace(draft, layout=layout, entries=tuple(entries)))

    def _change(self, draft: UnlikeDraft) -> UnlikeDraft | None:
        """Change the schedule, or one thing that a layout says of how it trains."""
        rng, drafts = self.rng, self.drafts
        name = rng.choice(("schedule", *drafts.chosen))
        every = drafts.single_stage_schedules if name == "schedule" else drafts.chosen[name]
        layout = replace(draft.layout, **{name: rng.choice(every)})
        return self._checked(replace(draft, layout=layout))
