"""A small tokenizer with a chat template, and conversations, for tests of data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TURNS = "<|user|>", "<|assistant|>", "<|system|>"
END = "<|end|>"
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|end|>"
    "{% endgeneration %}{% else %}{{ m['content'] }}<|end|>{% endif %}{{ '\\n' }}{% endfor %}"
)
"""The same text, with what the assistant says marked."""
FORGETFUL = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' and not loop.last %}...{% else %}{{ m['content'] }}{% endif %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tokenizer(folder: Path, *, template: str | None = TEMPLATE) -> None:
    """Write a tokenizer whose tokens are the 256 bytes and the marks of turns."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*TURNS, END])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)
    fast.chat_template = template
    fast.save_pretrained(folder)


def said(*turns: tuple[str, str]) -> dict[str, Any]:
    """Return a row of messages."""
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as lines of JSON."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def written(row: dict[str, Any]) -> tuple[str, list[bool]]:
    """Return a row's text by hand, and of each letter whether the loss counts it.

    A mark counts as one letter, which stands in its place as its first.
    """
    text, counts = "", []
    for message in row["messages"]:
        assistant = message["role"] == "assistant"
        for part, counted in (
            (f"<|{message['role']}|>", False),
            (message["content"] + END, assistant),
            ("\n", False),
        ):
            text += part
            counts += [counted] * len(part)
    return text, counts
