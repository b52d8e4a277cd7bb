"""Conversations as tokens: written by the tokenizer's chat template, with what the loss counts.

Only what the assistant says counts, and the mark that ends its turn.  A template may say what that
is (`{% generation %}`); otherwise a turn is what the template adds for it behind the prompt that
asks the assistant to speak.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.planner.documents.document import json_data, refuse_irregular
from meshwright.planner.errors import DocumentError
from meshwright.runtime.data.row_readers import Row

ASSISTANT = "assistant"
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)
"""Files of a folder's tokenizer."""


class Conversations:
    """The tokenizer and the chat template of a Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds to import

        refuse_irregular(folder)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError) as error:
            raise DocumentError(
                "tokenizer", f"cannot be read: {str(error).splitlines()[0]}", file=str(folder)
            ) from error
        if not getattr(self._tokenizer, "is_fast", False):
            raise DocumentError(
                "tokenizer",
                "is no fast tokenizer, and token positions in the text are needed; save one "
                "there (tokenizer.json)",
                file=str(folder),
            )
        self.folder = folder
        end = self._tokenizer.eos_token_id
        if end is None:
            raise DocumentError(
                "eos_token",
                "names no token of the tokenizer; add it to the tokenizer, or name another",
                file=str(folder),
            )
        self.end = int(end)
        digest = hashlib.sha256()
        for name in FILES:
            file = folder / name
            digest.update(name.encode() + (file.read_bytes() if file.is_file() else b""))
        self.name = "sha256:" + digest.hexdigest()[:16]

    @property
    def size(self) -> int:
        """Return how many tokens there are, added ones among them."""
        return len(self._tokenizer)

    def tokens(self, row: Row, place: str, file: Path) -> tuple[list[int], list[bool]]:
        """Return a row's tokens, and of each whether the loss counts it as a target."""
        try:
            if "messages" in row:
                return self._turns(_messages(row["messages"]), 0, row.get("tools"))
            prompt, completion = row["prompt"], row["completion"]
            if isinstance(prompt, str) and isinstance(completion, str):
                text = prompt + completion
                tokens, counts = self._tokens_and_marks(text, [(len(prompt), len(text))])
                return [*tokens, self.end], [*counts, True]
            first = _messages(prompt)
            every = [*first, *_messages(completion)]
            return self._turns(every, len(first), row.get("tools"))
        except _RowError as error:
            raise DocumentError(place, str(error), file=str(file)) from None

    def _turns(
        self, messages: list[dict[str, Any]], first: int, tools: Any
    ) -> tuple[list[int], list[bool]]:
        """Return the tokens of messages; what the assistant says from `first` on counts."""
        template = self._tokenizer.chat_template
        if template is None:
            raise DocumentError(
                "chat_template",
                "is missing; save it beside the tokenizer (chat_template.jinja), or give rows of "
                "'prompt' and 'completion' as plain text",
                file=str(self.folder),
            )
        if first == 0 and "{% generation" in str(template).replace("{%-", "{%"):
            encoded = self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            return list(encoded["input_ids"]), [bool(mark) for mark in encoded["assistant_masks"]]
        return self._tokens_and_marks(*self._spans(messages, first, tools))

    def _spans(
        self, messages: list[dict[str, Any]], first: int, tools: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of messages and where in it the assistant's turns are."""
        text = self._text(messages, tools)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != ASSISTANT or index < first:
                continue
            before = self._text(messages[:index], tools, asks=True)
            turn = self._text(messages[: index + 1], tools)
            if not (turn.startswith(before) and text.startswith(turn.rstrip("\n"))):
                raise _RowError(
                    "the chat template writes earlier turns anew when others follow, so what the "
                    "assistant said cannot be found in it; mark it in the template with "
                    "{% generation %} and {% endgeneration %}"
                )
            spans.append((len(before), len(turn.rstrip("\n"))))
        return text, spans

    def _text(self, messages: Sequence[Any], tools: Any, *, asks: bool = False) -> str:
        from jinja2 import TemplateError  # noqa: PLC0415 - only where templates are

        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tools=tools, tokenize=False, add_generation_prompt=asks
                )
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise _RowError(f"the chat template refuses it: {error}") from error

    def _tokens_and_marks(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[bool]]:
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        counts = [
            any(begin <= first < end for begin, end in spans)
            for first, _ in encoded["offset_mapping"]
        ]
        return list(encoded["input_ids"]), counts

    def marked_text(self, tokens: Sequence[int], counts: Sequence[bool]) -> str:
        """Return a text in which what counts stands between [[ and ]]."""
        parts, at = [], 0
        while at < len(tokens):
            end = at
            while end < len(tokens) and counts[end] == counts[at]:
                end += 1
            part = self._tokenizer.decode(list(tokens[at:end]), skip_special_tokens=False)
            parts.append(f"[[{part}]]" if counts[at] else part)
            at = end
        return "".join(parts)


class _RowError(Exception):
    """An error in a row, without the row's position."""


def _messages(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str):
        try:
            value = json_data(value)
        except DocumentError:
            raise _RowError("'messages' is a text; it is a list of role and content") from None
    if not isinstance(value, Sequence) or not value:
        raise _RowError("'messages' is empty; it is a list of role and content")
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise _RowError("a message has no 'role'; each has role and content")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise _RowError("a message's 'content' is no text; images and sounds are not read here")
    return [dict(message) for message in value]
