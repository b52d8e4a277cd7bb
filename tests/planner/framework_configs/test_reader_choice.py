"""A configuration's settings tell whose it is."""

from __future__ import annotations

import pytest

from benchmarks.inputs_read import Input, inputs
from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.import_plan import READERS
from meshwright.planner.framework_configs.reader_choice import reader_of
from meshwright.planner.framework_configs.readers import shell

DOCUMENTS = [
    entry
    for entry in inputs()
    if entry.reader not in (None, "slurm", "fsdp")
    and entry.gives
    and not shell.is_script(entry.text)
]


def reader_or_none(entry: Input) -> str | None:
    try:
        return reader_of(entry.text)
    except DocumentError:
        return None


def test_inputs_are_read_as_their_authors_say() -> None:
    """A few have too little for that; then nothing is read as another framework's."""
    found = {entry.source: (entry.reader, reader_or_none(entry)) for entry in DOCUMENTS}
    others = {name: pair for name, pair in found.items() if pair[1] not in (None, pair[0])}

    assert len(DOCUMENTS) > 100
    assert others == {}
    assert sum(pair[1] is None for pair in found.values()) < 0.1 * len(found)


@pytest.mark.parametrize("text", ["a: 3", "", "[1, 2]", "hello world", "model: {name: x}"])
def test_what_is_of_no_framework_is_refused(text: str) -> None:
    with pytest.raises(DocumentError):
        READERS[reader_of(text)](text)
