"""Seconds and bytes of each layer kind, measured on the runtime's own modules.

A trial is a forward and a backward of one micro-batch through the whole chain.  Hooks on the
activations between layers cut it at the layers' borders: a layer's forward ends where the next one
begins, and since autograd runs later operators first, a layer's backward is what happens between
the arrival of its output's gradient and that of its input's.  Gradients of parameters are added to
earlier ones, as in all micro-batches of a step but the first.  The last layer has the loss too.  A
layer's recomputation is a forward within the backward, and timed as such.

A table of tokens takes so little beside blocks that one look at it per trial, right after all ranks
met, shows more of the meeting: such layers run some more times by themselves, each time with caches
that hold other things, and a trial's median counts.

A head whose loss is computed in chunks runs by itself: in a chain the head returns all logits.
Its parameters are multiplied a few rows at a time, as the runtime does it in training.
"""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.planner.documents.profile import ChunkedLoss, LayerMeasurement
from meshwright.profiler.cache import Parts
from meshwright.profiler.chain import Case, Chain, Division
from meshwright.profiler.clock import Clock, Moment, median, slowest, spread
from meshwright.profiler.interference import Watch
from meshwright.profiler.layer_bytes import (
    MeasuredLayerBytes,
    bytes_of,
    layer_bytes,
    least_bytes,
    looks_at,
)
from meshwright.runtime.core.layer_names import HEAD
from meshwright.runtime.core.object_collectives import all_gather_json
from meshwright.runtime.techniques.chunked_cross_entropy import in_chunks

LEAST_ROUNDS = 3
ENOUGH_ROUNDS = 6
"""Number of rounds that suffice if nothing spreads by more than the target."""
MOST_ROUNDS = 20
TARGET_SPREAD = 0.1
"""Interquartile range over median of a pass through the chain."""
SHORT = 0.03
"""Share of a pass below which a layer that reads tokens is run some more times."""
MORE_LOOKS = 4
"""Number of such additional runs."""
OTHER_BYTES = 8 * 2**20
"""Bytes that pass through the caches before each run."""
HEAD_WARM_UP, HEAD_ROUNDS = 1, 6
"""Passes of a head whose loss is in chunks: not counted, counted."""


@dataclass(frozen=True, slots=True)
class LayerSamples:
    """Everything measured of one layer kind under one case."""

    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    recompute_s: list[float] = field(default_factory=list)
    held: list[MeasuredLayerBytes] = field(default_factory=list)


SamplesByCase = dict[tuple[str, Case], LayerSamples]


def measurements(
    chains: Sequence[Chain],
    cases: Sequence[Case],
    *,
    budget_s: float,
    least: int | None = None,
    parts: Parts | None = None,
    watch: Watch | None = None,
    progress: Callable[[float], None] | None = None,
) -> list[LayerMeasurement]:
    """Measure every kind under each case, in the order of their value, as far as the budget goes.

    All ranks call it together and get the same.  First each case's bytes and one timed pass, until
    two more passes of all of them would take what is left; the first `least` cases (default: all)
    are measured whatever they take.  Then rounds in changing order, so that a slow second of the
    machine falls on all alike.  After the least rounds only cases that still spread are visited,
    until the budget is used.
    """
    clock = Clock(chains[0].device)
    begin_s = clock.now_s()
    parts = parts or Parts(None, 0, lambda value: value)

    def used_s() -> float:
        return slowest([clock.now_s() - begin_s])[0]

    by_division = {chain.division: chain for chain in chains}
    once = {chain.division: _once(chain, clock) for chain in chains}
    least = len(cases) if least is None else min(least, len(cases))
    accepted = _accepted_samples(parts, cases, by_division)
    chosen: list[Case] = []
    passes_s = 0.0
    for case in cases:
        wanted_s = used_s() + (LEAST_ROUNDS - 1) * passes_s
        if len(chosen) >= least and wanted_s >= budget_s:
            break
        chain = by_division[case.division]
        passes_s += slowest([_first(accepted, chain, case, once[case.division], clock)])[0]
        chosen.append(case)
        if progress:
            done = max(len(chosen) / len(cases), wanted_s / budget_s if budget_s else 1.0)
            progress(min(1.0, done) * 2 / (LEAST_ROUNDS + 1))
    accepted = {key: samples for key, samples in accepted.items() if key[1] in chosen}
    rounds = 0
    while rounds < MOST_ROUNDS:
        # Samples of a run that was cut short count: a round that is whole is not done again.
        due = [c for c in chosen if _visits(accepted, by_division[c.division], c) <= rounds]
        if rounds >= LEAST_ROUNDS and used_s() >= budget_s:
            break
        if rounds >= ENOUGH_ROUNDS:
            wide = slowest([_spread(accepted, by_division[case.division], case) for case in due])
            due = [c for c, width in zip(due, wide, strict=True) if width > TARGET_SPREAD]
            if not due:
                break
        if watch is not None:
            watch.look()
        order = random.Random(rounds).sample(due, len(due))
        for index, case in enumerate(order):
            chain = by_division[case.division]
            _visit(accepted, chain, case, once[case.division], clock)
            if progress:
                done = (1 + rounds + (index + 1) / len(order)) / (LEAST_ROUNDS + 1)
                progress(min(0.99, done))
        rounds += 1
        parts.store("layers", _plain(accepted))
    return [
        measurement(kind, case, samples, by_division[case.division])
        for (kind, case), samples in of_all_ranks(accepted).items()
    ]


def _first(
    samples: SamplesByCase, chain: Chain, case: Case, once_s: Mapping[str, float], clock: Clock
) -> float:
    """Count a case's bytes, which also warms it up, and time one pass; return what that took."""
    first = next(iter(chain.kinds.values()))
    if not samples[first, case].held:
        for name, held in layer_bytes(chain, case).items():
            samples[chain.kinds[name], case].held.append(held)
    if _visits(samples, chain, case) > 0:
        return _last_pass_s(samples, chain, case)
    before_s = clock.now_s()
    _visit(samples, chain, case, once_s, clock)
    return clock.now_s() - before_s


def _visit(
    by_case: SamplesByCase, chain: Chain, case: Case, once_s: Mapping[str, float], clock: Clock
) -> None:
    """Add one trial's seconds to what was found."""
    again: dict[str, float] = {}
    seconds = trial(chain, case, clock, again)
    for name in _short(chain, once_s):
        seconds[name] = looked_at_again(chain, case, clock, name, seconds[name])
    for name, (forward_s, backward_s) in seconds.items():
        samples = by_case[chain.kinds[name], case]
        samples.forward_s.append(forward_s)
        samples.backward_s.append(backward_s)
        samples.recompute_s.append(again.get(name, 0.0))


def _accepted_samples(
    parts: Parts, cases: Sequence[Case], by_division: Mapping[Division, Chain]
) -> SamplesByCase:
    """Return the samples of these cases that all ranks accepted, and empty ones for the others."""
    keys = [
        (kind, case)
        for case in cases
        for kind in dict.fromkeys(by_division[case.division].kinds.values())
    ]
    accepted: SamplesByCase = {key: LayerSamples() for key in keys}
    if not parts.everywhere_stored("layers"):
        return accepted
    kept = _read(parts["layers"])
    counts = [float(len(kept[key].forward_s)) if key in kept else 0.0 for key in keys]
    least = [-value for value in slowest([-count for count in counts])]
    for key, count in zip(keys, least, strict=True):
        if count > 0:
            stored = kept[key]
            accepted[key] = LayerSamples(
                stored.forward_s[: int(count)],
                stored.backward_s[: int(count)],
                stored.recompute_s[: int(count)],
                stored.held,
            )
    return accepted


def _plain(by_case: SamplesByCase) -> list[dict[str, Any]]:
    return [
        {"kind": kind, "case": asdict(case), **asdict(samples)}
        for (kind, case), samples in by_case.items()
    ]


def _read(rows: Sequence[Mapping[str, Any]]) -> SamplesByCase:
    return {
        (row["kind"], Case(**row["case"])): LayerSamples(
            row["forward_s"],
            row["backward_s"],
            row["recompute_s"],
            [MeasuredLayerBytes(**held) for held in row["held"]],
        )
        for row in rows
    }


def _visits(samples: SamplesByCase, chain: Chain, case: Case) -> int:
    """Return in how many rounds a case was measured."""
    first = next(iter(chain.kinds.values()))
    of_kind = sum(kind == first for kind in chain.kinds.values())
    return len(samples[first, case].forward_s) // of_kind


def _last_pass_s(by_case: SamplesByCase, chain: Chain, case: Case) -> float:
    """Return the seconds of the last visit that was accepted."""
    samples = [by_case[kind, case] for kind in chain.kinds.values()]
    return sum(each.forward_s[-1] + each.backward_s[-1] for each in samples)


def _spread(by_case: SamplesByCase, chain: Chain, case: Case) -> float:
    """Return the spread of a whole pass, layer by layer of each kind together."""
    every = [by_case[kind, case] for kind in dict.fromkeys(chain.kinds.values())]
    rounds = _visits(by_case, chain, case)
    totals = []
    for visit in range(rounds):
        total = 0.0
        for samples in every:
            size = len(samples.forward_s) // rounds
            part = slice(visit * size, (visit + 1) * size)
            total += sum(samples.forward_s[part]) + sum(samples.backward_s[part])
        totals.append(total)
    return spread(totals) if totals else 1.0


def trial(
    chain: Chain, case: Case, clock: Clock, again: dict[str, float] | None = None
) -> dict[str, tuple[float, float]]:
    """Return forward and backward seconds of each layer for one micro-batch, on this rank.

    `again` is given the seconds of what layers compute again within backward.
    """
    chain.gradients_exist()
    tokens, targets = chain.batch(case.micro_batch)
    layers = chain.layers(case)
    names = list(layers)
    arrived: dict[str, Moment] = {}
    with in_step(), chain.loss_context(), contextlib.ExitStack() as noted:
        begin = {names[0]: clock.moment()}
        outputs: tuple[Tensor, ...] = (tokens,)
        for name, following in zip(names, [*names[1:], None], strict=True):
            outputs = chain.run(layers[name], outputs)
            if following is not None:
                begin[following] = clock.moment()
                _note_all(outputs, arrived, name, clock)
        loss = chain.loss(outputs[0], targets)
        del outputs
        middle = clock.moment()
        spans: dict[str, list[Moment]] = {}
        if again is not None and case.recompute != "none" and not case.compiled:
            noted.enter_context(_noting_forwards(chain, spans, clock))
        loss.backward()
        end = clock.moment()
    if again is not None:
        again.update({n: clock.between_s(span[0], span[-1]) for n, span in spans.items()})
    result = {}
    for index, name in enumerate(names):
        last, first = index == len(names) - 1, index == 0
        forward_end = middle if last else begin[names[index + 1]]
        backward_begin = middle if last else arrived.get(name, end)
        backward_end = end if first else arrived.get(names[index - 1], end)
        result[name] = (
            clock.between_s(begin[name], forward_end),
            clock.between_s(backward_begin, backward_end),
        )
    return result


def _note_all(
    outputs: Sequence[Tensor], moments: dict[str, Moment], name: str, clock: Clock
) -> None:
    """Record the time at which the last gradient of a layer's outputs arrives."""
    for value in outputs:
        if value.requires_grad:
            value.register_hook(_noting(moments, name, clock))


def _noting(moments: dict[str, Moment], name: str, clock: Clock) -> Callable[[Tensor], None]:
    def note(_: Tensor) -> None:
        moments[name] = clock.moment()

    return note


@contextlib.contextmanager
def _noting_forwards(chain: Chain, spans: dict[str, list[Moment]], clock: Clock) -> Iterator[None]:
    """Record the begin and end of each layer's own forward; checkpointing may cut it short."""
    hooks = []
    for name, layer in chain.parts.items():
        note = partial(_note_span, spans, name, clock)
        hooks.append(layer.register_forward_pre_hook(note))
        hooks.append(layer.register_forward_hook(note, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _note_span(spans: dict[str, list[Moment]], name: str, clock: Clock, *_: object) -> None:
    spans.setdefault(name, []).append(clock.moment())


def _once(chain: Chain, clock: Clock) -> dict[str, float]:
    """Return the seconds of one sample in each layer, after warm-up; the same on every rank."""
    case = Case(micro_batch=1, recompute="none", **asdict(chain.division))
    trial(chain, case, clock)
    seconds = trial(chain, case, clock)
    return dict(zip(seconds, slowest([f + b for f, b in seconds.values()]), strict=True))


def _short(chain: Chain, once_s: Mapping[str, float]) -> list[str]:
    """Return the layer that reads tokens, if it is a small part of the chain."""
    most_s = SHORT * sum(once_s.values())
    return [name for name in list(chain.parts)[:1] if once_s[name] < most_s]


def looked_at_again(
    chain: Chain, case: Case, clock: Clock, name: str, first: tuple[float, float]
) -> tuple[float, float]:
    """Return the medians of a first look at a layer that reads tokens, and of some more."""
    tokens, _ = chain.batch(case.micro_batch)
    layer = chain.layers(case)[name]
    other = torch.ones(OTHER_BYTES // 4, device=chain.device)
    forwards, backwards = [first[0]], [first[1]]
    for _ in range(MORE_LOOKS):
        arrived: dict[str, Moment] = {}
        with in_step():
            other.add_(1.0)
            begin = clock.moment()
            outputs = chain.run(layer, (tokens,))
            middle = clock.moment()
            _note_all(outputs, arrived, name, clock)
            trained = [value for value in outputs if value.requires_grad]
            if not trained:
                return first
            torch.autograd.backward(trained, [torch.ones_like(value) for value in trained])
            end = clock.moment()
        forwards.append(clock.between_s(begin, middle))
        backwards.append(clock.between_s(arrived[name], end))
    return median(forwards), median(backwards)


@contextlib.contextmanager
def in_step() -> Iterator[None]:
    """All ranks begin together, and no garbage is collected meanwhile."""
    if dist.is_initialized():
        dist.barrier()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def of_all_ranks(samples: SamplesByCase) -> SamplesByCase:
    """Return the samples of all ranks to each rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return samples
    everyone = [_read(of_rank) for of_rank in all_gather_json(_plain(samples))]
    return {
        key: LayerSamples(
            [s for of_rank in everyone for s in of_rank[key].forward_s],
            [s for of_rank in everyone for s in of_rank[key].backward_s],
            [s for of_rank in everyone for s in of_rank[key].recompute_s],
            [b for of_rank in everyone for b in of_rank[key].held],
        )
        for key in samples
    }


def measurement(kind: str, case: Case, samples: LayerSamples, chain: Chain) -> LayerMeasurement:
    """Return the measurement of one layer kind."""
    both = [f + b for f, b in zip(samples.forward_s, samples.backward_s, strict=True)]
    return LayerMeasurement(
        kind=kind,
        tensor=case.tensor,
        context=case.context,
        expert=case.expert,
        sequence_parallel=case.tensor > 1,
        micro_batch=case.micro_batch,
        seq_len=chain.seq_len,
        precision=chain.precision,
        recompute=case.recompute,
        forward_s=median(samples.forward_s),
        backward_s=median(samples.backward_s),
        compiled=case.compiled,
        recompute_s=None if case.compiled else median(samples.recompute_s),
        resident_bytes=max(
            size for name, size in chain.resident_bytes.items() if chain.kinds[name] == kind
        ),
        stored_bytes=max(held.stored for held in samples.held),
        forward_transient_bytes=max(held.forward_transient for held in samples.held),
        backward_transient_bytes=max(held.backward_transient for held in samples.held),
        spread=spread(both),
        samples=len(both),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCase:
    """One head to measure."""

    division: Division
    micro_batch: int
    loss: ChunkedLoss

    @property
    def case(self) -> Case:
        """The setting of the layers around it; a head recomputes nothing beside its loss."""
        return Case(micro_batch=self.micro_batch, recompute="none", **asdict(self.division))


def heads(chains: Sequence[Chain], wanted: Sequence[HeadCase]) -> list[LayerMeasurement]:
    """Measure each head; all ranks call it together and get the same."""
    by_division = {chain.division: chain for chain in chains}
    return [_head(by_division[head.division], head) for head in wanted]


def _head(chain: Chain, wanted: HeadCase) -> LayerMeasurement:
    clock, head_samples = Clock(chain.device), LayerSamples()
    chain.gradients_exist()
    tokens, targets = chain.batch(wanted.micro_batch)
    hidden = _before_head(chain, tokens)
    with _chunked_head(chain, wanted.loss, targets) as head:
        for visit in range(HEAD_WARM_UP + HEAD_ROUNDS):
            seconds = _passes(head, hidden, clock)
            if visit >= HEAD_WARM_UP:
                head_samples.forward_s.append(seconds[0])
                head_samples.backward_s.append(seconds[1])
                head_samples.recompute_s.append(0.0)
        looks = [bytes_of(head, [hidden], lambda out: out[0])[0] for _ in range(looks_at(chain))]
        head_samples.held.append(least_bytes(looks))
    kind, case = chain.kinds[HEAD], wanted.case
    samples = of_all_ranks({(kind, case): head_samples})[kind, case]
    return measurement(kind, case, samples, chain).model_copy(update={"loss": wanted.loss})


def _passes(head: nn.Module, hidden: Tensor, clock: Clock) -> tuple[float, float]:
    x = hidden.detach().requires_grad_()
    with in_step():
        begin = clock.moment()
        total, _ = head(x)
        middle = clock.moment()
        total.backward()
        end = clock.moment()
    return clock.between_s(begin, middle), clock.between_s(middle, end)


def _before_head(chain: Chain, tokens: Tensor) -> Tensor:
    """Return the head's inputs of a micro-batch: [sample, this rank's positions, hidden]."""
    activations = tokens
    with torch.no_grad():
        for name, layer in chain.parts.items():
            if name != HEAD:
                activations = layer(activations)
    return activations.detach().clone()


class _OfTargets(nn.Module):
    """A head that makes its loss, with the targets that it takes."""

    def __init__(self, head: nn.Module, targets: Tensor) -> None:
        super().__init__()
        self.head, self.targets = head, targets

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        loss_and_count: tuple[Tensor, Tensor] = self.head(x, self.targets)
        return loss_and_count


@contextlib.contextmanager
def _chunked_head(chain: Chain, how: ChunkedLoss, targets: Tensor) -> Iterator[nn.Module]:
    """Let the chain's head compute its loss in chunks, and as before behind this."""
    head = chain.parts[HEAD]
    group = chain.place.axis("tensor").get_group() if chain.division.tensor > 1 else None
    in_chunks(head, how, group)
    try:
        yield _OfTargets(head, targets)
    finally:
        del head.forward  # the class's own comes forward again
