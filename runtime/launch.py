"""Launching a plan on this machine: everything is checked first, then one process per rank runs.

What would stop a run is found before a rank starts, as far as it can be known without torch: a plan
for another model, too few devices, missing data, a folder that cannot be written.  runtime.rank is
what each process runs; runtime.supervise watches them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shlex
import shutil
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from planner.document import read, write
from planner.errors import DocumentError, LaunchError
from planner.model import ModelGraph
from planner.plan import Plan
from planner.units import bytes_text, count_text, seconds_text
from runtime import checkpoint, data, run
from runtime.checkpoint import Progress
from runtime.data import Files
from runtime.report import RunReport, summarise
from runtime.run import Device, Failure, Orders, RankRecord, StepRecord
from runtime.supervise import Exit, Ranks, first_cause, free_socket, last_lines

RANKS_PER_CORE = 4
"""More ranks than cores take turns, which is slow but right; beyond this it is a mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """A launch of which everything that can be checked without starting it has been checked."""

    plan: Plan
    model: ModelGraph
    device: Device
    files: Files
    tokenizer: Path | None
    steps: int
    checkpoint: Path | None
    checkpoint_every: int | None
    resume: Path | None
    max_seconds: float | None
    weights: Path | None
    output: Path
    warnings: tuple[str, ...]

    @property
    def ranks(self) -> int:
        """Processes that will run."""
        return self.plan.mesh.devices

    @property
    def command(self) -> list[str]:
        """What each rank runs."""
        return [sys.executable, "-m", "runtime.rank", str(run.orders_file(self.output))]

    def environment(self, rank: int, *, port: int | str = "<a free port>") -> dict[str, str]:
        """Return what a rank's environment has beside the launcher's own."""
        threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // self.ranks)))
        result = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": threads,
            "PYTHONSAFEPATH": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if Path("/sys/class/net/lo").exists():
            # Host names need not resolve to an address that this machine has.
            result["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        root = str(Path(__file__).resolve().parent.parent)
        if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
            known = os.environ.get("PYTHONPATH", "")
            result["PYTHONPATH"] = f"{root}{os.pathsep}{known}" if known else root
        return result

    def text(self) -> str:
        """Return the command and environment of each rank, as a shell would take them."""
        lines = []
        for rank in range(self.ranks):
            settings = [f"{key}={shlex.quote(v)}" for key, v in self.environment(rank).items()]
            lines.append(" ".join([*settings, shlex.join(self.command)]))
        return "\n".join(lines)


def launch(
    plan_path: Path | str,
    *,
    model: ModelGraph,
    data: Path | str | None = None,
    tokenizer: Path | str | None = None,
    steps: int = 20,
    checkpoint: Path | str | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
    output: Path | str | None = None,
    on: str = "local",
    dry_run: bool = False,
    max_seconds: float | None = None,
    weights: Path | str | None = None,
    device: Device | None = None,
    quiet: bool = False,
) -> RunReport | None:
    """Run a plan, and return what it did and measured; a dry run prints its commands instead.

    `model` is the graph that the plan's model source names.  `steps` counts from the start of
    training: a run resumed at step 30 with steps=50 does 20 more.  Without `data`, Python's own
    sources are the text; without `tokenizer`, that of the model's folder or else bytes.
    Progress and warnings go to stderr unless `quiet`.
    """
    started_unix_s = time.time()
    ready = preflight(
        plan_path,
        model=model,
        source=data,
        tokenizer=tokenizer,
        steps=steps,
        checkpoint_folder=checkpoint,
        checkpoint_every=checkpoint_every,
        resume=resume,
        output=output,
        on=on,
        max_seconds=max_seconds,
        weights=weights,
        device=device,
    )
    say = Console(stderr=True, quiet=quiet, soft_wrap=True, highlight=False, markup=False)
    for warning in ready.warnings:
        say.print(f"warning: {warning}")
    if dry_run:
        print(ready.text())
        return None
    with contextlib.ExitStack() as held:
        held.enter_context(_alone_in(ready.output))
        if ready.checkpoint is not None:
            held.enter_context(_alone_in(ready.checkpoint))
        orders = _write_orders(ready, say, started_unix_s)
        _supervise(ready, orders, say)
        return _report(ready, orders, started_unix_s)


def preflight(
    plan_path: Path | str,
    *,
    model: ModelGraph,
    source: Path | str | None,
    tokenizer: Path | str | None,
    steps: int,
    checkpoint_folder: Path | str | None,
    checkpoint_every: int | None,
    resume: bool,
    output: Path | str | None,
    on: str,
    max_seconds: float | None,
    weights: Path | str | None,
    device: Device | None,
) -> Preflight:
    """Check a launch without starting or writing anything but its output folder."""
    if on != "local":
        raise LaunchError(f"on: '{on}' is not known here; known: local")
    for name, value in (
        ("steps", steps),
        ("checkpoint_every", checkpoint_every),
        ("max_seconds", max_seconds),
    ):
        if value is not None and value <= 0:
            raise LaunchError(f"{name}: is {value}; it must be more than 0")
    plan = read(Plan, plan_path)
    try:
        plan.check_model(model)
    except DocumentError as error:
        raise error.in_file(str(plan_path)) from None
    chosen = device or ("cuda" if cuda_devices() else "cpu")
    warnings = _check_devices(plan, chosen)
    if source is None:
        files = data.files(data.standard_library(), suffixes=[".py"])
        warnings.append(f"no data is named; training on Python's own sources in {files.source}")
    else:
        files = data.files(Path(source))
    saved = _checkpoint_to_resume(
        Path(checkpoint_folder) if checkpoint_folder is not None else None,
        every=checkpoint_every,
        resume=resume,
        steps=steps,
    )
    folder = Path(output) if output is not None else _default_output(plan)
    _check_writable(folder)
    if checkpoint_folder is not None:
        _check_writable(Path(checkpoint_folder))
    if weights is not None and not Path(weights).exists():
        raise LaunchError(f"{weights}: there are no weights")
    return Preflight(
        plan=plan,
        model=model,
        device=chosen,
        files=files,
        tokenizer=Path(tokenizer) if tokenizer is not None else _own_tokenizer(plan),
        steps=steps,
        checkpoint=Path(checkpoint_folder).resolve() if checkpoint_folder is not None else None,
        checkpoint_every=checkpoint_every,
        resume=saved.resolve() if saved else None,
        max_seconds=max_seconds,
        weights=Path(weights).resolve() if weights is not None else None,
        output=folder.resolve(),
        warnings=tuple(warnings),
    )


def cores() -> int:
    """Return the processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cuda_devices() -> int:
    """Return how many CUDA or ROCm devices torch would see; torch is asked only if one may be."""
    drivers = [*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("kfd"), Path("/dev/dxg")]
    if sys.platform.startswith("linux") and not any(driver.exists() for driver in drivers):
        return 0
    import torch  # noqa: PLC0415

    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def _check_devices(plan: Plan, device: Device) -> list[str]:
    """Refuse more ranks than this machine can carry; return what is worth a warning."""
    ranks = plan.mesh.devices
    if device == "cuda":
        have = cuda_devices()
        if ranks > have:
            raise LaunchError(
                f"the plan needs {ranks} devices ({plan.layout.text()}); this machine has {have}. "
                "Plan again for `--cluster local`, or launch where they are"
            )
        return []
    have = cores()
    if ranks > RANKS_PER_CORE * have:
        raise LaunchError(
            f"the plan needs {ranks} ranks ({plan.layout.text()}); this machine has no accelerator "
            f"and {have} cores, which carry at most {RANKS_PER_CORE * have}. Plan again for "
            "`--cluster local`, or launch where the devices are"
        )
    if ranks > have:
        return [f"{ranks} ranks share {have} cores; step times will not be those of a real machine"]
    return []


def _checkpoint_to_resume(
    folder: Path | None, *, every: int | None, resume: bool, steps: int
) -> Path | None:
    """Return the checkpoint to go on from, if the run is to; refuse to overwrite one otherwise."""
    if folder is None:
        if every is not None or resume:
            what = "resume" if resume else "checkpoint_every"
            raise LaunchError(f"{what}: name the folder of the checkpoints too (checkpoint)")
        return None
    saved = checkpoint.newest(folder)
    if saved is None:
        if resume:
            raise LaunchError(
                f"{folder}: there is no complete checkpoint to resume; leave out `resume` to "
                "start anew"
            )
        return None
    done = checkpoint.progress(saved).step
    if not resume:
        raise LaunchError(
            f"{folder}: already holds a checkpoint of step {done}; resume it, or name another "
            "folder"
        )
    if done >= steps:
        raise LaunchError(
            f"{saved}: has done {done} steps and {steps} are asked for; ask for more to go on"
        )
    return saved


def _default_output(plan: Plan) -> Path:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", plan.model.name).strip("-.") or "model"
    return Path("runs", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise LaunchError(f"{folder}: cannot be written: {error.strerror}") from error


def _own_tokenizer(plan: Plan) -> Path | None:
    source = Path(plan.model.source)
    folder = source if source.is_dir() else source.parent
    named = source.is_dir() or source.name == "config.json"
    return folder if named and (folder / "tokenizer.json").is_file() else None


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold a folder for this launch; the lock ends with the process, however that ends."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise LaunchError(f"{folder}: another launch is using it; name another") from None
        yield


def _write_orders(ready: Preflight, say: Console, started_unix_s: float) -> Orders:
    """Prepare the data, check it against the model, and write what the ranks will read."""
    say.print(f"preparing {len(ready.files.paths)} files of {ready.files.source}")
    corpus = data.prepare(ready.files, tokenizer=ready.tokenizer)
    if corpus.skipped:
        say.print(f"warning: {corpus.skipped} files are not UTF-8 text and were left out")
    say.print(
        f"{count_text(corpus.tokens)} tokens by {corpus.tokenizer}; "
        f"{ready.ranks} ranks on {ready.device}, {ready.plan.layout.text()}; in {ready.output}"
    )
    if ready.model.architecture is not None:
        corpus.check_vocabulary(ready.model.architecture.vocab_size)
    if ready.resume is not None:
        progress: Progress = checkpoint.progress(ready.resume)
        progress.check(plan=ready.plan, model=ready.model, corpus=corpus, folder=ready.resume)
        say.print(f"going on from {ready.resume}")
    orders = Orders(
        run=secrets.token_hex(8),
        output=str(ready.output),
        corpus=str(corpus.folder.resolve()),
        device=ready.device,
        steps=ready.steps,
        started_unix_s=started_unix_s,
        max_seconds=ready.max_seconds,
        checkpoint=str(ready.checkpoint) if ready.checkpoint else None,
        checkpoint_every=ready.checkpoint_every,
        resume=str(ready.resume) if ready.resume else None,
        weights=str(ready.weights) if ready.weights else None,
    )
    for left_behind in ("logs", "ranks"):
        shutil.rmtree(ready.output / left_behind, ignore_errors=True)
        (ready.output / left_behind).mkdir()
    run.forget_steps_after(
        checkpoint.progress(ready.resume).step if ready.resume else 0,
        run.metrics_file(ready.output),
    )
    write(ready.plan, run.plan_file(ready.output))
    write(ready.model, run.model_file(ready.output))
    write(orders, run.orders_file(ready.output))
    return orders


def _supervise(ready: Preflight, orders: Orders, say: Console) -> None:
    """Run the ranks to their end; whatever goes wrong becomes one error, with no rank left."""
    listening, port = free_socket()
    own = {
        "MESHWRIGHT_RUN": orders.run,
        "MESHWRIGHT_LAUNCHER": str(os.getpid()),
        "MESHWRIGHT_STORE_FD": str(listening),
    }
    environments = [
        {**os.environ, **ready.environment(rank, port=port), **own} for rank in range(ready.ranks)
    ]
    logs = [run.log_file(ready.output, rank) for rank in range(ready.ranks)]
    shown = _Shown(run.metrics_file(ready.output), steps=ready.steps, say=say)
    try:
        with _signals_interrupt(), contextlib.ExitStack() as held:
            held.callback(os.close, listening)
            ranks = held.enter_context(
                Ranks(ready.command, environments, logs=logs, rank_0_inherits=[listening])
            )
            bad = ranks.wait(meanwhile=shown.refresh)
    except KeyboardInterrupt:
        raise LaunchError(f"interrupted after step {shown.step}{_way_on(ready)}") from None
    finally:
        shown.close()
    if bad:
        raise _bad_end(ready, bad, after_step=shown.step)


def _bad_end(ready: Preflight, bad: Sequence[Exit], *, after_step: int) -> Exception:
    """Return the error that says which rank ended the run, how, and what can be done."""
    ended, failure = first_cause(bad, run.read_failures(ready.output, ready.ranks))
    if failure is not None and failure.kind == "DocumentError":
        return DocumentError("", failure.message)
    if failure is not None and failure.kind in ("LaunchError", "NoPlanFits"):
        return LaunchError(failure.message)
    log = run.log_file(ready.output, ended.rank)
    return LaunchError(
        f"rank {ended.rank} {_how(ended, failure)} after step {after_step}{_way_on(ready)}. "
        f"The end of {log}:{last_lines(log)}"
    )


def _how(ended: Exit, failure: Failure | None) -> str:
    if failure is not None and failure.kind == "OutOfMemoryError":
        return "ran out of device memory (plan again with less memory per device)"
    if failure is not None:
        first = (failure.message.splitlines() or [""])[0]
        return f"stopped with {failure.kind}: {first[:300]}"
    if ended.signal == "SIGKILL":
        return "was killed by SIGKILL (as the system does when host memory runs out)"
    return f"was killed by {ended.signal}" if ended.signal else f"exited with code {ended.code}"


def _way_on(ready: Preflight) -> str:
    saved = checkpoint.newest(ready.checkpoint) if ready.checkpoint else None
    return f"; {saved} is complete and can be resumed" if saved else "; nothing was saved"


def _report(ready: Preflight, orders: Orders, started_unix_s: float) -> RunReport:
    report = summarise(
        ready.plan,
        orders,
        ranks=[
            read(RankRecord, run.record_file(ready.output, rank)) for rank in range(ready.ranks)
        ],
        steps=list(run.read_records(run.metrics_file(ready.output))),
        wall_s=time.time() - started_unix_s,
        files=(str(run.metrics_file(ready.output)), str(ready.output / "logs")),
    )
    run.write_json(report, ready.output / "report.json")
    return report


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the run as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        before[number] = signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


class _Shown:
    """The line of progress on stderr, read from what rank 0 writes.

    On a terminal it is renewed in place; elsewhere a line appears every tenth of the steps.
    """

    def __init__(self, metrics: Path, *, steps: int, say: Console) -> None:
        self.step = 0
        self._metrics = metrics
        self._offset = metrics.stat().st_size
        self._steps = steps
        self._say = say
        self._status = say.status("starting ranks") if say.is_terminal else None
        self._next_line = 0
        if self._status:
            self._status.start()

    def refresh(self) -> None:
        """Show the newest step."""
        for record in self._news():
            self.step = record.step
            line = self._line(record)
            if self._status:
                self._status.update(line)
            elif record.step >= self._next_line or record.step == self._steps:
                self._say.print(line)
                self._next_line = record.step + max(1, self._steps // 10)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._status:
            self._status.stop()

    def _news(self) -> list[StepRecord]:
        with self._metrics.open("rb") as file:
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
            f"{count_text(record.tokens_per_s)} tokens/s",
        ]
        if record.peak_memory_bytes:
            parts.append(f"peak {bytes_text(record.peak_memory_bytes)}")
        return "  ".join(parts)
