"""Checkpoints in an object store: what counts is whole, whatever ended in the middle.

The store of every run is a folder that fsspec opens; S3 is moto's server, where it is installed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("fsspec")

from meshwright.planner.errors import LaunchError  # noqa: E402
from meshwright.runtime.checkpoint import checkpoint, object_store  # noqa: E402
from meshwright.runtime.checkpoint.object_store import ObjectStore  # noqa: E402
from meshwright.runtime.checkpoint.writer import Saver  # noqa: E402
from tests.runtime.checkpoint.test_weight_export import progress  # noqa: E402
from tests.runtime.ports import free_port  # noqa: E402
from tests.runtime.rooms import MODEL, plan_of  # noqa: E402


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ObjectStore, Path]]:
    """Yield a store and the spool of this node."""
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(object_store, "_LEAST_S", 0.0)
    monkeypatch.setattr(object_store, "_MOST_S", 0.0)
    with object_store.spooled(Path(f"file://{tmp_path}/store")) as spool:
        assert spool is not None
        yield ObjectStore(f"file://{tmp_path}/store"), spool


def save(spool: Path, step: int, *, keep: int = 2) -> None:
    saver = Saver(spool, plan=plan_of(), model=MODEL, run=f"r{step}", keep=keep)
    done = progress(plan_of(), MODEL).model_copy(update={"step": step})
    saver.save({"model.a": torch.full((4, 3), float(step))}, done)


def value(spool: Path, step: int) -> float:
    state = {"model.a": torch.zeros(4, 3)}
    checkpoint.load(spool / f"step-{step:06}", state)
    assert (state["model.a"] == state["model.a"][0, 0]).all()
    return float(state["model.a"][0, 0])


def test_the_newest_checkpoint_comes_back_to_a_node_that_has_nothing(
    stored: tuple[ObjectStore, Path],
) -> None:
    store, spool = stored
    for step in (2, 4, 6):
        save(spool, step)
    assert store.steps() == [4, 6]  # two are kept
    shutil.rmtree(spool)
    spool.mkdir()

    object_store.fetch_newest(spool, say=print)

    assert [path.name for path in checkpoint.complete(spool)] == ["step-000006"]
    assert value(spool, 6) == 6.0


def test_records_of_a_run_go_to_the_store_and_to_the_node_that_goes_on(
    stored: tuple[ObjectStore, Path], tmp_path: Path
) -> None:
    store, spool = stored
    first, other, new = (tmp_path / name for name in ("first", "other", "new"))
    (first / "records").mkdir(parents=True)
    (first / "records" / "events-000001.jsonl.gz").write_bytes(b"old")
    (first / "secret").symlink_to(tmp_path)
    (first / "report.json").symlink_to("/etc/hostname")

    with object_store.RecordSender(first, spool, goes_on=False) as sender:
        (first / "events.jsonl").write_text("one\n")
        sender._send(store)
        (first / "events.jsonl").write_text("one\ntwo\n")
    with object_store.RecordSender(other, spool, goes_on=True):
        (other / "metrics.jsonl").write_text("here\n")
    with object_store.RecordSender(new, spool, goes_on=False):
        pass

    assert (other / "events.jsonl").read_text() == "one\ntwo\n"
    assert (other / "records" / "events-000001.jsonl.gz").read_bytes() == b"old"
    names = ["events.jsonl", "metrics.jsonl", "records/events-000001.jsonl.gz"]
    assert sorted(store.sizes("run")) == names
    assert not new.exists()


def test_a_save_that_ends_in_the_middle_does_not_count(
    stored: tuple[ObjectStore, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, spool = stored
    save(spool, 2)
    names = [*checkpoint.progress(spool / "step-000002").files, checkpoint.META]
    put = ObjectStore.put
    for last in names:

        def ends(self: ObjectStore, file: Path, name: str, last: str = last) -> None:
            if name == f"step-000004/{last}":
                raise KeyboardInterrupt
            put(self, file, name)

        monkeypatch.setattr(ObjectStore, "put", ends)
        with pytest.raises((KeyboardInterrupt, LaunchError)):
            save(spool, 4)
        assert store.steps() == [2], last
    monkeypatch.setattr(ObjectStore, "put", put)

    other = spool.with_name("other")
    spool.rename(other)  # of a node that is gone
    spool.mkdir()
    object_store.fetch_newest(spool, say=print)
    assert [path.name for path in checkpoint.all_steps(spool)] == ["step-000002"]
    save(spool, 4)
    assert store.steps() == [2, 4]


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_damaged_one_is_passed_over_and_the_one_before_is_taken(
    stored: tuple[ObjectStore, Path], tmp_path: Path, damage: str
) -> None:
    _, spool = stored
    save(spool, 2)
    save(spool, 4)
    file = tmp_path / "store" / "step-000004" / "rank-00000.bin"
    content = bytearray(file.read_bytes())
    content[5] ^= 4
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(content[:7] if damage == "cut" else content)
    shutil.rmtree(spool)
    spool.mkdir()
    lines: list[str] = []

    object_store.fetch_newest(spool, say=lines.append)

    assert [path.name for path in checkpoint.complete(spool)] == ["step-000002"]
    assert any("step-000004" in line and "before it is taken" in line for line in lines)


def test_what_does_not_answer_is_asked_again_until_patience_ends(
    stored: tuple[ObjectStore, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = stored
    asked = []

    def fails(path: str, content: bytes, **options: Any) -> None:
        asked.append(path)
        if len(asked) < 4:
            raise ConnectionError("no answer")

    monkeypatch.setattr(store._fs, "pipe_file", fails)
    store.put_text("a", "b.txt")
    assert len(asked) == 4
    asked.clear()
    monkeypatch.setattr(object_store, "PATIENCE_S", -1.0)
    with pytest.raises(LaunchError, match=r"storing b\.txt failed: ConnectionError: no answer"):
        store.put_text("a", "b.txt")


def test_a_name_is_taken_once(stored: tuple[ObjectStore, Path]) -> None:
    store, _ = stored
    assert store.create("a", "epochs/1.json")
    assert not store.create("b", "epochs/1.json")
    assert store.create("a", "epochs/1.json")  # the answer to an earlier try was lost
    assert store.text("epochs/1.json") == "a"


def test_another_folder_than_the_spool_is_no_store(
    stored: tuple[ObjectStore, Path], tmp_path: Path
) -> None:
    store, _ = stored
    save(tmp_path / "own", 8)
    assert store.steps() == []


def test_parts_of_two_nodes_make_a_checkpoint(
    stored: tuple[ObjectStore, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, spool = stored
    with monkeypatch.context() as patch:

        def ends(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(checkpoint, "finish", ends)
        with pytest.raises(KeyboardInterrupt):
            save(spool, 4)
        left = sorted(spool.glob(".step-000004*"))
    assert len(left) == 2
    assert store.steps() == []
    # What one node has is stored, and whoever finds all of it completes it.
    object_store.send_saved(spool, say=print)
    assert store.steps() == [4]
    shutil.rmtree(spool)
    spool.mkdir()
    object_store.fetch_newest(spool, say=print)
    assert value(spool, 4) == 4.0


def test_addresses_are_told_from_folders() -> None:
    assert object_store.address_of(Path("gs://bucket/a/b/")) == "gs://bucket/a/b"
    assert object_store.address_of(Path("C:/saved")) is None
    assert object_store.address_of("./a:b/c") is None
    for nothing in ("memory://a", "https://a/b", "ftp://", "s3:"):
        with pytest.raises(LaunchError, match="s3://BUCKET/PATH"):
            object_store.address_of(Path(nothing))
    with pytest.raises(LaunchError, match="install what opens it"):
        ObjectStore("nothing-like-it://a")


# --- S3, on two nodes ----------------------------------------------------------------------------

ASKED = """
import os, time
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(258, 32), nn.Linear(32, 258)

    def forward(self, tokens):
        if self.training:
            time.sleep(0.1)
        return self.head(torch.tanh(self.words(tokens)))
"""
CLUSTER = """
format: 1
name: two
groups:
- name: cpu
  accelerator:
    name: cpu
    kind: cpu
    memory_bytes: 8000000000
    peak_flops: {fp32: 100000000000}
    memory_bytes_per_s: 10000000000
    curve: {launch_s: 0.000002, matmul: 1.0, attention_forward: 0.5, attention_backward: 0.5,
      memory: 1.0, spread: 0.3, provenance: quoted, source: this test}
  nodes: 2
  devices_per_node: 1
  host_memory_bytes: 16000000000
tiers:
- {name: loopback, devices: 2, latency_s: 0.0001, bytes_per_s: 1000000000}
"""


class TwoNodes:
    """Launchers with spools of their own, and moto's server."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self._started: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **os.environ,
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "MESHWRIGHT_SECRET": "a secret of this test alone",
        }
        (folder / "own.py").write_text(ASKED)
        (folder / "cluster.yaml").write_text(CLUSTER)
        (folder / "data.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
        words = ["plan", "own.py:Own", "--cluster", "cluster.yaml", "--seq-len", "16"]
        self.meshwright(*words, "--global-batch", "8", "--fix", "dp=2", "-o", "plan.yaml").wait()
        self.server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-p", str(self.port)],
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        make = "import boto3; boto3.client('s3').create_bucket(Bucket='runs')"
        until_s = time.monotonic() + 60
        while subprocess.run(
            [sys.executable, "-c", make], env=self.environment, check=False
        ).returncode:
            assert time.monotonic() < until_s

    def meshwright(self, *words: str, node: int = 0) -> subprocess.Popen[bytes]:
        with (self.folder / f"log-{node}.txt").open("ab") as log:
            started = subprocess.Popen(
                [sys.executable, "-m", "meshwright", *words],
                cwd=self.folder,
                env={**self.environment, "MESHWRIGHT_CACHE": str(self.folder / f"cache-{node}")},
                stdout=log,
                stderr=log,
            )
        self._started.append(started)
        return started

    def close(self) -> None:
        """Leave no process behind."""
        for process in (*self._started, self.server):
            process.kill()
            process.wait()

    def start(self, steps: int, *more: str) -> list[subprocess.Popen[bytes]]:
        words = ["launch", "plan.yaml", "--data", "data.txt", "--steps", str(steps), "--elastic"]
        words += ["--checkpoint", "s3://runs/one", "--checkpoint-every", "10", "-o", "out", *more]
        words += ["--nodes", "2", "--rendezvous", f"127.0.0.1:{free_port()}"]
        return [self.meshwright(*words, "--node", str(node), node=node) for node in (0, 1)]

    def step(self) -> int:
        try:
            lines = (self.folder / "out" / "metrics.jsonl").read_text().splitlines()
            return json.loads(lines[-1])["step"]
        except (OSError, IndexError, ValueError):
            return 0

    def wait_for(self, step: int) -> None:
        until_s = time.monotonic() + 200
        while self.step() < step:
            assert time.monotonic() < until_s, (self.folder / "log-0.txt").read_text()[-2000:]
            time.sleep(0.1)

    def losses(self) -> dict[int, float]:
        lines = (self.folder / "out" / "metrics.jsonl").read_text().splitlines()
        return {record["step"]: record["loss"] for record in map(json.loads, lines)}

    def stored(self) -> set[str]:
        listed = (
            "import boto3; found = boto3.client('s3').list_objects_v2(Bucket='runs'); "
            "print(*(o['Key'] for o in found.get('Contents', [])))"
        )
        done = subprocess.run(
            [sys.executable, "-c", listed], env=self.environment, check=True, capture_output=True
        )
        return set(done.stdout.decode().split())


@pytest.mark.matrix
def test_a_server_that_stands_still_for_a_minute_costs_nothing(tmp_path: Path) -> None:
    for needed in ("moto", "s3fs", "boto3"):
        pytest.importorskip(needed)
    nodes = TwoNodes(tmp_path)
    try:
        launchers = nodes.start(60)
        nodes.wait_for(6)
        nodes.server.send_signal(signal.SIGSTOP)
        time.sleep(60)
        nodes.server.send_signal(signal.SIGCONT)
        assert [launcher.wait(timeout=300) for launcher in launchers] == [0, 0]
        assert len(nodes.losses()) == 60
        assert {"one/step-000060/meta.json", "one/step-000060/rank-00001.bin"} <= nodes.stored()
        assert "attempt" in (tmp_path / "out" / "events.jsonl").read_text()
        events = (tmp_path / "out" / "events.jsonl").read_text()
        assert events.count('"event": "attempt"') == 1  # nothing was taken for a hang
    finally:
        nodes.close()


@pytest.mark.matrix
def test_all_killed_in_the_middle_of_a_save_go_on_from_what_is_whole(tmp_path: Path) -> None:
    for needed in ("moto", "s3fs", "boto3"):
        pytest.importorskip(needed)
    nodes = TwoNodes(tmp_path)
    try:
        launchers = nodes.start(90)
        nodes.wait_for(10)
        while "one/step-000010/meta.json" not in nodes.stored():
            time.sleep(0.1)
        nodes.server.send_signal(signal.SIGSTOP)
        nodes.wait_for(30)  # the save of step 20 or 30 is under way
        before = nodes.losses()
        for launcher in launchers:
            launcher.kill()
        nodes.server.send_signal(signal.SIGCONT)
        for launcher in launchers:
            launcher.wait()
        for left in Path("/dev/shm").glob("meshwright-*"):  # the machines are gone, too
            about = json.loads((left / "about.json").read_text())
            if str(tmp_path) in about["checkpoints"]:
                shutil.rmtree(left)
        for node in (0, 1):
            shutil.rmtree(tmp_path / f"cache-{node}" / "stores")
        time.sleep(3)
        launchers = nodes.start(90, "--resume")
        assert [launcher.wait(timeout=300) for launcher in launchers] == [0, 0]
        after = nodes.losses()
        assert len(after) == 90
        assert {step: loss for step, loss in before.items() if after[step] != loss} == {}
        assert "going on from s3://runs/one/step-0000" in (tmp_path / "log-0.txt").read_text()
    finally:
        nodes.close()
