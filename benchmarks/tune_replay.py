"""docs/results/tuning.md's table: trials replayed on sweeps of real runs, source by source.

    python benchmarks/tune_replay.py TABLE.csv [--json] [--no-optuna] [--smaller]

Each sweep of the table is a cluster: its layouts are what may be tried, and a trial returns the
measured step and memory, or that there was not enough memory.  No row is looked at before it is
tried, and predictions are without the figures that rest on the sweep's own source.  Rows of one
layout are repeats: a trial draws one of them, and regret is that of their median.

Beside the belief: random order, the order of predictions, the order in which DeepSpeed's autotuner
goes (ZeRO stage by stage, micro-batches upwards), and optuna's tree-structured Parzen estimator.

`--smaller`: instead, sweeps of one model on fewer devices are tried for those on more, of whose
rows none is ever seen.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwright.planner.calibration.scores.validate import ScoredRow, validate
from meshwright.planner.tuning.next_trial import ENOUGH, NEAR, Outcome, Tuner
from meshwright.planner.tuning.trial_options import TrialOption

AFTER = (0, 1, 3, 5, 8)
FEWEST = 3
"""Layouts that ran, of a sweep that is replayed."""
WORST = 1.0
"""Regret of a sweep is capped here; so is that of an answer that does not fit in memory."""
MOST_TRIALS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Layouts of one model on one machine, and what was measured of each."""

    source: str
    name: str
    options: tuple[TrialOption, ...]
    steps_s: tuple[tuple[float, ...], ...]
    """[option] Measured seconds of each repeat; empty: out of memory."""
    ratios: tuple[float | None, ...]
    """[option] Measured over predicted peak."""
    devices: int = 1
    nodes: int = 1
    shape: tuple[int, ...] = ()
    """Width and blocks of the model, tokens of a sample."""

    @property
    def best_s(self) -> float:
        """The fastest layout's median step."""
        return min(statistics.median(steps) for steps in self.steps_s if steps)

    def regret(self, option: int) -> float:
        """Return how much slower than the fastest an option is."""
        steps = self.steps_s[option]
        return min(WORST, statistics.median(steps) / self.best_s - 1) if steps else WORST

    def trial(self, option: int, rng: random.Random) -> Outcome:
        """Return what a trial of an option tells."""
        steps = self.steps_s[option]
        step_s = rng.choice(steps) if steps else None
        return Outcome(option=option, step_s=step_s, memory_ratio=self.ratios[option])


def sweeps_of(table: Path) -> list[Sweep]:
    """Return the sweeps of a table that have a choice."""
    found: dict[tuple[str, str], dict[str, list[ScoredRow]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in validate(table, left_out=True).rows:
        seen = row.measured
        told = (seen.step_time_s and seen.judge_rank) or seen.out_of_memory
        if seen.complete and seen.sweep and row.outcome not in (None, "refused") and told:
            found[seen.source, seen.sweep][repr(row.setup)].append(row)
    every = [_sweep(*key, list(alike.values())) for key, alike in found.items()]
    return [sweep for sweep in every if sum(map(bool, sweep.steps_s)) >= FEWEST]


def _sweep(source: str, name: str, layouts: Sequence[Sequence[ScoredRow]]) -> Sweep:
    setup = layouts[0][0].setup
    assert setup is not None
    request = setup.request
    a = request.model.architecture
    return Sweep(
        devices=request.cluster.devices,
        nodes=request.cluster.groups[0].nodes,
        shape=() if a is None else (a.hidden_size, a.layers, request.job.seq_len),
        source=source,
        name=name,
        options=tuple(_option(rows[0]) for rows in layouts),
        steps_s=tuple(
            tuple(row.measured.step_time_s for row in rows if row.measured.step_time_s)
            for rows in layouts
        ),
        ratios=tuple(
            next((row.memories[1] / row.memories[0] for row in rows if row.memories), None)
            for rows in layouts
        ),
    )


def _option(row: ScoredRow) -> TrialOption:
    setup, prediction = row.setup, row.prediction
    assert setup is not None
    assert prediction is not None
    cluster, framework = setup.request.cluster, setup.request.framework
    return TrialOption(
        layout=setup.layout,
        kept=f"{setup.recompute} {setup.activations}",
        step_s=prediction.step_time_s,
        parts=prediction.step_parts,
        devices_per_node=cluster.groups[0].devices_per_node,
        fit_probability=prediction.fit_probability or 0.0,
        memory_spread=framework.memory.spread,
    )


Policy = Callable[[Sweep, random.Random], Iterator[tuple[int, Outcome | None]]]
"""Yields the answer before any trial with None, then after each trial with its outcome."""


def _in_order(order: Callable[[Sweep, random.Random], Sequence[int]]) -> Policy:
    """Return what tries options in an order and answers with the fastest measured one."""

    def policy(sweep: Sweep, rng: random.Random) -> Iterator[tuple[int, Outcome | None]]:
        best: tuple[float, int] | None = None
        wanted = list(order(sweep, rng))
        yield wanted[0], None
        for option in wanted:
            outcome = sweep.trial(option, rng)
            if outcome.step_s is not None:
                found = (outcome.step_s, option)
                best = found if best is None else min(best, found)
            yield (option if best is None else best[1]), outcome

    return policy


def _shuffled(sweep: Sweep, rng: random.Random) -> list[int]:
    return rng.sample(range(len(sweep.options)), len(sweep.options))


def _predicted(sweep: Sweep, rng: random.Random) -> list[int]:
    """Fastest predicted first; what may not fit comes last."""
    every = range(len(sweep.options))
    fits = [one.fit_probability >= ENOUGH for one in sweep.options]
    return sorted(every, key=lambda one: (not fits[one], sweep.options[one].step_s))


def _by_stage(sweep: Sweep, rng: random.Random) -> list[int]:
    """DeepSpeed's: stage by stage, degrees upwards, micro-batches upwards."""

    def key(at: int) -> tuple[int, ...]:
        one = sweep.options[at].layout
        return (one.zero, one.tensor, one.pipeline, one.virtual_stages, one.micro_batch)

    return sorted(range(len(sweep.options)), key=key)


def _parzen(sweep: Sweep, rng: random.Random) -> list[int]:
    """The order in which optuna's TPE asks for options of the sweep, each told as it was measured.

    What it asks for that is not in the sweep, or was tried, is told to be pruned and costs nothing.
    """
    import optuna  # noqa: PLC0415 - of this benchmark alone

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    fields = ("tensor", "pipeline", "data", "virtual_stages", "micro_batch", "zero", "kept")
    known = [
        tuple(one.kept if name == "kept" else getattr(one.layout, name) for name in fields)
        for one in sweep.options
    ]
    values = {name: sorted({key[i] for key in known}) for i, name in enumerate(fields)}
    sampler = optuna.samplers.TPESampler(seed=rng.randrange(2**31), n_startup_trials=3)
    study = optuna.create_study(sampler=sampler)
    order: list[int] = []
    for _ in range(4 * MOST_TRIALS):
        if len(order) >= min(MOST_TRIALS, len(known)):
            break
        asked = study.ask()
        key = tuple(asked.suggest_categorical(name, values[name]) for name in fields)
        left = [at for at, one in enumerate(known) if one == key and at not in order]
        if not left:
            study.tell(asked, state=optuna.trial.TrialState.PRUNED)
            continue
        order.append(left[0])
        outcome = sweep.trial(left[0], rng)
        if outcome.step_s is None:
            study.tell(asked, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(asked, math.log(outcome.step_s))
    rest = [at for at in _shuffled(sweep, rng) if at not in order]
    return order + rest


POLICIES: dict[str, Policy] = {
    "random": _in_order(_shuffled),
    "predicted order": _in_order(_predicted),
    "DeepSpeed's order": _in_order(_by_stage),
    "optuna TPE": _in_order(_parzen),
}
REPEATED = {"random": 5, "optuna TPE": 1}
"""Policies that draw, and from how many seeds they are replayed."""


@dataclass(slots=True)
class Score:
    """What replays of a source or a policy add up to; regrets and errors are fractions."""

    regret: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    trials: list[int] = field(default_factory=list)
    """Until an answer was within NEAR of the best, of each replay."""
    out_of_memory: int = 0
    tried: int = 0
    before: list[float] = field(default_factory=list)
    """Of each sweep: the median error of rows that were not tried in three trials."""
    after: list[float] = field(default_factory=list)
    """The same rows, after those trials."""
    stated: list[tuple[float, bool]] = field(default_factory=list)
    """Probability that an answer is within NEAR of the best, and whether it is."""


def replay(sweep: Sweep, seed: int, score: Score, policy: Policy) -> None:
    """Replay a policy on a sweep."""
    first: int | None = None
    last = 0.0
    answers = policy(sweep, random.Random(seed))
    for count, (answer, outcome) in enumerate(answers):
        last = sweep.regret(answer)
        first = count if first is None and last <= NEAR else first
        if count in AFTER:
            score.regret[count].append(last)
        if outcome is not None and count <= AFTER[-1]:
            score.tried += 1
            score.out_of_memory += outcome.step_s is None
        if count >= AFTER[-1] and (first is not None or count >= MOST_TRIALS):
            break
    for count in AFTER:  # a sweep with fewer layouts ends at its best
        if len(score.regret[count]) < len(score.regret[0]):
            score.regret[count].append(last)
    score.trials.append(MOST_TRIALS if first is None else first)


def _learning(score: Score) -> Policy:
    """Return the policy of `meshwright.planner.tuning`, which notes what it believes on the way."""

    def policy(sweep: Sweep, rng: random.Random) -> Iterator[tuple[int, Outcome | None]]:
        tuner = Tuner(sweep.options)
        yield tuner.answer, None
        start = tuner
        while (option := tuner.next_trial()) is not None:
            outcome = sweep.trial(option, rng)
            tuner = tuner.with_outcome(outcome)
            count = len(tuner.outcomes)
            if count == 3:
                _errors(sweep, start, tuner, score)
            if count in AFTER:
                score.stated.append((tuner.sure, sweep.regret(tuner.answer) <= NEAR))
            yield tuner.answer, outcome

    return policy


def _errors(sweep: Sweep, start: Tuner, tuner: Tuner, score: Score) -> None:
    """Note how far steps of what was not tried are off, before any trial and now."""
    left = [at for at, steps in enumerate(sweep.steps_s) if steps and at not in tuner.tried_options]
    if not left:
        return
    for belief, errors in ((start, score.before), (tuner, score.after)):
        errors.append(
            statistics.median(
                abs(math.exp(belief.posterior.mean[at]) / statistics.median(sweep.steps_s[at]) - 1)
                for at in left
            )
        )


def by_source(sweeps: Sequence[Sweep], name: str | None) -> dict[str, Score]:
    """Replay all sweeps under a policy, or with learning if none is named."""
    scores: dict[str, Score] = defaultdict(Score)
    for sweep in sweeps:
        score = scores[sweep.source]
        policy = _learning(score) if name is None else POLICIES[name]
        for seed in range(REPEATED.get(name or "", 1)):
            replay(sweep, seed, score, policy)
    return scores


def counted(sweeps: Sequence[Sweep]) -> list[str]:
    """Return the sources that count: half of their sweeps have more layouts than trials."""
    sizes: dict[str, list[int]] = defaultdict(list)
    for sweep in sweeps:
        sizes[sweep.source].append(len(sweep.options))
    return sorted(name for name, each in sizes.items() if statistics.median(each) > AFTER[-1])


def summary(scores: dict[str, Score], sources: Sequence[str]) -> dict[str, Any]:
    """Return the means over sources of what each score is on average."""
    chosen = [scores[name] for name in sources]
    return {
        "regret": {
            str(count): statistics.mean(statistics.mean(one.regret[count]) for one in chosen)
            for count in AFTER
        },
        "trials_to_near": statistics.mean(statistics.mean(one.trials) for one in chosen),
        "out_of_memory": sum(one.out_of_memory for one in chosen)
        / sum(one.tried for one in chosen),
    }


def fifths(scores: dict[str, Score], sources: Sequence[str]) -> list[dict[str, float]]:
    """Return, by fifths of the stated probability, how often it was so; sources count alike."""
    found: list[dict[str, float]] = []
    for fifth in range(5):
        rows = [
            (stated, was, 1 / len(scores[name].stated))
            for name in sources
            for stated, was in scores[name].stated
            if fifth == min(4, int(5 * stated))
        ]
        if rows:
            weight = sum(each for _, _, each in rows)
            found.append(
                {
                    "answers": len(rows),
                    "stated": sum(stated * each for stated, _, each in rows) / weight,
                    "was": sum(was * each for _, was, each in rows) / weight,
                }
            )
    return found


def in_small(sweeps: Sequence[Sweep]) -> dict[str, dict[str, Any]]:
    """Replay each sweep by trials of sweeps on half as many devices or fewer, by source and ratio.

    Of the larger one no row is told; regrets are those of what is believed fastest there.
    """
    found: dict[str, dict[int, Score]] = defaultdict(lambda: defaultdict(Score))
    inside: dict[str, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for large in sweeps:
        for small in sweeps:
            alike = (large.source, large.shape) == (small.source, small.shape) and large.shape
            if not alike or 2 * small.devices > large.devices:
                continue
            ratio = large.devices // small.devices
            tuner = _told_in_small(large, small, found[large.source][ratio])
            inside[large.source][ratio] += [
                (tuner.posterior.spread(at), abs(math.log(statistics.median(steps)) - mean))
                for at, (steps, mean) in enumerate(
                    zip(large.steps_s, tuner.posterior.mean, strict=False)
                )
                if steps
            ]
    return {
        f"{source}, x{ratio}": {
            "sweeps": len(score.trials),
            "regret": {str(count): statistics.mean(score.regret[count]) for count in AFTER},
            "in_range": statistics.mean(
                float(off <= 1.28 * spread) for spread, off in inside[source][ratio]
            ),
        }
        for source, ratios in sorted(found.items())
        for ratio, score in sorted(ratios.items())
    }


def _told_in_small(large: Sweep, small: Sweep, score: Score) -> Tuner:
    """Return what is known of a sweep after trials of a smaller one, whose regrets are noted."""
    doublings = math.log2(large.devices / small.devices)
    unseen = small.nodes == 1 < large.nodes
    options = [replace(one, doublings=doublings, unseen_links=unseen) for one in large.options]
    tuner = Tuner([*options, *small.options], stand_ins=len(small.options))
    rng = random.Random(0)
    for count in range(AFTER[-1] + 1):
        if count in AFTER:
            score.regret[count].append(large.regret(tuner.answer))
        option = tuner.next_trial()
        if option is not None and count < AFTER[-1]:
            told = small.trial(option - len(options), rng)
            tuner = tuner.with_outcome(replace(told, option=option))
    score.trials.append(len(tuner.outcomes))
    return tuner


def _print_in_small(found: dict[str, dict[str, Any]]) -> None:
    heads = " | ".join(str(count) for count in AFTER)
    print(f"| source, devices | sweeps | {heads} | in range |\n|---|" + "---:|" * 7)
    for name, one in found.items():
        regrets = " | ".join(f"{100 * one['regret'][str(count)]:.1f} %" for count in AFTER)
        print(f"| {name} | {one['sweeps']} | {regrets} | {100 * one['in_range']:.0f} % |")


def result(table: Path, *, optuna: bool = True) -> dict[str, Any]:
    """Return all figures; fractions."""
    started = time.process_time()
    sweeps = sweeps_of(table)
    sources = counted(sweeps)
    learnt = by_source(sweeps, None)
    policies = {
        name: summary(by_source(sweeps, name), sources)
        for name in POLICIES
        if optuna or name != "optuna TPE"
    }
    told = summary(learnt, sources)
    return {
        **told,
        "sources": {
            name: {
                "sweeps": sum(sweep.source == name for sweep in sweeps),
                "counted": name in sources,
                **summary(learnt, [name]),
                "error_before": statistics.mean(score.before) if score.before else None,
                "error_after_3": statistics.mean(score.after) if score.after else None,
            }
            for name, score in sorted(learnt.items())
        },
        "error_before": statistics.mean(statistics.mean(learnt[name].before) for name in sources),
        "error_after_3": statistics.mean(statistics.mean(learnt[name].after) for name in sources),
        "calibration": fifths(learnt, sources),
        "policies": policies,
        "cpu_s": time.process_time() - started,
    }


def _print(found: dict[str, Any]) -> None:
    heads = " | ".join(str(count) for count in AFTER)
    print(f"| regret after | {heads} | trials to 2 % | out of memory |\n|---|" + "---:|" * 7)
    rows = {"belief": found, **found["policies"]}
    rows |= {f"belief: {name}": one for name, one in found["sources"].items()}
    for name, one in rows.items():
        regrets = " | ".join(f"{100 * one['regret'][str(count)]:.1f} %" for count in AFTER)
        trials, lost = one["trials_to_near"], 100 * one["out_of_memory"]
        print(f"| {name} | {regrets} | {trials:.1f} | {lost:.1f} % |")
    print(
        f"\nError of rows not tried: {100 * found['error_before']:.1f} % before, "
        f"{100 * found['error_after_3']:.1f} % after 3 trials.\n"
    )
    print("| stated | was so | answers |\n|---:|---:|---:|")
    for one in found["calibration"]:
        print(f"| {100 * one['stated']:.0f} % | {100 * one['was']:.0f} % | {one['answers']} |")
    print(f"\n{found['cpu_s']:.0f} CPU seconds")


def main() -> None:
    """Run what the command line asks for."""
    asked = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    asked.add_argument("table", type=Path)
    asked.add_argument("--json", action="store_true", help="print one JSON object")
    asked.add_argument("--no-optuna", action="store_true", help="leave optuna's order out")
    asked.add_argument("--smaller", action="store_true", help="try sweeps on fewer devices")
    options = asked.parse_args()
    if options.smaller:
        small = in_small(sweeps_of(options.table))
        if options.json:
            print(json.dumps(small, indent=2))
        else:
            _print_in_small(small)
        return
    found = result(options.table, optuna=not options.no_optuna)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        _print(found)


if __name__ == "__main__":
    main()
