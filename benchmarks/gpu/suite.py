"""What a device at hand is worth most for: run in minutes, written line by line, resumed by itself.

    python benchmarks/gpu/suite.py --seconds 540 --out DIR
    python benchmarks/gpu/suite.py --devices 4 --out DIR               what several GPUs tell first
    python benchmarks/gpu/suite.py --tiny --seconds 160 --out DIR      a dry run, on any machine
    python benchmarks/gpu/suite.py --tiny --devices 2 --out DIR        the same over gloo
    python benchmarks/gpu/report.py DIR

Each call runs the most valuable cases that are not done yet and fit into the seconds left, each in
a process of its own, and appends every result to DIR/lines.jsonl as it comes.  A case that the time
cut short goes on at its next row in the next call; one that failed is tried once more, behind all
others.  Nothing is downloaded; packages beyond torch, transformers and what the planner itself
imports are not needed.  One device is enough, and up to 8 are used.  `--devices N` runs the cases
of several ranks alone, on N of them, which take ten minutes in all: collectives, equality with one
process, steps of ZeRO-3, tensor with async, pipeline, experts and context, two launchers, and what
a launch says of a lost rank; what can be predicted has its prediction beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

TRIES = 2
MARGIN_S = 5.0
"""Left at the end of a call, to write and to leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to find out."""

    name: str
    seconds: float
    """About, on a device; a case is not begun with less than a third of it left."""
    devices: int = 1


CASES = (
    Case(name="machine", seconds=20),
    Case(name="equality", seconds=90),
    Case(name="graphs", seconds=90),
    Case(name="plans", seconds=240),
    Case(name="products", seconds=40),
    Case(name="kernels", seconds=40),
    Case(name="backends", seconds=40),
    Case(name="collectives", seconds=60, devices=2),
    Case(name="ranks", seconds=120, devices=2),
    Case(name="shared device", seconds=90),
    Case(name="edge", seconds=120),
    Case(name="compile", seconds=120),
    Case(name="loss", seconds=40),
    Case(name="launches", seconds=40),
    Case(name="layouts", seconds=200, devices=2),
    Case(name="two nodes", seconds=60, devices=2),
    Case(name="ends", seconds=120, devices=2),
    Case(name="profile", seconds=240),
    Case(name="walk", seconds=90),
)
"""Most valuable first."""
SEVERAL = ("machine", "collectives", "ranks", "layouts", "two nodes", "ends")
"""Cases of `--devices`."""

Line = dict[str, Any]


def read_lines(file: Path) -> list[Line]:
    """Return all whole lines; a call that was killed may have left half of one."""
    if not file.exists():
        return []
    found = []
    for text in file.read_text().splitlines():
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    return found


def todo(lines: Iterable[Line], devices: int, left_s: float, cases: Sequence[Case]) -> Case | None:
    """Return the case to run now: the first that is neither done nor out of tries or of time.

    >>> todo([{"case": "a", "done": True}], 1, 99.0, [Case(name="a", seconds=1)]) is None
    True
    """
    done: set[str] = set()
    failures: dict[str, int] = {}
    for line in lines:
        if line.get("done"):
            done.add(line["case"])
        if "failed" in line and "key" not in line:
            failures[line["case"]] = failures.get(line["case"], 0) + 1
    able = [
        case
        for case in cases
        if case.name not in done
        and failures.get(case.name, 0) < TRIES
        and case.devices <= max(1, devices)
        and case.seconds / 3 <= left_s
    ]
    return min(able, key=lambda case: failures.get(case.name, 0), default=None)


def run(case: Case, out: Path, *, left_s: float, tiny: bool, device: str, devices: int) -> None:
    """Run one case in a process of its own and write its lines as they come."""
    file = out / "lines.jsonl"
    known = [
        line["key"] for line in read_lines(file) if line["case"] == case.name and "key" in line
    ]
    command = [sys.executable, str(Path(__file__).with_name("suite_rows.py")), case.name]
    command += ["--device", device, "--devices", str(devices)]
    command += ["--known", json.dumps(known), "--out", str(out)]
    command += ["--tiny"] if tiny else []
    begin_s = time.monotonic()
    with (out / f"{case.name.replace(' ', '-')}.log").open("ab") as log:
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
            env=_environment(),
            start_new_session=True,
        )
        cut = _follow(child, case, file, deadline_s=begin_s + left_s)
    seconds = round(time.monotonic() - begin_s, 1)
    if child.returncode == 0:
        _append(file, {"case": case.name, "done": True, "seconds": seconds})
    elif cut:
        _append(file, {"case": case.name, "cut": True, "seconds": seconds})
    else:
        text = Path(log.name).read_text(errors="replace")[-1500:]
        _append(file, {"case": case.name, "failed": text, "seconds": seconds})


def _environment() -> dict[str, str]:
    """Return this process's variables with the project in front of the caller's own paths."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **own}


def _follow(child: subprocess.Popen[str], case: Case, file: Path, *, deadline_s: float) -> bool:
    """Write what a child says until it ends; say whether the time ended it."""
    import selectors  # noqa: PLC0415
    import signal  # noqa: PLC0415

    assert child.stdout is not None
    os.set_blocking(child.stdout.fileno(), False)
    chooser = selectors.DefaultSelector()
    chooser.register(child.stdout, selectors.EVENT_READ)
    text, cut = "", False
    while True:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            cut = True
            os.killpg(child.pid, signal.SIGKILL)
            break
        if chooser.select(min(left_s, 1.0)):
            part = child.stdout.read()
            if part == "":
                break
            text += part or ""
            *whole, text = text.split("\n")
            for line in whole:
                if line.startswith("{"):
                    _append(file, {"case": case.name, **json.loads(line)})
                    print(f"{case.name}: {line[:160]}", flush=True)
    child.wait()
    child.stdout.close()
    chooser.close()
    return cut


def _append(file: Path, line: Mapping[str, Any]) -> None:
    with file.open("a") as out:
        out.write(json.dumps(dict(line)) + "\n")
        out.flush()
        os.fsync(out.fileno())


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="small sizes, on any machine")
    parser.add_argument("--cases", help="only these, with commas between")
    parser.add_argument("--devices", type=int, help="the cases of several ranks, on so many")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    deadline_s = time.monotonic() + args.seconds - MARGIN_S
    args.out.mkdir(parents=True, exist_ok=True)
    device, devices = _devices(args.tiny, args.devices)
    every = SEVERAL if args.devices else tuple(case.name for case in CASES)
    chosen = args.cases.split(",") if args.cases else every
    cases = [case for case in CASES if case.name in chosen]
    while True:
        left_s = deadline_s - time.monotonic()
        # Sizes of a dry run take a tenth of the time.
        case = todo(
            read_lines(args.out / "lines.jsonl"), devices, left_s * (10 if args.tiny else 1), cases
        )
        if case is None or left_s <= 0:
            break
        run(case, args.out, left_s=left_s, tiny=args.tiny, device=device, devices=devices)
    lines = read_lines(args.out / "lines.jsonl")
    done = {line["case"] for line in lines if line.get("done")} & {case.name for case in cases}
    print(f"{len(done)} of {len(cases)} cases done; {args.out / 'lines.jsonl'}")


def _devices(tiny: bool, chosen: int | None) -> tuple[str, int]:
    """Return what to run on and how many there are, without importing torch here."""
    if chosen is not None and chosen < 2:
        raise SystemExit(f"suite.py: --devices {chosen}: takes 2 or more, or leave it out")
    counted = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"],
        capture_output=True,
        text=True,
        check=True,
    )
    count = int(counted.stdout)
    if count == 0 and not tiny:
        raise SystemExit("suite.py: no CUDA device; --tiny is a dry run on the CPU")
    if count and chosen is not None and chosen > count:
        raise SystemExit(f"suite.py: --devices {chosen}: there are {count} CUDA devices")
    return ("cuda", chosen or min(count, 8)) if count else ("cpu", chosen or 2)


if __name__ == "__main__":
    main()
