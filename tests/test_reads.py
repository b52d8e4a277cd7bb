"""Every place that reads a file of others: by which hostile input it is tried, or why by none."""

from __future__ import annotations

import ast
import os
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.planner.documents import document
from meshwright.planner.documents.document import json_data
from meshwright.planner.errors import DocumentError, LaunchError
from meshwright.runtime.checkpoint import shard_manifest as parts
from meshwright.runtime.checkpoint import tensor_index
from meshwright.runtime.core import checksums
from meshwright.runtime.data import row_readers as records
from meshwright.runtime.engine.engine_state import own_state
from tests.meshwright import hostile_documents
from tests.test_writes import PACKAGES, ROOT, _writes, last_name

CHECKED = "its bytes, depth or count are bounded where it stands"
SYSTEM = "what the operating system says of this machine"
OURS = "what this process or its own child has just written"
CACHE = "in the user's own cache, which only the user writes"
PEER = "an authenticated message of a node, or of a rank of the same job"
PROGRAM = "part of the program or of the user's own, which is run anyway"
TEXT = "text of a configuration; tests/meshwright/hostile_configurations.py"
NAMES = tuple(hostile_documents.READERS)
READS: dict[tuple[str, str], str] = {
    ("planner/documents/document.py", "os.open"): CHECKED,
    ("planner/system/safe_files.py", "os.open"): CHECKED,
    ("planner/documents/document.py", "json.loads"): CHECKED,
    ("planner/documents/document.py", "yaml.load"): CHECKED,
    ("planner/documents/document.py", "yaml.parse"): CHECKED,
    ("planner/catalog/__init__.py", "read_text"): PROGRAM,
    ("planner/schemas.py", "ast.parse"): PROGRAM,
    ("meshwright/cli/reference.py", "read_text"): PROGRAM,
    ("planner/documents/plugins.py", "read_text"): PROGRAM,
    ("planner/report/html.py", "read_text"): PROGRAM,
    ("planner/report/svg.py", "read_text"): PROGRAM,
    ("planner/report/trials.py", "read_text"): PROGRAM,
    ("planner/report/run_page.py", "read_text"): PROGRAM,
    ("planner/report/validation_report.py", "read_text"): PROGRAM,
    ("planner/report/whatif_html.py", "read_text"): PROGRAM,
    ("planner/framework_configs/readers/input_limits.py", "json.loads"): TEXT,
    ("planner/framework_configs/readers/input_limits.py", "tomllib.loads"): TEXT,
    ("planner/framework_configs/readers/input_limits.py", "ast.parse"): TEXT,
    ("planner/catalog/machine_figures.py", "json.loads"): OURS,
    ("planner/catalog/machine_figures.py", "read_text"): SYSTEM,
    ("profiler/cache.py", "json.loads"): CACHE,
    ("profiler/cache.py", "read_text"): CACHE,
    ("profiler/cache.py", "read_bytes"): PROGRAM,
    ("profiler/machine.py", "read_text"): SYSTEM,
    ("profiler/interference.py", "read_text"): SYSTEM,
    ("profiler/start_ranks.py", "json.loads"): OURS,
    ("profiler/start_ranks.py", "read_text"): OURS,
    ("runtime/run/addresses.py", "read_text"): SYSTEM,
    ("runtime/resilience/hang_detector.py", "read_text"): SYSTEM,
    ("runtime/run/run_clock.py", "read_text"): SYSTEM,
    ("runtime/launch/host_memory_limits.py", "read_text"): SYSTEM,
    ("runtime/core/process_group.py", "read_text"): SYSTEM,
    ("runtime/run/authenticated_channel.py", "json.loads"): PEER,
    ("runtime/resilience/replication.py", "json.loads"): PEER,
    ("runtime/run/authenticated_channel.py", "open"): CACHE,
    ("runtime/run/rendezvous.py", "json.loads"): OURS,
    ("runtime/core/object_collectives.py", "json.loads"): PEER,
    ("runtime/core/checksums.py", "os.open"): CHECKED,
    ("runtime/checkpoint/shard_manifest.py", "os.open"): OURS,
    ("runtime/resilience/heartbeat.py", "open"): OURS,
    ("runtime/resilience/heartbeat.py", "read_bytes"): SYSTEM,
    ("runtime/resilience/shared_memory.py", "open"): OURS,
    ("runtime/resilience/shared_memory.py", "json.loads"): OURS,
    ("runtime/resilience/shared_memory.py", "read_text"): OURS,
    ("meshwright/launch/ssh.py", "json.loads"): PEER,
    ("meshwright/launch/ssh_remote.py", "json.loads"): OURS,
    ("runtime/launch/fork_client.py", "json.loads"): OURS,
    ("runtime/launch/fork_server.py", "json.load"): OURS,
    ("runtime/launch/fork_server.py", "os.open"): SYSTEM,
    ("runtime/run/run_folder.py", "open"): OURS,
    ("runtime/launch/script_run.py", "read_bytes"): PROGRAM,
    ("runtime/launch/transient_errors.py", "read_bytes"): OURS,
    ("runtime/run/record_segments.py", "read_bytes"): OURS,
    ("runtime/engine/user_code.py", "read_bytes"): PROGRAM,
    ("runtime/engine/user_code.py", "ast.parse"): PROGRAM,
    ("meshwright/launch/schedulers.py", "read_bytes"): PROGRAM,
    ("meshwright/tune/trial.py", "open"): OURS,
    ("runtime/data/row_readers.py", "open"): "rows.jsonl",
    ("runtime/data/corpus.py", "open"): "rows.jsonl",
    ("runtime/data/corpus.py", "np.load"): "corpus.json",
    ("runtime/data/corpus.py", "np.memmap"): "corpus.json",
    ("runtime/data/corpus.py", "from_file"): "tokenizer/tokenizer.json",
    ("runtime/data/corpus.py", "read_bytes"): "tokenizer/tokenizer.json",
    ("runtime/data/chat.py", "from_pretrained"): "tokenizer/tokenizer.json",
    ("runtime/data/chat.py", "read_bytes"): "tokenizer/tokenizer.json",
    ("runtime/models/families.py", "from_pretrained"): "saved/config.json",
    ("runtime/models/library_model.py", "from_pretrained"): "saved/config.json",
    ("runtime/models/safetensors_weights.py", "safe_open"): "weights/model.safetensors",
    ("runtime/engine/engine_state.py", "torch.load"): "saved/user-00000.pt",
    ("runtime/launch/failure_cause.py", "pickle"): "flight/rank-0",
}
"""By file and call."""
OF_MODULES = {
    "json.load", "json.loads", "yaml.load", "yaml.safe_load", "yaml.parse", "tomllib.load",
    "tomllib.loads", "ast.parse", "np.load", "np.memmap", "np.fromfile", "numpy.load", "torch.load",
    "pickle.load", "pickle.loads", "os.open",
}  # fmt: skip
METHODS = {"read_text", "read_bytes", "from_pretrained", "from_file", "safe_open", "open"}
BOUNDED = {"", "document", "checksums", "Corpus", "guarded_files"}
"""What `read_text` and the like are of this project's own, whose bytes are bounded."""
WORDS = re.compile("|".join(sorted(METHODS | OF_MODULES | {"pickle.Unpickler"})))
LAST = METHODS | {name.rpartition(".")[2] for name in OF_MODULES}


def read(file: Path) -> Iterator[tuple[str, int]]:
    """Yield what a file calls that reads files or parses what they say, with the line."""
    text = file.read_text()
    if not WORDS.search(text):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and any(
            "Unpickler" in ast.unparse(b) for b in node.bases
        ):
            yield "pickle", node.lineno
        if not isinstance(node, ast.Call) or last_name(node.func) not in LAST:
            continue
        of, _, name = ast.unparse(node.func).rpartition(".")
        if f"{of}.{name}" in OF_MODULES:
            if name != "open" or not _writes(ast.unparse(node)):
                yield f"{of}.{name}", node.lineno
        elif name == "safe_open" or (name in METHODS and of not in BOUNDED):
            mode = [ast.unparse(one) for one in node.args[:1]]
            if name != "open" or not set("".join(mode).strip("'\"")) & set("wax"):
                yield name, node.lineno
        elif name == "open" and of == "" and node.args:
            yield name, node.lineno


def test_every_place_that_reads_is_bounded_or_attacked() -> None:
    places = {
        (name, what): line
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        if (name := str(file.relative_to(ROOT))) != "meshwright/cli/demo.py"
        for what, line in read(file)
    }

    new = {f"{name}:{line} {what}" for (name, what), line in places.items()
           if (name, what) not in READS}  # fmt: skip
    assert new == set(), (
        "read by meshwright.planner.documents.document, or say by which hostile input it is tried"
    )
    assert set(READS) <= set(places), "no longer read there"
    assert {why for why in READS.values() if "." in why and " " not in why} <= set(NAMES)


# JSON --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "is not JSON"),
        ("[" * 41 + "]" * 41, "nested more than 40 deep"),
        ('{"a":' * 41 + "1" + "}" * 41, "nested more than 40 deep"),
        ("[" + "[]," * 300_000 + "0]", "more than 200,000 keys and values"),
        ("[" + "0," * 300_000 + "0]", "more than 200,000 keys and values"),
        ('{"a": ' + "9" * 5000 + "}", "is not JSON"),
        ("", "is not JSON"),
        ('"unfinished, and, so, on', "is not JSON"),
    ],
)
def test_json_that_would_fill_the_memory_is_refused_before_it_does(text: str, message: str) -> None:
    tracemalloc.start()
    with pytest.raises(DocumentError, match=message):
        json_data(text)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert most_bytes < 10 * 2**20


def test_commas_in_strings_are_no_values() -> None:
    text = '["' + "a, b: [c] \\\\" * 100_000 + '"]'

    assert len(json_data(text)[0]) == 1_100_000


def test_an_index_has_no_more_bytes_than_its_tensors_need(tmp_path: Path) -> None:
    (tmp_path / "tensors.json").write_text("[" + "[]," * 3_000_000 + "[]]")
    (tmp_path / "rank-00000.bin").write_bytes(b"\0" * 8)

    with pytest.raises(
        DocumentError, match=r"more than 4\.5 MiB, which is too much for the tensors"
    ):
        tensor_index.read(tmp_path, sizes={"rank-00000.bin": 8}, checksum="")


def test_a_part_has_no_more_bytes_than_its_tensors_need(tmp_path: Path) -> None:
    folder = tmp_path / ".step-000003.run.parts"
    folder.mkdir()
    (tmp_path / ".step-000003.run").mkdir()
    text = checksums.with_seal('{"chunks": [' + "[]," * 2_000_000 + "[]]}")
    (folder / "part-00000.json").write_text(text)

    with pytest.raises(
        DocumentError, match=r"more than 4\.0 MiB, which is too much for the tensors"
    ):
        parts.read(folder)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("[" * 50_000, "line 2: is not JSON"),
        ('{"text": ' + "[" * 50 + "]" * 50 + "}", "line 2: is not JSON: is nested more than 40"),
        ('{"text": [' + "[]," * 300_000 + "0]}", "line 2: has more than 200,000 keys and values"),
        (r'{"text": "\ud800"}', "line 2: has half of a surrogate pair"),
        (r'{"messages": [{"role": "\udfff"}]}', "line 2: has half of a surrogate pair"),
    ],
)
def test_a_row_that_cannot_be_text_is_refused_by_its_line(
    row: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "roses \\ud83c\\udf39"}\n' + row + "\n")

    with pytest.raises(DocumentError, match=re.escape(message)):
        list(records.rows(file))


def test_a_row_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_BYTES", 100)
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "roses"}\n{"text": "' + "x" * 200)

    with pytest.raises(DocumentError, match="line 2: has 100 characters or more"):
        list(records.rows(file))


# What is no file ---------------------------------------------------------------------------------


def test_a_pipe_is_refused_where_it_would_be_waited_for(tmp_path: Path) -> None:
    for name in ("plan.yaml", "user-00000.pt"):
        os.mkfifo(tmp_path / name)

    with pytest.raises(DocumentError, match=r"plan.yaml: is no regular file"):
        document.open_regular_file(tmp_path / "plan.yaml")
    with pytest.raises(DocumentError, match="is no regular file"):
        document.refuse_irregular(tmp_path)
    with pytest.raises(LaunchError, match="cannot be read as plain data: OSError: is a link"):
        own_state(tmp_path, 0)


@pytest.mark.parametrize("content", [b"", b"a: 1", b"PK\x03\x04" + b"\0" * 99, b"\x80\x02a."])
def test_state_that_is_no_pickle_of_torch_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "user-00000.pt").write_bytes(content)

    with pytest.raises(LaunchError, match="cannot be read as plain data"):
        own_state(tmp_path, 0)
