"""Object stores: checkpoints of nodes that share no folder (s3://, gs://, hf:// and others).

What fsspec opens is named as the folder of checkpoints.  Each node has a folder of its own instead,
the spool, where its ranks write as they would write elsewhere; each rank then sends its files, and
the one that is rank 0 the last of them, by which a checkpoint counts:

    STORE/
    ├── step-000030/            the files of a checkpoint; meta.json is put last, and deleted first
    ├── parts/step-000040.RUN/  what nodes have of one whose ranks have died
    ├── book/                   plans for fewer devices
    ├── run/                    events, metrics and reports, renewed while the run lives
    └── epochs/                 decisions of a run on several nodes

What does not answer is asked again for PATIENCE_S; nobody waits for that but the next save.
Nothing here imports torch, and fsspec only where a store is named.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from meshwright.planner.catalog.machine_figures import cache_folder
from meshwright.planner.errors import LaunchError, MeshwrightError
from meshwright.planner.system.safe_files import replace_file
from meshwright.runtime.checkpoint import checkpoint, commit_recovery
from meshwright.runtime.checkpoint import shard_manifest as parts
from meshwright.runtime.checkpoint.checkpoint import META
from meshwright.runtime.run.environment import STORE_VARIABLE

PATIENCE_S = 900.0
"""Seconds for which requests to a store that does not answer are repeated."""
START_PATIENCE_S = 120.0
"""The same where a run begins: an address that is wrong should not cost a quarter of an hour."""
RECORDS_S = 30.0
"""Seconds between two looks for records of the run that have changed."""
RECORDS = ("*.jsonl", "report.json", "plan.yaml", "model.yaml", "prediction.yaml", "records/*",
           "incidents/*/*")  # fmt: skip
ANSWER_S = 5.0
"""The same where what is there is only told."""
_LEAST_S, _MOST_S = 0.5, 10.0
"""Between two tries."""
_ADDRESS = re.compile(r"([a-z][a-z0-9+]*):/+(?!/)(.+)", re.DOTALL)
_NO_STORES = frozenset(
    {"memory", "http", "https", "data", "blockcache", "filecache", "simplecache"}
)
"""Kinds of storage that fsspec opens but that do not keep data, or that it cannot write."""
_STEP = re.compile(r"step-(\d{6,})")
_FINAL = (PermissionError, NotImplementedError, ValueError)
"""Errors that another try does not change."""
_S3 = {"connect_timeout": 5, "read_timeout": 30, "retries": {"max_attempts": 1}}
Say = Callable[[str], object]
_T = TypeVar("_T")


def address_of(folder: Path | str | None) -> str | None:
    """Return the address of a store, None where a folder is named.

    Raises LaunchError for an address that stores nothing.

    >>> address_of(Path("s3://bucket/run")), address_of("saved"), address_of(Path("/a/b"))
    ('s3://bucket/run', None, None)
    """
    match = None if folder is None else _ADDRESS.fullmatch(str(folder))
    if folder is not None and re.fullmatch(r"[a-z][a-z0-9+]+:/*", str(folder)):
        raise LaunchError(f"{folder}: names no bucket; write s3://BUCKET/PATH")
    if match is None:
        return None
    if match[1] in _NO_STORES:
        raise LaunchError(
            f"{match[1]}:// keeps nothing for other processes; name a store that is written to, "
            "as s3://BUCKET/PATH"
        )
    from_root = "/" if match[1] in ("file", "local") else ""
    return f"{match[1]}://{from_root}{match[2].rstrip('/')}"


def spool_of(address: str) -> Path:
    """Return the folder of this node where checkpoints lie before they are sent."""
    key = hashlib.sha256(address.encode()).hexdigest()[:16]
    return cache_folder() / "stores" / key


def store_of(folder: Path) -> ObjectStore | None:
    """Return the store whose spool a folder is, in this launch; None for any other folder."""
    address = os.environ.get(STORE_VARIABLE)
    is_spool = address is not None and folder.resolve() == spool_of(address).resolve()
    return ObjectStore(address) if address is not None and is_spool else None


class ObjectStore:
    """The objects stored below an address, by name."""

    def __init__(self, address: str) -> None:
        """Raises LaunchError where nothing is installed that opens it."""
        self.address = address
        kind = address.partition(":")[0]
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        if kind in ("s3", "s3a"):
            options["config_kwargs"] = _S3
        try:
            from fsspec.core import url_to_fs  # noqa: PLC0415 - where a store is named

            self._fs, self._root = url_to_fs(address, **options)
        except (ImportError, ValueError) as error:
            raise LaunchError(
                f"{address}: {error}; install what opens it (s3fs, gcsfs, huggingface_hub)"
            ) from None

    def _retry(
        self,
        what: str,
        action: Callable[[], _T],
        *,
        is_read: bool = False,
        patience_s: float | None = None,
    ) -> _T:
        """Return what an action returns, tried again for a while where it fails.

        Raises LaunchError in the end; FileNotFoundError where something `is_read` that is missing.
        """
        until_s = time.monotonic() + (PATIENCE_S if patience_s is None else patience_s)
        wait_s = _LEAST_S
        while True:
            try:
                return action()
            except FileNotFoundError:
                if is_read:
                    raise
                raise LaunchError(f"{self.address}: is not there; make the bucket") from None
            except Exception as error:
                if isinstance(error, _FINAL) or time.monotonic() + wait_s > until_s:
                    raise LaunchError(
                        f"{self.address}: {what} failed: {checkpoint.short(error)}; look whether "
                        "the store answers, and at its keys"
                    ) from error
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, _MOST_S)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def put(self, file: Path, name: str, *, patience_s: float | None = None) -> None:
        """Store a file; what had the name before is replaced."""
        self._retry(
            f"storing {name}",
            lambda: self._upload(file.read_bytes, file, name),
            patience_s=patience_s,
        )

    def _upload(self, content: Callable[[], bytes], file: Path | None, name: str) -> None:
        path = self._path(name)
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        if file is None:
            self._fs.pipe_file(path, content())
        else:
            self._fs.put_file(str(file), path)

    def put_text(self, text: str, name: str) -> None:
        """Store a text; what had the name before is replaced."""
        self._retry(f"storing {name}", lambda: self._upload(text.encode, None, name))

    def create(self, text: str, name: str) -> bool:
        """Store a text under a name that nothing has; say whether it was so."""
        path = self._path(name)

        def write() -> bool:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            try:
                with self._fs.open(path, "xb") as file:
                    file.write(text.encode())
            except (NotImplementedError, ValueError):  # it cannot be said there
                if self._fs.exists(path):
                    return self.text(name) == text
                self._fs.pipe_file(path, text.encode())
            except FileExistsError:
                return self.text(name) == text  # an answer to an earlier try was lost
            except OSError as error:
                if "PreconditionFailed" in str(error) or "pre-conditions" in str(error):
                    return self.text(name) == text
                raise
            return True

        return self._retry(f"storing {name}", write)

    def get(self, name: str, file: Path) -> None:
        """Have a stored file on the disk, whole or not at all."""
        hidden = file.with_name(f".{file.name}.{os.getpid()}")

        def read() -> None:
            self._fs.get_file(self._path(name), str(hidden))
            hidden.rename(file)

        try:
            self._retry(f"reading {name}", read, is_read=True)
        finally:
            hidden.unlink(missing_ok=True)

    def text(self, name: str, *, most: int = 2**24) -> str:
        """Return a stored text; FileNotFoundError where there is none."""
        content = self._retry(
            f"reading {name}",
            lambda: self._fs.cat_file(self._path(name), start=0, end=most),
            is_read=True,
        )
        return bytes(content).decode(errors="replace")

    def sizes(self, under: str = "", *, patience_s: float | None = None) -> dict[str, int]:
        """Return the bytes of what is stored below a name, by the rest of its name."""
        root = self._path(under)

        def find() -> dict[str, int]:
            self._fs.invalidate_cache()
            if not self._fs.exists(root):
                return {}
            found = self._fs.find(root, detail=True)
            return {
                name[len(root) :].lstrip("/"): int(about["size"] or 0)
                for name, about in found.items()
            }

        return self._retry(f"listing {under or 'it'}", find, patience_s=patience_s)

    def remove(self, name: str) -> None:
        """Delete what has a name, or is below it."""

        def delete() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(self._path(name), recursive=True)

        self._retry(f"deleting {name}", delete)

    def check(self) -> None:
        """Raise LaunchError where it cannot be written to."""
        self._retry(
            "storing a first text",
            lambda: self._upload(lambda: b"checkpoints of meshwright", None, "about.txt"),
            patience_s=START_PATIENCE_S,
        )

    # --- checkpoints ---

    def steps(self, *, patience_s: float | None = None) -> list[int]:
        """Return the steps of checkpoints that count, the newest last."""
        names = self.sizes(patience_s=patience_s)
        found = (_STEP.fullmatch(name.partition("/")[0]) for name in names if name.endswith(META))
        return sorted({int(match[1]) for match in found if match})

    def begin(self, name: str) -> None:
        """Let what has the name of a checkpoint count no more, as others take its place."""
        self.remove(f"{name}/{META}")

    def send(self, folder: Path, name: str, files: Sequence[str]) -> None:
        """Store files of a checkpoint; with its META it counts."""
        for file in sorted(files, key=lambda file: file == META):
            self.put(folder / file, f"{name}/{file}")

    def prune(self, keep: int) -> None:
        """Delete all but the last checkpoints, and parts of those that never counted."""
        steps = self.steps()
        for step in steps[:-keep]:
            name = f"step-{step:06}"
            self.begin(name)  # half deleted it would pass for damaged
            self.remove(name)
        for name in {name.partition("/")[0] for name in self.sizes("parts")}:
            match = _STEP.match(name)
            if match and steps and int(match[1]) <= steps[-1]:
                self.remove(f"parts/{name}")


# --- the spool ---------------------------------------------------------------------------------


@contextlib.contextmanager
def spooled(folder: Path | None) -> Iterator[Path | None]:
    """Yield the folder of checkpoints on this node; where a store is named that is its spool.

    What is in the spool at the end and not in the store is sent.
    """
    address = address_of(folder)
    if address is None:
        yield folder
        return
    store, spool = ObjectStore(address), spool_of(address)
    store.check()
    spool.mkdir(parents=True, exist_ok=True)
    before = os.environ.get(STORE_VARIABLE)
    os.environ[STORE_VARIABLE] = address
    try:
        yield spool
    finally:
        if before is None:
            del os.environ[STORE_VARIABLE]
        else:
            os.environ[STORE_VARIABLE] = before


def send_saved(spool: Path, *, say: Say) -> None:
    """Send what this node has and the store has not: whole checkpoints, and parts of others.

    Whoever finds the parts of all ranks has the checkpoint.
    """
    store = store_of(spool)
    if store is None:
        return
    steps = store.steps()
    last = steps[-1] if steps else 0
    newest = checkpoint.newest(spool)
    if newest is not None and checkpoint.progress(newest).step > last:
        say(f"{newest.name} is sent to {store.address}")
        _send_whole(store, newest)
        return
    for records in sorted(spool.glob(f".step-*{parts.SUFFIX}")):
        name = records.name.removesuffix(parts.SUFFIX).removeprefix(".")
        match = _STEP.match(name)
        if match and int(match[1]) > last:
            _exchange_parts(store, spool, records, name, say=say)


def _send_whole(store: ObjectStore, folder: Path) -> None:
    store.begin(folder.name)
    store.send(folder, folder.name, [*checkpoint.progress(folder).files, META])


def _exchange_parts(store: ObjectStore, spool: Path, records: Path, name: str, *, say: Say) -> None:
    """Store this node's parts of a checkpoint; complete it where all others are there."""
    temporary = records.with_name(f".{name}")
    target = spool / name.partition(".")[0]
    there = store.sizes(f"parts/{name}")
    for record in sorted(records.glob("part-*.json")):
        if f"records/{record.name}" in there:
            continue
        with contextlib.suppress(MeshwrightError):
            part = parts.read_one(records, int(record.stem.removeprefix("part-")))
            for file in part.files:
                store.put(temporary / file, f"parts/{name}/files/{file}")
            if part.rank == 0:
                store.put(records / META, f"parts/{name}/records/{META}")
            store.put(record, f"parts/{name}/records/{record.name}")
    there = store.sizes(f"parts/{name}")
    if f"records/{parts.record_of(records, 0).name}" not in there:
        return
    for stored in there:
        kind, _, file = stored.partition("/")
        place = records if kind == "records" else temporary
        if re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}", file) and not (place / file).exists():
            store.get(f"parts/{name}/{stored}", place / file)
    if commit_recovery.complete(records, target, say):
        _send_whole(store, target)


def fetch_newest(spool: Path, *, say: Say) -> None:
    """Have the newest checkpoint of the store in the spool, and no newer one."""
    store = store_of(spool)
    if store is None:
        return
    for step in reversed(store.steps()):
        target = spool / f"step-{step:06}"
        try:
            _fetch(store, target, say=say)
        except (MeshwrightError, FileNotFoundError) as error:
            say(f"warning: {store.address}/{target.name}: {error}; the one before it is taken")
            shutil.rmtree(target, ignore_errors=True)
            continue
        break
    else:
        step = 0
    for path in checkpoint.all_steps(spool):
        if path.name > f"step-{step:06}":  # parts of one that never counted
            shutil.rmtree(path, ignore_errors=True)


def _fetch(store: ObjectStore, target: Path, *, say: Say) -> None:
    """Have a checkpoint of the store in its place."""
    hidden = target.with_name(f".{target.name}.fetched")
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir()
    try:
        replace_file(store.text(f"{target.name}/{META}"), hidden / META)
        done = checkpoint.progress(hidden)
        if any(file.startswith(".") for file in done.files):
            raise LaunchError(f"{META}: names a file that no checkpoint has; delete it")
        is_whole = target.is_dir() and checkpoint.problem(target) is None
        if is_whole and checkpoint.progress(target) == done:
            return
        say(f"{store.address}/{target.name} is fetched")
        for file, size in done.files.items():
            here = target / file
            if here.is_file() and here.stat().st_size == size:
                shutil.copyfile(here, hidden / file)  # a damaged one is found by its checksum
            else:
                store.get(f"{target.name}/{file}", hidden / file)
        wrong = checkpoint.verify(hidden)
        if wrong is not None:
            for file in done.files:
                store.get(f"{target.name}/{file}", hidden / file)
            wrong = checkpoint.verify(hidden)
        if wrong is not None:
            raise LaunchError(f"{wrong}")
        shutil.rmtree(target, ignore_errors=True)
        hidden.rename(target)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


class RecordSender:
    """Sends the records of a run to the store of its checkpoints, while a `with` block lasts.

    What has changed is sent twice a minute and at the end.  Nothing waits for a store that does not
    answer, and none of it ends a run.
    """

    def __init__(self, output: Path, spool: Path | None, *, goes_on: bool) -> None:
        """A run that `goes_on` has the records of the nodes where it began, if it has none."""
        self._output, self._goes_on = output, goes_on
        self._store = None if spool is None else store_of(spool)
        self._sent: dict[str, tuple[int, int]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._send_often, name="records", daemon=True)

    def __enter__(self) -> RecordSender:
        if self._store is not None:
            if self._goes_on:
                self._fetch(self._store)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._store is not None:
            self._ended.set()
            self._thread.join(2 * ANSWER_S)
            self._send(self._store)

    def _send_often(self) -> None:
        assert self._store is not None
        while not self._ended.wait(RECORDS_S):
            self._send(self._store)

    def _send(self, store: ObjectStore) -> None:
        """Store records that have changed since they were sent."""
        with contextlib.suppress(OSError, MeshwrightError):
            for pattern in RECORDS:
                for file in sorted(self._output.glob(pattern)):
                    status = file.stat()
                    state = status.st_mtime_ns, status.st_size
                    name = str(file.relative_to(self._output))
                    if self._sent.get(name) != state and stat.S_ISREG(file.lstat().st_mode):
                        store.put(file, f"run/{name}", patience_s=ANSWER_S)
                        self._sent[name] = state

    def _fetch(self, store: ObjectStore) -> None:
        """Have the records of a run that began on another node; what is here is the newer."""
        if any((self._output / name).exists() for name in ("events.jsonl", "records")):
            return
        with contextlib.suppress(OSError, MeshwrightError):
            for name in store.sizes("run", patience_s=ANSWER_S):
                if re.fullmatch(r"([A-Za-z0-9_-][A-Za-z0-9_.-]*/?)+", name):
                    file = self._output / name
                    file.parent.mkdir(parents=True, exist_ok=True)
                    store.get(f"run/{name}", file)


def send_book(spool: Path) -> None:
    """Store the plans for fewer devices that this node has solved."""
    store = store_of(spool)
    if store is not None:
        there = store.sizes("book")
        for file in (spool / "book").rglob("*"):
            name = str(file.relative_to(spool / "book"))
            if file.is_file() and not file.name.startswith(".") and name not in there:
                store.put(file, f"book/{name}")


def fetch_book(spool: Path) -> None:
    """Have the plans for fewer devices that another node has solved."""
    store = store_of(spool)
    if store is not None:
        for name in store.sizes("book"):
            file = spool / "book" / name
            if re.fullmatch(r"([A-Za-z0-9_-][A-Za-z0-9_.-]*/?)+", name) and not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                store.get(f"book/{name}", file)


def newest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint in the store of a spool; 0 without one or answer."""
    store = store_of(folder)
    if store is not None:
        with contextlib.suppress(MeshwrightError):
            return max(store.steps(patience_s=ANSWER_S), default=0)
    return 0


def newest_name(folder: Path) -> str | None:
    """Return the address of the newest checkpoint in a spool's store, if it answers."""
    step = newest_step(folder)
    return f"{os.environ[STORE_VARIABLE]}/step-{step:06}" if step else None


def shown(path: Path | str) -> str:
    """Return a path as a user knows it: what is in the spool is in the store."""
    address = os.environ.get(STORE_VARIABLE)
    text = str(path)
    return text if address is None else text.replace(str(spool_of(address)), address)
