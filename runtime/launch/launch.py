"""Launching a plan, on this machine or on every node of a job: one process per rank.

runtime.launch.preflight has checked everything that can be checked before;
runtime.launch.rank_config is what ranks get; runtime.launch.rank_main is what each process runs;
runtime.launch.rank_processes starts and ends them, and runtime.launch.monitor is what is looked at
meanwhile.  A launch ends in a report or in one error that says what can be done
(meshwright.runtime.launch.failure_report).

On several nodes a launcher runs on each, and starts the ranks whose devices the node has.  They
meet (runtime.run.rendezvous) before they start, agree that they do the same, and leave together;
the one with rank 0 shows progress and has the report.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator

from meshwright.planner.documents.document import read
from meshwright.planner.documents.events import Attempt, AttemptEnded, Event, Expected
from meshwright.planner.errors import HandedOver, Interrupted, LaunchError
from meshwright.planner.errors.shown import lines
from meshwright.planner.report.terminal import Terminal
from meshwright.runtime.checkpoint import checkpoint, object_store
from meshwright.runtime.checkpoint import commit_recovery as unfinished
from meshwright.runtime.checkpoint.tokenizer_files import tokenizer_files
from meshwright.runtime.launch import failure_cause as faults
from meshwright.runtime.launch.failure_report import (
    EndsToGrow,
    MemoryUse,
    RankFailed,
    RanksHang,
    RankSlow,
    bad_end,
    incident,
    log_event,
    name_copies,
    way_on,
    write_incident,
)
from meshwright.runtime.launch.host_memory_limits import killed_for_memory
from meshwright.runtime.launch.launch_config import Launch
from meshwright.runtime.launch.monitor import Looks, Pace
from meshwright.runtime.launch.preflight import Preflight, preflight
from meshwright.runtime.launch.rank_config import write_orders
from meshwright.runtime.launch.rank_processes import BadEnd, Exit, supervise
from meshwright.runtime.resilience.hang_detector import HangWatch
from meshwright.runtime.resilience.heartbeat import BEACONS, beacons
from meshwright.runtime.resilience.shared_memory import CopyContext
from meshwright.runtime.resilience.state_rescue import adopt, rescue
from meshwright.runtime.run import preemption as notice
from meshwright.runtime.run import run_folder as run
from meshwright.runtime.run import scale_up as growth
from meshwright.runtime.run.environment import messages_beside, place_of
from meshwright.runtime.run.launch_options import LaunchRun
from meshwright.runtime.run.locks_and_signals import alone_in, signals_interrupt
from meshwright.runtime.run.progress_line import ProgressLine
from meshwright.runtime.run.rendezvous import NodeLeft, Rendezvous
from meshwright.runtime.run.run_clock import unix_now_s
from meshwright.runtime.run.run_folder import RankOrders, RankRecord
from meshwright.runtime.run.run_report import RunReport, expected_text, summarise
from meshwright.runtime.run.telemetry import Telemetry

SAID_S = 3600.0
"""A longer run says before it what share of the time it should train."""


def launch(asked: Launch) -> RunReport | None:
    """Run a plan, and return what it did and measured; a dry run prints its commands instead.

    A run resumed at step 30 with steps=50 does 20 more.  Without data, Python's own sources are the
    text; without a tokenizer, that of the model's folder or else bytes.
    Nodes other than the one with rank 0 return nothing, and so does a run whose last step is saved.
    With `elastic` RanksHang names a rank that hangs.
    """
    started_unix_s, started_s = unix_now_s(), time.monotonic()
    node_rank, agent = asked.node_rank, asked.agent
    check = functools.partial(
        preflight,
        asked.plan,
        asked.run,
        model=asked.model,
        device=asked.device,
        node=node_rank.node,
        nodes=asked.nodes,
    )
    say = Terminal(stderr=True, quiet=asked.quiet, soft_wrap=True)
    if asked.dry_run:
        ready = check()
        _warn(ready, asked, say)
        print(lines(ready.nothing_left or ready.text()))
        return None
    with contextlib.ExitStack() as held:
        rendezvous = held.enter_context(
            Rendezvous(
                node_rank,
                warn=lambda text: say.print(f"warning: {text}"),
                meanwhile=lambda: None if agent is None else agent.check(),
            )
        )
        if asked.run.checkpoint is not None:
            if not asked.again:
                adopt(asked.run.checkpoint.absolute(), say=say.print)
            if node_rank.node == 0:
                unfinished.prepare_folder(asked.run, say=say.print)
            object_store.send_saved(asked.run.checkpoint, say=say.print)
            if node_rank.nodes > 1:
                rendezvous.all_gather("looked for checkpoints")
            object_store.fetch_newest(asked.run.checkpoint, say=say.print)
        ready = check()
        _warn(ready, asked, say)
        if agent is None:
            held.enter_context(alone_in(ready.output))
        if ready.run.checkpoint is not None and ready.ranks.leads and agent is None:
            held.enter_context(alone_in(ready.run.checkpoint))
        shown = ProgressLine(steps=ready.run.steps, say=say)
        # From here on: what comes while data are prepared is a notice too.
        shared = held.enter_context(_noticing(ready, shown))
        held.enter_context(_record_sender(ready))
        looks: Looks | None = None
        try:
            orders = _begin_attempt(ready, rendezvous, asked, say, started_unix_s=started_unix_s)
            if orders is None:
                return None
            shared["MESHWRIGHT_RUN"] = orders.token
            shared |= _of_survival(ready, asked)
            looks = Looks(ready, shown, asked)
            looks.telemetry = held.enter_context(_telemetry(ready))
            _supervise(ready, rendezvous, shared, looks, asked)
            return _report(ready, rendezvous, orders, started_s)
        except KeyboardInterrupt:
            _rescue(ready, asked, say)
            raise Interrupted(f"interrupted {_progress_text(looks)}{way_on(ready)}") from None
        except OSError as error:
            if error.filename is None:
                raise
            _rescue(ready, asked, say)
            raise LaunchError(
                f"{error.filename}: {error.strerror} {_progress_text(looks)}{way_on(ready)}. Do "
                f"not change the folder of the run, {ready.output}, while it runs"
            ) from error
        finally:
            shown.close()


def _record_sender(ready: Preflight) -> object_store.RecordSender:
    """Return what sends the run's records into an object store, from the node that leads."""
    spool = ready.run.checkpoint if ready.ranks.leads else None
    return object_store.RecordSender(ready.output, spool, goes_on=ready.run.resume)


def _progress_text(looks: Looks | None) -> str:
    """Return how far training was, as far as this node knows."""
    step = 0 if looks is None else looks.after_step
    return f"after step {step}" if step else "before the first step"


def _of_survival(ready: Preflight, asked: Launch) -> dict[str, str]:
    """Return what ranks are given to copy their state, and to end where the run grows."""
    environment: dict[str, str] = {}
    if asked.agent is not None:
        environment |= growth.environment(ready.output)
    if asked.slots is not None:
        run = ready.run
        companions = tokenizer_files(ready.tokenizer, run.weights, ready.plan.model.source)
        context = CopyContext(
            plan=ready.plan,
            model=ready.model,
            companions={name: str(file.resolve()) for name, file in companions.items()},
        )
        environment |= asked.slots.environment(len(ready.ranks.devices), context)
    return environment


def _rescue(ready: Preflight, asked: Launch, say: Terminal) -> None:
    """Have the newest state on disk before it is said what is there."""
    if asked.slots is not None and ready.run.checkpoint is not None:
        rescue(asked.slots, ready.run.checkpoint, say=say.print)


def _telemetry(ready: Preflight) -> Telemetry:
    """Return what the node that leads serves and sends."""
    asked = ready.run if ready.ranks.leads else LaunchRun()
    return Telemetry(ready.output, prometheus=asked.prometheus, opentelemetry=asked.opentelemetry)


def _begin_attempt(
    ready: Preflight,
    rendezvous: Rendezvous,
    asked: Launch,
    say: Terminal,
    *,
    started_unix_s: float,
) -> RankOrders | None:
    """Write what the ranks get, and that an attempt begins; None where nothing is left to do."""
    orders = write_orders(ready, rendezvous, asked, say, started_unix_s=started_unix_s)
    if orders is None:
        return None
    if asked.expect is not None and ready.ranks.leads:
        _expect(ready, asked.expect, say, announced=asked.elastic)
    if asked.before is not None:
        log_event(ready, asked.before)
    log_event(ready, _attempt(ready, orders))
    return orders


def _warn(ready: Preflight, asked: Launch, say: Terminal) -> None:
    if asked.again:
        return
    for warning in (*ready.warnings, *([asked.caution] if asked.caution else [])):
        say.print(f"warning: {warning}")
    elastic = asked.elastic and not asked.dry_run
    alone = ready.plan.mesh.data_replicate == 1 and ready.plan.other_pipelines is None
    if elastic and alone and ready.ranks.world > 1:
        say.print(
            "warning: flipped bits in parameters will not be detected, since no two ranks hold the "
            "same ones; a plan with data_replicate of 2 or more compares them"
        )


def _expect(
    ready: Preflight, expect: Callable[[int], Expected], say: Terminal, *, announced: bool
) -> None:
    """Write down what a run should take, before its first attempt; a long one is printed too."""
    if run.expected_of(ready.output) is not None:
        return
    done = checkpoint.progress(ready.resumed).step if ready.resumed else 0
    if ready.run.steps <= done:
        return
    expected = expect(ready.run.steps - done)
    log_event(ready, expected)
    if expected.seconds["steps"] > SAID_S or (announced and expected.is_of_training):
        say.print(f"goodput predicted {expected_text(expected)}")


def _attempt(ready: Preflight, orders: RankOrders) -> Event:
    return Attempt(
        at_unix_s=unix_now_s(),
        plan=ready.plan.digest,
        devices=ready.ranks.world,
        after_step=checkpoint.progress(ready.resumed).step if ready.resumed else 0,
        predicted_step_s=orders.predicted_step_s,
    )


@contextlib.contextmanager
def _noticing(ready: Preflight, shown: ProgressLine) -> Iterator[dict[str, str]]:
    """Take signals as notices where a step can be saved, else as Ctrl-C; yield what ranks need."""
    if ready.run.checkpoint is None:
        with messages_beside(), signals_interrupt():
            yield {}
        return
    shared = notice.environment(ready.output)

    def on_notice(number: int) -> None:
        shown.say.print(notice.leave_notice(ready.output, number))
        log_event(ready, incident("notice", notice.name_of(number), after_step=shown.step))

    with messages_beside(), signals_interrupt(on_notice):
        yield shared


def _supervise(
    ready: Preflight,
    rendezvous: Rendezvous,
    shared: dict[str, str],
    looks: Looks,
    asked: Launch,
) -> None:
    """Run this node's ranks to their end; what goes wrong is one error, with no rank left."""
    killed = killed_for_memory()
    most: dict[int, int] = {}
    recorded = faults.recorder(ready.output) if ready.ranks.device == "cuda" else {}
    shown = looks.shown
    with contextlib.ExitStack() as held:
        if asked.elastic:
            seen = looks.seen = held.enter_context(beacons(len(ready.ranks.devices)))
            shared[BEACONS] = str(seen.file)
            devices, start_s = ready.ranks.devices, ready.plan.timeout_s
            looks.watch = HangWatch(
                seen,
                devices,
                ready.output,
                start_s=start_s,
                alone=rendezvous.node_rank.nodes == 1,
            )
            looks.pace = Pace(ready, shown, seen, asked.prediction, most, asked.paced, asked.agent)
        saved = checkpoint.progress(ready.resumed).step if ready.resumed else 0
        before = run.steps_of_events(ready.output, after=saved) if asked.slots is not None else ()
        shown.follow(run.metrics_file(ready.output), before)
        try:
            bad = supervise(
                ready.command,
                list(ready.ranks.devices),
                lambda rank, port: {**ready.ranks.environment(rank, port=port), **recorded},
                folder=ready.output,
                world=ready.ranks.world,
                rendezvous=rendezvous,
                leads=ready.ranks.leads,
                shared=shared,
                grace_s=0.0,  # they leave these signals to us, and what they wrote is whole
                zygote=asked.zygote,
                refresh=looks,
            )
        except (RanksHang, RankSlow) as error:
            name_copies(error, asked.slots)
            write_incident(ready, error, after_step=looks.after_step)
            raise
        except NodeLeft as error:
            if looks.agent is None:  # with agents whoever decides knows the cause
                write_incident(ready, error, after_step=looks.after_step)
            raise RankFailed(str(error), output=ready.output, left=error) from error
        finally:
            if ready.run.checkpoint is not None and ready.ranks.leads:
                unfinished.commit(ready.run.checkpoint, say=shown.say.print)
        bad = bad or _left_early(ready)
        if bad is not None:
            memory = MemoryUse(
                prediction=asked.prediction,
                killed=killed_for_memory() > killed,
                most_bytes=most.get(bad.cause.rank),
            )
            ended = bad_end(ready, bad, after_step=looks.after_step, memory=memory)
            name_copies(ended, asked.slots)
            write_incident(ready, ended, after_step=looks.after_step)
            end = ended.end if isinstance(ended, RankFailed) else None
            if asked.slots is not None and end is not None and end.spoils_copies:
                asked.slots.forget()
            raise ended


def _left_early(ready: Preflight) -> BadEnd | None:
    """Return the end of a rank of this node that left with code 0 before it had done its steps."""
    early = [
        rank
        for rank in ready.ranks.devices
        if not place_of(run.record_file(ready.output, rank)).exists()
    ]
    if not early:
        return None
    ends = tuple(Exit(rank=rank, code=0) for rank in early)
    return BadEnd(seen=ends, cause=ends[0], failure=None)


def _report(
    ready: Preflight, rendezvous: Rendezvous, orders: RankOrders, started_s: float
) -> RunReport | None:
    """Return the report on the node with rank 0, from the records of all nodes."""
    records = {
        rank: read(RankRecord, place_of(run.record_file(ready.output, rank))).model_dump(
            mode="json"
        )
        for rank in ready.ranks.devices
    }
    all_records = {
        int(rank): record
        for node_records in rendezvous.all_gather(records)
        for rank, record in node_records.items()
    }
    if not ready.ranks.leads:
        stopped = {record["stopped"] for record in records.values()}
        if "notice" in stopped:
            raise HandedOver(f"the run stopped on notice{way_on(ready)}")
        if "grow" in stopped:
            raise EndsToGrow(growth.REASON, output=ready.output)
        return None
    ranks = [RankRecord.model_validate(all_records[rank]) for rank in range(ready.ranks.world)]
    done = ranks[0].first_step + len(ranks[0].step_s) - 1
    ended = ranks[0].stopped
    log_event(ready, AttemptEnded(at_unix_s=unix_now_s(), stopped=ended, after_step=done))
    if ended == "grow":
        raise EndsToGrow(growth.REASON, rest=f", that of step {done}", output=ready.output)
    report = summarise(
        ready.plan,
        orders,
        ranks=ranks,
        steps=list(run.read_records(run.metrics_file(ready.output))),
        wall_s=time.monotonic() - started_s,
        files=(str(run.metrics_file(ready.output)), str(ready.output / "logs")),
        cost=run.account_of(ready.output),
        before=run.expected_of(ready.output),
    )
    file = ready.output / "report.json"
    with run.never_fatal(file):
        run.write_json(report, file)
    if report.stopped == "notice":
        raise HandedOver(
            f"the run stopped on notice after step {done} of {orders.steps}{way_on(ready)}. Its "
            f"report is {file}. Start it again with --resume"
        )
    return report
