"""`meshwright profile`: a model's layers and these machines' links, measured by their ranks.

This side runs once on every node: it meets the others, starts the ranks of its node and writes the
birth certificate; meshwright.profiler.measure is what ranks do.
Nothing here imports torch.
"""

from __future__ import annotations

import math
import os
import platform
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.costs.layout_costs import refusal
from meshwright.planner.documents.cluster import EIGHT_BITS, ClusterSpec
from meshwright.planner.documents.model import ModelGraph, is_factory, is_script
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.documents.profile import (
    Birth,
    Finding,
    MeasuredDevice,
    MeasuredNode,
    Profile,
)
from meshwright.planner.documents.units import bytes_text
from meshwright.planner.errors import DocumentError, LaunchError
from meshwright.planner.search.space import divisors
from meshwright.profiler.cache import folder_of
from meshwright.profiler.cache import load as load_cached
from meshwright.profiler.cache import save as save_cached
from meshwright.profiler.diagnostics import below_quote, disturbances, findings
from meshwright.profiler.machine import (
    NETWORK,
    disk_bytes_per_s,
    joint_cluster,
    node_here,
    with_measured_links,
)
from meshwright.profiler.measurement_plan import (
    Budget,
    Degrees,
    HeadWish,
    LayerRequest,
    StageRequest,
    best_plans,
    budget,
    degrees_of,
    head_wishes,
    stage_wishes,
    wishes,
)
from meshwright.profiler.start_ranks import result_of, versions
from meshwright.runtime.launch.preflight import cores, cuda_devices
from meshwright.runtime.run.node_rank import ALONE, NodeRank
from meshwright.runtime.run.rendezvous import Rendezvous
from meshwright.runtime.run.run_folder import Device

MOST_MEASURED = 64
"""Largest number of samples of a measured micro-batch."""
JobOf = Job | Callable[[ClusterSpec], Job]
"""Work of a step, or a function that returns it once the machine is known."""
ScriptFile = tuple[str, Mapping[str, str]]
"""`script.py:build`, and the digests of its files, as runtime.engine.script_module has them."""
BUDGET_S = 75.0
"""Default seconds of a whole profile; a busy machine takes longer, not less care."""
LEAST_CASES = 6
"""Number of layer settings that are measured whatever time they take."""
MEMORY_SHARE = 0.5
"""Share of a device's memory that the measured pieces of the model may take."""
SAME_KIND = 2
"""Layers of one kind in such a piece, as meshwright.profiler.chain has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCluster:
    """A profile and its cluster, with the links that were measured."""

    profile: Profile
    cluster: ClusterSpec
    cached: bool = False
    """True if nothing was measured since all of it was known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileAgenda:
    """Measurements of a profile, in this order."""

    machine: ClusterSpec
    job: Job
    counts: tuple[int, ...]
    """Number of ranks of each node."""
    groups: tuple[Groups, ...]
    wishes: tuple[LayerRequest, ...]
    heads: tuple[HeadWish, ...]
    stages: tuple[StageRequest, ...]
    budget: Budget


def profile(
    model: ModelGraph,
    cluster: str,
    job: JobOf,
    *,
    script: ScriptFile | None = None,
    budget_s: float = BUDGET_S,
    fresh: bool = False,
    node_rank: NodeRank = ALONE,
    quiet: bool = False,
) -> MeasuredCluster:
    """Measure what the search of a job will ask for, on the machines where this is called.

    Called once on every node, with the same arguments beside `node_rank`; all get the same.
    `cluster` is `local`, `local:N` for N ranks on each node, or a document of just these nodes.
    Earlier measurements of the same model by the same software on the same machines are reused
    unless `fresh`; one that was cut short goes on.  Several nodes measure their links always.  A
    module that a script builds is measured from its file.
    """
    if script is None and is_script(model.source or ""):
        raise DocumentError(
            "model.source",
            f"is {model.source}, whose module its own script builds; name its file, as "
            "script.py:build",
        )
    if model.edges and not is_factory(model.source or ""):
        raise DocumentError(
            "model.edges",
            "a graph of layers is measured by running its modules; name the file.py:factory that "
            "returns them, or plan it without a profile",
        )
    load = os.getloadavg()[0]
    with Rendezvous(node_rank) as rendezvous:
        wanted, descriptions = _agreement(model, cluster, job, budget_s, rendezvous)
        folder = _folder(model, cluster, wanted, descriptions, budget_s)
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
        cached = load_cached(folder / "profile.json")
        # Links between nodes change unseen, so several nodes only keep what each has by itself.
        if node_rank.nodes == 1 and cached is not None:
            return MeasuredCluster(
                profile=Profile.of(cached["profile"]),
                cluster=ClusterSpec.of(cached["cluster"]),
                cached=True,
            )
        count = wanted.counts[node_rank.node]
        device = _device_here(wanted.machine, cluster, ranks=count)
        new_result = result_of(
            "meshwright.profiler.measure:measure",
            _order(model, script, wanted, folder),
            ranks=count,
            device=device,
            title=f"profile of {model.name}",
            quiet=quiet,
            rendezvous=rendezvous,
        )
        # The disk is tried when nothing else is measured.
        disks = rendezvous.all_gather(disk_bytes_per_s(Path.cwd()))
    nodes = [
        MeasuredNode.model_validate(of_node["node"]).model_copy(
            update={"disk_write_bytes_per_s": write, "disk_read_bytes_per_s": read}
        )
        for of_node, (write, read) in zip(descriptions, disks, strict=True)
    ]
    nodes = _with_devices(nodes, new_result, wanted.counts)
    result = Profile.of(
        {
            "model": model.name,
            "model_digest": model.digest,
            "birth": Birth(
                command=shlex.join(["meshwright", "profile", model.name, "--cluster", cluster]),
                date=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                host=platform.node() or "unknown",
                device=new_result["device"],
                ranks=sum(wanted.counts),
                threads_per_rank=new_result["threads_per_rank"],
                load=load,
                software={
                    **versions(["meshwright"]),
                    "python": platform.python_version(),
                    **new_result["software"],
                },
            ).model_dump(),
            "layers": new_result["layers"],
            "stages": new_result["stages"],
            "collectives": new_result["collectives"],
            "overheads": new_result["overheads"],
            "nodes": [node.model_dump() for node in nodes],
            "pairs": new_result["pairs"],
        }
    )
    measured = MeasuredCluster(
        profile=result.model_copy(
            update={"findings": (*_findings(result, wanted), *disturbances(new_result["noise"]))}
        ),
        cluster=with_measured_links(wanted.machine, result.collectives, result.pairs),
    )
    if node_rank.nodes == 1 and save_cached(
        {
            "profile": measured.profile.model_dump(mode="json", exclude_none=True),
            "cluster": measured.cluster.model_dump(mode="json", exclude_none=True),
        },
        folder / "profile.json",
    ):
        for part in folder.glob("rank-*.json"):
            part.unlink(missing_ok=True)
    return measured


def agenda(
    model: ModelGraph,
    cluster: str,
    job: JobOf,
    *,
    budget_s: float = BUDGET_S,
    node_rank: NodeRank = ALONE,
) -> ProfileAgenda:
    """Return the agenda of `profile`."""
    with Rendezvous(node_rank) as rendezvous:
        return _agreement(model, cluster, job, budget_s, rendezvous)[0]


def _agreement(
    model: ModelGraph, cluster: str, job: JobOf, budget_s: float, rendezvous: Rendezvous
) -> tuple[ProfileAgenda, list[dict[str, Any]]]:
    """Meet the other nodes; return what all will measure, and each rank's own description."""
    local_cluster = resolve_cluster(cluster)
    descriptions = rendezvous.all_gather(
        {
            "node": node_here().model_dump(mode="json"),
            "cluster": local_cluster.model_dump(mode="json"),
            "model": model.digest,
            "ranks": _ranks_here(local_cluster, cluster, rendezvous.node_rank),
        }
    )
    if {of_node["model"] for of_node in descriptions} != {model.digest}:
        raise LaunchError("nodes: measure different models; give all the same command")
    counts = tuple(int(of_node["ranks"]) for of_node in descriptions)
    # From all answers, so that all nodes come to the same result.
    machine = _machine(
        ClusterSpec.of(descriptions[0]["cluster"]),
        [ClusterSpec.of(of_node["cluster"]) for of_node in descriptions],
        cluster,
    )
    wanted_job = job if isinstance(job, Job) else job(machine)
    if wanted_job.precision in EIGHT_BITS:
        raise DocumentError(
            "precision",
            f"is {wanted_job.precision}, whose products are not measured apart; profile in bf16",
        )
    measured_groups = tuple(groups(machine, counts))
    plans = best_plans(model, machine, wanted_job)
    of_layers = divisions(
        model, machine, wanted_job, counts, preferred=[degrees_of(plan) for _, plan in plans]
    )
    return ProfileAgenda(
        machine=machine,
        job=wanted_job,
        counts=counts,
        groups=measured_groups,
        wishes=tuple(wishes(plans, divisions=of_layers, micro_batches=micro_batches(wanted_job))),
        # Heads of adapters alone are run by themselves.
        heads=tuple(head_wishes(plans, divisions=of_layers)) if model.architecture else (),
        stages=tuple(stage_wishes(model, plans, divisions=of_layers)),
        budget=budget(budget_s, groups=len(measured_groups)),
    ), descriptions


def _folder(
    model: ModelGraph,
    cluster: str,
    wanted: ProfileAgenda,
    descriptions: Sequence[dict[str, Any]],
    budget_s: float,
) -> Path:
    """Return the folder in which a profile of this content is cached."""
    # Virtual machines give and take memory and interfaces; neither changes a second.
    same = ("name", "processor", "cores", "devices")
    nodes = [
        {"ranks": of_node["ranks"], **{fact: of_node["node"][fact] for fact in same}}
        for of_node in descriptions
    ]
    document = Path(cluster)
    return folder_of(
        {
            "model": model.digest,
            "job": repr(wanted.job),
            "cluster": document.read_text("utf-8") if document.is_file() else cluster,
            "nodes": nodes,
            "budget": budget_s,
            "threads": os.environ.get("OMP_NUM_THREADS"),
        }
    )


def _order(
    model: ModelGraph, script: ScriptFile | None, wanted: ProfileAgenda, folder: Path
) -> dict[str, Any]:
    """Return the orders of the ranks."""
    source, files = script or (None, None)
    return {
        "model": model.model_dump(mode="json", exclude_none=True),
        "script": source,
        "files": None if files is None else dict(files),
        "seq_len": wanted.job.seq_len,
        "precision": wanted.job.precision,
        "cases": [_setting(wish) for wish in wanted.wishes],
        "heads": [
            {
                **dict(zip(("tensor", "context", "expert"), head.division, strict=True)),
                "micro_batch": head.micro_batch,
                "loss": head.loss.model_dump(),
            }
            for head in wanted.heads
        ],
        "stages": [
            {"case": _setting(stage.wish), "layers": stage.layers} for stage in wanted.stages
        ],
        "stages_s": wanted.budget.stages_s,
        "least": min(LEAST_CASES, len(wanted.wishes)),
        "groups": [asdict(group) for group in wanted.groups],
        "first_ranks": [sum(wanted.counts[:node]) for node in range(len(wanted.counts))],
        "group_s": wanted.budget.group_s,
        "pairs_s": wanted.budget.pairs_s,
        "layers_s": wanted.budget.layers_s,
        "kept": str(folder),
    }


def _setting(wish: LayerRequest) -> dict[str, Any]:
    return {name: value for name, value in asdict(wish).items() if name != "value"}


def _findings(result: Profile, wanted: ProfileAgenda) -> list[Finding]:
    notes = list(findings(result))
    network = wanted.machine.tiers[-1] if len(wanted.counts) > 1 else None
    if network is not None and network.provenance == "quoted" and network.name != NETWORK:
        notes += below_quote(
            result.pairs,
            [node.name for node in result.nodes],
            quoted_bytes_per_s=network.bytes_per_s,
        )
    return notes


def _machine(local_cluster: ClusterSpec, every: Sequence[ClusterSpec], text: str) -> ClusterSpec:
    """Return the cluster that all nodes are: from its document, or as the nodes detect it."""
    if len(every) == 1 or _nodes(local_cluster) == len(every):
        return local_cluster
    if _nodes(local_cluster) != 1:
        raise LaunchError(
            f"{text}: has {_nodes(local_cluster)} nodes, and the command was started on "
            f"{len(every)}; start it on all of them, or give --cluster local"
        )
    return joint_cluster(every)


def _nodes(cluster: ClusterSpec) -> int:
    return sum(group.nodes for group in cluster.groups)


def _ranks_here(local_cluster: ClusterSpec, text: str, node_rank: NodeRank) -> int:
    """Return the number of a cluster's devices on this node."""
    if _nodes(local_cluster) == 1:
        return local_cluster.devices
    if _nodes(local_cluster) != node_rank.nodes:
        raise LaunchError(
            f"{text}: has {local_cluster.devices} x {local_cluster.groups[0].accelerator.name} "
            f"on {_nodes(local_cluster)} nodes, "
            f"and a profile is measured where it runs, which is {node_rank.nodes} "
            f"{'node' if node_rank.nodes == 1 else 'nodes'} here; start it on each of the nodes, "
            "or profile with --cluster local on one of them"
        )
    per_node = [
        group.devices_per_node for group in local_cluster.groups for _ in range(group.nodes)
    ]
    return per_node[node_rank.node]


def _with_devices(
    nodes: Sequence[MeasuredNode], by_rank: dict[str, Any], counts: Sequence[int]
) -> list[MeasuredNode]:
    """Return nodes with their ranks' measurements beside the system's description."""
    measured = [MeasuredDevice.model_validate(device) for device in by_rank["devices"]]
    result = []
    for index, node in enumerate(nodes):
        first = sum(counts[:index])
        mine = []
        for local, device in enumerate(measured[first : first + counts[index]]):
            known_device = node.devices[local] if local < len(node.devices) else None
            facts = (
                {"bus": known_device.bus, "pcie": known_device.pcie, "numa": known_device.numa}
                if known_device
                else {}
            )
            mine.append(device.model_copy(update=facts))
        result.append(node.model_copy(update={"devices": tuple(mine)}))
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Groups of ranks to measure, `stride` apart; `inner` neighbours have a faster tier."""

    tier: str
    ranks: int
    stride: int = 1
    inner: int = 1


def groups(machine: ClusterSpec, counts: Sequence[int]) -> list[Groups]:
    """Return the measured groups: pairs and all ranks, of a node, of the nodes, of both together.

    Seconds among other numbers of ranks follow from the nearest of these.
    """
    result = []
    per_node = counts[0]
    if len(set(counts)) == 1:
        tiers = machine.tiers or machine.groups[0].tiers or ()
        result += [
            Groups(tier=next(t.name for t in tiers if t.devices >= size), ranks=size)
            for size in sorted({2, per_node} if per_node % 2 == 0 else {per_node})
            if 1 < size <= per_node
        ]
    if len(counts) == 1:
        return result
    network = machine.tiers[-1].name
    if len(set(counts)) > 1:
        return [*result, Groups(tier=network, ranks=sum(counts))]
    sizes = {2, len(counts)} if len(counts) % 2 == 0 else {len(counts)}
    result += [Groups(tier=network, ranks=size, stride=per_node) for size in sorted(sizes)]
    if per_node > 1:
        result.append(Groups(tier=network, ranks=sum(counts), inner=per_node))
    return result


def micro_batches(job: Job) -> list[int]:
    """Return the powers of two that a micro-batch of the job can have and that are measured.

    >>> micro_batches(Job(seq_len=128, global_batch=12))
    [1, 2, 4, 8]
    """
    largest = min(job.global_batch, MOST_MEASURED)
    return [2**power for power in range(largest.bit_length())]


def divisions(
    model: ModelGraph,
    machine: ClusterSpec,
    job: Job,
    counts: Sequence[int],
    *,
    preferred: Sequence[Degrees] = (),
) -> list[Degrees]:
    """Return the worthwhile divisions of layers over groups of neighbours on a node.

    Tensor parallelism by itself; then the degrees of good plans, `preferred`; then context and
    expert parallelism by themselves.  Each is a short chain of the model that stays in memory, so
    the last ones are left out where those before take half of it.
    """
    sizes = divisors(machine.devices)
    every: list[Degrees] = [(degree, 1, 1) for degree in sizes]
    every += preferred
    every += [(1, degree, 1) for degree in sizes] + [(1, 1, degree) for degree in sizes]
    fine = [
        degrees
        for degrees in dict.fromkeys(every)
        if all(count % ranks_of(degrees) == 0 for count in counts)
        and refusal(model, machine, job, layout_of(degrees)) is None
    ]
    result: list[Degrees] = []
    has_bytes = machine.groups[0].accelerator.memory_bytes
    least_bytes = min((chain_bytes(model, degrees) for degrees in fine), default=0.0)
    if least_bytes > has_bytes:
        raise LaunchError(
            f"{model.name}: a layer of each kind takes {bytes_text(least_bytes)} with gradients, "
            f"and a device has {bytes_text(has_bytes)}; profile a narrower model of the same "
            "kind, or on more devices"
        )
    left_bytes = MEMORY_SHARE * has_bytes
    for degrees in fine:
        left_bytes -= chain_bytes(model, degrees)
        if degrees[0] == max(degrees) or left_bytes > 0:
            result.append(degrees)
    return result


def ranks_of(degrees: Degrees) -> int:
    """Return the ranks of one group; experts take those of tensor and context first.

    >>> ranks_of((2, 1, 4)), ranks_of((2, 2, 1))
    (4, 4)
    """
    tensor, context, expert = degrees
    return math.lcm(tensor * context, expert)


def layout_of(degrees: Degrees) -> Layout:
    """Return a layout of one group, with nothing else."""
    tensor, context, expert = degrees
    rest = ranks_of(degrees) // (tensor * context)
    return Layout(
        tensor=tensor, context=context, expert=expert, data_shard=rest, zero=int(rest > 1)
    )


def chain_bytes(model: ModelGraph, degrees: Degrees) -> float:
    """Return about what a short chain takes on a rank, gradients included."""
    seen: Counter[str] = Counter()
    parameters = 0
    for _, layer in model.chain:
        seen[layer.kind] += 1
        if model.edges or seen[layer.kind] <= SAME_KIND:
            parameters += layer.parameters
    return 2 * 4.0 * parameters / degrees[0]


def _device_here(machine: ClusterSpec, text: str, *, ranks: int) -> Device:
    """Return the kind of device to measure; refuse a node that has not enough of them."""
    group = machine.groups[0]
    device: Device = "cpu" if group.accelerator.kind == "cpu" else "cuda"
    have = cores() if device == "cpu" else cuda_devices()
    if device == "cuda" and have < ranks:
        raise LaunchError(
            f"{text}: has {ranks} x {group.accelerator.name} on a node, and a profile is measured "
            f"where it runs, which is here, with {have} devices; profile with --cluster local"
        )
    return device
