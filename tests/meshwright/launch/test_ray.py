"""`--on ray`: Ray places a launcher on each node, and again on another where one is lost."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.launch import ray_cluster
from meshwright.launch.launch import launch
from meshwright.launch.ssh import HostCommand
from meshwright.planner.documents.document import write
from meshwright.planner.errors import DocumentError, LaunchError
from meshwright.runtime.run.launch_options import LaunchRun, Where
from tests.limits import PATIENCE_S
from tests.runtime.rooms import MODEL, ROOT, plan_of

CLUSTER = """format: 1
name: pair
groups:
- name: cpu
  accelerator: {name: cpu, kind: cpu, memory_bytes: 2000000000, peak_flops: {fp32: 1e11},
    memory_bytes_per_s: 1e10, curve: {launch_s: 1e-6, matmul: 1, attention_forward: 0.5,
    attention_backward: 0.5, memory: 1, spread: 0.3, provenance: quoted, source: made up}}
  nodes: 2
  devices_per_node: 1
tiers:
- {name: network, devices: 2, latency_s: 5e-5, bytes_per_s: 1e9, provenance: quoted, source: no one}
"""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the file of a plan for two nodes of one device."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pair.yaml").write_text(CLUSTER)
    (tmp_path / "text.txt").write_text("a text that is long enough to train on for a while. " * 99)
    write(MODEL, tmp_path / "model.yaml")
    made = plan_of(data=2)
    named = made.model.model_copy(update={"source": "model.yaml"})
    write(made.model_copy(update={"model": named, "cluster": "pair.yaml"}), tmp_path / "plan.yaml")
    return "plan.yaml"


def test_each_node_has_a_launcher_that_goes_on_from_checkpoints(
    plan: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = LaunchRun(checkpoint=Path("saved"), steps=7)

    launch(plan, run, Where(on="ray"), dry_run=True)

    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("node 0: meshwright launch plan.yaml --steps 7 --checkpoint saved ")
    assert first.endswith("--nodes 2 --node 0 --rendezvous HOST:PORT")
    assert " --resume --or-start " in second and " --node 1 " in second


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        (Where(on="ray", job=("partition=gpu",)), "'partition' is not known"),
        (Where(on="ray", job=("restarts=often",)), "is no whole number"),
        (Where(on="ray", hosts="a,b"), "leave one out"),
    ],
)
def test_what_ray_does_not_take_is_refused(plan: str, where: Where, reason: str) -> None:
    with pytest.raises(DocumentError, match=reason):
        launch(plan, LaunchRun(), where)


def test_ray_is_asked_for_where_it_is_not_installed(
    plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LaunchError, match="pip install ray"):
        launch(plan, LaunchRun(), Where(on="ray"))


def test_a_launcher_of_a_node_prints_ends_and_has_its_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os, sys; print(len(os.environ['MESHWRIGHT_SECRET'])); sys.exit('no room')"
    monkeypatch.setattr(ray_cluster, "COMMAND", (sys.executable, "-c", code))
    launcher = ray_cluster.NodeLauncher(str(tmp_path))
    launcher.start((), "s" * 7)
    code_of_exit, output = None, []
    end_s = time.monotonic() + PATIENCE_S
    while code_of_exit is None and time.monotonic() < end_s:
        found, code_of_exit = launcher.poll()
        output += found
    assert code_of_exit == 1
    assert sorted(output) == [("err", "no room\n"), ("out", "7\n")]


@pytest.fixture
def cluster() -> Iterator[Any]:
    utils = pytest.importorskip("ray.cluster_utils")
    head = {"num_cpus": 1, "include_dashboard": False}
    made = utils.Cluster(initialize_head=True, head_node_args=head)
    yield made
    made.shutdown()


def losses(text: str) -> dict[int, str]:
    """Return the loss of each step that was printed."""
    return {int(step): loss for step, loss in re.findall(r"step (\d+)/\d+  loss (\S+)", text)}


@pytest.mark.matrix
def test_a_lost_node_of_a_cluster_of_two_is_replaced_and_training_goes_on(
    plan: str, cluster: Any, tmp_path: Path
) -> None:
    other = cluster.add_node(num_cpus=1)
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "PYTHONSAFEPATH": "1"}
    environment["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, "-m", "meshwright", "launch", plan, "--data", "text.txt"]
    command += ["--on", "ray"]

    def run(*options: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*command, *options], env=environment, text=True, stderr=subprocess.PIPE
        )

    whole = run("--steps", "12", "--output", "whole")
    _, expected = whole.communicate(timeout=PATIENCE_S)
    assert whole.returncode == 0, expected

    saves = ("--checkpoint", "saved", "--checkpoint-every", "2", "--keep-checkpoints", "9")
    killed = run("--steps", "12", "--output", "killed", *saves)
    end_s = time.monotonic() + PATIENCE_S
    while not list(Path("saved").glob("step-*")) and time.monotonic() < end_s:
        time.sleep(0.05)
    cluster.remove_node(other, allow_graceful=False)
    cluster.add_node(num_cpus=1)
    _, printed = killed.communicate(timeout=PATIENCE_S)

    assert killed.returncode == 0, printed
    assert "lost node" in printed and "starting again" in printed
    assert losses(printed) == losses(expected)
    assert len(losses(expected)) == 12


@pytest.mark.matrix
@pytest.mark.usefixtures("plan")
def test_a_cluster_without_room_is_refused_with_what_it_has(cluster: Any) -> None:
    command = HostCommand(arguments=(), files=(), devices=0, nodes=2, spares=False)
    job = (f"address={cluster.address}", "wait=3")
    with pytest.raises(LaunchError, match="no room for 2 nodes with 1 CPUs each; its nodes have 1"):
        ray_cluster.on_ray(command, job, devices=1, saved=None, dry_run=False)
