"""Runs every command of every page from an empty folder, and compares what the pages show.

    COLUMNS=80 python -m tests.page_commands [PAGE ...]

A page's commands run in their order in a folder of its own, with the files that a user has.  A
block that begins with `$` shows what its commands print; a line `...` stands for any lines.  Where
a command measures this machine, any figure equals any other.  A command that cannot run here has
its reason in NOT_HERE, and INSTEAD makes a shorter form that can.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.meshwright.answers_at_80 import PROBLEM, SCRIPT

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    DOCS / "index.md",
    DOCS / "tutorial" / "first-plan.md",
    *sorted((DOCS / "how-to").glob("*.md")),
    *sorted((DOCS / "explanation").glob("*.md")),
    *(page for page in sorted((DOCS / "reference").glob("*.md")) if page.stem != "commands"),
]
"""Pages with commands; reference/commands.md has those that each command's help shows."""
PROGRAMS = ("meshwright", "python", "torchrun", "srun", "pip", "make", "docker")
BEGINS = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:{'|'.join(PROGRAMS)})\b")
NOT_HERE = {
    r"^(pip|make|docker) ": "installs or builds the project",
    r"^srun ": "needs Slurm",
    r"^torchrun .*--nnodes 2 ": "needs a second node",
    r"--nproc-per-node 8 ": "needs 8 devices",
    r"--nodes 2 --node 0 |--hosts node": "needs a plan and machines of two nodes",
    r"--weights \./llama-3.1-8b": "needs 16 GB of weights",
    r"\bwatch OUTPUT|SAVED": "has names that stand for your own folders",
    r"pretrain_gpt\.py": "is Megatron's own command, which run.sh has",
    r"\bprofile script\.py:build|\bplan script\.py:build|\brun .*script\.py": "needs your script",
    r"\btune mine\.yaml .*train\.py": "needs your script",
    r"^meshwright run --plan plan.yaml examples/library_models.py": "tests/test_examples.py does",
    r"^(python|torchrun.*) examples/library_models.py": "tests/test_examples.py runs it",
    r"\bexport checkpoints --to huggingface": "needs a model of transformers, and this is demo-4m",
}
"""Reasons why a command does not run here, by a pattern of it."""
INSTEAD = (
    (r"( --(?:on (?:slurm|kubernetes|ray)|hosts) .*)$", r"\1 --dry-run"),
    (r"(\btune (?:.*--cluster \d+x.*|demo-4m .*)(?<!--dry-run))$", r"\1 --dry-run"),
    (r"--steps (?:30|1000)\b", "--steps 2"),
    (r"--steps 2000\b", "--steps 4"),
    (r"(launch plan.yaml --tensorboard.*)$", r"\1 --steps 2"),
)
"""Shorter forms: jobs are printed and not submitted, trials are listed, runs have few steps."""
MEASURED = re.compile(r"local|\blaunch\b|\brun\b|\bprofile\b|\bwatch\b")
"""Commands whose figures are those of this machine."""
UNITS = "ms|µs|s|MiB|GiB|KiB|%|tokens/s"
LONGEST_S = 600
PLAN = "meshwright plan demo-4m --cluster local:2 --seq-len 64 --global-batch 8 -o plan.yaml"
"""The plan of a user who comes to a page with one."""


@dataclass(frozen=True, slots=True)
class PageCommand:
    """A command of a page."""

    page: str
    text: str
    shown: tuple[str, ...] | None
    """Lines that the page shows of its output; None where it shows none."""
    document: str = ""
    """The YAML that the page shows last before it."""

    @property
    def reason(self) -> str | None:
        """The reason why it does not run here."""
        return next((why for what, why in NOT_HERE.items() if re.search(what, self.text)), None)

    @property
    def here(self) -> str:
        """Its form that runs here."""
        text = self.text
        for pattern, replacement in INSTEAD:
            text = re.sub(pattern, replacement, text)
        return text


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a command."""

    command: PageCommand
    word: str
    """compared, ran, not here, failed or differs."""
    detail: str = ""

    @property
    def is_good(self) -> bool:
        """True if it did what the page says, or has a reason not to."""
        return self.word in ("compared", "ran", "not here")


def fenced(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the language and the text of each fenced block of a page."""
    yield from re.findall(
        r"^```([a-z]*)\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE
    )


def commands_of(page: Path) -> list[PageCommand]:
    """Return the commands of a page in their order."""
    name, found, document = str(page.relative_to(ROOT)), [], ""
    for language, text in fenced(page):
        document = text if language == "yaml" else document
        if language not in ("", "bash", "console"):
            continue
        shows = text.startswith("$ ") and language != "console"
        lines = text.replace("\\\n", " ").splitlines()
        for at, line in enumerate(lines):
            plain = re.sub(r"\s+#\s.*", "", line.removeprefix("$ ")).strip()
            if (shows and not line.startswith("$ ")) or not BEGINS.match(plain):
                continue
            if plain.startswith("meshwright:"):
                continue
            behind = [
                at + 1 + n for n, next_ in enumerate(lines[at + 1 :]) if next_.startswith("$ ")
            ]
            shown = tuple(lines[at + 1 : behind[0] if behind else None])
            found.append(PageCommand(name, plain, shown if shows and shown else None, document))
    return found


def named_files() -> dict[str, str]:
    """Return the files that pages show: Python that begins with its name, and the problem."""
    files = {"run.sh": SCRIPT, "small.yaml": PROBLEM, "text.txt": "a text to train on. " * 400}
    for page in PAGES:
        for language, text in fenced(page):
            first = re.match(r"# (\w+\.py)\n", text)
            if language == "python" and first:
                files[first[1]] = text
    return files


def prepare(folder: Path) -> None:
    """Write the files that a user has into a folder, and programs that are these."""
    for name, text in named_files().items():
        (folder / name).write_text(text)
    (folder / "train.py").write_text("raise SystemExit('no training here')\n")
    for name in ("examples", "plans"):
        (folder / name).symlink_to(ROOT / name)
    programs = folder / ".programs"
    programs.mkdir()
    for name, words in (("meshwright", "-m meshwright "), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words}"$@"\n')
        (programs / name).chmod(0o755)


def run_page(page: Path, folder: Path) -> Iterator[Outcome]:
    """Run a page's commands in a folder; yield what became of each."""
    prepare(folder)
    environment = {
        **os.environ,
        "COLUMNS": "80",
        "MESHWRIGHT_DEFAULTS": "",
        "PYTHONPATH": str(ROOT),
        "PYTHONSAFEPATH": "1",
        "PATH": f"{folder / '.programs'}:{os.environ['PATH']}",
    }
    for command in commands_of(page):
        if command.reason is not None:
            yield Outcome(command, "not here", command.reason)
            continue
        needs_plan = "plan.yaml" in command.text and "-o plan.yaml" not in command.text
        if needs_plan and not (folder / "plan.yaml").exists():
            subprocess.run(["bash", "-c", PLAN], cwd=folder, env=environment, check=True)
        if "solve problem.yaml" in command.text:
            (folder / "problem.yaml").write_text(command.document)
        try:
            done = subprocess.run(
                ["bash", "-c", command.here],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=LONGEST_S,
            )
        except subprocess.TimeoutExpired:
            yield Outcome(command, "failed", f"took more than {LONGEST_S} s")
            continue
        yield _outcome(command, done)


def _outcome(command: PageCommand, done: subprocess.CompletedProcess[str]) -> Outcome:
    shows_refusal = command.shown is not None and command.shown[0].startswith("meshwright: ")
    if done.returncode != (1 if shows_refusal else 0):
        return Outcome(command, "failed", done.stderr.strip()[-300:])
    if command.shown is None:
        return Outcome(command, "ran")
    printed = f"{done.stdout}\n{done.stderr}"
    missing = difference(command.shown, printed, measured=bool(MEASURED.search(command.text)))
    return Outcome(command, "differs" if missing else "compared", missing)


def difference(shown: Sequence[str], printed: str, *, measured: bool) -> str:
    """Return the first words that a page shows and a command did not print; '' if there are none.

    >>> difference(["time 3 ms", "...", "end"], "time 3 ms\\nmore\\nthe end", measured=False)
    ''
    >>> difference(["time 3 ms"], "time 41.2 s", measured=True)
    ''
    """

    def words(text: str) -> str:
        plain = " ".join(text.split())
        return re.sub(rf"[+-]?[\d.,]*\d(?: ?(?:{UNITS}))?(?!\w)", "#", plain) if measured else plain

    rest = words(printed)
    for part in "\n".join(shown).split("\n...\n"):
        wanted = words(part)
        at = rest.find(wanted)
        if at < 0:
            sizes = range(len(wanted))
            begun = next((n for n in reversed(sizes) if wanted[:n] in rest), 0)
            return wanted[max(0, begun - 30) :][:120]
        rest = rest[at + len(wanted) :]
    return ""


def main(names: Sequence[str]) -> int:
    """Run pages, print a line for each command, and return 1 if one is not as its page says."""
    pages = [ROOT / name for name in names] or PAGES
    bad = total = 0
    for page in pages:
        with tempfile.TemporaryDirectory() as folder:
            for outcome in run_page(page, Path(folder)):
                total += 1
                bad += not outcome.is_good
                detail = f"\n    {shlex.quote(outcome.detail)}" if outcome.detail else ""
                print(f"{outcome.word:9} {outcome.command.page}: {outcome.command.text}{detail}")
                sys.stdout.flush()
    print(f"{total} commands, {bad} are not as their pages say")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
