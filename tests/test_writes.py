"""Files are written by guarded_files.py, which follows no link; the rest has its reason."""

from __future__ import annotations

import ast
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshwright.planner.documents.document import write_text
from meshwright.planner.documents.events import StepRecord
from meshwright.planner.errors import DocumentError
from meshwright.planner.system import safe_files as guarded_files
from meshwright.runtime.run import run_folder as run
from meshwright.runtime.run.locks_and_signals import alone_in

ROOT = Path(__file__).parent.parent
PACKAGES = ("planner", "runtime", "profiler", "meshwright")
GUARD = "planner/system/safe_files.py"

# Every other place -------------------------------------------------------------------------------

NEW = "in a folder that this process has just made under a random name"
NAMED = "makes the very folder that the user named, or the one above it"
OURS = "removes or renames a name; what a link leads to stays as it is"
HOME = "in the user's own configuration, by a name that must be new"
LOCK = "a lock in the user's own cache: no link is followed, nothing truncated or written"
PRIVATE = "in a folder that this user alone can write to, and which is no link"
SPOOL = "in the spool of an object store, a folder of this user's own cache"
STORED = "in the object store that the user named"
STREAM = "opens no path, but /dev/null or what is open already"
ALLOWED = {
    ("planner/system/stdout_guard.py", "open"): STREAM,
    ("planner/system/stdout_guard.py", "fdopen"): STREAM,
    ("planner/system/stdout_guard.py", "os.open"): STREAM,
    ("runtime/run/run_folder.py", "mkdir"): NAMED,
    ("runtime/run/preemption.py", "mkdir"): NAMED,
    ("meshwright/cli/reference.py", "mkdir"): NAMED,
    ("planner/catalog/machine_figures.py", "mkdir"): NAMED,
    ("planner/catalog/machine_figures.py", "os.open"): LOCK,
    ("meshwright/launch/plan_script.py", "mkdir"): NAMED,
    ("meshwright/launch/plan_script.py", "unlink"): OURS,
    ("profiler/machine.py", "NamedTemporaryFile"): NEW,
    ("profiler/profile.py", "rmtree"): OURS,
    ("profiler/profile.py", "unlink"): OURS,
    ("profiler/start_ranks.py", "TemporaryDirectory"): NEW,
    ("runtime/run/environment.py", "mkdir"): NEW,
    ("runtime/run/environment.py", "rmtree"): NEW,
    ("profiler/start_ranks.py", "mkdir"): NEW,
    ("runtime/resilience/node_agent.py", "link"): OURS,  # the name must be new
    ("runtime/resilience/node_agent.py", "unlink"): OURS,
    ("runtime/run/authenticated_channel.py", "mkdir"): HOME,
    ("runtime/run/authenticated_channel.py", "os.open"): HOME,
    ("runtime/run/authenticated_channel.py", "link"): HOME,
    ("runtime/run/authenticated_channel.py", "unlink"): HOME,
    ("runtime/run/authenticated_channel.py", "fdopen"): HOME,
    ("runtime/resilience/heartbeat.py", "truncate"): OURS,
    ("runtime/resilience/heartbeat.py", "open"): OURS,
    ("runtime/resilience/shared_memory.py", "truncate"): OURS,
    ("runtime/resilience/shared_memory.py", "open"): OURS,
    ("runtime/resilience/shared_memory.py", "mkdir"): PRIVATE,
    ("runtime/resilience/shared_memory.py", "os.open"): PRIVATE,
    ("runtime/resilience/shared_memory.py", "write_text"): PRIVATE,
    ("runtime/resilience/shared_memory.py", "rmtree"): OURS,
    ("runtime/resilience/shared_memory.py", "unlink"): OURS,
    ("runtime/checkpoint/object_store.py", "mkdir"): SPOOL,
    ("runtime/checkpoint/object_store.py", "rmtree"): SPOOL,
    ("runtime/checkpoint/object_store.py", "rename"): SPOOL,
    ("runtime/checkpoint/object_store.py", "unlink"): SPOOL,
    ("runtime/checkpoint/object_store.py", "copyfile"): SPOOL,
    ("runtime/checkpoint/object_store.py", "makedirs"): STORED,
    ("runtime/checkpoint/object_store.py", "open"): STORED,
    ("runtime/resilience/state_rescue.py", "mkdir"): NAMED,
    ("runtime/resilience/state_rescue.py", "rename"): OURS,
    ("runtime/resilience/state_rescue.py", "rmtree"): OURS,
    ("runtime/resilience/state_rescue.py", "unlink"): OURS,
    ("runtime/checkpoint/checkpoint.py", "copyfile"): NEW,
    ("runtime/checkpoint/checkpoint.py", "rename"): OURS,
    ("runtime/checkpoint/checkpoint.py", "rmtree"): OURS,
    ("runtime/data/corpus.py", "mkdir"): NAMED,
    ("runtime/data/corpus.py", "mkdtemp"): NEW,
    ("planner/documents/document.py", "truncate"): OURS,  # half of a line
    ("runtime/data/corpus.py", "open"): NEW,
    ("runtime/data/corpus.py", "np.save"): NEW,
    ("runtime/data/corpus.py", "write_text"): NEW,
    ("runtime/data/corpus.py", "truncate"): NEW,
    ("runtime/data/corpus.py", "rename"): OURS,
    ("runtime/data/corpus.py", "rmtree"): OURS,
    ("runtime/checkpoint/weight_export.py", "mkdir"): NAMED,
    ("runtime/checkpoint/weight_export.py", "copyfile"): NEW,
    ("runtime/checkpoint/weight_export.py", "save_file"): NEW,
    ("runtime/checkpoint/weight_export.py", "write_text"): NEW,
    ("runtime/checkpoint/weight_export.py", "rename"): OURS,
    ("runtime/checkpoint/weight_export.py", "unlink"): OURS,
    ("runtime/checkpoint/weight_export.py", "rmtree"): OURS,
    ("runtime/run/locks_and_signals.py", "mkdir"): NAMED,
    ("runtime/launch/rank_config.py", "mkdir"): NAMED,
    ("runtime/launch/rank_config.py", "unlink"): OURS,
    ("runtime/run/preemption.py", "unlink"): OURS,
    ("runtime/run/scale_up.py", "unlink"): OURS,
    ("runtime/run/run_folder.py", "unlink"): OURS,
    ("runtime/run/record_segments.py", "unlink"): OURS,
    ("runtime/run/record_segments.py", "rename"): OURS,
    ("runtime/run/record_segments.py", "write_bytes"): OURS,
    ("runtime/models/safetensors_weights.py", "save_file"): NEW,
    ("runtime/models/safetensors_weights.py", "write_text"): NEW,
    ("runtime/launch/script_run.py", "mkdir"): NAMED,
    ("runtime/launch/transient_errors.py", "unlink"): OURS,
    ("runtime/engine/engine_state.py", "torch.save"): NEW,  # into memory
    ("runtime/checkpoint/storage.py", "open"): NEW,
    ("runtime/checkpoint/writer.py", "rmtree"): OURS,
    ("runtime/checkpoint/commit_recovery.py", "rmtree"): OURS,
    ("runtime/checkpoint/storage.py", "mkdir"): NEW,
}
METHODS = {
    "write_text", "write_bytes", "touch", "mkdir", "rename", "symlink_to", "hardlink_to", "unlink",
    "rmdir", "chmod", "truncate", "mkdtemp", "mkstemp", "NamedTemporaryFile", "TemporaryDirectory",
    "TemporaryFile", "copyfile", "copytree", "rmtree", "makedirs", "link", "save_file", "tofile",
    "FileHandler", "extractall", "savez", "savetxt",
}  # fmt: skip
"""Whatever they are called on."""
OF_MODULES = {
    "os.replace", "os.remove", "os.renames", "os.mkfifo", "os.mknod", "os.symlink", "os.open",
    "os.chown", "os.removedirs", "shutil.copy", "shutil.copy2", "shutil.move", "shutil.chown",
    "shutil.unpack_archive", "torch.save", "np.save", "numpy.save",
}  # fmt: skip
WORDS = re.compile("|".join(sorted({"open", "replace"} | METHODS | OF_MODULES)))
LAST = {"open", "fdopen", "replace"} | METHODS | {name.rpartition(".")[2] for name in OF_MODULES}
"""Names of calls that may write, without what they are called on."""


def written(file: Path) -> Iterator[tuple[str, int]]:
    """Yield what a file calls that writes, removes or renames files, with the line."""
    text = file.read_text()
    if not WORDS.search(text):
        return
    nodes = list(ast.walk(ast.parse(text)))
    ours = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        and node.module
        and node.module.startswith("meshwright.planner")
        for alias in node.names
    } | {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    for node in nodes:
        if isinstance(node, ast.Call) and last_name(node.func) in LAST:
            of, _, name = ast.unparse(node.func).rpartition(".")
            if (of or name) not in ours | {"document"} and _is_write(node, of, name):
                yield (f"{of}.{name}" if f"{of}.{name}" in OF_MODULES else name), node.lineno


def last_name(called: ast.expr) -> str:
    """Return a function's name without what it is an attribute of, empty if it has none."""
    match called:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def _is_write(call: ast.Call, of: str, name: str) -> bool:
    if f"{of}.{name}" == "os.open":
        return _writes(ast.unparse(call))
    if name in ("open", "fdopen"):
        method = name == "open" and of not in ("", "io")
        return of not in ("Corpus", "checksums") and _mode(call, method=method)
    if name == "replace":  # of text it has two arguments
        return of == "os" or (len(call.args) == 1 and not call.keywords)
    return name in METHODS or f"{of}.{name}" in OF_MODULES


def _writes(call: str) -> bool:
    return any(flag in call for flag in ("O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "flags"))


def _mode(call: ast.Call, *, method: bool) -> bool:
    """Whether a call of open() has a mode that writes, or one that is not said."""
    given = [keyword.value for keyword in call.keywords if keyword.arg == "mode"]
    position = 0 if method else 1
    given += call.args[position : position + 1]
    if not given:
        return False
    mode = given[0]
    return not isinstance(mode, ast.Constant) or bool(set(str(mode.value)) & set("wax+"))


def test_no_other_place_writes_files() -> None:
    places = {
        (name, what): line
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        if (name := str(file.relative_to(ROOT))) not in (GUARD, "meshwright/cli/demo.py")
        for what, line in written(file)
    }

    new = {f"{name}:{line} {what}" for (name, what), line in places.items()
           if (name, what) not in ALLOWED}  # fmt: skip
    assert new == set(), "write by planner/system/safe_files.py, or say here why it is safe"
    assert set(ALLOWED) <= set(places), "no longer written there"


@pytest.mark.parametrize(
    "code",
    [
        "open(p, 'w')", "open(p, mode='ab')", "p.open('x')", "p.open('r+b')", "open(p, m)",
        "os.open(p, os.O_WRONLY | os.O_CREAT)", "p.write_text('a')", "p.write_bytes(b'')",
        "os.replace(a, b)", "p.replace(q)", "shutil.copy(a, b)", "shutil.rmtree(p)", "p.mkdir()",
        "os.makedirs(p)", "p.touch()", "torch.save(s, p)", "np.save(p, a)", "save_file(t, p)",
        "os.fdopen(h, 'w')", "logging.FileHandler(p)", "tempfile.mkstemp()", "a.tofile(p)",
    ],
)  # fmt: skip
def test_the_walk_sees(code: str, tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text(code)

    assert list(written(file))


@pytest.mark.parametrize(
    "code",
    ["open(p)", "p.open('rb')", "os.open(p, os.O_RDONLY)", "s.replace('a', 'b')", "copy.copy(x)",
     "from meshwright.planner.documents.document import write_text\nwrite_text('a', p)"],
)  # fmt: skip
def test_the_walk_passes(code: str, tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text(code)

    assert list(written(file)) == []


# What lies there ---------------------------------------------------------------------------------

PRECIOUS = "what a user has elsewhere"


def link(path: Path, precious: Path) -> None:
    path.symlink_to(precious)


def hard_link(path: Path, precious: Path) -> None:
    path.hardlink_to(precious)


def dangling(path: Path, precious: Path) -> None:
    path.symlink_to(precious.with_name("made-through-a-link"))


def pipe(path: Path, precious: Path) -> None:
    os.mkfifo(path)


def device(path: Path, precious: Path) -> None:
    path.symlink_to("/dev/full")


def folder(path: Path, precious: Path) -> None:
    path.mkdir()


def linked_parent(path: Path, precious: Path) -> None:
    path.parent.rmdir()
    path.parent.symlink_to(precious.parent)


TRAPS = (link, hard_link, dangling, pipe, device, folder)
Trap = Callable[[Path, Path], None]


@pytest.fixture
def precious(tmp_path: Path) -> Iterator[Path]:
    """A file of the user in a folder of its own, which ends as it was."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    file = elsewhere / "thesis.txt"
    file.write_text(PRECIOUS)
    yield file
    assert file.read_text() == PRECIOUS
    assert [path.name for path in elsewhere.iterdir()] == [file.name]


def lock(path: Path) -> None:
    with alone_in(path.parent):
        pass


def log(path: Path) -> None:
    guarded_files.open_below(path, within=path.parents[1]).close()


def metrics(path: Path) -> None:
    record = StepRecord(step=1, loss=1.0, grad_norm=1.0, step_s=1.0, samples_per_s=1.0, epoch=0)
    run.append_record(record, path)


WRITES: dict[Callable[[Path], None], str] = {
    lock: "run/.lock",
    log: "run/rank-00000.log",
    metrics: "run/metrics.jsonl",
}


@pytest.mark.parametrize(
    ("write", "trap"),
    [*((write, trap) for write in WRITES for trap in TRAPS), (log, linked_parent)],
    ids=lambda function: function.__name__,
)
def test_a_trap_in_a_received_folder_is_refused_in_words(
    write: Callable[[Path], None], trap: Trap, tmp_path: Path, precious: Path
) -> None:
    path = tmp_path / WRITES[write]
    path.parent.mkdir()
    trap(path, precious)

    with pytest.raises(DocumentError, match="remove it, or name another folder") as refused:
        write(path)

    assert refused.value.file == str(path)


@pytest.mark.parametrize("trap", [link, hard_link, dangling, device], ids=lambda t: t.__name__)
def test_a_document_takes_the_name_of_a_link_and_not_its_place(
    trap: Trap, tmp_path: Path, precious: Path
) -> None:
    path = tmp_path / "plan.yaml"
    trap(path, precious)

    write_text("ours", path)

    assert stat.S_ISREG(path.lstat().st_mode)
    assert path.read_text() == "ours"


def test_a_pipe_that_nobody_reads_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    os.mkfifo(path)

    with pytest.raises(DocumentError, match="cannot be written"):
        write_text("ours", path)


def test_a_pipe_that_is_read_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    write_text("ours", path)

    assert os.read(reading, 100) == b"ours"
    os.close(reading)


@pytest.mark.parametrize("name", ["logs", "ranks", "flight", "tensorboard"])
def test_a_linked_folder_of_a_run_is_refused(name: str, tmp_path: Path, precious: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(precious.parent)

    with pytest.raises(DocumentError, match="is a symbolic link; remove it"):
        guarded_files.folder_within(tmp_path / "run", name, emptied_of="*")


def test_a_run_deletes_its_own_files_of_a_folder_alone(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    for name in ("rank-00000.log", "diary.txt"):
        (logs / name).write_text("")

    guarded_files.folder_within(tmp_path, "logs", emptied_of="rank-*")

    assert [path.name for path in logs.iterdir()] == ["diary.txt"]


@pytest.mark.parametrize("trap", [link, pipe, device], ids=lambda trap: trap.__name__)
def test_the_steps_of_a_received_run_are_read_from_a_file_alone(
    trap: Trap, tmp_path: Path, precious: Path
) -> None:
    trap(tmp_path / "metrics.jsonl", precious)

    with pytest.raises(DocumentError, match="cannot be read"):
        run.forget_steps_after(0, tmp_path / "metrics.jsonl")
