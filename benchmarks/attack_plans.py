"""Plans for an attack: drafts, written as documents, and what each of them may be changed into.

A draft has a plan's choices as plain values; `document` writes them down, and
`planner.documents.plan.Plan` reads them as it reads any file.  Nothing here knows the search: which
cuts go with several stages a rank, and what a closed form charges, is worked out again from what
the certificate says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple, get_args

from benchmarks.attack_unlike import Choice, UnlikeDraft, UnlikeDrafts
from meshwright.planner.costs.predict import balanced_cuts
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import (
    INSIDE_OUT,
    Activations,
    Axis,
    Compile,
    Dispatch,
    GradientCompression,
    Graphs,
    Job,
    Layout,
    Mesh,
    Offload,
    Plan,
    Prefetch,
    TensorOverlap,
    WeightGatherDtype,
)
from meshwright.planner.documents.profile import ChunkedLoss, LossGradients
from meshwright.planner.frameworks.native_limits import refusal
from meshwright.planner.schedules import PLAIN, SCHEDULES, Schedule, name_with_ahead
from meshwright.planner.schedules.schedule import obstacle, rank_of_stage

LARGEST_CONTEXT = 64
SCALES = ("tensorwise", "rowwise")
"""By which the runtime rounds; others are of other frameworks."""
MOST_STAGES = 8
"""On a rank."""
LOSSES = tuple(
    ChunkedLoss(rows=rows, gradients=gradients)
    for gradients in get_args(LossGradients)
    for rows in (64, 256, 512, 1024, 2048, 8192)
)
"""In chunks, as a space has them or not."""
DRAINED = tuple(schedule for schedule in SCHEDULES.values() if not schedule.stale)
UNLIKE_SHARE = 0.4
"""Of random drafts where devices differ: those with pipelines that differ."""


class Run(NamedTuple):
    """The longest run of like layers, and how many layers stand on either side."""

    before: int
    alike: int
    behind: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A plan before it is written down."""

    layout: Layout
    sizes: tuple[int, ...]
    """[stage] Layers."""
    choices: tuple[Choice, ...]
    """[layer]"""
    groups: tuple[str, ...] = ()
    """[rank] Whose devices it uses, where devices differ."""

    @property
    def devices(self) -> int:
        """Ranks of the whole job."""
        return self.layout.devices

    @property
    def actions(self) -> int:
        """Forwards and backwards that are simulated of one step."""
        return 2 * self.layout.micro_batches * self.layout.stages

    @property
    def layers_of_ranks(self) -> list[list[int]]:
        """[rank] Places of its layers among `choices`."""
        layers: list[list[int]] = [[] for _ in range(self.layout.pipeline)]
        ends = pairwise(accumulate(self.sizes, initial=0))
        for rank, (first, end) in zip(homes(self.layout), ends, strict=True):
            layers[rank] += range(first, end)
        return layers


AnyDraft = Draft | UnlikeDraft


class Drafts:
    """Drafts for one request: random ones, and neighbours of given ones."""

    def __init__(
        self,
        model: ModelGraph,
        cluster: ClusterSpec,
        job: Job,
        *,
        allowed: frozenset[str],
        rng: random.Random,
    ) -> None:
        self.model = model
        self.cluster = cluster
        self.job = job
        self.rng = rng
        self.allowed = allowed
        self.run = longest_run(model.chain_kinds)
        every: tuple[Activations, ...] = ("keep", "offload", "compress")
        self.activations = tuple(one for one in every if one == "keep" or one in allowed)
        self.offloads: tuple[Offload, ...] = ("none",)
        if "offload" in allowed:
            self.offloads = get_args(Offload)
        self.wires: tuple[GradientCompression, ...] = ("full",)
        if "compress" in allowed:
            self.wires = get_args(GradientCompression)
        self.chosen = self._chosen()
        """What a layout may say of how it trains, by its field; the plainest first."""
        self.layer_s: Callable[[Layout, Sequence[Choice]], list[float]] = lambda _, choices: (
            [1.0] * len(choices)
        )
        """Seconds of each layer, to balance stages by; the attack has them."""
        self.divisors_of_batch = divisors(job.global_batch)
        self.single_stage_schedules = tuple(
            schedule.name
            for schedule in DRAINED
            if schedule.takes(1) and not schedule.several_stages
        )
        self.may_differ = cluster.is_mixed and not model.edges
        """Whether pipelines differ from one group of devices to another."""
        self.unlike = UnlikeDrafts(self)

    def _chosen(self) -> dict[str, tuple[Any, ...]]:
        group = self.cluster.groups[0]
        found: dict[str, tuple[Any, ...]] = {
            "compile": get_args(Compile),
            "loss": (None, *LOSSES),
        }
        if group.accelerator.kind != "cpu":
            found["prefetch"] = get_args(Prefetch)
            within = [d for d in divisors(self.cluster.devices) if d < self.cluster.devices]
            found["reshard_after_forward"] = (None, *within)
            found["graphs"] = get_args(Graphs)
        if "async-tensor" in self.allowed:
            found["tensor_overlap"] = get_args(TensorOverlap)
        if self.job.precision == "fp8":
            found |= {"scales": SCALES, "weight_gather_dtype": get_args(WeightGatherDtype)}
        a = self.model.architecture
        if a is not None and a.experts is not None:
            found["dispatch"] = get_args(Dispatch)
            found["hierarchical_all_to_all"] = (None, *divisors(a.experts.count)[1:])
        return found

    def document(self, draft: AnyDraft, *, name: str) -> dict[str, Any]:
        """Return a draft as the contents of a plan.yaml."""
        written, lora = _written(draft.layout), self.job.lora
        if isinstance(draft, UnlikeDraft):
            unlike = self.unlike.stages_written(draft)
            written |= {**unlike, "mesh": {**written["mesh"], **unlike["mesh"]}}
        else:
            groups_of_stages = [draft.groups[rank] for rank in homes(draft.layout) if draft.groups]
            written["stages"] = self.stages_written(draft.sizes, draft.choices, groups_of_stages)
        groups = [{"name": one.name, "devices": one.devices} for one in self.cluster.groups]
        return {
            "model": {
                "name": self.model.name,
                "source": self.model.source or self.model.name,
                "digest": self.model.digest,
            },
            "cluster": name,
            "seq_len": self.job.seq_len,
            "global_batch": self.job.global_batch,
            "precision": self.job.precision,
            **written,
            **({"document_len": self.job.document_len} if self.job.document_len else {}),
            **({"training": {"lora": lora.model_dump(mode="json")}} if lora else {}),
            **({"groups": groups} if self.cluster.is_mixed else {}),
        }

    def stages_written(
        self, sizes: Sequence[int], choices: Sequence[Choice], groups: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Return stages as a plan.yaml has them; `groups` [stage] are empty where all are alike."""
        chain = self.model.chain
        stages: list[dict[str, Any]] = []
        for s, (first, end) in enumerate(pairwise(accumulate(sizes, initial=0))):
            layers = [
                {
                    "layer": chain[at][0],
                    "recompute": choices[at][0],
                    "activations": choices[at][1],
                }
                for at in range(first, end)
            ]
            stages.append({"layers": layers, **({"group": groups[s]} if groups else {})})
        return stages

    def of(self, plan: Plan) -> AnyDraft:
        """Return the draft that a plan stands for."""
        if plan.other_pipelines is not None or plan.shares is not None:
            return self.unlike.of(plan)
        layout = plan.layout
        of_rank = dict(zip(homes(layout), plan.stages, strict=True))
        return Draft(
            layout=layout,
            sizes=tuple(len(stage.layers) for stage in plan.stages),
            choices=tuple(
                (one.recompute, one.activations) for stage in plan.stages for one in stage.layers
            ),
            groups=tuple(of_rank[rank].group or "" for rank in range(layout.pipeline))
            if plan.groups is not None
            else (),
        )

    # Random drafts.

    def some(self) -> AnyDraft | None:
        """Return a random draft; None if what was drawn cannot be."""
        if self.may_differ and self.rng.random() < UNLIKE_SHARE:
            return self.unlike.some()
        return self._alike()

    def _alike(self) -> Draft | None:
        rng, devices = self.rng, self._devices()
        tensor = self.divisor(devices, most=self._most_tensor())
        context = self.divisor(devices // tensor, most=LARGEST_CONTEXT, like_one=0.7)
        pipeline = self.divisor(devices // tensor // context, most=len(self.model.chain))
        data = devices // tensor // context // pipeline
        zero = rng.randrange(4) if data > 1 else 0
        shard = rng.choice([d for d in divisors(data) if d > 1]) if zero else 1
        if zero and rng.random() < 0.6:
            shard = data
        if self.job.global_batch % data:
            return None
        share = self.job.global_batch // data
        size = rng.choice(divisors(share))
        schedule, virtual = self.timetable(pipeline) if pipeline > 1 else (PLAIN, 1)
        layout = Layout(
            tensor=tensor,
            context=context,
            pipeline=pipeline,
            data_shard=shard,
            data_replicate=data // shard,
            expert=self._expert(shard * context * tensor),
            zero=zero,
            schedule=schedule,
            virtual_stages=virtual,
            micro_batch=size,
            micro_batches=share // size,
            order=self._order(),
            offload=rng.choice(self.offloads),
            gradient_compression=rng.choice(self.wires),
            **self.drawn(gathers=zero == 3 and pipeline == 1),
        )
        kind: Choice = (rng.choice(("none", "selective", "full")), rng.choice(self.activations))
        return self.laid(layout, (kind,) * len(self.model.chain))

    def _devices(self) -> int:
        """Return how many devices a random layout uses: all, or some of those that are alike."""
        devices = self.cluster.devices
        if self.rng.random() < 0.8:
            return devices
        return self.rng.randint(1, devices)

    def drawn(self, *, gathers: bool) -> dict[str, Any]:
        """Return what a random layout says of how it trains, most of it plain."""
        rng = self.rng
        found: dict[str, Any] = {
            name: rng.choice(self.chosen[name]) for name in ("compile", "loss")
        }
        for name, every in self.chosen.items():
            fits = gathers or name not in (
                "prefetch",
                "reshard_after_forward",
                "weight_gather_dtype",
            )
            if name not in found and fits and rng.random() < 0.3:
                found[name] = rng.choice(every)
        return found

    def laid(self, layout: Layout, choices: tuple[Choice, ...]) -> Draft | None:
        """Return a draft with stages as equal as they can be; None if the layout cannot run."""
        if not self._runs(layout):
            return None
        groups = self._groups(layout)
        if groups is None:
            return None
        if layout.virtual_stages == 1:
            cuts = balanced_cuts(self.layer_s(layout, choices), layout.stages)
            sizes = tuple(b - a for a, b in pairwise(cuts))
        else:
            found = self._shared(layout, self._even(layout, choices))
            if found is None:
                return None
            sizes = found
        return Draft(layout=layout, sizes=sizes, choices=choices, groups=groups)

    def _runs(self, layout: Layout) -> bool:
        if layout.devices > self.cluster.devices or min(layout.micro_batches, layout.data) < 1:
            return False
        if (layout.data_shard > 1) != (layout.zero > 0):
            return False
        if (layout.data_shard * layout.context * layout.tensor) % layout.expert:
            return False
        if layout.stages > 1 and obstacle(
            layout.schedule,
            stages=layout.stages,
            micro_batches=layout.micro_batches,
            virtual_stages=layout.virtual_stages,
        ):
            return False
        return refusal(self.model, self.cluster, self.job, layout) is None

    def _groups(self, layout: Layout) -> tuple[str, ...] | None:
        if not self.cluster.is_mixed:
            return ()
        each = layout.devices // layout.pipeline
        names = [one.name for one in self.cluster.groups for _ in range(one.devices // each)]
        if len(names) < layout.pipeline:
            return None
        self.rng.shuffle(names)
        del names[layout.pipeline :]
        if self.rng.random() < 0.6:
            names.sort(reverse=self.rng.random() < 0.5)
        return tuple(names)

    def divisor(self, number: int, *, most: int, like_one: float = 0.3) -> int:
        """Return a random divisor, 1 more often than others."""
        few = [d for d in divisors(number) if d <= most]
        return 1 if self.rng.random() < like_one else self.rng.choice(few)

    def _most_tensor(self) -> int:
        a = self.model.architecture
        return a.heads if a is not None else 1

    def _expert(self, ranks: int) -> int:
        a = self.model.architecture
        if a is None or a.experts is None:
            return 1
        return self.rng.choice([d for d in divisors(a.experts.count) if ranks % d == 0])

    def _order(self) -> tuple[Axis, ...]:
        if self.cluster.is_mixed or self.rng.random() < 0.6:
            return INSIDE_OUT
        return tuple(self.rng.sample(INSIDE_OUT, len(INSIDE_OUT)))

    def timetable(self, ranks: int) -> tuple[str, int]:
        """Return a random schedule with a number of stages on each rank."""
        schedule = self.rng.choice(DRAINED)
        name = schedule.name
        if schedule.with_ahead and self.rng.random() < 0.6:
            name = name_with_ahead(name, self.rng.choice(every_ahead(ranks)))
        return name, self.rng.choice(numbers_of_stages(schedule))

    # Ranks of several stages.

    def _even(self, layout: Layout, choices: Sequence[Choice]) -> list[int]:
        """[rank] Like layers, each to the rank that has the fewest seconds before it."""
        run, home = self.run, homes(layout)
        counts, seconds = [0] * layout.pipeline, [0.0] * layout.pipeline
        if run is None:
            return counts
        layer_s = self.layer_s(layout, choices)
        seconds[home[0]] += sum(layer_s[: run.before])
        seconds[home[-1]] += sum(layer_s[run.before + run.alike :])
        for at in range(run.before, run.before + run.alike):
            rank = min(range(layout.pipeline), key=seconds.__getitem__)
            counts[rank] += 1
            seconds[rank] += layer_s[at]
        return counts

    def _shared(self, layout: Layout, counts: Sequence[int]) -> tuple[int, ...] | None:
        """[stage] Layers, where ranks have so many like ones and share them evenly.

        Of n like layers the stages of a rank have ⌊n / V⌋ or one more, the later ones more; where
        other ranks hold neither end the last rank's stages are as large as theirs but the last,
        which holds the rest.
        """
        run, virtual, home = self.run, layout.virtual_stages, homes(layout)
        if run is None or min(counts) < 0:
            return None
        sizes: dict[int, list[int]] = {}
        for rank, own in enumerate(counts):
            sizes[rank] = [(own + at) // virtual for at in range(virtual)]
            if home[0] != home[-1] and run.behind and rank == home[-1]:
                first = [(max(counts) + at) // virtual for at in range(virtual - 1)]
                if sum(first) > own:
                    first = [(own + at) // (virtual - 1) for at in range(virtual - 1)]
                sizes[rank] = [*first, own - sum(first)]
        result = [sizes[rank].pop(0) for rank in home]
        result[0] += run.before
        result[-1] += run.behind
        return tuple(result) if min(result) > 0 else None

    def counts(self, draft: Draft) -> list[int]:
        """[rank] Like layers."""
        run = self.run
        if run is None:
            return []
        result = [0] * draft.layout.pipeline
        for rank, like in zip(homes(draft.layout), like_layers(draft.sizes, run), strict=True):
            result[rank] += like
        return result

    # Neighbours.

    def sweep(self, draft: AnyDraft) -> Iterator[AnyDraft]:
        """Yield a draft's layout under every schedule, sharding and twice or half the micro-batch.

        Nothing is recomputed.
        """
        if isinstance(draft, UnlikeDraft):
            yield from self.unlike.sweep(draft)
            return
        layout = draft.layout
        kind: Choice = ("none", draft.choices[0][1])
        data, size, count = layout.data, layout.micro_batch, layout.micro_batches
        changes: list[dict[str, Any]] = []
        for schedule in DRAINED if layout.pipeline > 1 else ():
            each = numbers_of_stages(schedule)
            changes += [{"schedule": schedule.name, "virtual_stages": virtual} for virtual in each]
            if schedule.with_ahead:
                names = (name_with_ahead(schedule.name, n) for n in every_ahead(layout.pipeline))
                changes += [{"schedule": name, "virtual_stages": 1} for name in names]
        changes += [
            {"zero": zero, "data_shard": shard, "data_replicate": data // shard}
            for zero in range(4)
            for shard in ([d for d in divisors(data) if d > 1] if zero else [1])
        ]
        changes += [{name: value} for name, every in self.chosen.items() for value in every]
        changes += [{"micro_batch": 2 * size, "micro_batches": count // 2}] * (count % 2 == 0)
        changes += [{"micro_batch": size // 2, "micro_batches": 2 * count}] * (size % 2 == 0)
        for change in changes:
            found = self.laid(replace(layout, **change), (kind,) * len(draft.choices))
            if found is not None:
                yield found

    def neighbour(self, draft: AnyDraft) -> AnyDraft | None:
        """Return a draft that differs in one thing; None if it cannot be."""
        if isinstance(draft, UnlikeDraft):
            return self.unlike.neighbour(draft)
        moves = [
            (6, self._shift),
            (3, self._treat),
            (2, self._retime),
            (1, self._resize),
            (1, self._swap),
            (1, self._reshard),
            (0 if self.cluster.is_mixed else 1, self._reorder),
            (2, self._choose),
            (1, self._leave_idle),
        ]
        if self.model.architecture is not None and self.model.architecture.experts is not None:
            moves.append((1, self._move_experts))
        if len(self.offloads) + len(self.wires) > 2:
            moves.append((1, self._save))
        if self.cluster.is_mixed:
            moves.append((1, self._reseat))
        weights, every = zip(*moves, strict=True)
        return self.rng.choices(every, weights)[0](draft)

    def _shift(self, draft: Draft) -> Draft | None:
        """Move a layer across a cut, or from one rank to another."""
        layout, rng = draft.layout, self.rng
        if layout.pipeline == 1:
            return None
        if layout.virtual_stages > 1 and rng.random() < 0.8:
            counts = self.counts(draft)
            one, other = rng.sample(range(layout.pipeline), 2)
            counts[one] -= 1
            counts[other] += 1
            sizes = self._shared(layout, counts)
            return None if sizes is None else replace(draft, sizes=sizes)
        changed = list(draft.sizes)
        at = rng.randrange(len(changed) - 1)
        one, other = rng.choice(((at, at + 1), (at + 1, at)))
        changed[one] -= 1
        changed[other] += 1
        return replace(draft, sizes=tuple(changed)) if changed[one] else None

    def _treat(self, draft: Draft) -> Draft:
        """Change what some consecutive layers recompute, or what becomes of their activations."""
        choices, rng = list(draft.choices), self.rng
        first = rng.randrange(len(choices))
        count = rng.choice((1, 1, 2, 4, len(choices)))
        kind: Choice = (
            rng.choice(("none", "none", "selective", "full")),
            rng.choice(self.activations),
        )
        for at in range(first, min(first + count, len(choices))):
            choices[at] = kind
        return replace(draft, choices=tuple(choices))

    def _changed(self, draft: Draft, **changes: Any) -> Draft | None:
        """Return the draft under another layout, laid out anew where its stages are others."""
        layout = replace(draft.layout, **changes)
        same = (layout.stages, layout.schedule, layout.pipeline) == (
            draft.layout.stages,
            draft.layout.schedule,
            draft.layout.pipeline,
        )
        if same:
            return replace(draft, layout=layout) if self._runs(layout) else None
        return self.laid(layout, draft.choices)

    def _retime(self, draft: Draft) -> Draft | None:
        if draft.layout.pipeline == 1:
            return None
        schedule, virtual = self.timetable(draft.layout.pipeline)
        return self._changed(draft, schedule=schedule, virtual_stages=virtual)

    def _resize(self, draft: Draft) -> Draft | None:
        size, count = draft.layout.micro_batch, draft.layout.micro_batches
        if self.rng.random() < 0.5 and count % 2 == 0:
            return self._changed(draft, micro_batch=2 * size, micro_batches=count // 2)
        if size % 2:
            return None
        return self._changed(draft, micro_batch=size // 2, micro_batches=2 * count)

    def _swap(self, draft: Draft) -> Draft | None:
        """Take a factor from one axis and give it to another."""
        axes = ("tensor", "context", "pipeline", "data")
        one, other = self.rng.sample(axes, 2)
        layout = draft.layout
        degrees = {axis: getattr(layout, axis) for axis in axes}
        factors = [d for d in divisors(degrees[one]) if d > 1]
        if not factors:
            return None
        factor = self.rng.choice(factors)
        degrees[one] //= factor
        degrees[other] *= factor
        return self._of_degrees(draft, degrees)

    def _leave_idle(self, draft: Draft) -> Draft | None:
        """Give one axis any degree that leaves devices over, or takes such as are left over."""
        axes = ("tensor", "context", "pipeline", "data")
        degrees = {axis: getattr(draft.layout, axis) for axis in axes}
        one = self.rng.choice(axes)
        others = draft.layout.devices // degrees[one]
        degrees[one] = self.rng.randint(1, self.cluster.devices // others)
        return self._of_degrees(draft, degrees)

    def _of_degrees(self, draft: Draft, degrees: dict[str, int]) -> Draft | None:
        """Return a draft of these degrees, the rest as near as can be."""
        layout = draft.layout
        data = degrees.pop("data")
        if self.job.global_batch % data:
            return None
        share = self.job.global_batch // data
        size = min(divisors(share), key=lambda d: abs(d - layout.micro_batch))
        zero = layout.zero if data > 1 else 0
        if data > 1 and not zero:
            zero = self.rng.randrange(4)
        timetable = {"schedule": layout.schedule, "virtual_stages": layout.virtual_stages}
        if degrees["pipeline"] == 1:
            timetable = {"schedule": PLAIN, "virtual_stages": 1}
        ranks = (data if zero else 1) * degrees["context"] * degrees["tensor"]
        return self.laid(
            replace(
                layout,
                **degrees,
                **timetable,
                zero=zero,
                data_shard=data if zero else 1,
                data_replicate=1 if zero else data,
                expert=layout.expert if ranks % layout.expert == 0 else self._expert(ranks),
                micro_batch=size,
                micro_batches=share // size,
            ),
            draft.choices,
        )

    def _reshard(self, draft: Draft) -> Draft | None:
        data = draft.layout.data
        zero = self.rng.randrange(4) if data > 1 else 0
        shard = self.rng.choice([d for d in divisors(data) if d > 1]) if zero else 1
        return self._changed(draft, zero=zero, data_shard=shard, data_replicate=data // shard)

    def _reorder(self, draft: Draft) -> Draft | None:
        order = list(draft.layout.order)
        one, other = self.rng.sample(range(len(order)), 2)
        order[one], order[other] = order[other], order[one]
        return self._changed(draft, order=tuple(order))

    def _move_experts(self, draft: Draft) -> Draft | None:
        layout = draft.layout
        ranks = layout.data_shard * layout.context * layout.tensor
        return self._changed(draft, expert=self._expert(ranks))

    def _save(self, draft: Draft) -> Draft | None:
        return self._changed(
            draft,
            offload=self.rng.choice(self.offloads),
            gradient_compression=self.rng.choice(self.wires),
        )

    def _choose(self, draft: Draft) -> Draft | None:
        name = self.rng.choice(list(self.chosen))
        return self._changed(draft, **{name: self.rng.choice(self.chosen[name])})

    def _reseat(self, draft: Draft) -> Draft | None:
        if len(draft.groups) < 2:
            return None
        names = list(draft.groups)
        one, other = self.rng.sample(range(len(names)), 2)
        names[one], names[other] = names[other], names[one]
        return replace(draft, groups=tuple(names))


def _written(layout: Layout) -> dict[str, Any]:
    """Return the fields of a layout as a plan's document has them."""
    values = {field.name: getattr(layout, field.name) for field in fields(Layout)}
    mesh = {name: values.pop(name) for name in Mesh.model_fields}
    loss = values.pop("loss")
    dumped = {"loss": loss.model_dump(mode="json")} if loss is not None else {}
    return {**values, **dumped, "mesh": {**mesh, "order": list(layout.order)}}


def every_ahead(ranks: int) -> list[tuple[int, ...]]:
    """Forwards ahead of all links, and of any one."""
    alike = [(number,) * (ranks - 1) for number in (1, 2, 3, 5, 8)]
    single = [
        tuple(number * (at == link) for at in range(ranks - 1))
        for number in (1, 3)
        for link in range(ranks - 1)
    ]
    return alike + single


def numbers_of_stages(schedule: Schedule) -> list[int]:
    return [virtual for virtual in range(1, MOST_STAGES + 1) if schedule.takes(virtual)]


def homes(layout: Layout) -> tuple[int, ...]:
    """[stage] Its rank."""
    return rank_of_stage(
        layout.schedule, stages=layout.stages, virtual_stages=layout.virtual_stages
    )


def longest_run(kinds: Sequence[str]) -> Run | None:
    """Return the longest run of like layers; None if more than 4 layers stand on one side of it."""
    best, at = Run(0, 0, len(kinds)), 0
    for _, same in groupby(kinds):
        count = len(list(same))
        if count > best.alike:
            best = Run(at, count, len(kinds) - at - count)
        at += count
    return best if max(best.before, best.behind) <= 4 else None


def like_layers(sizes: Sequence[int], run: Run) -> Iterator[int]:
    """[stage] How many of its layers are of the run."""
    for first, end in pairwise(accumulate(sizes, initial=0)):
        yield max(0, min(end, run.before + run.alike) - max(first, run.before))


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order."""
    return [d for d in range(1, number + 1) if number % d == 0]
