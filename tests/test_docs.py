"""The site is true: links resolve, commands exist, code runs, the reference is that of types."""

from __future__ import annotations

import doctest
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from meshwright import cli
from meshwright.cli import reference
from tests.limits import children_cpu_s
from tests.meshwright.answers_at_80 import COMMANDS, GOLDEN, prepare
from tests.meshwright.test_output import words

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("*.md"))]
READ = [
    *sorted((DOCS / "how-to").glob("*.md")),
    *sorted((DOCS / "explanation").glob("*.md")),
    DOCS / "tutorial" / "first-plan.md",
    DOCS / "index.md",
]
GROUP: Any = typer.main.get_command(cli.app())


def site() -> dict[str, Any]:
    """Return the settings of the site."""
    found: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    return found


def blocks(page: Path, *languages: str) -> Iterator[str]:
    """Yield the fenced blocks of a page in some languages; '' is none."""
    for language, text in re.findall(
        r"^```([a-z]*)\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE
    ):
        if language in languages:
            yield text


def anchors(page: Path) -> set[str]:
    """Return the names of a page's headings, as links name them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", head.lower()).strip() for head in heads)
    return {re.sub(r"[\s]+", "-", head) for head in plain}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`\n]*`", "", text)

    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        aim = (page.parent / file).resolve() if file else page
        assert aim.exists(), target
        if aim.suffix == ".webp":
            assert anchor in ("", "only-light", "only-dark"), target
            continue
        assert not anchor or anchor in anchors(aim), target
    for included in re.findall(r'^--8<-- "(.*)"$', text, flags=re.MULTILINE):
        assert (ROOT / included).is_file()


@pytest.mark.parametrize("page", READ, ids=[page.stem for page in READ])
def test_a_page_is_short_and_easy_to_read(page: Path) -> None:
    readability = pytest.importorskip("tests.readability", exc_type=ImportError)

    words, mean_words, ease = readability.figures(page)

    assert mean_words <= 16
    assert ease >= 50
    if page.parent.name == "how-to":
        assert words <= 700
        assert next(blocks(page, "", "python", "bash")).strip()


def test_the_site_has_at_most_26_pages_to_read() -> None:
    pages = [*READ, *(DOCS / "project").glob("*.md")]

    assert len(pages) <= 26
    assert sum(len(page.read_text().split()) for page in pages) <= 35_000


def test_files_of_the_planner_that_pages_and_sources_name_are_there() -> None:
    """Decisions and the changelog tell of what was; paths of other projects start otherwise."""
    said = [page for page in PAGES if not {"decisions", "CHANGELOG.md"} & {*page.parts}]
    said += [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "planner").glob("catalog/**/*.yaml")]
    named = r"(?<![\w/.])(?:planner|meshwright|profiler)/[\w/.@-]+\.(?:py|yaml|mjs|html)\b"

    gone = {
        f"{file.relative_to(ROOT)}: {path}"
        for file in said
        for path in re.findall(named, file.read_text())
        if not (ROOT / path).exists() and "NAME" not in path
    }

    assert gone == set()


def test_files_and_names_that_the_architecture_gives_are_there() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    places = re.findall(r"`([\w/]+/[\w/.]+\.py)(?:: ([\w.]+))?`", text)

    missing = [
        f"{file}: {name}"
        for file, name in places
        if not (ROOT / file).exists()
        or not re.search(rf"\b(def|class) {name.rpartition('.')[2]}", (ROOT / file).read_text())
    ]

    assert len(places) > 40
    assert missing == []


def test_the_site_has_every_page_once() -> None:
    def pages(part: Any) -> Iterator[str]:
        if isinstance(part, str):
            yield part
        for one in (
            part if isinstance(part, list) else part.values() if isinstance(part, dict) else ()
        ):
            yield from pages(one)

    listed = list(pages(site()["nav"]))
    results = {str(page.relative_to(DOCS)) for page in (DOCS / "results").rglob("*.md")}

    assert sorted([*listed, *results]) == sorted(
        str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")
    )
    assert site()["not_in_nav"].split() == ["/results/"]


def test_one_page_links_every_page_of_results() -> None:
    page = DOCS / "explanation" / "how-true-it-is.md"
    linked = {
        (page.parent / target).resolve()
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text())
    }

    assert {page.resolve() for page in (DOCS / "results").rglob("*.md")} <= linked
    assert len(page.read_text().split()) <= 700


def test_the_reference_is_that_of_types_and_commands() -> None:
    """`python -m meshwright.cli.reference` writes it."""
    texts = reference.texts()
    written = {name: (DOCS / "reference" / name).read_text() for name in texts}

    assert written == texts
    for name in GROUP.commands:
        assert f"\n## {name}\n" in written["commands.md"]


def test_the_page_for_assistants_has_every_command_and_pages_that_are_there() -> None:
    text = (DOCS / "llms.txt").read_text()

    assert text == reference.llms_text()
    assert all(f"\n- {name}: " in text for name in GROUP.commands)
    for page in re.findall(r"/blob/main/docs/([^)]+)\)", text):
        assert (DOCS / page).is_file()
    for call in re.findall(r"`meshwright ([^`]+)`$", text, flags=re.MULTILINE):
        name, *arguments = shlex.split(call)
        assert GROUP.commands[name].make_context(name, arguments).params
    assert len(text.split()) <= 500


def test_every_command_that_is_shown_is_one() -> None:
    """Commands in fenced blocks parse, whatever stands around them."""
    seen = set()
    for page in PAGES:
        if page.name in ("CHANGELOG.md", "studies.md"):
            continue
        for block in blocks(page, "", "bash", "console", "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                call = re.match(r"\$? ?(?:srun \S+ |torchrun .* )?meshwright (.*)", line.strip())
                if call is None:
                    continue
                said = re.sub(r"\s#\s.*", "", call[1])
                name, *arguments = shlex.split(said)
                if name == "--version" or any(word.isupper() for word in arguments[:1]):
                    continue
                assert name in GROUP.commands, line
                context = GROUP.commands[name].make_context(name, arguments)
                assert context.params
                seen.add(name)
    assert seen >= {"plan", "launch", "show", "export", "import", "compare", "whatif", "profile"}


def test_numbers_of_the_theory_are_computed() -> None:
    failed, tried = doctest.testfile(str(DOCS / "explanation" / "theory.md"), module_relative=False)

    assert not failed and tried >= 20


def test_python_of_the_pages_is_python() -> None:
    for page in PAGES:
        for block in blocks(page, "python"):
            if ">>>" not in block:
                compile(block, str(page), "exec")


@pytest.mark.matrix
def test_the_tutorial_is_fifteen_commands_that_run_in_five_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    page = DOCS / "tutorial" / "first-plan.md"
    commands = [
        line.removeprefix("$ meshwright ")
        for block in blocks(page, "console")
        for line in block.splitlines()
    ]
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path)
    (script,) = blocks(page, "bash")
    assert script == (tmp_path / "run.sh").read_text()
    started = time.process_time() + children_cpu_s()

    for command in commands:
        assert cli.main(shlex.split(command)) == 0, capfd.readouterr().err

    assert len(commands) == 15
    assert time.process_time() + children_cpu_s() - started < 300
    assert (tmp_path / "report.html").is_file() and (tmp_path / "config.py").is_file()
    assert "predicted" in capfd.readouterr().out


def test_answers_that_pages_show_are_those_of_the_commands() -> None:
    seen = set()
    for page in PAGES:
        for block in blocks(page, ""):
            first, _, text = block.partition("\n")
            for name, command in COMMANDS.items():
                if first == f"$ meshwright {command}":
                    golden = (GOLDEN / f"{name}.txt").read_text().partition("\n")[2]
                    assert words(text) == words(golden)
                    seen.add(page.name)
    assert seen >= {"README.md", "first-plan.md"}


def test_the_readme_has_the_example_that_is_run() -> None:
    text = (ROOT / "README.md").read_text()
    example = (ROOT / "examples" / "first_engine.py").read_text()

    assert example in text


def test_the_readme_is_one_page_with_one_picture_that_is_small() -> None:
    text = (ROOT / "README.md").read_text()

    assert len(text.splitlines()) <= 130
    assert text.count("<img ") == 1
    for source in re.findall(r'src(?:set)?="([^"]+)"', text):
        assert (ROOT / source).is_file()
    assert all(file.stat().st_size <= 60_000 for file in (DOCS / "pictures").iterdir())
