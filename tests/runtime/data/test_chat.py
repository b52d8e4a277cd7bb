"""Conversations are the template's text, and what counts is what the assistant says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.errors import DocumentError, LaunchError
from meshwright.runtime.data import row_readers as records
from meshwright.runtime.data.chat import Conversations
from meshwright.runtime.data.corpus import Corpus, files, prepare
from meshwright.runtime.data.packing import OPEN_ROWS, PackedSamples, pack_rows
from meshwright.runtime.launch.launch import launch
from meshwright.runtime.launch.launch_config import Launch
from meshwright.runtime.run.launch_options import LaunchRun
from tests.runtime import chats
from tests.runtime.chats import said
from tests.runtime.rooms import MODEL, Room, plan_of

TALK = said(("system", "Be brief."), ("user", "Grüße!"), ("assistant", "Hallo."))
LONG = said(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "dd\n"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    chats.save_tokenizer(folder)
    return folder


def corpus_of(rows: list[dict[str, Any]], tmp_path: Path, tokenizer: Path | None) -> Corpus:
    file = chats.write_rows(tmp_path / "chat.jsonl", rows)
    return prepare(files(file), tokenizer=tokenizer, cache=tmp_path / "cache")


def decoded(tokens: list[int], counts: list[bool], tokenizer: Path) -> str:
    return Conversations(tokenizer).marked_text(tokens, counts)


@pytest.mark.parametrize("template", [chats.TEMPLATE, chats.MARKED])
@pytest.mark.parametrize("row", [TALK, LONG])
def test_what_the_assistant_says_counts(row: dict[str, Any], template: str, tmp_path: Path) -> None:
    chats.save_tokenizer(tmp_path, template=template)
    chosen = Conversations(tmp_path)

    tokens, counts = chosen.tokens(row, "line 1", Path("chat.jsonl"))

    text, letters = chats.written(row)
    expected = "".join(
        ("[[" if counted and not before else "]]" if before and not counted else "") + letter
        for letter, counted, before in zip(text, letters, [False, *letters], strict=False)
    )
    assert chosen.marked_text(tokens, counts) == expected


def test_a_completion_counts_with_its_end(tokenizer: Path) -> None:
    chosen, file = Conversations(tokenizer), Path("p.jsonl")

    plain = chosen.tokens({"prompt": "2+2=", "completion": "4"}, "line 1", file)
    turns = chosen.tokens(
        {"prompt": LONG["messages"][:3], "completion": LONG["messages"][3:]}, "line 1", file
    )

    assert chosen.marked_text(*plain) == "2+2=[[4<|end|>]]"
    assert chosen.marked_text(*turns) == (
        "<|user|>a<|end|>\n<|assistant|>b<|end|>\n<|user|>c<|end|>\n<|assistant|>[[dd\n<|end|>]]\n"
    )


def test_rows_of_text_are_a_stream(tmp_path: Path) -> None:
    corpus = corpus_of([{"text": "roses"}, {"text": "violets"}], tmp_path, None)

    assert corpus.kind == "text"
    assert bytes(t for t in corpus.stream.tolist() if t < 256) == b"rosesviolets"
    assert corpus.documents == 2


def test_a_corpus_of_conversations_holds_tokens_and_marks(tmp_path: Path, tokenizer: Path) -> None:
    silent = said(("user", "hello?"))
    corpus = corpus_of([TALK, silent, LONG], tmp_path, tokenizer)

    assert (corpus.kind, corpus.documents, corpus.skipped) == ("conversations", 2, 1)
    text = "".join(
        decoded(corpus.stream[a:b].tolist(), corpus.counts[a:b].tolist(), tokenizer)
        for a, b in zip(corpus.starts, corpus.starts[1:], strict=False)
    )
    assert "<|assistant|>[[Hallo.<|end|>]]\n" in text
    assert corpus.counted == int(corpus.counts.sum()) == 7 + 2 + 4
    assert Corpus.open(corpus.folder) == corpus


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "x"}, r"line 2: has the keys question; rows hold 'messages'"),
        ({"messages": []}, "line 2: 'messages' is empty"),
        ({"messages": [{"content": "x"}]}, "line 2: a message has no 'role'"),
        ({"messages": [{"role": "user", "content": [1]}]}, "line 2: .*'content' is no text"),
        ({"text": "roses"}, "line 2: is no conversation, as earlier rows are"),
    ],
)
def test_a_row_that_is_no_conversation_is_named(
    row: dict[str, Any], message: str, tmp_path: Path, tokenizer: Path
) -> None:
    with pytest.raises(DocumentError, match=message):
        corpus_of([TALK, row], tmp_path, tokenizer)
    assert list((tmp_path / "cache" / "corpora").iterdir()) == []


def test_what_is_no_json_is_named_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text('{"text": "a"}\n\n{"text": \n')

    with pytest.raises(DocumentError, match="line 3: is not JSON"):
        prepare(files(tmp_path / "chat.jsonl"), cache=tmp_path / "cache")


def test_conversations_need_a_tokenizer_with_a_template(tmp_path: Path, tokenizer: Path) -> None:
    with pytest.raises(DocumentError, match="tokenizer: is needed for conversations"):
        corpus_of([TALK], tmp_path, None)
    chats.save_tokenizer(tmp_path / "bare", template=None)
    with pytest.raises(DocumentError, match="chat_template: is missing"):
        corpus_of([TALK], tmp_path, tmp_path / "bare")


def test_a_template_that_changes_earlier_turns_is_refused(tmp_path: Path) -> None:
    chats.save_tokenizer(tmp_path, template=chats.FORGETFUL)

    with pytest.raises(DocumentError, match=r"line 1: .* mark it in the template with"):
        corpus_of([LONG], tmp_path, tmp_path)


# --- parquet ----------------------------------------------------------------------------------


@pytest.mark.matrix
def test_a_table_holds_the_same_rows(tmp_path: Path, tokenizer: Path) -> None:
    import datasets

    datasets.Dataset.from_list([TALK, LONG]).to_parquet(tmp_path / "chat.parquet")
    table = prepare(files(tmp_path / "chat.parquet"), tokenizer=tokenizer, cache=tmp_path / "cache")
    lines = corpus_of([TALK, LONG], tmp_path, tokenizer)

    assert table.digest == lines.digest


def test_a_table_without_the_library_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr(records.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(LaunchError, match=r"pip install 'meshwright\[datasets\]'"):
        list(records.rows(tmp_path / "chat.parquet"))


# --- packing ----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), max_size=200), room=st.integers(1, 10))
def test_packing_keeps_all_documents_and_the_room(lengths: list[int], room: int) -> None:
    rows = pack_rows(lengths, room=room)

    assert sorted(at for row in rows for at in row) == list(range(len(lengths)))
    used = [sum(min(lengths[at], room) for at in row) for row in rows]
    assert all(0 < one <= room for one in used)
    # Two rows that are both less than half full would have been one, but for those open at once.
    assert sum(2 * one <= room for one in used) <= 1 + len(lengths) // OPEN_ROWS


def test_samples_hold_whole_documents_with_their_marks(tmp_path: Path, tokenizer: Path) -> None:
    rows = [said(("user", "q" * n), ("assistant", "a" * (n % 5 + 1))) for n in range(12)]
    corpus = corpus_of(rows, tmp_path, tokenizer)
    samples = PackedSamples(corpus, seq_len=40, seed=3)
    whole = samples.batch(0, len(samples.rows))
    seen = []
    assert whole.counts is not None
    assert whole.starts is not None

    for tokens, counts, starts in zip(*whole, strict=True):
        every = [*starts.tolist(), starts[-1] if counts[-1] or tokens[-1] else -1]
        for begin in dict.fromkeys(starts.tolist()):
            place = [at for at, start in enumerate(every) if start == begin]
            assert place[0] == begin
            part = slice(place[0], place[-1] + 1)
            marks = [False, *counts.tolist()][part]
            if any(marks):
                seen.append(decoded(tokens[part].tolist(), marks, tokenizer))

    expected = [
        decoded(*Conversations(tokenizer).tokens(row, "", Path()), tokenizer) for row in rows
    ]
    assert sorted(seen) == sorted(expected)


def test_an_epoch_is_another_order_of_the_same_rows(tmp_path: Path, tokenizer: Path) -> None:
    rows = [said(("user", "q" * n), ("assistant", "a" * 9)) for n in range(20)]
    corpus = corpus_of(rows, tmp_path, tokenizer)
    samples, others = (PackedSamples(corpus, seq_len=32, seed=seed) for seed in (1, 2))
    count = len(samples.rows)
    first, second = (samples.batch(epoch * count, count).tokens.tolist() for epoch in (0, 1))

    assert sorted(first) == sorted(second)
    assert first != second
    assert first != others.batch(0, count).tokens.tolist()
    again = PackedSamples(corpus, seq_len=32, seed=1)
    assert np.array_equal(again.batch(count + 2, 3).tokens, samples.batch(count + 2, 3).tokens)
    assert (samples.epoch(count - 1), samples.epoch(count)) == (0, 1)


def test_a_document_longer_than_a_row_is_cut(tmp_path: Path, tokenizer: Path) -> None:
    corpus = corpus_of([said(("user", "q"), ("assistant", "a" * 50))], tmp_path, tokenizer)
    samples = PackedSamples(corpus, seq_len=16, seed=0)

    assert samples.cut == 1
    assert samples.batch(0, 1).tokens[0].tolist() == corpus.stream[:17].tolist()


def test_conversations_with_a_model_of_our_own_are_refused_before_ranks_start(
    room: Room, tokenizer: Path
) -> None:
    talks = chats.write_rows(room.folder / "chat.jsonl", [TALK, LONG])

    with pytest.raises(LaunchError, match="is no model of transformers, and attention of others"):
        launch(
            Launch(
                room.plan(plan_of()),
                LaunchRun(data=talks, tokenizer=tokenizer, output=room.folder / "out"),
                model=MODEL,
                quiet=True,
            )
        )

    assert not (room.folder / "out" / "orders.yaml").exists()
