"""Watch of a launcher over its ranks: their steps, pace, and whether they hang."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from meshwright.planner.documents.events import (
    CopyInterval,
    Drift,
    Paced,
    PhaseDone,
    SaveFailed,
    StepRecord,
    events_of,
)
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.errors import MeshwrightError
from meshwright.runtime.checkpoint import checkpoint
from meshwright.runtime.launch.failure_report import RunContext, hung, log_event
from meshwright.runtime.launch.host_memory_limits import most_bytes
from meshwright.runtime.launch.launch_config import Launch
from meshwright.runtime.launch.memory_growth import MemoryGrowth
from meshwright.runtime.launch.preflight import Preflight
from meshwright.runtime.resilience.hang_detector import HangWatch
from meshwright.runtime.resilience.heartbeat import Beacons
from meshwright.runtime.resilience.node_agent import NodeAgent
from meshwright.runtime.resilience.shared_memory import Slots
from meshwright.runtime.resilience.state_rescue import newest_copy_step
from meshwright.runtime.resilience.straggler_detector import DriftWatch
from meshwright.runtime.run import run_folder as run
from meshwright.runtime.run.progress_line import ProgressLine
from meshwright.runtime.run.record_segments import Rotation
from meshwright.runtime.run.run_clock import unix_now_s
from meshwright.runtime.run.telemetry import Telemetry

PACE_S = 1.0
"""Between looks at the pace of ranks where no step is reported."""
RENEW_S = 0.5
"""Between looks at whether copies in memory still have their names."""


def look_at_paces(
    context: RunContext,
    watch: DriftWatch,
    seen: Beacons,
    agent: NodeAgent | None,
    *,
    step: int,
    say: Callable[[str], None],
    paced: Callable[[Drift | Paced], None] | None,
    seconds: Sequence[float] = (),
) -> None:
    """Say which ranks are slower than others with equal work, here and on other nodes.

    `seconds` are those of the steps that were done since the last look.
    """
    local = seen.paces()
    paces = {rank: local[place] for rank, place in context.ranks.devices.items()}
    others = agent.exchange_paces(watch.stage_paces) if agent is not None else ()
    for event in watch.look(seconds, paces, step, others):
        log_event(context, event)
        if isinstance(event, Drift):
            say(f"warning: {event.text}")
            if agent is not None:
                agent.add_drift(event)
        if paced is not None:
            paced(event)
    if agent is not None and context.ranks.leads:
        for drift in agent.new_drifts():
            log_event(context, drift)
            say(f"warning: {drift.text}")


class CopyNames:
    """Looks now and then whether copies in memory still have their names, and says what is not."""

    def __init__(self, slots: Slots | None, say: Callable[[str], None]) -> None:
        self._slots, self._say = slots, say
        self._next_s = 0.0

    def __call__(self) -> None:
        """Look, if it is time to."""
        if self._slots is not None and time.monotonic() > self._next_s:
            self._next_s = time.monotonic() + RENEW_S
            if (text := self._slots.renew_names()) is not None:
                self._say(text)


class Pace:
    """Looks whether steps are as predicted and ranks alike, and says what is not."""

    def __init__(
        self,
        ready: Preflight,
        shown: ProgressLine,
        seen: Beacons,
        prediction: Prediction | None,
        most: dict[int, int],
        paced: Callable[[Drift | Paced], None] | None = None,
        agent: NodeAgent | None = None,
    ) -> None:
        """`most` gets the most host memory that each rank has had, `paced` what is found.

        `agent` knows how fast other nodes are.
        """
        self._paced, self._agent = paced, agent
        self._ready, self._shown, self._seen, self._most = ready, shown, seen, most
        self._watch = DriftWatch(ready.plan, ready.ranks.devices, prediction)
        self._memory = MemoryGrowth()
        self._usual_s = 0.0
        """Usual seconds of a step."""
        self._next_s = 0.0

    def __call__(self, news: Sequence[StepRecord]) -> None:
        """Look at steps that were done, and at ranks once a while."""
        now_s = time.monotonic()
        if not news and now_s < self._next_s:
            return
        if now_s >= self._next_s:
            self._next_s = now_s + PACE_S
            places = self._seen.places()
            processes = {
                rank: places[place].process for rank, place in self._ready.ranks.devices.items()
            }
            for rank, process in processes.items():
                self._most[rank] = most_bytes(process) or self._most.get(rank, 0)
            self._look_at_memory(processes, now_s)
        if news:
            self._usual_s = statistics.median(record.step_s for record in news)
        look_at_paces(
            self._ready,
            self._watch,
            self._seen,
            self._agent,
            seconds=[record.step_s for record in news],
            step=self._steps_done(),
            say=self._shown.say.print,
            paced=self._paced,
        )

    def _steps_done(self) -> int:
        """Return the last step, also on a node whose ranks report none."""
        return max([self._shown.step, *(place.steps_done for place in self._seen.places())])

    def _look_at_memory(self, processes: Mapping[int, int], now_s: float) -> None:
        """Say which process will have used up the node's memory before the run ends."""
        step = self._steps_done()
        left_s = self._usual_s * (self._ready.run.steps - step)
        for growth in self._memory.look(processes, left_s=left_s, now_s=now_s):
            said = Drift(
                at_unix_s=unix_now_s(),
                cause="host memory",
                rank=growth.rank,
                after_step=step,
                measured_s=growth.left_s,
                predicted_s=left_s,
                text=growth.text,
            )
            log_event(self._ready, said)
            self._shown.say.print(f"warning: {growth.text}")


class Looks:
    """Work of a launcher while its ranks run: it shows steps, and looks for ranks that hang."""

    def __init__(self, ready: Preflight, shown: ProgressLine, asked: Launch) -> None:
        self.shown, self.agent = shown, asked.agent
        self.watch: HangWatch | None = None
        self.pace: Callable[[Sequence[StepRecord]], None] | None = None
        self.telemetry: Telemetry | None = None
        self.seen: Beacons | None = None
        self._ready, self._asked = ready, asked
        self._begin_s = time.monotonic()
        self._most_lost = ""
        self._look_at_names = CopyNames(asked.slots, self.shown.say.print)
        self._begun_from = checkpoint.progress(ready.resumed).step if ready.resumed else 0
        self._predicted_s = run.account_of(ready.output).start_s
        tells = asked.elastic and ready.ranks.leads
        self._events = run.AddedLines(run.events_file(ready.output)) if tells else None
        self._rotation = (
            Rotation(run.events_file(ready.output), run.metrics_file(ready.output))
            if ready.ranks.leads
            else None
        )

    @property
    def after_step(self) -> int:
        """The last step that was done, as far as this node knows."""
        places = [] if self.seen is None else self.seen.places()
        return max(
            [
                self.shown.step,
                self._begun_from,
                newest_copy_step(self._asked.slots),
                *(place.steps_done for place in places),
            ]
        )

    def __call__(self) -> None:
        """Look once; raises RanksHang where a rank hangs."""
        news = self.shown.refresh()
        if self.pace is not None:
            self.pace(news)
        if self._events is not None and news:
            self._tell_of_state(self._events.read())
        if self.telemetry is not None:
            self.telemetry.look()
        if self._rotation is not None:
            with run.never_fatal(self._ready.output / "records", MeshwrightError):
                self._rotation.look()
        if self._begin_s and news:
            took_s, self._begin_s = time.monotonic() - self._begin_s, 0.0
            started = PhaseDone(
                at_unix_s=unix_now_s(),
                phase="start",
                measured_s=took_s,
                predicted_s=self._predicted_s,
            )
            log_event(self._ready, started)
            if self._asked.begun is not None and self._ready.ranks.leads:
                self._asked.begun()
        self._look_at_names()
        if self.agent is not None:
            self.agent.check()
        if self._asked.meanwhile is not None and self._ready.ranks.leads:
            self._asked.meanwhile()
        waiting = self.watch.look() if self.watch is not None else []
        if waiting:
            raise hung(self._ready, waiting, after_step=self.after_step)

    def _tell_of_state(self, lines: Sequence[bytes]) -> None:
        """Say what could not be saved, and how often state is copied where that has changed.

        Ranks write it down, and train on.
        """
        words = (b'"save_failed"', b'"copies"')
        # Few lines are read as what they are.
        for event in events_of(line for line in lines if any(word in line for word in words)):
            if isinstance(event, SaveFailed):
                self.shown.say.print(f"warning: {event.text}")
            if isinstance(event, CopyInterval) and event.text != self._most_lost:
                self._most_lost = event.text
                self.shown.say.print(event.text)
