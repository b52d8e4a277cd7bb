"""Files beside a model's weights: its tokenizer, chat template, how it generates text."""

from __future__ import annotations

from pathlib import Path

TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
GENERATION = "generation_config.json"
NAMES = (*TOKENIZER, GENERATION)


def tokenizer_files(*folders: Path | str | None) -> dict[str, Path]:
    """Return the files by name: those of a tokenizer from the first folder that has one.

    A file stands for its folder, as the config.json of a plan's model does.
    """
    result: dict[str, Path] = {}
    for named in folders:
        if not named:
            continue
        folder = Path(named) if Path(named).is_dir() else Path(named).parent
        if not Path(named).exists():
            continue
        if (folder / GENERATION).is_file():
            result.setdefault(GENERATION, folder / GENERATION)
        has_tokenizer = any(
            (folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")
        )
        if has_tokenizer and not set(TOKENIZER) & set(result):
            result |= {name: folder / name for name in TOKENIZER if (folder / name).is_file()}
    return result
