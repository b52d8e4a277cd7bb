"""Launching a plan, on this machine or on every node of a job: one process per rank.

runtime.preflight has checked everything that can be checked before; runtime.rank is what each
process runs; runtime.supervise starts and ends them.  Here a launch gets its data and orders, shows
its progress, and ends in a report or in one error that says what can be done.

On several nodes a launcher runs on each, and starts the ranks whose devices the node has.  They
meet (runtime.rendezvous) before they start, agree that they do the same, and leave together; the
one with rank 0 shows progress and has the report.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from planner.documents.document import read, write
from planner.documents.events import (
    Attempt,
    AttemptEnded,
    Cause,
    Drift,
    Event,
    Expected,
    Incident,
    PhaseDone,
    StepRecord,
)
from planner.documents.model import ModelGraph
from planner.documents.prediction import Prediction
from planner.documents.units import bytes_text, count_text, seconds_text
from planner.errors import DocumentError, HandedOver, LaunchError
from planner.errors.shown import lines
from planner.process.guarded_files import folder_within, opened
from planner.report.terminal import Terminal
from planner.whatif.survival import SaveFigures
from runtime import checkpoint, data, faults, growth, notice, run, unfinished
from runtime.agent import NodeAgent
from runtime.beacon import BEACONS, Beacons, beacons
from runtime.checkpoint import Progress
from runtime.drift import DriftWatch
from runtime.hang import HangWatch, HungRank, stack_file
from runtime.held import alone_in, signals_interrupt
from runtime.host_memory import killed_for_memory, most_bytes
from runtime.nodes import ALONE, NodeRank
from runtime.preflight import Preflight, preflight
from runtime.rendezvous import NodeLeft, Rendezvous
from runtime.report import RunReport, expected_text, summarise
from runtime.run import Device, LaunchRun, RankOrders, RankRecord
from runtime.slots import Slots
from runtime.supervise import (
    BadEnd,
    blames_a_peer,
    is_timeout,
    last_lines,
    log_text,
    supervised,
)
from runtime.supported import documents_refused
from runtime.telemetry import Telemetry
from runtime.verdict import RankEnd
from runtime.zygote import Zygote

MOST_EVIDENCE = 1000
"""Characters of an error that are written down."""
PACE_S = 1.0
"""Between looks at the pace of ranks where no step is reported."""
SAID_S = 3600.0
"""A longer run says before it what share of the time it should train."""
MOST_KEPT = 4000
"""Characters of a rank's stack, and of the end of its log, that are stored with an incident."""
MOST_WAITING = 3
"""Ranks that an error names beside the one that they wait for."""


class RankFailed(LaunchError):  # noqa: N818 - reads as the sentence that it is
    """A rank ended, and its program has not said why: the same training may go on."""

    def __init__(
        self,
        message: str,
        *,
        lead: str,
        output: Path,
        local_rank: int = 0,
        end: RankEnd | None = None,
        left: NodeLeft | None = None,
    ) -> None:
        super().__init__(message)
        self.left = left
        """What was heard, where it was another node."""
        self.lead = lead
        """What happened, without what can be done."""
        self.local_rank = local_rank
        self.end = end
        """None where it was a rank of another node, which tells it."""
        self.output = output


class EndsToGrow(RankFailed):
    """The ranks have ended after a save, so that the run goes on on more nodes."""


class RanksHang(RankFailed):
    """Ranks waited for others in vain."""


class RankLost(RankFailed):
    """A rank ended as if its device were gone: killed from outside, or by its driver."""


def launch(
    plan_path: Path | str,
    asked: LaunchRun,
    *,
    model: ModelGraph | None = None,
    device: Device | None = None,
    dry_run: bool = False,
    peak_step_s: float | None = None,
    predicted_step_s: float | None = None,
    prediction: Prediction | None = None,
    saves: SaveFigures | None = None,
    expect: Callable[[int], Expected] | None = None,
    node_rank: NodeRank = ALONE,
    nodes: Sequence[int] = (),
    survive: bool = False,
    agent: NodeAgent | None = None,
    zygote: Zygote | None = None,
    slots: Slots | None = None,
    begun: Callable[[], None] | None = None,
    meanwhile: Callable[[], None] | None = None,
    copies: bool = True,
    quiet: bool = False,
) -> RunReport | None:
    """Run a plan, and return what it did and measured; a dry run prints its commands instead.

    `model` is the graph of the plan's model; it must be given for a `file.py:factory`, which takes
    torch to trace.  A run resumed at step 30 with steps=50 does 20 more.  Without data, Python's
    own sources are the text; without a tokenizer, that of the model's folder or else bytes.
    `peak_step_s` is what a step would take with every device at its peak; with it the report has
    the MFU.  With `saves` the steps between checkpoints are computed again from what is measured.
    `expect` says where the seconds of a number of steps should go; the report compares.
    Progress and warnings go to stderr unless `quiet`.

    With `survive` ranks tell where they are, and one that hangs ends the run: RanksHang names it.
    Steps that leave the range of `prediction`, and ranks that are slower than others, are named.
    A `zygote` forks the ranks, so that the next attempt need not import torch again.
    Ranks copy their state into `slots`, and go on from what is there if `copies` are trusted.
    On the node with rank 0 `begun` is called after the first step, and `meanwhile` while they run.
    An `agent` says whether the other nodes live; by its epochs no other launch is in our folders.

    `node_rank` says which of several nodes this is, and `nodes` how many devices each of them has;
    nodes other than the one with rank 0 return nothing.
    """
    started_unix_s = time.time()
    check = functools.partial(
        preflight, plan_path, asked, model=model, device=device, node=node_rank.node, nodes=nodes
    )
    say = Terminal(stderr=True, quiet=quiet, soft_wrap=True)
    if dry_run:
        ready = check()
        _warn(ready, say)
        print(lines(ready.text()))
        return None
    with contextlib.ExitStack() as held:
        rendezvous = held.enter_context(
            Rendezvous(
                node_rank,
                warn=lambda text: say.print(f"warning: {text}"),
                meanwhile=lambda: None if agent is None else agent.check(),
            )
        )
        if asked.checkpoint is not None:
            if node_rank.node == 0:
                unfinished.commit(asked.checkpoint, say=say.print)
            if node_rank.nodes > 1:
                rendezvous.all_gather("looked for checkpoints")
        ready = check()
        _warn(ready, say, survive=survive)
        if agent is None:
            held.enter_context(alone_in(ready.output))
        if ready.run.checkpoint is not None and ready.ranks.leads and agent is None:
            held.enter_context(alone_in(ready.run.checkpoint))
        shown = _ProgressLine(steps=ready.run.steps, say=say)
        # From here on: what comes while data are prepared is a notice too.
        shared = held.enter_context(_noticing(ready, shown))
        try:
            told = {
                "started_unix_s": started_unix_s,
                "peak_step_s": peak_step_s,
                "predicted_step_s": predicted_step_s,
                "saves": saves,
                "copies": copies,
            }
            orders = _write_orders(ready, rendezvous, say, told, prediction)
            if expect is not None and ready.ranks.leads:
                _expect(ready, expect, say, told=survive)
            happened(ready, _attempt(ready, orders))
            shared["MESHWRIGHT_RUN"] = orders.token
            shared |= _of_survival(ready, agent, slots)
            refresh = _Refresh(ready, shown, agent, begun, meanwhile)
            refresh.telemetry = held.enter_context(_telemetry(ready))
            _supervise(
                ready,
                rendezvous,
                shared,
                refresh,
                survive=survive,
                prediction=prediction,
                zygote=zygote,
            )
            return _report(ready, rendezvous, orders, started_unix_s)
        except KeyboardInterrupt:
            raise LaunchError(f"interrupted {shown.after}{_way_on(ready)}") from None
        except OSError as error:
            if error.filename is None:
                raise
            raise LaunchError(
                f"{error.filename}: {error.strerror} {shown.after}{_way_on(ready)}. The folder of "
                f"a run, {ready.output}, must stay as it is until the run has ended"
            ) from error
        finally:
            shown.close()


def _of_survival(ready: Preflight, agent: NodeAgent | None, slots: Slots | None) -> dict[str, str]:
    """Return what ranks are given to copy their state, and to end where the run grows."""
    found: dict[str, str] = {}
    if agent is not None:
        found |= growth.environment(ready.output)
    if slots is not None:
        found |= slots.environment(len(ready.ranks.devices))
    return found


def _telemetry(ready: Preflight) -> Telemetry:
    """Return what the node that leads serves and sends."""
    asked = ready.run if ready.ranks.leads else LaunchRun()
    return Telemetry(ready.output, prometheus=asked.prometheus, opentelemetry=asked.opentelemetry)


def _warn(ready: Preflight, say: Terminal, *, survive: bool = False) -> None:
    for warning in ready.warnings:
        say.print(f"warning: {warning}")
    if survive and ready.plan.mesh.data_replicate == 1 and ready.ranks.world > 1:
        say.print(
            "warning: no two ranks hold the same parameters, so flipped bits in them are not "
            "found; data_replicate of 2 and more compares them"
        )


def _agree(ready: Preflight, rendezvous: Rendezvous, corpus: str) -> str:
    """Refuse nodes that would do different things; return the run's token, the same on all."""
    rendezvous.agree(
        {
            "plan": ready.plan.digest,
            "steps": ready.run.steps,
            "text": corpus,
            "resumed checkpoint": str(ready.resumed),
            "folder of checkpoints": str(ready.run.checkpoint),
            "steps between checkpoints": str(ready.run.checkpoint_every),
        }
    )
    token = str(rendezvous.all_gather(secrets.token_hex(8))[0])
    if ready.run.checkpoint is not None and rendezvous.node_rank.nodes > 1:
        _check_shared(ready.run.checkpoint, rendezvous, token=token)
    return token


def _check_shared(folder: Path, rendezvous: Rendezvous, *, token: str) -> None:
    """Refuse a folder that is not one and the same on all nodes."""
    mark = folder / f".seen-{token}"
    if rendezvous.node_rank.node == 0:
        folder.mkdir(parents=True, exist_ok=True)
        opened(mark, within=folder).close()
    rendezvous.all_gather("marked")
    # A network file system may show a listing that is seconds old.
    with contextlib.suppress(OSError):
        list(folder.iterdir())
    seen = rendezvous.all_gather(mark.exists())
    if rendezvous.node_rank.node == 0:
        mark.unlink()
    if not all(seen):
        raise LaunchError(
            f"{folder}: is not the same folder on node {seen.index(False)}; checkpoints of several "
            "nodes need one that all of them share"
        )


def _write_orders(
    ready: Preflight,
    rendezvous: Rendezvous,
    say: Terminal,
    told: Mapping[str, Any],
    prediction: Prediction | None = None,
) -> RankOrders:
    """Prepare the data, check it against the model, and write what the ranks will read.

    `told` has fields of orders that the launch was given.
    """
    say.print(f"preparing {len(ready.files.paths)} files of {ready.files.source}")
    corpus = data.prepare(ready.files, tokenizer=ready.tokenizer)
    left_out = f" ({corpus.skipped} files are not UTF-8 text)" if corpus.skipped else ""
    here = (
        ""
        if rendezvous.node_rank.nodes == 1
        else f", {len(ready.ranks.devices)} of them on this node"
    )
    if corpus.kind == "conversations":
        if reason := documents_refused(ready.plan, ready.model):
            raise LaunchError(reason)
        _tell_conversations(corpus, ready, say)
        left_out = f", of which {count_text(corpus.counted)} count"
    say.print(
        f"{count_text(corpus.tokens)} tokens by {corpus.tokenizer}{left_out}; "
        f"{ready.ranks.world} ranks on {ready.ranks.device}{here}, {ready.plan.layout.text()}; "
        f"in {ready.output}"
    )
    held_out = data.prepare(ready.held_out, tokenizer=ready.tokenizer) if ready.held_out else None
    for text in (corpus, held_out):
        if text is not None and ready.model.architecture is not None:
            text.check_vocabulary(ready.model.architecture.vocab_size)
    if held_out is not None and held_out.kind != corpus.kind:
        raise LaunchError(
            f"evaluate: {held_out.source} has {held_out.kind}, and training is on {corpus.kind}; "
            "hold out what is of the same kind"
        )
    if held_out is not None and held_out.digest == corpus.digest:
        raise LaunchError(f"evaluate: {held_out.source} is what is trained on; hold other text out")
    if ready.resumed is not None:
        progress: Progress = checkpoint.progress(ready.resumed)
        progress.check(
            plan=ready.plan,
            model=ready.model,
            corpus=corpus,
            folder=ready.resumed,
            frozen=checkpoint.frozen_weights(ready.plan, ready.run.weights),
        )
        say.print(f"going on from {ready.resumed}")
    orders = RankOrders(
        **{
            **ready.run.model_dump(),
            "tokenizer": ready.tokenizer and ready.tokenizer.resolve(),
            "evaluate": held_out and held_out.folder.resolve(),
            "output": ready.output,
            **told,
        },
        token=_agree(ready, rendezvous, corpus.digest),
        corpus=corpus.folder.resolve(),
        device=ready.ranks.device,
        resumed=ready.resumed,
    )
    for left_behind in ("logs", "ranks", "flight"):
        folder_within(ready.output, left_behind, emptied_of="rank-*")
    run.forget_steps_after(
        checkpoint.progress(ready.resumed).step if ready.resumed else 0,
        run.metrics_file(ready.output),
    )
    write(ready.plan, run.plan_file(ready.output))
    write(ready.model, run.model_file(ready.output))
    if prediction is not None:
        write(prediction, run.prediction_file(ready.output))
    write(orders, run.orders_file(ready.output))
    return orders


def happened(ready: Preflight, event: Event) -> None:
    """Write down what happened, on the node that leads."""
    if ready.ranks.leads:
        run.append_record(event, run.events_file(ready.output))


def _expect(
    ready: Preflight, expect: Callable[[int], Expected], say: Terminal, *, told: bool
) -> None:
    """Write down what a run should take, before its first attempt; a long one is printed too."""
    if run.expected_of(ready.output) is not None:
        return
    done = checkpoint.progress(ready.resumed).step if ready.resumed else 0
    if ready.run.steps <= done:
        return
    found = expect(ready.run.steps - done)
    happened(ready, found)
    if told or found.seconds["steps"] > SAID_S:
        say.print(f"goodput predicted {expected_text(found)}")


def _attempt(ready: Preflight, orders: RankOrders) -> Event:
    return Attempt(
        at_unix_s=time.time(),
        plan=ready.plan.digest,
        devices=ready.ranks.world,
        after_step=checkpoint.progress(ready.resumed).step if ready.resumed else 0,
        predicted_step_s=orders.predicted_step_s,
    )


def _tell_conversations(corpus: data.Corpus, ready: Preflight, say: Terminal) -> None:
    """Print how conversations are laid into samples, and the first of them with what counts."""
    from runtime.conversations import Conversations  # noqa: PLC0415 - imports transformers
    from runtime.packing import PackedSamples  # noqa: PLC0415

    assert ready.tokenizer is not None
    plan = ready.plan
    samples = PackedSamples(corpus, seq_len=plan.seq_len, seed=plan.training.seed)
    rows = len(samples.rows)
    notes = [f"{corpus.documents} conversations in {rows} samples of {plan.seq_len} tokens"]
    lengths = [length for row in range(rows) for _, length in samples.places(row)]
    span = round(sum(length**2 for length in lengths) / sum(lengths))
    planned = plan.document_len or plan.seq_len
    notes.append(f"the conversation of a token has {span} on average")
    if not planned / 2 < span < 2 * planned:
        notes.append(f"the plan counts on {planned}: plan with --document-len {span}")
    if samples.cut:
        notes.append(f"{samples.cut} are longer and cut off")
    if corpus.skipped:
        notes.append(f"{corpus.skipped} say nothing that counts and are left out")
    say.print("; ".join(notes))
    first = samples.batch(0, 1)
    assert first.counts is not None
    places = samples.places(0)
    length = sum(length for _, length in places)
    say.print(
        f"the first sample has {len(places)} of them, and the loss counts "
        f"{int(first.counts.sum())} of its {plan.seq_len} targets, which stand in [[ ]]:"
    )
    marks = [False, *first.counts[0].tolist()]
    shown = Conversations(ready.tokenizer).shown(first.tokens[0].tolist()[:length], marks)
    say.print(shown)


@contextlib.contextmanager
def _noticing(ready: Preflight, shown: _ProgressLine) -> Iterator[dict[str, str]]:
    """Take signals as notices where a step can be saved, else as Ctrl-C; yield what ranks need."""
    if ready.run.checkpoint is None:
        with signals_interrupt():
            yield {}
        return
    shared = notice.environment(ready.output)

    def noticed(number: int) -> None:
        shown.say.print(notice.leave_notice(ready.output, number))
        happened(ready, _incident("notice", notice.name_of(number), after_step=shown.step))

    with signals_interrupt(noticed):
        yield shared


def _supervise(
    ready: Preflight,
    rendezvous: Rendezvous,
    shared: dict[str, str],
    refresh: _Refresh,
    *,
    survive: bool,
    prediction: Prediction | None,
    zygote: Zygote | None,
) -> None:
    """Run this node's ranks to their end; what goes wrong is one error, with no rank left."""
    killed = killed_for_memory()
    most: dict[int, int] = {}
    recorded = faults.recorder(ready.output) if ready.ranks.device == "cuda" else {}
    shown = refresh.shown
    with contextlib.ExitStack() as held:
        if survive:
            seen = refresh.seen = held.enter_context(beacons(len(ready.ranks.devices)))
            shared[BEACONS] = str(seen.file)
            devices, start_s = ready.ranks.devices, ready.plan.timeout_s
            refresh.watch = HangWatch(
                seen,
                devices,
                ready.output,
                start_s=start_s,
                alone=rendezvous.node_rank.nodes == 1,
            )
            refresh.pace = _Pace(ready, shown, seen, prediction, most)
        shown.follow(run.metrics_file(ready.output))
        try:
            bad = supervised(
                ready.command,
                list(ready.ranks.devices),
                lambda rank, port: {**ready.ranks.environment(rank, port=port), **recorded},
                folder=ready.output,
                world=ready.ranks.world,
                rendezvous=rendezvous,
                leads=ready.ranks.leads,
                shared=shared,
                grace_s=0.0,  # they leave these signals to us, and what they wrote is whole
                zygote=zygote,
                refresh=refresh,
            )
        except RanksHang as error:
            _write_incident(ready, error, after_step=refresh.after_step)
            raise
        except NodeLeft as error:
            if refresh.agent is None:  # with agents whoever decides knows the cause
                _write_incident(ready, error, after_step=refresh.after_step)
            lead = str(error)
            raise RankFailed(lead, lead=lead, output=ready.output, left=error) from error
        finally:
            if ready.run.checkpoint is not None and ready.ranks.leads:
                unfinished.commit(ready.run.checkpoint, say=shown.say.print)
        if bad is not None:
            memory = MemoryUse(
                prediction=prediction,
                killed=killed_for_memory() > killed,
                most_bytes=most.get(bad.cause.rank),
            )
            ended = _bad_end(ready, bad, after_step=refresh.after_step, memory=memory)
            _write_incident(ready, ended, after_step=refresh.after_step)
            raise ended


class _Pace:
    """Looks whether steps are as predicted and ranks alike, and says what is not."""

    def __init__(
        self,
        ready: Preflight,
        shown: _ProgressLine,
        seen: Beacons,
        prediction: Prediction | None,
        most: dict[int, int],
    ) -> None:
        """`most` gets the most host memory that each rank has had."""
        self._ready, self._shown, self._seen, self._most = ready, shown, seen, most
        self._watch = DriftWatch(ready.plan, ready.ranks.devices, prediction)
        self._next_s = 0.0

    def __call__(self, news: Sequence[StepRecord]) -> None:
        now_s = time.monotonic()
        if not news and now_s < self._next_s:
            return
        if now_s >= self._next_s:
            self._next_s = now_s + PACE_S
            places = self._seen.places()
            for rank, place in self._ready.ranks.devices.items():
                self._most[rank] = most_bytes(places[place].process) or self._most.get(rank, 0)
        local = self._seen.paces()
        paces = {rank: local[place] for rank, place in self._ready.ranks.devices.items()}
        for found in self._watch.look([one.step_s for one in news], paces, self._shown.step):
            happened(self._ready, found)
            if isinstance(found, Drift):
                self._shown.say.print(f"warning: {found.text}")


class _Refresh:
    """What a launcher does while its ranks run: it shows steps, and looks for ranks that hang."""

    def __init__(
        self,
        ready: Preflight,
        shown: _ProgressLine,
        agent: NodeAgent | None,
        begun: Callable[[], None] | None,
        meanwhile: Callable[[], None] | None,
    ) -> None:
        self.shown, self.agent = shown, agent
        self.watch: HangWatch | None = None
        self.pace: Callable[[Sequence[StepRecord]], None] | None = None
        self.telemetry: Telemetry | None = None
        self.seen: Beacons | None = None
        self._ready, self._begun, self._meanwhile = ready, begun, meanwhile
        self._begin_s = time.monotonic()
        self._before = shown.step
        self._predicted_s = run.account_of(ready.output).start_s

    @property
    def after_step(self) -> int:
        """The last step that was done, as far as this node knows."""
        places = [] if self.seen is None else self.seen.places()
        return max([self.shown.step, *(place.done for place in places)])

    def __call__(self) -> None:
        news = self.shown.refresh()
        if self.pace is not None:
            self.pace(news)
        if self.telemetry is not None:
            self.telemetry.look()
        if self._begin_s and self.shown.step > self._before:
            took_s, self._begin_s = time.monotonic() - self._begin_s, 0.0
            started = PhaseDone(
                at_unix_s=time.time(),
                phase="start",
                measured_s=took_s,
                predicted_s=self._predicted_s,
            )
            happened(self._ready, started)
            if self._begun is not None and self._ready.ranks.leads:
                self._begun()
        if self.agent is not None:
            self.agent.check()
        if self._meanwhile is not None and self._ready.ranks.leads:
            self._meanwhile()
        waiting = self.watch.look() if self.watch is not None else []
        if waiting:
            raise _hung(self._ready, waiting, after_step=self.after_step)


def _hung(ready: Preflight, waiting: Sequence[HungRank], *, after_step: int) -> RanksHang:
    """Return the error that names the rank that the others wait for, and where they do."""
    first, *others = waiting
    lead = f"the run hangs after step {after_step}: {first.text}"
    lead += "".join(f"; {one.text}" for one in others[:MOST_WAITING])
    return RanksHang(
        f"{lead}{_way_on(ready)}. Stacks of all ranks are in {ready.output / 'flight'}",
        lead=lead,
        local_rank=ready.ranks.devices[first.rank],
        end=RankEnd(
            cause="hang",
            rank=first.rank,
            after_step=after_step,
            waits=first.collective is not None,
        ),
        output=ready.output,
    )


def _write_incident(ready: Preflight, error: Exception, *, after_step: int) -> None:
    _keep_evidence(ready)
    end = error.end if isinstance(error, RankFailed) else None
    cause = end.cause if end else "program"
    rank = end.rank if end else None
    happened(ready, _incident(cause, str(error), after_step=after_step, rank=rank))


def _keep_evidence(ready: Preflight) -> None:
    """Copy this node's stacks and the ends of its logs: the next attempt empties their folders."""
    attempt = run.account_of(ready.output).attempts
    for rank in ready.ranks.devices:
        name = f"rank-{rank:05}"
        for file, kind in (
            (stack_file(ready.output, rank), "stack"),
            (run.log_file(ready.output, rank), "log"),
        ):
            if text := log_text(file)[-MOST_KEPT:]:
                kept_in = run.evidence_folder(ready.output, attempt)
                folder = folder_within(
                    folder_within(ready.output, kept_in.parent.name), kept_in.name
                )
                with opened(folder / f"{name}.{kind}", within=ready.output) as kept:
                    kept.write(text.encode(errors="replace"))


def _incident(cause: Cause, evidence: str, *, after_step: int, rank: int | None = None) -> Incident:
    return Incident(
        at_unix_s=time.time(),
        cause=cause,
        rank=rank,
        after_step=after_step,
        evidence=evidence[:MOST_EVIDENCE] or "nothing was said",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """What is known of memory when a rank has ended."""

    prediction: Prediction | None = None
    killed: bool = False
    """Whether the system has killed a process of this launch for memory."""
    most_bytes: int | None = None
    """The most host memory that the rank had, where that was looked at."""


def _out_of_memory(
    ready: Preflight, bad: BadEnd, memory: MemoryUse, *, after_step: int
) -> tuple[str, RankEnd] | None:
    """Return what the rank held beside what was predicted, and its end; None for another end."""
    ended, failure = bad.cause, bad.failure
    raised = failure is not None and failure.kind == "OutOfMemoryError"
    if not raised and not (memory.killed and failure is None and ended.code == -signal.SIGKILL):
        return None
    on_host = ready.ranks.device == "cuda" and not raised
    held = dict(failure.held) if failure is not None else {}
    total = failure.needed_bytes if failure is not None else memory.most_bytes
    needed = None
    said = ", ".join(f"{kind} {bytes_text(size)}" for kind, size in held.items() if size)
    text = f"; held: {said}" if said else ""
    text += f"; needed {bytes_text(total)} at least" if total else ""
    if memory.prediction is not None and not on_host:
        stage = memory.prediction.stages[_stage_of(ready, ended.rank)]
        parts = stage.memory_parts.items()
        listed = ", ".join(f"{kind} {bytes_text(size)}" for kind, size in parts if size)
        text += f"; predicted: {listed}, {bytes_text(stage.peak_memory_bytes)} in all"
        if total:
            needed = min(1e3, max(1.0, total / stage.peak_memory_bytes))
    return text, RankEnd(
        cause="out_of_memory",
        rank=ended.rank,
        after_step=after_step,
        needed=needed,
        on_host=on_host,
    )


_WRONG = ("ReplicaDrifted", "StepDiffered", "NotANumber")
"""Failures of ranks whose numbers are wrong."""


def _wrong_numbers(
    ready: Preflight, rank: int, failure: run.Failure, *, after_step: int
) -> RankFailed:
    """Return the error of damaged memory or arithmetic, or of a loss that is no number."""
    suspect = rank if failure.suspect is None else failure.suspect
    drifted = failure.kind != "NotANumber"
    return RankFailed(
        failure.message,
        lead=failure.message,
        local_rank=ready.ranks.devices.get(suspect, 0),
        end=RankEnd(
            cause="corruption" if drifted else "not_a_number",
            rank=suspect,
            after_step=after_step,
            named=failure.suspect is not None,
        ),
        output=ready.output,
    )


def _stage_of(ready: Preflight, rank: int) -> int:
    return ready.plan.stages_of_rank(ready.plan.mesh.coordinate(rank, "pipeline"))[0]


def _bad_end(
    ready: Preflight, bad: BadEnd, *, after_step: int, memory: MemoryUse | None = None
) -> Exception:
    """Return the error that says which rank ended the run, how, and what can be done."""
    ended, failure = bad.cause, bad.failure
    if failure is not None and failure.kind == "DocumentError":
        return DocumentError("", failure.message)
    if failure is not None and failure.kind in _WRONG:
        return _wrong_numbers(ready, ended.rank, failure, after_step=after_step)
    if failure is not None and failure.kind in ("LaunchError", "NoPlanFits"):
        return LaunchError(failure.message)
    log = run.log_file(ready.output, ended.rank)
    said = log_text(log)
    how, hung = _how(ready, bad, said, after_step=after_step)
    kind: type[RankFailed] | None = None
    end: RankEnd | None = None
    cause: Cause = "crash"
    full = _out_of_memory(ready, bad, memory or MemoryUse(), after_step=after_step)
    if full is not None:
        kind, (text, end) = RankFailed, full
        how += text
    elif faults.device_lost(ended.code, failure, said):
        # SIGKILL alone is no evidence of the device: its rank may start on it again.
        killed = failure is None and not faults.names_hardware(said)
        kind, cause = RankLost, "crash" if killed else "device"
    elif hung:
        kind, cause = RanksHang, "hang"
    elif failure is None and ended.code < 0:
        kind = RankFailed
    elif failure is not None and blames_a_peer(failure):
        # No rank ended before it: a connection did, of which each side blames the other.
        kind, end = (
            RankFailed,
            RankEnd(cause="hang", rank=ended.rank, after_step=after_step, waits=True),
        )
    message = f"{how}{_way_on(ready)}. The end of {log}:{last_lines(log)}"
    if kind is None:
        return LaunchError(message)
    return kind(
        message,
        lead=how,
        local_rank=ready.ranks.devices[ended.rank],
        end=end or RankEnd(cause=cause, rank=ended.rank, after_step=after_step),
        output=ready.output,
    )


def _how(ready: Preflight, bad: BadEnd, said: str, *, after_step: int) -> tuple[str, bool]:
    """Return which rank ended the run and how, and whether it waited for others in vain."""
    ended, failure = bad.cause, bad.failure
    waited = faults.hang(said)
    if waited is not None:
        late = faults.behind(ready.output, waited.group)
        others = ", ".join(f"rank {rank} began {count}" for rank, count in late.items())
        how = f"{waited.text} after step {after_step}"
        return (f"{how}; {others}" if others else how), True
    if failure is not None and is_timeout(failure):
        seen = {seen.rank for seen in bad.seen}
        silent = [rank for rank in ready.ranks.devices if rank not in seen]
        named = f" (ranks {', '.join(map(str, silent[:8]))} said nothing)" if silent else ""
        limit = f"{ready.plan.timeout_s:g} s (the plan's timeout_s)"
        how = f"waited {limit} for other ranks{named}"
        return f"rank {ended.rank} {how} after step {after_step}", True
    how = faults.how(ended.code, failure)
    return f"rank {ended.rank} {how} after step {after_step}", False


def _way_on(ready: Preflight) -> str:
    saved = checkpoint.newest(ready.run.checkpoint) if ready.run.checkpoint else None
    return f"; {saved} is complete and can be resumed" if saved else "; nothing was saved"


_GROWS = "to go on on more nodes, ranks have ended after a save"


def _report(
    ready: Preflight, rendezvous: Rendezvous, orders: RankOrders, started_unix_s: float
) -> RunReport | None:
    """Return the report on the node with rank 0, from the records of all nodes."""
    own = {
        rank: read(RankRecord, run.record_file(ready.output, rank)).model_dump(mode="json")
        for rank in ready.ranks.devices
    }
    known = {
        int(rank): record for told in rendezvous.all_gather(own) for rank, record in told.items()
    }
    if not ready.ranks.leads:
        stopped = {record["stopped"] for record in own.values()}
        if "notice" in stopped:
            raise HandedOver(f"a notice ended the run{_way_on(ready)}")
        if "grow" in stopped:
            raise EndsToGrow(_GROWS, lead=_GROWS, output=ready.output)
        return None
    ranks = [RankRecord.model_validate(known[rank]) for rank in range(ready.ranks.world)]
    done = ranks[0].first_step + len(ranks[0].step_s) - 1
    ended = ranks[0].stopped
    happened(ready, AttemptEnded(at_unix_s=time.time(), stopped=ended, after_step=done))
    if ended == "grow":
        raise EndsToGrow(f"{_GROWS}, that of step {done}", lead=_GROWS, output=ready.output)
    report = summarise(
        ready.plan,
        orders,
        ranks=ranks,
        steps=list(run.read_records(run.metrics_file(ready.output))),
        wall_s=time.time() - started_unix_s,
        files=(str(run.metrics_file(ready.output)), str(ready.output / "logs")),
        cost=run.account_of(ready.output),
        before=run.expected_of(ready.output),
    )
    file = ready.output / "report.json"
    run.write_json(report, file)
    if report.stopped == "notice":
        raise HandedOver(
            f"a notice ended the run after step {done} of {orders.steps}{_way_on(ready)}, and the "
            f"report is in {file}; start it again with --resume"
        )
    return report


class _ProgressLine:
    """The line of progress on stderr, read from what rank 0 writes.

    On a terminal it is renewed in place; elsewhere a line appears every tenth of the steps.
    """

    def __init__(self, *, steps: int, say: Terminal) -> None:
        self.step = 0
        self._steps = steps
        self.say = say
        self._bar: Bar | None = None
        if say.is_terminal:
            text = TextColumn("{task.description}", markup=False)
            columns = (text, BarColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, console=say, transient=True)
            self._task = self._bar.add_task("starting ranks", total=steps)
        self._next_line = 0
        self._metrics: Path | None = None
        self._offset = 0

    @property
    def after(self) -> str:
        """How far training has come, in words."""
        return f"after step {self.step}" if self.step else "before the first step"

    def follow(self, metrics: Path) -> None:
        """Show what is added to a metrics file from now on."""
        self._metrics = metrics
        self._offset = metrics.stat().st_size
        if self._bar:
            self._bar.start()

    def refresh(self) -> list[StepRecord]:
        """Show the newest step; return those that were done since the last time."""
        assert self._metrics is not None
        news = self._news(self._metrics)
        for record in news:
            self.step = record.step
            line = self._line(record)
            if self._bar:
                self._bar.update(self._task, description=line, completed=record.step)
            elif (
                record.step >= self._next_line
                or record.step == self._steps
                or record.eval_loss is not None
            ):
                self.say.print(line)
                self._next_line = record.step + max(1, self._steps // 10)
        return news

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar:
            self._bar.stop()

    def _news(self, metrics: Path) -> list[StepRecord]:
        with metrics.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [StepRecord.model_validate_json(line) for line in whole.splitlines()]

    def _line(self, record: StepRecord) -> str:
        parts = [
            f"step {record.step}/{self._steps}",
            f"loss {record.loss:.4f}",
            f"gradient norm {record.grad_norm:.3g}",
            f"{seconds_text(record.step_s)} per step",
            f"{count_text(record.tokens_per_s or 0.0)} tokens/s",
        ]
        if record.mfu is not None:
            parts.append(f"MFU {100 * record.mfu:.1f} %")
        if record.eval_loss is not None:
            parts.append(f"held-out loss {record.eval_loss:.4f}")
        if record.peak_memory_bytes:
            parts.append(f"peak {bytes_text(record.peak_memory_bytes)}")
        if record.expert_load:
            parts.append(f"busiest expert {record.expert_load:.2f} x mean")
        return "  ".join(parts)
