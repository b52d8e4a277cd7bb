"""What people read: ten lines first, columns that hold, every option described, defaults said."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from meshwright import cli
from meshwright.cli import console, examples
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.report.facts import INDENT, Fact, Summary
from meshwright.planner.report.terminal import Terminal
from meshwright.render.text import compiled_texts, improved_parts
from tests.meshwright.answers_at_80 import COMMANDS, GOLDEN, prepare

GROUP: Any = typer.main.get_command(cli.app())


CHOSEN = {"plan", "layout", "yours", "best", "memory", "why", "proof", "change", "warning", "gain"}
"""Labels of what the cost model decides: which plan it is, and why."""
DETAILS = {"stages", "causes", "compile"}
"""Labels of what is left out where there is no room."""


def words(text: str) -> str:
    """Return what is said, not how much nor of which plan: figures and choices are masked."""
    kept, label = [], ""
    for line in text.splitlines():
        label = line[:INDENT].strip() or label
        if label in CHOSEN and line.startswith(label):
            kept.append(label)
        elif label not in CHOSEN | DETAILS:
            kept.append(line)
    said = " ".join(dict.fromkeys(kept))
    return " ".join(re.sub(r"\d[\d,.]*", "#", said).split())


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what each of the common commands prints on 80 columns."""
    folder = tmp_path_factory.mktemp("answers")
    prepare(folder)
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("COLUMNS", "80")
        patch.setenv("MESHWRIGHT_DEFAULTS", "")
        for name, command in COMMANDS.items():
            with Output() as output:
                cli.main(shlex.split(command))
            found[name] = output.text
    return found


class Output:
    """What is printed meanwhile, on stdout and stderr together."""

    def __enter__(self) -> Output:
        import contextlib
        import io

        self._file = io.StringIO()
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(contextlib.redirect_stdout(self._file))
        self._stack.enter_context(contextlib.redirect_stderr(self._file))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self.text = self._file.getvalue()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_common_command_says_what_its_golden_text_says(
    name: str, printed: dict[str, str]
) -> None:
    """Figures may move with the cost model; words and their order may not, unless rewritten."""
    golden = (GOLDEN / f"{name}.txt").read_text()
    command, _, text = golden.partition("\n")

    assert command == f"$ meshwright {COMMANDS[name]}"
    assert words(printed[name]) == words(text)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "catalog"])
def test_a_common_command_answers_in_ten_lines_of_80_columns(
    name: str, printed: dict[str, str]
) -> None:
    lines = printed[name].splitlines()

    assert 1 <= len(lines) <= 10
    # A message on stderr is one line, for logs; a terminal wraps it.
    assert all(len(line) <= 80 or line.startswith("meshwright: ") for line in lines)


@pytest.mark.parametrize("width", [40, 60, 120])
def test_piped_output_is_as_wide_as_columns_say(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["predict", "gpt2", "--cluster", "8xa100-sxm-80gb", "--layout", "pp=2"]
    monkeypatch.setenv("COLUMNS", str(width))

    assert cli.main([*asked, "--explain"]) == 0

    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert width - 12 < max(map(len, lines)) <= width


def test_an_answer_says_plan_time_memory_why_and_what_next(printed: dict[str, str]) -> None:
    labels = [line[:INDENT].strip() for line in printed["plan"].splitlines()[1:]]

    assert [label for label in labels if label and label not in DETAILS] == [
        *("plan", "time", "memory", "why", "proof", "defaults", "next"),
    ]
    assert re.search(r"a step \(.* to .*\)", printed["plan"])


def test_what_changes_save_adds_up_to_the_gain(printed: dict[str, str]) -> None:
    unit = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
    text = printed["compare-best"]

    saved = [
        (1 if does == "saves" else -1) * float(number) * unit[of]
        for does, number, of in re.findall(r"(saves|costs) ([\d.]+) (s|ms|µs) \(", text)
    ]

    assert len(saved) > 2
    assert sum(saved[1:]) == pytest.approx(saved[0], rel=0.01)


def test_proof_and_sources_stand_under_explain(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "gpt2", "--cluster", "2xa100-sxm-80gb"]

    assert cli.main(asked) == 0
    brief = capsys.readouterr().out
    assert cli.main([*asked, "--explain"]) == 0
    whole = capsys.readouterr().out

    for section in (
        "\nproof\n",
        "\nassumptions\n",
        "The plan takes ",
        "plan and why",
        "excluded  ",
    ):
        assert section in whole
        assert section not in brief
    assert "--explain" in brief and "--explain" not in whole


def test_what_has_no_place_is_left_out_whole_and_the_long_answer_has_all_of_it() -> None:
    texts = [f"number {at}: {'word ' * 30}end{at}" for at in range(8)]
    facts = [Fact(label=f"f{at}", text=text, detail=at > 4) for at, text in enumerate(texts)]

    brief, whole = (shown(Summary("head", facts, whole=w)) for w in (False, True))

    assert len(brief.splitlines()) == 11  # those that are no detail take two lines each
    assert [f"number {at}" in brief for at in range(8)] == [True] * 5 + [False] * 3
    assert brief.count(" ...\n") == 5 and "end" not in brief
    assert " ".join(whole.split()).count("word") == 8 * 30
    assert all(f"end{at}" in whole for at in range(8))


def test_a_cut_is_made_between_parts_and_a_copied_word_is_never_broken() -> None:
    parts = ", ".join(f"cause{at} {at}00 ms" for at in range(20))
    path = "/".join(["folder"] * 20)

    text = shown(
        Summary("", [Fact(label="a", text=parts, lines=1), Fact(label="b", text=path, copied=True)])
    )

    first, second = text.splitlines()
    assert re.fullmatch(r"a +(cause\d+ \d+00 ms, )*cause\d+ \d+00 ms \.\.\.", first)
    assert len(first) <= 80
    assert second == f"{'b':<{INDENT}}{path}"


@pytest.mark.parametrize(("odds", "said"), [(0.999, ""), (None, ""), (0.61, " (fits with 61 %)")])
def test_a_best_plan_is_compared_with_the_probability_that_it_fits(
    odds: float | None, said: str
) -> None:
    def priced(step_s: float, fit_probability: float | None) -> Any:
        stage = SimpleNamespace(peak_memory_bytes=79 * 2**30)
        return SimpleNamespace(
            layout_text=Layout().text(),
            step_time_s=step_s,
            stages=[stage],
            fit_probability=fit_probability,
            step_parts={},
            notes=(),
        )

    plan = SimpleNamespace(
        layout=Layout(),
        model=SimpleNamespace(name="x"),
        cluster="y",
        job=Job(seq_len=4, global_batch=8),
    )
    best = SimpleNamespace(plan=plan, prediction=priced(1.0, odds))
    change = SimpleNamespace(what="tp 2 -> 1", saved_s=1.0)
    told: Any = SimpleNamespace(
        mine=plan, prediction=priced(2.0, 1.0), best=best, changes=[change], warnings=()
    )

    [facts] = improved_parts(told, then="launch", explain=False)

    [gain] = [fact.text for fact in facts.facts if fact.label == "gain"]  # type: ignore[union-attr]
    assert gain == f"2 s -> 1 s a step, saves 1 s (50.0 %); memory 79.0 GiB -> 79.0 GiB{said}"


def shown(facts: Summary) -> str:
    terminal = Terminal(width=80)
    with terminal.capture() as captured:
        terminal.print(facts)
    return captured.get()


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize(
    ("message", "first"),
    [
        (
            "mesh: tensor 3 x pipeline 1 x data 2 leaves 2 of 8 devices idle; add "
            "idle=2, or other degrees",
            "meshwright: add idle=2, or other degrees",
        ),
        (
            f"no plan of {'x' * 30} fits 4 x rtx-4090 (24.0 GiB each). It would fit on 64 of them.",
            "meshwright: it would fit on 64 of them",
        ),
        (
            f"plan.yaml: has {'a' * 40} (known since 1.0; use the newer one), which nothing reads",
            "meshwright: plan.yaml has",
        ),
        (f"{'/long' * 30}: is no plan; name one", "meshwright: name one"),
        ("seq_len: is 0; give 1 or more", "meshwright: seq_len is 0; give 1 or more"),
    ],
)
def test_a_refusal_of_several_lines_begins_with_what_to_do(
    message: str, first: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal(width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(console, "talk", terminal)

    with terminal.capture() as captured:
        console.refuse(message)

    said = captured.get().splitlines()
    assert said[0].startswith(first)
    assert all(len(line) <= width or " " not in line.strip() for line in said)
    assert all(line.startswith("  ") for line in said[1:])
    words_of = partial(re.findall, r"\w+")
    assert {*words_of(message.lower())} <= {*words_of(" ".join(said).lower())}


def test_the_end_of_a_log_is_shown_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(width=40, force_terminal=True, color_system=None)
    monkeypatch.setattr(console, "talk", terminal)

    with terminal.capture() as captured:
        console.refuse("rank 1 stopped; see its log:\n  ValueError: a\n  b")

    assert captured.get().splitlines() == [
        "meshwright: rank 1 stopped; see its log:",
        "  ValueError: a",
        "  b",
    ]


def test_every_command_has_examples_which_it_takes() -> None:
    assert set(examples.EXAMPLES) == set(GROUP.commands)
    for name, lines in examples.EXAMPLES.items():
        text = "\n".join(lines).replace("\\\n", " ")
        for line in text.splitlines():
            program, command, *arguments = shlex.split(line)
            assert (program, command) == ("meshwright", name)
            context = GROUP.commands[name].make_context(name, list(arguments))
            assert context.params
        assert max(map(len, lines)) <= 76


@pytest.mark.parametrize("name", GROUP.commands)
def test_help_describes_every_option_on_80_columns(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    assert cli.main([name, "--help"]) == 0

    text = capsys.readouterr().out
    assert text.startswith(f"Usage: meshwright {name} ")
    assert max(map(len, text.splitlines())) <= 80
    assert "Examples:\n" in text
    for parameter in GROUP.commands[name].params:
        assert parameter.help, parameter.name
        told = " ".join(text.split())
        assert all(word in told for word in parameter.help.split()[:3])


def test_commands_are_listed_with_their_whole_sentences(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    assert cli.main(["--help"]) == 0

    text = capsys.readouterr().out
    assert "..." not in text.partition("Commands:")[2]
    assert all(f"\n  {name} " in text for name in GROUP.commands)
    assert "--install-completion" in text and "--show-completion" in text


def test_a_shell_can_complete(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_MESHWRIGHT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "meshwright pl")
    monkeypatch.setenv("COMP_CWORD", "1")

    assert cli.main([]) == 0

    assert capsys.readouterr().out.split() == ["plan"]


def test_a_run_says_what_ran_compiled_and_why_the_rest_did_not() -> None:
    why = "there is no C++ compiler; install g++ or set CXX"
    none_captured = {"captured": 0, "not_captured": None}
    report = SimpleNamespace(compile_s=26.1, not_compiled={}, **none_captured)

    assert list(compiled_texts(report)) == ["compiled blocks, for 26.1 s of the first step"]  # type: ignore[arg-type]
    report = SimpleNamespace(
        compile_s=0.0,
        not_compiled={"block.0": why, "block.1": why, "block.2": "graph break"},
        captured=12,
        not_captured="pageable memory",
    )
    assert list(compiled_texts(report)) == [  # type: ignore[arg-type]
        f"eager 2 layers, the first block.0: {why}",
        "eager block.2: graph break",
        "12 micro-batches ran as captured graphs",
        "micro-batches ran as they are: pageable memory",
    ]
    nothing = SimpleNamespace(compile_s=0.0, not_compiled={}, **none_captured)
    assert not list(compiled_texts(nothing))  # type: ignore[arg-type]


def test_a_locale_without_a_letter_ends_no_command() -> None:
    """A run of minutes must not end with a traceback of its report, which has µs."""
    program = (
        "import sys; sys.argv = ['meshwright', '--version']\n"
        "from meshwright.__main__ import main\n"
        "main(); print('5 \\u00b5s')"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    environment.pop("PYTHONIOENCODING", None)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.splitlines()[-1] == rb"5 \xb5s"
