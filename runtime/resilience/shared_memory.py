"""Slots: memory of a launcher that its ranks write their state into, and that outlives them.

Each rank has two, so that one is whole while the other is written.  As many are there for each rank
of another node, the ward, whose launcher sends what its ranks have written
(`runtime.resilience.replication`).  A slot has a label, a JSON object, and bytes, with checksums of
both in a header that is written last:

    MAGIC (8)  bytes of the label (8)  of the rest (8)  CRC-32 of both (4 each)  label  bytes

Where /dev/shm has room they have names there, in a folder that a launcher locks while it lives and
deletes when it leaves.  A launcher that is killed leaves them to the next one of the same folder of
checkpoints on the node, which makes a checkpoint of them (`runtime.resilience.state_rescue`):

    /dev/shm/meshwright-UID-KEY-0/      KEY is of the folder of checkpoints
    ├── .lock  about.json               whose copies they are
    ├── plan-KEY.yaml  model-KEY.yaml   what a checkpoint has beside its tensors, by plan
    └── own-000 ...  wards-000 ...      the slots

Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from meshwright.planner.documents.document import read, write
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import MeshwrightError

SLOTS = "MESHWRIGHT_SLOTS"
"""Tells each rank, as JSON, where its node's slots are."""
GENERATIONS = 2
MAGIC = b"mw-slot1"
_HEADER = struct.Struct("=8sQQII")
_KEPT = struct.Struct("=QQQQ")
"""Run, step, nanoseconds of processors, nanoseconds until it was stored."""
_ROOM_BYTES = 2**16
"""Slots grow by multiples of it: labels grow by a digit now and then, and each time that a slot
is mapped anew every page of it faults."""


SHARED = Path("/dev/shm")
ROOM = 1.25
"""Ratio of required free space to the expected bytes, for slots that have names."""
_MOST_FOLDERS = 64
_PIECE_BYTES = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyContext:
    """The parts of a checkpoint beside tensors, of a plan whose ranks made copies."""

    plan: Plan
    model: ModelGraph | None = None
    companions: Mapping[str, str] = field(default_factory=dict)
    """Files by their names in a checkpoint."""


class Slots:
    """The slots of a node; they go with this process, unless it is killed and they have names."""

    def __init__(self, checkpoints: Path | None = None, *, expected_bytes: float = 0.0) -> None:
        """With a folder of `checkpoints` they have names, where there is room for what is expected.

        That are `expected_bytes` of all slots of the node.
        """
        self._checkpoints, self._expected_bytes = checkpoints, expected_bytes
        self._folder: Path | None = None
        self._lock: int | None = None
        self._own: list[int] = []
        self._wards: list[int] = []
        self._kept: int | None = None
        self._epoch = 0
        self._has_partner = False
        self.ranks = 0
        """Number of ranks that this node has now."""
        self.contexts: dict[str, CopyContext] = {}
        """By the digest of the plan."""
        self.stays = False
        """True if named slots stay behind: their contents could not be written."""
        self._seen: tuple[dict[str, Any], NodeSlots] | None = None
        self._lacks_room = False
        """True if names could not be written anew."""

    def __enter__(self) -> Slots:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._folder is not None and not self.stays:
            shutil.rmtree(self._folder, ignore_errors=True)
        for descriptor in (*self._own, *self._wards, self._kept, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._own, self._wards, self._kept, self._lock, self._seen = [], [], None, None, None

    @property
    def place(self) -> str:
        """The location of the slots, as an error names it."""
        return "its launcher's memory" if self._folder is None else str(self._folder)

    def begin(self, *, epoch: int, wards: int, has_partner: bool) -> None:
        """Take notice of an epoch in which a ward has this number of ranks."""
        self._epoch, self._has_partner = epoch, has_partner
        self._grow(self._wards, wards, "wards")

    def environment(self, ranks: int, context: CopyContext | None = None) -> dict[str, str]:
        """Return what tells this node's ranks, by their number, where slots are.

        What a checkpoint has beside their state is in the `context`.
        """
        self.ranks = ranks
        self._grow(self._own, ranks, "own")
        if context is not None:
            self._keep_context(context)
        return {SLOTS: json.dumps(self._description())}

    def forget(self) -> None:
        """Have nothing in any slot: what is there may be damaged."""
        for descriptor in (*self._own, *self._wards):
            if os.fstat(descriptor).st_size:
                os.pwrite(descriptor, bytes(_HEADER.size), 0)

    def renew_names(self) -> str | None:
        """Write anew what was removed from the folder of the slots; return what is said of it.

        Ranks find what has taken the place of a slot at their next look.
        """
        if self._folder is None or self._checkpoints is None:
            return None
        before = self._folder
        try:
            if not self._is_removed():
                return None
            if not _is_at(self._lock, before / ".lock"):
                self._make_folder(self._checkpoints)
                _remove_unlocked(before)
            self._write_about(self._checkpoints)
            for descriptor, file in self._named_slots():
                if not _is_at(descriptor, file):
                    _move_to_new_file(descriptor, file)
            for context in self.contexts.values():
                self._keep_context(context)
        except OSError as error:
            if self._lacks_room:
                return None
            self._lacks_room = True
            return (
                f"warning: {before}: copies of state in memory were removed, and cannot be written "
                f"there again ({error.strerror}). They are lost if this launcher is killed"
            )
        self._lacks_room = False
        return f"warning: {before}: copies of state in memory were removed; they are there again"

    def _is_removed(self) -> bool:
        assert self._folder is not None
        places = [(self._lock, self._folder / ".lock"), *self._named_slots()]
        beside = [self._folder / "about.json"]
        beside += [self._folder / f"plan-{_key_of_plan(plan)}.yaml" for plan in self.contexts]
        return not (
            all(_is_at(descriptor, file) for descriptor, file in places)
            and all(file.exists() for file in beside)
        )

    def _named_slots(self) -> Iterator[tuple[int, Path]]:
        """Yield each slot with the file that it has in the folder."""
        assert self._folder is not None
        for kind, descriptors in (("own", self._own), ("wards", self._wards)):
            for number, descriptor in enumerate(descriptors):
                yield descriptor, self._folder / f"{kind}-{number:03}"

    def _take_name(self) -> None:
        """Have a folder in shared memory, if there is room for what is expected."""
        if self._checkpoints is None or self._folder is not None or self._own or self._wards:
            return
        with contextlib.suppress(OSError):
            room = os.statvfs(SHARED)
            if room.f_bavail * room.f_frsize < ROOM * self._expected_bytes:
                return
            self._make_folder(self._checkpoints)
            self._write_about(self._checkpoints)

    def _make_folder(self, checkpoints: Path) -> None:
        """Have a locked folder of one's own, in place of one that was removed."""
        for number in range(_MOST_FOLDERS):
            folder = SHARED / f"{_prefix(checkpoints)}-{number}"
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
                lock = _lock_folder(folder)
                if lock is None:
                    continue
                if self._lock is not None:
                    os.close(self._lock)
                self._lock, self._folder = lock, folder
                return
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    def _write_about(self, checkpoints: Path) -> None:
        if self._folder is not None:
            (self._folder / "about.json").write_text(json.dumps(_about(checkpoints)))

    def _keep_context(self, context: CopyContext) -> None:
        self.contexts[context.plan.digest] = context
        if self._folder is not None:
            with contextlib.suppress(OSError, MeshwrightError):
                _write_context(context, self._folder)

    def _grow(self, descriptors: list[int], ranks: int, kind: str) -> None:
        self._take_name()
        while len(descriptors) < GENERATIONS * ranks:
            if self._folder is None:
                descriptors.append(os.memfd_create("meshwright-slot"))
                continue
            file = self._folder / f"{kind}-{len(descriptors):03}"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptors.append(os.open(file, flags, 0o600))

    def _description(self) -> dict[str, Any]:
        if self._has_partner and self._kept is None:
            self._kept = os.memfd_create("meshwright-kept")
            os.truncate(self._kept, _KEPT.size)
        return {
            "own": [_file(slot) for slot in self._own],
            "wards": [_file(slot) for slot in self._wards],
            "kept": _file(self._kept) if self._has_partner and self._kept else None,
            "epoch": self._epoch,
        }

    @property
    def node(self) -> NodeSlots:
        """All of them, as the launcher itself sees them."""
        state = self._description()
        if self._seen is None or self._seen[0] != state:
            self._seen = state, _slots_of(state)
        return self._seen[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftCopies:
    """Slots of a launcher that was killed."""

    folder: Path
    node: NodeSlots
    contexts: Mapping[str, CopyContext]


@contextlib.contextmanager
def left_copies(
    checkpoints: Path, is_newer: Callable[[NodeSlots, Path], bool]
) -> Iterator[list[LeftCopies]]:
    """Yield what killed launchers of a folder of checkpoints left on this node, locked for us.

    What launchers left of other runs is deleted where their folder of checkpoints is gone, or
    nothing of it `is_newer` than what is there: these runs have come further elsewhere.
    """
    with contextlib.ExitStack() as held:
        leftovers = []
        for folder in sorted(SHARED.glob(f"meshwright-{os.getuid()}-*")):
            with contextlib.suppress(OSError, ValueError, KeyError):
                status = folder.lstat()
                if folder.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
                    continue  # somebody else could have written there
                lock = _lock_folder(folder)
                if lock is None:
                    continue
                held.callback(os.close, lock)
                about = json.loads((folder / "about.json").read_text())
                if about != _about(Path(about["checkpoints"])):
                    shutil.rmtree(folder, ignore_errors=True)
                elif folder.name.startswith(f"{_prefix(checkpoints)}-"):
                    leftovers.append(_left_copies(folder))
                elif not is_newer(_left_copies(folder).node, Path(about["checkpoints"])):
                    shutil.rmtree(folder, ignore_errors=True)
        yield leftovers


def _left_copies(folder: Path) -> LeftCopies:
    names = {kind: sorted(map(str, folder.glob(f"{kind}-*"))) for kind in ("own", "wards")}
    node = NodeSlots(own=_by_rank(names["own"]), wards=_by_rank(names["wards"]))
    contexts = {}
    for file in folder.glob("plan-*.yaml"):
        with contextlib.suppress(MeshwrightError, OSError, ValueError):
            plan = read(Plan, file)
            model = folder / file.name.replace("plan-", "model-")
            companions = folder / file.name.replace("plan-", "beside-").replace(".yaml", ".json")
            contexts[plan.digest] = CopyContext(
                plan=plan,
                model=read(ModelGraph, model) if model.exists() else None,
                companions=json.loads(companions.read_text()),
            )
    return LeftCopies(folder=folder, node=node, contexts=contexts)


def _write_context(context: CopyContext, folder: Path) -> None:
    key = _key_of_plan(context.plan.digest)
    (folder / f"beside-{key}.json").write_text(json.dumps(dict(context.companions)))
    if context.model is not None:
        write(context.model, folder / f"model-{key}.yaml")
    write(context.plan, folder / f"plan-{key}.yaml")


def _key_of_plan(digest: str) -> str:
    return hashlib.sha256(digest.encode()).hexdigest()[:16]


def _remove_unlocked(folder: Path) -> None:
    """Delete what is left of a folder, where no launcher has taken its place."""
    if folder.is_dir() and (lock := _lock_folder(folder)) is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _is_at(descriptor: int | None, file: Path) -> bool:
    """Say whether an open file still has its name."""
    if descriptor is None:
        return False
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), os.lstat(file))
    return False


def _move_to_new_file(descriptor: int, file: Path) -> None:
    """Let a descriptor be of a new file with the same content; OSError where there is no room.

    A rank may write meanwhile: what it began before is taken over once more, and what it begins
    behind is in the new file, as it looks again once it has written (`StateSlot.write`).
    """
    file.unlink(missing_ok=True)
    new = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    old = os.dup(descriptor)
    try:
        header = _copy_content(old, new)
        os.dup2(new, descriptor, inheritable=False)
        later = os.pread(old, _HEADER.size, 0)
        if later != header and os.pread(new, _HEADER.size, 0) == header:
            _copy_content(old, new)
    except OSError:
        file.unlink(missing_ok=True)
        raise
    finally:
        os.close(old)
        os.close(new)


def _copy_content(source: int, target: int) -> bytes:
    """Copy a slot, its header last; return the header."""
    size = os.fstat(source).st_size
    if not size:
        return b""
    _take_room(target, size)
    header = os.pread(source, _HEADER.size, 0)
    for at in range(_HEADER.size, size, _PIECE_BYTES):
        os.pwrite(target, os.pread(source, min(_PIECE_BYTES, size - at), at), at)
    os.pwrite(target, header, 0)
    return header


def _prefix(checkpoints: Path) -> str:
    """Return how the names of folders begin that have copies of a run."""
    key = hashlib.sha256(os.fsencode(checkpoints.resolve())).hexdigest()[:16]
    return f"meshwright-{os.getuid()}-{key}"


def _about(checkpoints: Path) -> dict[str, Any]:
    """Return whose copies they are: a folder that was deleted and made anew is another one."""
    status = checkpoints.stat() if checkpoints.is_dir() else None
    return {
        "checkpoints": str(checkpoints.resolve()),
        "inode": None if status is None else [status.st_dev, status.st_ino],
    }


def _lock_folder(folder: Path) -> int | None:
    """Return the descriptor of a folder's lock, None where a launcher that lives has it."""
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def _file(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"


class Kept:
    """A node launcher's record for its ranks of which of their copies the partner has, too."""

    def __init__(self, file: Path) -> None:
        with file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), _KEPT.size)

    def write_step(self, run: str, step: int, *, processor_s: float, stored_s: float = 0.0) -> None:
        """Say that copies of a step are there, and what sending the last ones took."""
        seconds = round(processor_s * 1e9), round(stored_s * 1e9)
        self._memory[:] = bytes(_KEPT.size)
        self._memory[:] = _KEPT.pack(int(run, 16), step, *seconds)

    def has_copy(self, run: str, step: int) -> bool:
        """Return whether the partner has a copy of a step."""
        # Read twice: a reader may see half of what is being written.
        return all(_KEPT.unpack(self._memory[:])[:2] == (int(run, 16), step) for _ in range(2))

    @property
    def processor_s(self) -> float:
        """Seconds of processors that copies of all ranks of the node took, the last time."""
        return float(_KEPT.unpack(self._memory[:])[2]) / 1e9

    @property
    def stored_s(self) -> float:
        """Seconds from a copy until the partner had it, the last time."""
        return float(_KEPT.unpack(self._memory[:])[3]) / 1e9


class StateSlot:
    """One slot, as a rank writes and reads it.

    Its memory is mapped once and kept: to map it for each copy takes longer than the copy.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._memory: mmap.mmap | None = None
        self._mapped: os.stat_result | None = None
        """State of the file that is mapped."""
        self._seen: tuple[bytes, dict[str, Any] | None] = b"", None
        self.problem: str | None = None
        """Reason why its memory could not be read."""

    @property
    def is_replaced(self) -> bool:
        """True if another file has taken the place of the one that is mapped."""
        try:
            return self._mapped is not None and not os.path.samestat(
                self._file.stat(), self._mapped
            )
        except OSError:
            return False  # its launcher is gone, and what is mapped stays

    def _map_memory(self, least: int = 0) -> mmap.mmap | None:
        """Return its memory, of this many bytes at least; None where it has none."""
        if (
            self._memory is None
            or self._memory.size() != len(self._memory)
            or (len(self._memory) < least)
            or self.is_replaced
        ):
            with self._file.open("r+b") as opened:
                self._mapped = os.fstat(opened.fileno())
                size = self._mapped.st_size
                if size < least:
                    _take_room(opened.fileno(), -(-least // _ROOM_BYTES) * _ROOM_BYTES)
                # Views of a shorter one keep it as long as they are there.
                self._memory = mmap.mmap(opened.fileno(), 0) if max(size, least) else None
        return self._memory

    def _readable_memory(self) -> mmap.mmap | None:
        """Return its memory; None where it has none, or may not be read."""
        try:
            return self._map_memory()
        except OSError as error:
            self.problem = f"{self._file}: {error.strerror}"
            return None

    def write(self, label: Mapping[str, Any], pieces: Sequence[memoryview]) -> None:
        """Put in a label and bytes; until all of them are there the slot has nothing."""
        is_written = False
        while not is_written:
            code = at = 0
            with self.fill(json.dumps(label), sum(piece.nbytes for piece in pieces)) as content:
                for piece in pieces:
                    content[at : at + piece.nbytes] = piece
                    code = zlib.crc32(piece, code)
                    at += piece.nbytes
                content.commit(code)
            is_written = not self.is_replaced

    @contextlib.contextmanager
    def fill(self, label: str, size: int) -> Iterator[Filling]:
        """Let bytes be put in behind a label; what is not said to be done leaves nothing."""
        text = label.encode()
        begin = _HEADER.size + len(text)
        memory = self._map_memory(begin + size)
        assert memory is not None
        memory[: _HEADER.size] = bytes(_HEADER.size)
        memory[_HEADER.size : begin] = text
        filling = Filling(memory, begin, size)
        yield filling
        if filling.code is not None:
            codes = zlib.crc32(text), filling.code
            memory[: _HEADER.size] = _HEADER.pack(MAGIC, len(text), size, *codes)

    def label(self) -> dict[str, Any] | None:
        """Return the label of what is in it, whose bytes are not looked at; soon if it was seen."""
        memory = self._readable_memory()
        head = b"" if memory is None else memory[: _HEADER.size]
        if head != self._seen[0]:
            contents = self.contents()
            self._seen = head, None if contents is None else json.loads(contents[0])
        return self._seen[1]

    def read(self) -> tuple[dict[str, Any], memoryview] | None:
        """Return what is in it; None where nothing is, or what is there is not what was written."""
        contents = self.contents()
        if contents is None or zlib.crc32(contents[1]) != contents[2]:
            return None
        return json.loads(contents[0]), contents[1]

    def contents(self) -> tuple[str, memoryview, int] | None:
        """Return label, bytes and the checksum that was written for them, which is not checked."""
        mapped = self._readable_memory()
        if mapped is None or len(mapped) < _HEADER.size:
            return None
        memory = memoryview(mapped)
        magic, length, size, label_code, code = _HEADER.unpack_from(memory)
        begin = _HEADER.size + length
        if magic != MAGIC or begin + size > len(memory):
            return None
        text = bytes(memory[_HEADER.size : begin])
        if zlib.crc32(text) != label_code:
            return None
        return text.decode(), memory[begin : begin + size], code


def _take_room(descriptor: int, size: int) -> None:
    """Let a slot have as many bytes; OSError where there is no room, and not SIGBUS later."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.truncate(descriptor, size)


class Filling:
    """The bytes of a slot while they are written."""

    def __init__(self, memory: mmap.mmap, begin: int, size: int) -> None:
        self._memory, self._begin = memory, begin
        self.size = size
        self.code: int | None = None

    def __setitem__(self, place: slice, piece: memoryview | bytes) -> None:
        self._memory[self._begin + place.start : self._begin + place.stop] = piece

    def commit(self, code: int) -> None:
        """Say that all bytes are there, and their CRC-32."""
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSlots:
    """The slots of a node, two of each rank."""

    own: tuple[tuple[StateSlot, ...], ...]
    """By local rank."""
    wards: tuple[tuple[StateSlot, ...], ...] = ()
    """By the local rank of another node."""
    kept: Kept | None = None
    """None where no partner is."""
    epoch: int = 0


def slots_of_node(environment: Mapping[str, str]) -> NodeSlots | None:
    """Return the slots that a launcher names; None without a launcher that has some."""
    if SLOTS not in environment:
        return None
    return _slots_of(json.loads(environment[SLOTS]))


def _slots_of(state: Mapping[str, Any]) -> NodeSlots:
    return NodeSlots(
        own=_by_rank(state["own"]),
        wards=_by_rank(state["wards"]),
        kept=None if state["kept"] is None else Kept(Path(state["kept"])),
        epoch=state["epoch"],
    )


def _by_rank(names: Sequence[str]) -> tuple[tuple[StateSlot, ...], ...]:
    files = [StateSlot(Path(name)) for name in names]
    starts = range(0, len(files), GENERATIONS)
    return tuple(tuple(files[at : at + GENERATIONS]) for at in starts)
