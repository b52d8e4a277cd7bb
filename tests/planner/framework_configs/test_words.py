"""Every word of a configuration is used, harmless, or named: none is passed over."""

from __future__ import annotations

import random
import re
from functools import lru_cache
from typing import Any

import pytest

from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.bash.interpreter import ScriptEnvironment
from meshwright.planner.framework_configs.harmless_words import not_understood
from meshwright.planner.framework_configs.import_plan import READERS, Imported, import_plan
from tests.planner.framework_configs.changed_words import Base, Change, bases, changes
from tests.planner.framework_configs.test_export_oracles import MODEL


@lru_cache(maxsize=5000)
def _read(of: str, text: str, cluster: str, model: str | None, files: tuple[Any, ...]) -> Any:
    graph = MODEL if model == "" else None if model is None else resolve_model(model)
    try:
        return import_plan(
            text,
            of,
            resolve_cluster(cluster),
            model=graph,
            global_batch=48 * 64 if of == "accelerate" else None,
            surroundings=ScriptEnvironment(files=lambda name: _beside(name, dict(files))),
        )
    except DocumentError as error:
        return error


def _beside(name: str, files: dict[str, str]) -> str | None:
    return files.get(name) or files.get(name.rpartition("/")[2])


def read(base: Base, text: str) -> Imported | DocumentError:
    """Return the plan of a text in the place of a known configuration's, or why there is none."""
    result: Imported | DocumentError = _read(
        base.of, text, base.cluster, base.model, tuple(base.files.items())
    )
    return result


@pytest.mark.parametrize(
    ("reader", "word"),
    [
        ("megatron", "--nnodes-per-expert"),
        ("transformers", "--seed-experts"),
        ("deepspeed", "steps_per_print_of_experts"),
    ],
)
def test_a_word_that_only_begins_as_a_harmless_one_is_named(reader: str, word: str) -> None:
    assert not_understood([word], reader) == (word,)


def test_words_that_decide_most_are_named_first() -> None:
    words = ["--zzz", "--my-attention", "--my-offload", "--my-batch"]

    assert not_understood(words, "megatron") == (
        "--my-offload",
        "--my-attention",
        "--my-batch",
        "--zzz",
    )


def places(key: str) -> list[str]:
    """Return a word and the sections that it is in, without how dashes are written."""
    path = key.partition("=")[0].replace("-", "_")
    parts = [part.strip("_") for part in path.split(".")]
    return [
        ".".join(parts),
        *(".".join(parts[:count]) for count in range(1, len(parts))),
        parts[-1],
    ]


def is_named(key: str, words: tuple[str, ...]) -> bool:
    """Whether a word, or the section that it is in, is among words."""
    plain = {word.partition("=")[0].replace("-", "_").strip("_") for word in words}
    plain |= {word.rpartition(".")[2] for word in plain}
    if any(place in plain for place in places(key)):
        return True
    # It may be in an expression that is named as a whole.
    inside = re.compile(rf"\b{re.escape(key.rpartition('.')[2])}\b")
    return any(inside.search(word.partition("=")[2]) for word in words)


def is_harmless(key: str, of: str) -> bool:
    """Whether the table of a reader lists a word, or the section that it is in."""
    words = [
        place.replace("_", sign)
        for place in places(key.removeprefix("MODEL_ARGS."))[:-1]
        for sign in "_-"
    ]
    return any(not not_understood([word], of) for word in words)


def passed_over(base: Base, change: Change) -> str:
    """Return what is wrong with the answer to a changed configuration; nothing if it is right."""
    known, changed = read(base, base.text), read(base, change.text)
    assert not isinstance(known, DocumentError), f"{base.of}: {known}"
    if isinstance(changed, DocumentError):
        return ""
    named = changed.not_understood
    if change.kind in ("add", "rename"):  # a word in a section that has no effect has none
        named += changed.without_effect
    if is_named(change.key, named) or is_harmless(change.key, base.of):
        return ""
    if change.kind in ("add", "rename"):
        return "is not named"
    if makes_a_difference(known, changed, change.key):
        return ""
    if change.kind == "drop":  # of what is usual anyway: it is used if another value is
        others = (
            passed_over(base, change._replace(kind="revalue", text=text, others=()))
            for text in change.others
        )
        return "" if "" in others else "makes no difference"
    return "makes no difference"


def makes_a_difference(known: Imported, changed: Imported, key: str) -> bool:
    """Whether plan or answer differ, or one of them says that the word has no effect."""
    unlike = {"not_understood"}
    plans = [each.plan.model_dump(exclude=unlike) for each in (known, changed)]
    idle = (*known.without_effect, *changed.without_effect)
    return (
        plans[0] != plans[1]
        or len(changed.not_understood) > len(known.not_understood)
        or is_named(key, (*known.not_understood, *idle))
        or changed.assumed != known.assumed
    )


def tried(of: str, seeds: range) -> list[str]:
    """Return what is wrong of changed configurations of a reader."""
    wrong = []
    for seed in seeds:
        rng = random.Random(f"{of}/{seed}")
        base = rng.choice(bases(of))
        change = changes(base, rng)
        if change is None:
            continue
        reason = passed_over(base, change)
        if reason:
            wrong.append(f"{seed}: {change.kind} {change.key} {reason}")
    return wrong


@pytest.mark.parametrize("of", READERS)
def test_no_word_is_passed_over(of: str) -> None:
    assert tried(of, range(1)) == []


@pytest.mark.matrix
@pytest.mark.parametrize("of", READERS)
def test_no_word_of_three_thousand_is_passed_over(of: str) -> None:
    assert tried(of, range(1000, 1190)) == []
