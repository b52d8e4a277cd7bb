"""How far predictions are from Sailor's real runs of OPT-350M on GH200 nodes, peers beside ours.

Two predictions of ours, neither fitted to these runs:

    simulated     the seconds of layers and links that Sailor measured beforehand, played by our
                  event simulator, both ends busy with a transfer; then the optimizer and the
                  gradients' all-reduce
    data sheets   nothing measured: Megatron-DeepSpeed in fp32 by `planner.calibration.tables` on
    the
                  catalogue's GH200, with the links of Alps' nodes as HPE and NVIDIA publish them,
                  and the blocks spread evenly, which is not always how they were

Memory of `simulated` is what a rank reserves: the profile's bytes of layers and of the framework,
micro-batches in flight as 1F1B keeps them, the loss's copies of its logits, which no profile of
layers shows, and the allocator's fragments at the share of a framework that nothing is known of
(framework `unknown`).  Sailor's formulas use the same measurements.
The predictions of Sailor and of its rivals' models are those stored with the runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.comparison import read_case, require_score
from benchmarks.peers.sailor import Case, all_reduce_s, score, send_s
from meshwright.planner.architectures.architecture import graph_of
from meshwright.planner.calibration.tables.predictions import predict_run
from meshwright.planner.catalog import frameworks
from meshwright.planner.catalog.expressions import cluster_of
from meshwright.planner.documents.cluster import ClusterSpec, LinkTier
from meshwright.planner.documents.model import Architecture
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.requests.request import Request
from meshwright.planner.requests.setup import Setup
from meshwright.planner.schedules.schedule import orders
from meshwright.planner.schedules.simulate import timeline

# Four GH200 in a node, each pair joined by six NVLinks; one Slingshot port of 200 Gb/s for each.
NVLINK = {"latency_s": 6e-6, "bytes_per_s": 450e9, "peer_bytes_per_s": 150e9}
SLINGSHOT = {"latency_s": 20e-6, "bytes_per_s": 25e9}

# Scores stored with six decimals.
_PRINTED = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Mean absolute relative errors of one model; memory is None where it has none."""

    model: str
    runs: int
    time: float
    memory: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)


def simulated_s(case: Case, plan: dict[str, Any], batch: int) -> float:
    """Seconds of an iteration of one pipeline on equal replicas, played action by action."""
    [pipeline] = plan["pipelines"]
    contents, stages = pipeline["layers_per_stage"], pipeline["stages"]
    replica, replicas = stages[0][0], len(stages[0])
    if any(one != replica for of_stage in stages for one in of_stage):
        raise ValueError("the replicas of a plan differ; one of them cannot speak for all")
    micro_batch = plan["mbs"]
    forward, backward, update = (
        case.layer_s(replica["gpu"], micro_batch, replica["tp"], what)
        for what in ("fwd_s", "bwd_s", "update_s")
    )
    if forward is None or backward is None or update is None:
        return math.inf
    link, last = case.link(replica, replica), len(contents) - 1
    sent_s = [send_s(case.output_bytes[layers[-1]] * micro_batch, link) for layers in contents]
    # A send or a receive is an instruction of its own in DeepSpeed's pipeline: both ends wait.
    passed_s = [
        (sent_s[number - 1] if number > 0 else 0.0) + (sent_s[number] if number < last else 0.0)
        for number in range(last + 1)
    ]
    played = timeline(
        orders(
            "1f1b",
            stages=last + 1,
            micro_batches=math.ceil(batch / (micro_batch * replicas)),
        ),
        forward_s=[
            sum(forward[at] for at in layers) + passed
            for layers, passed in zip(contents, passed_s, strict=True)
        ],
        backward_s=[
            sum(backward[at] for at in layers) + passed
            for layers, passed in zip(contents, passed_s, strict=True)
        ],
    )
    ring = case.ring_link(replica["gpu"], replica["gpu"])
    weights = [sum(case.weight_bytes[at] for at in layers) for layers in contents]
    reduced_s = max(all_reduce_s(w / replica["tp"], replicas, ring) for w in weights)
    updated_s = float(max(update[layers[0]] for layers in contents))
    return played.makespan_s + updated_s + reduced_s


LOGIT_COPIES = 2
"""Of a divided loss in fp32, beside what it keeps: shifted logits and the gradient."""


def reserved_bytes(raw: dict[str, Any], plan: dict[str, Any], batch: int) -> float:
    """Bytes that the fullest rank of a run reserves."""
    rule, config = raw["memory"], raw["model"]["config"]
    [pipeline] = plan["pipelines"]
    contents, stages = pipeline["layers_per_stage"], pipeline["stages"]
    tensor, micro_batch = stages[0][0]["tp"], plan["mbs"]
    layers = rule["per_tp"][str(tensor)]
    micro_batches = math.ceil(batch / (micro_batch * len(stages[0])))
    framework = rule["framework_bytes_tp1" if tensor == 1 else "framework_bytes_tp_gt1"]
    logits = config["sequence_length"] * config["vocab_size"] * rule["bytes_per_float"] / tensor
    fullest = 0.0
    for number, held in enumerate(contents):
        in_flight = min(micro_batches, len(contents) - number)
        floats = sum(layers["act_floats"][at] for at in held) * rule["bytes_per_float"]
        size = rule["bytes_per_param"] * sum(layers["params"][at] for at in held)
        size += in_flight * micro_batch * floats
        if number == len(contents) - 1:
            size += LOGIT_COPIES * micro_batch * logits
        fullest = max(fullest, size)
    return float(framework + frameworks()["unknown"].memory.reserved * fullest)


def alps(devices: int, per_node: int) -> ClusterSpec:
    """Return so many GH200 in nodes of Alps."""
    in_node = min(per_node, devices)
    base = cluster_of("gh200", devices_per_node=1)
    group = base.groups[0].model_copy(
        update={"nodes": devices // in_node, "devices_per_node": in_node}
    )
    tiers = []
    if in_node > 1:
        tiers.append(LinkTier(name="nvlink", devices=in_node, **NVLINK))
    if devices > in_node:
        tiers.append(LinkTier(name="slingshot", devices=devices, **SLINGSHOT))
    return ClusterSpec(name="alps", groups=(group,), tiers=tuple(tiers))


def from_data_sheets(raw: dict[str, Any], plan: dict[str, Any], batch: int) -> Prediction:
    """Return what the planner says of a run of whose parts nothing was measured."""
    config: dict[str, Any] = raw["model"]["config"]
    [pipeline] = plan["pipelines"]
    stages = pipeline["stages"]
    tensor, data = stages[0][0]["tp"], len(stages[0])
    architecture = Architecture(
        family="gpt",
        hidden_size=config["hidden_size"],
        layers=config["num_layers"],
        heads=config["heads"],
        kv_heads=config["heads"],
        head_dim=config["head_dim"],
        ffn_size=4 * config["hidden_size"],
        vocab_size=config["vocab_size"],
        gated_mlp=False,
        norm="layer",
        positions="learned",
        max_positions=config["max_position_embeddings"],
        tied_embeddings=False,  # its last layer has an embedding's parameters of its own
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    )
    return predict_run(
        Setup(
            request=Request(
                graph_of(architecture, name="sailor"),
                alps(tensor * data * len(stages), raw["gpus_per_node"][stages[0][0]["gpu"]]),
                Job(seq_len=config["sequence_length"], global_batch=batch, precision="fp32"),
                framework=frameworks()["megatron-deepspeed"],
            ),
            layout=Layout(
                tensor=tensor,
                pipeline=len(stages),
                data_replicate=data,
                micro_batch=plan["mbs"],
                micro_batches=-(-batch // (data * plan["mbs"])),
                sequence_parallel=False,
            ),
        )
    )


def _mean_error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    pairs = zip(predicted, measured, strict=True)
    return sum(abs(p / m - 1) for p, m in pairs) / len(measured)


def errors(path: Path) -> list[Errors]:
    """Return the errors of our predictions and of every stored model, on the same runs."""
    raw = read_case(path)
    case, runs = Case(raw), raw["measurements"]
    for run in runs:
        ours = score(case, run["plan"], batch=run["gbs"]).iteration_s
        require_score(run["file"], run["sailor_formula_pred_s"], ours, tolerance=_PRINTED)
    measured_s = [run["measured_iter_s"] for run in runs]
    measured_bytes = [run["measured_peak_mem_bytes"] for run in runs]
    told = [from_data_sheets(raw, run["plan"], run["gbs"]) for run in runs]
    found = [
        Errors(
            model="ours, simulated",
            runs=len(runs),
            time=_mean_error(
                [simulated_s(case, run["plan"], run["gbs"]) for run in runs], measured_s
            ),
            memory=_mean_error(
                [reserved_bytes(raw, run["plan"], run["gbs"]) for run in runs],
                measured_bytes,
            ),
        ),
        Errors(
            model="ours, data sheets",
            runs=len(runs),
            time=_mean_error([one.step_time_s for one in told], measured_s),
            memory=_mean_error([one.memory_bytes("device", "max") for one in told], measured_bytes),
        ),
    ]
    for model in runs[0]["predictions_by_ported_simulators"]:
        stored = [run["predictions_by_ported_simulators"][model] for run in runs]
        has_memory = all("peak_mem_bytes" in one for one in stored)
        found.append(
            Errors(
                model=model,
                runs=len(runs),
                time=_mean_error([one["iter_s"] for one in stored], measured_s),
                memory=_mean_error([one["peak_mem_bytes"] for one in stored], measured_bytes)
                if has_memory
                else None,
            )
        )
    return found


def error_table(rows: Sequence[Errors]) -> str:
    """Return the errors as a table of Markdown."""
    lines = ["| model | runs | mean error of time | of memory |", "| --- | --- | --- | --- |"]
    for row in rows:
        memory = "" if row.memory is None else f"{row.memory:.1%}"
        lines.append(f"| {row.model} | {row.runs} | {row.time:.1%} | {memory} |")
    return "\n".join(lines)
