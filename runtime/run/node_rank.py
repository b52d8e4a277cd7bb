"""Node ranks: which of a job's nodes this is, and where its first node listens.

`meshwright profile` and `meshwright launch` are started once on every node, by hand (`--nodes`,
`--node`, `--rendezvous`) or by what starts jobs there, whose environment says the same:

    torchrun, Kubeflow      PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT
    inside torchrun         GROUP_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT; one process each
    Slurm                   SLURM_NNODES, SLURM_NODEID, SLURM_JOB_NODELIST; srun with one task each
    Kubernetes              JOB_COMPLETION_INDEX, NNODES, MASTER_ADDR (an Indexed Job)

meshwright.runtime.run.rendezvous is how the nodes then meet.  Nothing here imports torch.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.planner.errors import LaunchError

PORT = 29400
BY_HAND = "the command line"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRank:
    """Number of this node, the number of nodes, and where node 0 listens."""

    node: int
    nodes: int
    host: str
    port: int = PORT
    source: str = BY_HAND
    """Name of the source that gave these values."""
    port_setting: str = "--rendezvous HOST:PORT"
    """Setting by which every node is given another port."""


ALONE = NodeRank(
    node=0, nodes=1, host="127.0.0.1", source="nothing says that there are other nodes"
)


def node_rank_of(
    environment: Mapping[str, str],
    *,
    nodes: int | None = None,
    node: int | None = None,
    rendezvous: str | None = None,
) -> NodeRank:
    """Return this node's rank: as asked for, or as whatever started us says.

    >>> node_rank_of({}, nodes=2, node=1, rendezvous="10.0.0.1:29500").port
    29500
    >>> kubeflow = {"PET_NNODES": "4", "PET_NODE_RANK": "3", "PET_MASTER_ADDR": "job-0"}
    >>> node_rank_of(kubeflow).node, node_rank_of({}).nodes
    (3, 1)
    """
    if nodes is not None or node is not None or rendezvous is not None:
        if nodes == 1 and not node:
            return ALONE
        if nodes is None or node is None or rendezvous is None:
            raise LaunchError(
                "nodes: several nodes need all of --nodes (how many), --node (which, from 0) and "
                "--rendezvous (HOST:PORT of node 0)"
            )
        host, port = host_and_port(rendezvous)
        return _check_node(node, nodes, host, port, BY_HAND)
    for source in (_torchrun, _inside_torchrun, _slurm, _kubernetes):
        node_rank = source(environment)
        if node_rank is not None:
            return node_rank
    return ALONE


def host_and_port(text: str) -> tuple[str, str]:
    """Read HOST, HOST:PORT or [IPv6 address]:PORT.

    >>> host_and_port("node0:29500"), host_and_port("[fd00::1]"), host_and_port("fd00::1")
    (('node0', '29500'), ('fd00::1', '29400'), ('fd00::1', '29400'))
    """
    match = re.fullmatch(r"\[([^\]]*)\](?::(.*))?", text)
    if match is not None:
        return match[1], match[2] or str(PORT)
    host, colon, port = text.rpartition(":")
    return (host, port) if colon and ":" not in host else (text, str(PORT))


def _check_node(
    node: int | str,
    nodes: int | str,
    host: str,
    port: int | str,
    source: str,
    port_setting: str = "--rendezvous HOST:PORT",
) -> NodeRank:
    try:
        node_rank = NodeRank(
            node=int(node),
            nodes=int(nodes),
            host=host,
            port=int(port),
            source=source,
            port_setting=port_setting,
        )
    except ValueError:
        raise LaunchError(
            f"{source}: node {node} of {nodes} at port {port} is not valid; give whole numbers"
        ) from None
    if not 0 <= node_rank.node < node_rank.nodes:
        raise LaunchError(f"{source}: node {node} of {nodes} is not valid; nodes count from 0")
    if not 0 < node_rank.port < 2**16:
        raise LaunchError(f"{source}: port {port} is not valid; ports are 1 to 65535")
    if not re.fullmatch(r"[A-Za-z0-9._:%-]+", host):
        raise LaunchError(
            f"{source}: host {host!r} is not valid; write a name or an address of node 0"
        )
    return node_rank if node_rank.nodes > 1 else ALONE


def _torchrun(environment: Mapping[str, str]) -> NodeRank | None:
    nodes = environment.get("PET_NNODES", "1")
    if nodes == "1" or "PET_MASTER_ADDR" not in environment:
        return None
    return _check_node(
        environment.get("PET_NODE_RANK", "0"),
        nodes,
        environment["PET_MASTER_ADDR"],
        environment.get("PET_MASTER_PORT", PORT),
        "PET_NNODES and others",
        "PET_MASTER_PORT",
    )


def _inside_torchrun(environment: Mapping[str, str]) -> NodeRank | None:
    if environment.get("GROUP_WORLD_SIZE", "1") == "1" or "MASTER_ADDR" not in environment:
        return None
    if environment.get("LOCAL_WORLD_SIZE", "1") != "1":
        raise LaunchError(
            "torchrun: has started several processes on this node; start one, with "
            "--nproc-per-node 1: the ranks of a node are started from there"
        )
    # torchrun itself listens on MASTER_PORT.
    return _check_node(
        environment["GROUP_RANK"],
        environment["GROUP_WORLD_SIZE"],
        environment["MASTER_ADDR"],
        int(environment.get("MASTER_PORT", PORT)) + 1,
        "torchrun's GROUP_WORLD_SIZE and others",
        "torchrun's --master-port",
    )


def _slurm(environment: Mapping[str, str]) -> NodeRank | None:
    if environment.get("SLURM_NNODES", "1") == "1" or "SLURM_PROCID" not in environment:
        return None
    if environment.get("SLURM_NTASKS", environment["SLURM_NNODES"]) != environment["SLURM_NNODES"]:
        raise LaunchError(
            f"srun: has started {environment['SLURM_NTASKS']} tasks on "
            f"{environment['SLURM_NNODES']} nodes; start one on each, with --ntasks-per-node=1"
        )
    listed = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    job = re.sub(r"\D", "", environment.get("SLURM_JOB_ID", "")) or "0"
    return _check_node(
        environment.get("SLURM_NODEID", environment["SLURM_PROCID"]),
        environment["SLURM_NNODES"],
        _slurm_address(first_host(listed)),
        PORT + int(job) % 1000,
        "Slurm's SLURM_NNODES and others",
        "--nodes, --node and --rendezvous HOST:PORT",
    )


def first_host(listed: str) -> str:
    """Return the first host of a Slurm list.

    >>> first_host("n[03-05,9],m1"), first_host("gpu1,gpu2"), first_host("rack[1-2]-n[0-3]")
    ('n03', 'gpu1', 'rack1-n0')
    """
    depth, end = 0, len(listed)
    for place, letter in enumerate(listed):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            end = place
            break
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", listed[:end])


def _slurm_address(host: str) -> str:
    """Return the address that Slurm itself uses for a node, where its name may not resolve."""
    command = shutil.which("scontrol")
    if command is None:
        return host
    try:
        asked = [command, "show", "node", host]
        output = subprocess.run(
            asked, capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return host
    match = re.search(r"NodeAddr=(\S+)", output)
    return match[1] if match else host


def _kubernetes(environment: Mapping[str, str]) -> NodeRank | None:
    if "JOB_COMPLETION_INDEX" not in environment or environment.get("NNODES", "1") == "1":
        return None
    if "MASTER_ADDR" not in environment:
        raise LaunchError(
            "JOB_COMPLETION_INDEX: is set and MASTER_ADDR is not; give the pods MASTER_ADDR, the "
            "name of pod 0 behind a headless service (JOB-0.SERVICE)"
        )
    return _check_node(
        environment["JOB_COMPLETION_INDEX"],
        environment["NNODES"],
        environment["MASTER_ADDR"],
        environment.get("MASTER_PORT", PORT),
        "the Indexed Job's JOB_COMPLETION_INDEX and NNODES",
        "MASTER_PORT in the pods' environment",
    )
