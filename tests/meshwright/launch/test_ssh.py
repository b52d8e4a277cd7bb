"""`--hosts`: all hosts are looked at, then started together; what stands for ssh runs it here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.launch import ssh as hosts
from meshwright.launch import ssh_remote as on_host
from meshwright.launch.launch import launch
from meshwright.launch.ssh import HostCommand, hosts_of, on_hosts
from meshwright.planner.documents.document import write
from meshwright.planner.errors import DocumentError, HandedOver, LaunchError
from meshwright.runtime.run.launch_options import LaunchRun, Where
from tests.limits import PATIENCE_S
from tests.runtime.rooms import MODEL, ROOT, plan_of

SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
echo "$2" >> "{folder}/asked"
export HOST="$2"
case "$2" in
down*) echo "ssh: connect to host $2 port 22: No route to host" >&2; exit 255;;
silent*) exec sleep 1000;;
esac
echo "welcome to $2"
exec sh -c "$3"
"""
SAYS = """
import os, sys
host = os.environ["HOST"]
print("said on", host, file=sys.stderr, flush=True)
{more}
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., HostCommand]:
    """What makes a command of which hosts run a program instead."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH.format(folder=tmp_path))
    (tmp_path / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.yaml").write_text("a plan\n")

    def made(more: str, *, nodes: int = 2, spares: bool = False, devices: int = 0) -> HostCommand:
        # Stands in for the module that a host runs behind its answer.
        (tmp_path / "meshwright.py").write_text(SAYS.format(more=more))
        monkeypatch.setattr(hosts, "REMOTE", stand_in(tmp_path))
        return HostCommand(
            arguments=("launch", "plan.yaml"),
            files=("plan.yaml",),
            devices=devices,
            nodes=nodes,
            spares=spares,
        )

    return made


def stand_in(folder: Path) -> str:
    """Return what runs `ssh_remote` there, with another program for its command."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
        "from meshwright.launch import ssh_remote; "
        f"ssh_remote.COMMAND = (sys.executable, {str(folder / 'meshwright.py')!r}); "
        "sys.exit(ssh_remote.main())"
    )
    return f'-c "{code}"'


def test_all_hosts_run_it_with_one_secret_and_the_first_has_the_results(
    command: Callable[..., HostCommand], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = command(
        f"open({str(tmp_path)!r} + '/' + host, 'w').write(os.environ['MESHWRIGHT_SECRET'])\n"
        "print(' '.join(sys.argv[1:])) if host == 'a' else None"
    )

    on_hosts(["a", "b"], made)

    out, err = capfd.readouterr()
    assert out == "launch plan.yaml --nodes 2 --node 0 --rendezvous a:29400\n"
    assert sorted(err.splitlines()) == ["a: said on a", "b: said on b"]
    secrets = {(tmp_path / host).read_text() for host in "ab"}
    assert len(secrets) == 1
    assert len(secrets.pop()) > 30
    assert sorted((tmp_path / "asked").read_text().split()) == ["a", "b"]


def test_nothing_starts_where_a_host_is_not_as_it_has_to_be(
    command: Callable[..., HostCommand], tmp_path: Path
) -> None:
    made = command(f"open({str(tmp_path)!r} + '/ran', 'w')", nodes=2, devices=9)

    with pytest.raises(LaunchError) as refused:
        on_hosts(["down1", "a"], made)

    said = str(refused.value)
    assert "down1: ssh: connect to host down1 port 22: No route to host" in said
    assert "a: has 0 devices, and the plan needs 9 of each node" in said
    assert not (tmp_path / "ran").exists()


def test_a_host_that_does_not_answer_is_not_waited_for(
    command: Callable[..., HostCommand], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "ANSWER_S", 0.2)

    with pytest.raises(LaunchError, match="hosts: silent: did not answer within"):
        on_hosts(["silent"], command("", nodes=1))


def test_hosts_beyond_the_plan_stand_in_for_those_that_do_not_answer(
    command: Callable[..., HostCommand], capfd: pytest.CaptureFixture[str]
) -> None:
    made = command("print('results') if host == 'c' else None", spares=True)

    on_hosts(["down", "b", "c"], made)

    out, err = capfd.readouterr()
    assert out == "results\n"
    assert "left out down: ssh: connect to host down port 22: No route to host" in err


@pytest.mark.parametrize(
    ("more", "kind", "said"),
    [
        ("sys.exit(75)", HandedOver, "a notice ended the run"),
        (
            "sys.exit(f'meshwright: {host} has no room')",
            LaunchError,
            "([ab]): meshwright: \\1 has no ro",
        ),
    ],
)
def test_how_it_ended_is_said(
    command: Callable[..., HostCommand], more: str, kind: type[LaunchError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        on_hosts(["a", "b"], command(more))


@pytest.mark.parametrize("status", [75, 143])
def test_the_host_that_failed_is_named_and_none_that_was_told_to_end(
    command: Callable[..., HostCommand], tmp_path: Path, status: int
) -> None:
    follows = (
        f"import pathlib, signal, time\n"
        f"up = pathlib.Path({str(tmp_path)!r}, 'up')\n"
        f"if host == 'a':\n"
        f"    signal.signal(signal.SIGTERM, lambda *_: sys.exit({status}))\n"
        f"    up.touch()\n"
        f"    time.sleep({PATIENCE_S})\n"
        f"while not up.exists():\n"
        f"    time.sleep(0.02)\n"
        f"sys.exit('meshwright: has no room')"
    )

    with pytest.raises(LaunchError) as failed:
        on_hosts(["a", "b"], command(follows))

    assert str(failed.value) == "hosts: b: meshwright: has no room"
    assert not isinstance(failed.value, HandedOver)


STARTS = """
import sys
sys.path.insert(0, {root!r})
from meshwright.launch import ssh as hosts
hosts.REMOTE = {remote!r}
hosts.on_hosts(["a", "b"], hosts.HostCommand(
    arguments=(), files=(), devices=0, nodes=2, spares={spares}))
"""
WAITS = """
import pathlib, signal, time
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(f"noticed-{host}").touch(), sys.exit(75)))
pathlib.Path(f"up-{host}").touch()
while True:
    time.sleep(0.05)
    if pathlib.Path("enough").exists():
        pathlib.Path(f"done-{host}").touch()
        sys.exit(0)
"""


def wait_for(folder: Path, name: str) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not all((folder / f"{name}-{host}").exists() for host in "ab"):
        assert time.monotonic() < end_s
        time.sleep(0.02)


@pytest.mark.long("15-False-noticed")
@pytest.mark.parametrize(
    ("number", "spares", "after"),
    [
        (signal.SIGTERM, False, "noticed"),
        (signal.SIGKILL, False, "noticed"),
        (signal.SIGKILL, True, "done"),
    ],
)
def test_a_signal_is_a_notice_and_a_run_that_survives_goes_on_without_us(
    command: Callable[..., HostCommand],
    tmp_path: Path,
    number: signal.Signals,
    spares: bool,
    after: str,
) -> None:
    command(WAITS)
    told = {"root": str(ROOT), "remote": stand_in(tmp_path), "spares": spares}
    starts = subprocess.Popen([sys.executable, "-c", STARTS.format(**told)], cwd=tmp_path)
    try:
        wait_for(tmp_path, "up")
        starts.send_signal(number)
        if after == "done":
            starts.wait(timeout=PATIENCE_S)
            (tmp_path / "enough").touch()
        wait_for(tmp_path, after)
    finally:
        starts.kill()
        starts.wait()


def test_another_version_or_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("x")
    files = {str(tmp_path / "plan.yaml"): "sha256:0", str(tmp_path / "none"): "sha256:0"}

    found = list(on_host.wrong_here({"version": "0", "files": files, "devices": 0}))

    assert found[0] == f"has meshwright {on_host.version()}, and 0 is wanted"
    assert found[1].endswith("plan.yaml: is another file than where the command was given")
    assert found[2].endswith("none: No such file or directory")


@pytest.mark.parametrize(
    "text", ["", "a,,b", "a,a", "-oProxyCommand=x", "a b", "b[", "b[3-1]", "b[0-999999999]", "b[x]"]
)
def test_what_is_no_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(DocumentError, match="hosts:"):
        hosts_of(text)


def test_the_command_of_each_host_can_be_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(MODEL, tmp_path / "model.yaml")
    plan = plan_of(data=2)
    named = plan.model.model_copy(update={"source": str(tmp_path / "model.yaml")})
    write(plan.model_copy(update={"model": named, "cluster": "local:2"}), tmp_path / "p.yaml")
    run = LaunchRun(checkpoint=Path("saved"), steps=7)

    launch(str(tmp_path / "p.yaml"), run, Where(hosts="a,b"), elastic=True, dry_run=True)

    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("ssh -o BatchMode=yes -o StrictHostKeyChecking=yes")
    assert first.endswith("--elastic --nodes 2 --node 0 --rendezvous a:29400")
    assert " a meshwright launch " in first
    assert " --steps 7 --checkpoint saved " in second
    with pytest.raises(LaunchError, match="hosts: are 2, and the plan is for 1 node"):
        launch(str(tmp_path / "p.yaml"), run, Where(hosts="a,b"))
    with pytest.raises(DocumentError, match="node: goes with a launcher on each node"):
        launch(str(tmp_path / "p.yaml"), run, Where(hosts="a", node=0))
