"""Every command as one Python function, with the arguments of the command line.

Functions here read documents, call one function of the package that knows, and return its answer.
torch is imported only inside the calls that need it.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from planner import catalog as shelves
from planner import document
from planner.calibrate.constants import calibrated
from planner.cluster import ClusterSpec, Precision
from planner.costs.group_costs import only_profile
from planner.costs.layout_costs import refusal
from planner.errors import DocumentError, LaunchError
from planner.expressions import is_factory, resolve_cluster, resolve_model
from planner.model import ModelGraph
from planner.plan import Job, Plan
from planner.predict import layout_prediction, plan_timeline
from planner.predict import predict as predict_plan
from planner.prediction import Certificate, Prediction
from planner.profile import Profile, Profiles
from planner.search.best_first import Answer, Progress, search
from planner.search.pins import pinned_layout, read_pins
from planner.solver.instance import Fathomed, Infeasible, Solution
from planner.solver.problem import Problem
from planner.solver.requirements import read_requirements
from planner.solver.sided import solve as solve_exactly
from planner.training import Training
from planner.units import bytes_text, count_text, duration_s, seconds_text

if TYPE_CHECKING:
    from planner.backends.search import BackendAnswer
    from planner.scores.validate import Validation
    from profiler.profile import Intended
    from runtime.export import Exported
    from runtime.report import Comparison, RunReport

TOKENS_PER_STEP = 2**20
"""Tokens of a default global batch on accelerators; on CPUs it is 8 samples a rank."""
FACTORY_SEQ_LEN = 256
"""Default tokens per sample of a model that does not say how many it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished training run beside its prediction."""

    plan: Plan
    report: RunReport
    prediction: Prediction
    rows: list[Comparison]


def model_of(text: str, *, seq_len: int | None = None) -> ModelGraph:
    """Return the model that a catalogue name, a configuration or `file.py:factory` names.

    A factory's modules are traced on samples of `seq_len` tokens, by default as many as a job has.
    """
    if is_factory(text):
        _need_torch(f"{text}: reading a Python factory")
        from runtime.factory import graph_of_factory  # noqa: PLC0415 - needs torch

        graph: ModelGraph = graph_of_factory(text, seq_len=seq_len or FACTORY_SEQ_LEN)
        return graph
    return resolve_model(text)


def job_of(
    model: ModelGraph,
    cluster: ClusterSpec,
    *,
    seq_len: int | None = None,
    global_batch: int | None = None,
    precision: Precision | None = None,
    lora: Sequence[str] = (),
) -> Job:
    """Return the work of one step, with defaults that suit the model and the devices."""
    for name, value in (("seq-len", seq_len), ("global-batch", global_batch)):
        if value is not None and value < 1:
            raise DocumentError(name, f"is {value}; it is a whole number from 1")
    on_cpu = cluster.groups[0].accelerator.kind == "cpu"
    limit = model.architecture.max_positions if model.architecture else FACTORY_SEQ_LEN
    if seq_len is None:
        seq_len = min(limit, 256 if on_cpu else 4096)
    if global_batch is None:
        samples = 8 * cluster.devices if on_cpu else max(1, TOKENS_PER_STEP // seq_len)
        global_batch = -(-samples // cluster.devices) * cluster.devices
    return Job(
        seq_len=seq_len,
        global_batch=global_batch,
        precision=precision or ("fp32" if on_cpu else "bf16"),
        lora=Training().changed([f"lora.{setting}" for setting in lora]).lora,
    )


def plan(
    model: str,
    cluster: str,
    *,
    seq_len: int | None = None,
    global_batch: int | None = None,
    precision: Precision | None = None,
    lora: Sequence[str] = (),
    profile: str | None = None,
    fix: Sequence[str] = (),
    allow: Sequence[str] = (),
    require: Sequence[str] = (),
    solver: str = "exact",
    top: int = 1,
    output: str | None = None,
    progress: Progress | None = None,
) -> Answer:
    """Find the fastest plan that fits, and prove it; with `top`, the best of other meshes too.

    `lora` are settings of adapters that alone are trained (`rank=16`).  `allow` names what the
    search may do beside: `offload` to the host, and what changes the arithmetic of training,
    `stale` weights and `compress`.
    `require` says in words what its stages must keep (see planner.solver.requirements).
    """
    if top < 1:
        raise DocumentError("top", f"is {top}; it is a whole number from 1")
    graph = model_of(model, seq_len=seq_len)
    measured = _profile_for(graph, profile)
    machine = _machine(cluster, measured)
    job = job_of(
        graph,
        machine,
        seq_len=seq_len,
        global_batch=global_batch,
        precision=precision,
        lora=lora,
    )
    answer = search(
        graph,
        machine,
        job,
        cluster_name=cluster,
        profile=measured,
        pins=replace(
            read_pins(fix, allow),
            require=read_requirements(require, [name for name, _ in graph.chain]),
        ),
        solver=solver,
        top=top,
        progress=progress,
    )
    if output is not None:
        document.write(answer.plan, output)
    return answer


def plan_for(
    backend: str,
    model: str,
    cluster: str,
    *,
    seq_len: int | None = None,
    global_batch: int | None = None,
    precision: Precision | None = None,
    lora: Sequence[str] = (),
    profile: str | None = None,
    fix: Sequence[str] = (),
    allow: Sequence[str] = (),
    require: Sequence[str] = (),
    top: int = 1,
    output: str | None = None,
    progress: Progress | None = None,
) -> BackendAnswer:
    """Find the fastest layout of another framework's space by its rules; write its flags.

    A profile gives constants of the cluster; layers measured in our runtime are not that
    framework's, and are left out.
    """
    from planner.backends.search import backend_search  # noqa: PLC0415 - rules of every framework

    graph = model_of(model, seq_len=seq_len)
    machine = _machine(cluster, _profile_for(graph, profile))
    pins = read_pins(fix, allow)
    answer = backend_search(
        graph,
        machine,
        job_of(
            graph,
            machine,
            seq_len=seq_len,
            global_batch=global_batch,
            precision=precision,
            lora=lora,
        ),
        backend=backend,
        pins=replace(pins, require=read_requirements(require, [name for name, _ in graph.chain])),
        top=max(top, 8),
        told=progress,
    )
    if output is not None:
        document.write_text("\n".join(answer.best.flags) + "\n", output)
    return answer


def predict(
    model_or_plan: str,
    cluster: str | None = None,
    *,
    layout: str | None = None,
    seq_len: int | None = None,
    global_batch: int | None = None,
    precision: Precision | None = None,
    profile: str | None = None,
    backend: str = "native",
) -> Prediction:
    """Say what a plan, or a layout of a model, will take in time and memory.

    With another backend than ours a layout is priced by that framework's accounting rules.
    """
    if _is_plan(model_or_plan):
        wanted = document.read(Plan, model_or_plan)
        if layout is not None:
            raise DocumentError("layout", "a plan has its layout already; give a model instead")
        if backend != "native":
            raise DocumentError("backend", "a plan has its backend already; give a model instead")
        graph = plan_model(wanted, model_or_plan)
        measured = _profile_for(graph, profile)
        machine = _machine(cluster or wanted.cluster, measured)
        _check_devices(wanted, machine)
        return predict_plan(wanted, graph, machine, measured)
    if cluster is None:
        raise DocumentError("cluster", "is missing; say on which machine, as in --cluster local")
    graph = model_of(model_or_plan, seq_len=seq_len)
    measured = _profile_for(graph, profile)
    machine = _machine(cluster, measured)
    job = job_of(graph, machine, seq_len=seq_len, global_batch=global_batch, precision=precision)
    pins = read_pins([layout] if layout else [], ["stale,compress"])
    wanted_layout = pinned_layout(machine, job, pins)
    if backend != "native":
        from planner.backends.prediction import (  # noqa: PLC0415 - rules of every framework
            backend_prediction,
        )

        return backend_prediction(
            graph,
            machine,
            job,
            wanted_layout,
            backend=backend,
            recompute=pins.recompute or "none",
        )
    reason = refusal(graph, machine, job, wanted_layout)
    if reason is not None:
        raise DocumentError("layout", f"{wanted_layout.text()}: {reason}")
    return layout_prediction(
        graph,
        machine,
        job,
        wanted_layout,
        recompute=pins.recompute or "none",
        activations=pins.activations or "keep",
        profile=only_profile(measured),
    )


def launch(
    plan_path: str,
    *,
    data: str | None = None,
    tokenizer: str | None = None,
    steps: int = 20,
    checkpoint: str | None = None,
    checkpoint_every: int | None = None,
    keep_checkpoints: int = 2,
    resume: bool = False,
    output: str | None = None,
    on: str = "local",
    dry_run: bool = False,
    max_seconds: float | None = None,
    weights: str | None = None,
    training: Sequence[str] = (),
    evaluate: str | None = None,
    evaluate_every: int | None = None,
    evaluate_batches: int = 8,
    tensorboard: bool = False,
    profile: str | None = None,
    nodes: int | None = None,
    node: int | None = None,
    rendezvous: str | None = None,
    quiet: bool = False,
) -> Run | None:
    """Train by a plan; return what was predicted and what was measured.

    On several nodes each calls it, and the one with rank 0 gets the answer, the others none.
    """
    from runtime.launch import launch as start  # noqa: PLC0415 - the runtime
    from runtime.nodes import seat_of  # noqa: PLC0415
    from runtime.preflight import cuda_devices  # noqa: PLC0415
    from runtime.report import comparison  # noqa: PLC0415

    _need_torch("launching a plan")
    wanted = document.read(Plan, plan_path)
    graph = plan_model(wanted, plan_path)
    measured = _profile_for(graph, profile)
    machine = _machine(wanted.cluster, measured)
    seat = seat_of(os.environ, nodes=nodes, node=node, rendezvous=rendezvous)
    devices = [group.devices_per_node for group in machine.groups for _ in range(group.nodes)]
    if seat.nodes > 1 and seat.nodes != len(devices):
        raise LaunchError(
            f"the plan is for {len(devices)} nodes ({wanted.cluster}), and {seat.source} says that "
            f"there are {seat.nodes}; plan again for what is there"
        )
    accelerator = machine.groups[0].accelerator
    if accelerator.kind != "cpu" and not cuda_devices():
        raise LaunchError(
            f"the plan is for {wanted.cluster}, and this machine has no {accelerator.name}; "
            "launch it where the devices are, or plan again for --cluster local"
        )
    prediction = predict_plan(wanted, graph, machine, measured)
    report = start(
        plan_path,
        model=graph,
        data=data,
        tokenizer=tokenizer,
        steps=steps,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        keep_checkpoints=keep_checkpoints,
        resume=resume,
        output=output,
        on=on,
        dry_run=dry_run,
        max_seconds=max_seconds,
        weights=weights,
        training=training,
        evaluate=evaluate,
        evaluate_every=evaluate_every,
        evaluate_batches=evaluate_batches,
        tensorboard=tensorboard,
        peak_step_s=prediction.mfu * prediction.step_time_s or None,
        seat=seat,
        nodes=devices if seat.nodes > 1 else (),
        quiet=quiet,
    )
    if report is None:
        return None
    return Run(
        plan=wanted, report=report, prediction=prediction, rows=comparison(report, prediction)
    )


def export(
    source: str, *, to: str, output: str, dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
) -> Exported:
    """Write a checkpoint in the form that another program reads."""
    if to not in ("huggingface", "peft"):
        raise DocumentError(
            "to", f"is '{to}'; a checkpoint is exported to huggingface, its adapters to peft"
        )
    _need_torch("exporting a checkpoint")
    from runtime.export import to_huggingface, to_peft  # noqa: PLC0415 - the runtime

    if to == "peft":
        written: Exported = to_peft(Path(source), Path(output))
    else:
        written = to_huggingface(Path(source), Path(output), dtype=dtype)
    return written


def profile(
    model: str,
    cluster: str = "local",
    *,
    seq_len: int | None = None,
    global_batch: int | None = None,
    precision: Precision | None = None,
    output: str | None = None,
    cluster_output: str | None = None,
    nodes: int | None = None,
    node: int | None = None,
    rendezvous: str | None = None,
    budget: str | None = None,
    fresh: bool = False,
    quiet: bool = False,
) -> Profile:
    """Measure a model's layers and the links of these machines.

    `budget` is about how long it may take (`5min`); what is most valuable to a plan is measured
    first.  What was measured before of the same model, software and machines is not measured again
    unless `fresh`, and a profile that was cut short goes on.

    On several nodes it is called once on each, with the same arguments; which of them this is say
    `nodes`, `node` and `rendezvous`, or the environment that torchrun, Slurm or Kubernetes made.
    Node 0 writes `output`, and to `cluster_output` the cluster with its links as measured.
    """
    _need_torch("measuring a machine")
    from profiler.profile import BUDGET_S  # noqa: PLC0415 - starts ranks
    from profiler.profile import profile as measure  # noqa: PLC0415
    from runtime.nodes import seat_of  # noqa: PLC0415 - starts ranks

    graph = model_of(model, seq_len=seq_len)
    seat = seat_of(os.environ, nodes=nodes, node=node, rendezvous=rendezvous)

    def job(machine: ClusterSpec) -> Job:
        return job_of(
            graph, machine, seq_len=seq_len, global_batch=global_batch, precision=precision
        )

    found = measure(
        graph,
        cluster,
        job,
        budget_s=BUDGET_S if budget is None else duration_s(budget),
        fresh=fresh,
        seat=seat,
        quiet=quiet,
    )
    measured: Profile = found.profile
    if seat.node == 0:
        if output is not None:
            document.write(measured, output)
        if cluster_output is not None:
            document.write(found.cluster, cluster_output)
    return measured


def profile_agenda(
    model: str,
    cluster: str = "local",
    *,
    seq_len: int | None = None,
    global_batch: int | None = None,
    precision: Precision | None = None,
    nodes: int | None = None,
    node: int | None = None,
    rendezvous: str | None = None,
    budget: str | None = None,
) -> Intended:
    """Return what `profile` would measure, in its order, and measure nothing."""
    from profiler.profile import BUDGET_S, intended  # noqa: PLC0415 - the profiler
    from runtime.nodes import seat_of  # noqa: PLC0415

    graph = model_of(model, seq_len=seq_len)

    def job(machine: ClusterSpec) -> Job:
        return job_of(
            graph, machine, seq_len=seq_len, global_batch=global_batch, precision=precision
        )

    found: Intended = intended(
        graph,
        cluster,
        job,
        budget_s=BUDGET_S if budget is None else duration_s(budget),
        seat=seat_of(os.environ, nodes=nodes, node=node, rendezvous=rendezvous),
    )
    return found


def agenda_json(found: Intended) -> dict[str, Any]:
    """Return what `profile --dry-run --json` prints."""
    return {
        "cluster": found.machine.name,
        "ranks_of_nodes": list(found.counts),
        "budget_s": {
            "each_group": found.budget.group_s,
            "pairs_of_nodes": found.budget.pairs_s,
            "layers": found.budget.layers_s,
        },
        "groups": [
            {"tier": g.tier, "ranks": g.ranks, "stride": g.stride, "inner": g.inner}
            for g in found.groups
        ],
        "layers": [
            {
                "tensor": w.tensor,
                "micro_batch": w.micro_batch,
                "recompute": w.recompute,
                "value": w.value,
            }
            for w in found.wishes
        ],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A plan beside its prediction, and where the pictures were written."""

    plan: Plan
    prediction: Prediction
    html: str | None
    trace: str | None


def show(
    plan_path: str,
    *,
    cluster: str | None = None,
    profile: str | None = None,
    html: str | None = None,
    trace: str | None = None,
    certificate: Certificate | None = None,
    rows: Sequence[Comparison] = (),
) -> Shown:
    """Show what a plan says and should do; as a page (`html`) or a Chrome trace (`trace`) too."""
    wanted = document.read(Plan, plan_path)
    graph = plan_model(wanted, plan_path)
    measured = _profile_for(graph, profile)
    machine = _machine(cluster or wanted.cluster, measured)
    prediction = predict_plan(wanted, graph, machine, measured)
    if html is not None:
        from planner.report.html import page as report_page  # noqa: PLC0415 - loads plotly

        page = report_page(
            wanted,
            prediction,
            timeline=plan_timeline(wanted, graph, machine, measured),
            certificate=certificate,
            measured=[comparison_cells(row) for row in rows],
        )
        document.write_text(page, html)
    if trace is not None:
        from planner.report.trace import trace_json  # noqa: PLC0415

        document.write_text(trace_json(plan_timeline(wanted, graph, machine, measured)), trace)
    return Shown(plan=wanted, prediction=prediction, html=html, trace=trace)


def comparison_cells(row: Comparison) -> tuple[str, str, str, str]:
    """Return what, predicted, measured and error as people read them."""
    shown: dict[str, Callable[[float], str]] = {
        "s": seconds_text,
        "bytes": bytes_text,
        "tokens/s": lambda rate: f"{rate:,.0f} tokens/s",
    }
    text = shown[row.unit]
    return row.quantity, text(row.predicted), text(row.measured), f"{100 * row.error:+.1f} %"


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """A partition problem and its best split, or why there is none."""

    problem: Problem
    result: Solution | Infeasible | Fathomed


def solve(problem: str, *, solver: str = "exact") -> Solved:
    """Solve a bare partition problem; docs/problem.md has its format."""
    stated = document.read(Problem, problem)
    instance = stated.instance()
    if solver == "exact":
        return Solved(problem=stated, result=solve_exactly(instance))
    if solver == "ilp":
        from planner.solver.ilp import solve as solve_program  # noqa: PLC0415 - loads HiGHS

        return Solved(problem=stated, result=solve_program(instance))
    raise DocumentError("solver", f"is '{solver}'; the solvers are exact and ilp")


def validate(
    table: str,
    *,
    html: str | None = None,
    rows: str | None = None,
    progress: Progress | None = None,
) -> Validation:
    """Predict every run of a table of real ones and score the predictions."""
    from planner.scores.validate import rows_csv  # noqa: PLC0415 - loads the rules of every framework
    from planner.scores.validate import validate as validate_table  # noqa: PLC0415

    result = validate_table(Path(table), told=progress)
    if rows is not None:
        document.write_text(rows_csv(result), rows)
    if html is not None:
        from planner.report.validation import page as validation_page  # noqa: PLC0415 - loads plotly

        document.write_text(validation_page(result), html)
    return result


def catalog(shelf: str) -> list[dict[str, str | float | None]]:
    """Return one list of the catalogue as rows."""
    if shelf == "accelerators":
        return [
            {
                "name": name,
                "memory": bytes_text(entry.memory_bytes),
                "bf16 TFLOP/s": entry.peak_flops.get("bf16", 0) / 1e12 or None,
                "memory GB/s": entry.memory_bytes_per_s / 1e9,
                "TDP W": entry.tdp_w,
                "matmul reaches": f"{100 * entry.curve.matmul:.0f} %",
                "provenance": entry.curve.provenance,
            }
            for name, entry in shelves.accelerators().items()
        ]
    if shelf == "nodes":
        return [
            {
                "name": name,
                "devices": entry.devices_per_node,
                "accelerator": entry.accelerator,
                "network GB/s per device": (
                    entry.network.bytes_per_s / 1e9 if entry.network else None
                ),
            }
            for name, entry in shelves.nodes().items()
        ]
    if shelf == "models":
        graphs = [(name, resolve_model(name)) for name in shelves.models()]
        return [
            {
                "name": name,
                "parameters": count_text(graph.parameters),
                "layers": graph.architecture.layers if graph.architecture else None,
                "hidden": graph.architecture.hidden_size if graph.architecture else None,
                "attention": graph.architecture.attention if graph.architecture else None,
            }
            for name, graph in graphs
        ]
    if shelf == "prices":
        return [
            {
                "accelerator": rent.accelerator,
                "provider": rent.provider,
                "instance": rent.instance,
                "on demand $/h": rent.on_demand_usd_per_device_hour,
                "spot from $/h": rent.spot_usd_per_device_hour,
                "date": rent.date,
            }
            for rent in shelves.rents()
        ]
    raise DocumentError("catalog", f"'{shelf}': ask for accelerators, nodes, models or prices")


def plan_model(wanted: Plan, plan_path: str | None = None) -> ModelGraph:
    """Return the model of a plan, and refuse one that is not the model the plan was made for."""
    try:
        graph = model_of(_source_of(wanted, plan_path), seq_len=wanted.seq_len)
        wanted.check_model(graph)
    except DocumentError as error:
        raise (error if error.file else error.in_file(plan_path or "plan")) from error
    return graph


def _source_of(wanted: Plan, plan_path: str | None) -> str:
    """A relative file in a plan is looked for where we stand, then beside the plan."""
    source = wanted.model.source
    file, colon, factory = source.partition(":")
    if plan_path is not None and not Path(file).exists():
        beside = Path(plan_path).parent / file
        if beside.exists():
            return f"{beside}{colon}{factory}"
    return source


def _need_torch(what: str) -> None:
    if importlib.util.find_spec("torch") is None:
        raise LaunchError(f"{what} needs torch; install it with: pip install 'meshwright[torch]'")


def _profile_for(graph: ModelGraph, paths: str | None) -> Profiles:
    """Read `profile.yaml`, or `GROUP=a.yaml,GROUP=b.yaml` where devices differ."""
    if paths is None:
        return None
    if "=" not in paths or Path(paths).is_file():
        return _one_profile_for(graph, paths)
    found: dict[str, Profile] = {}
    for part in paths.split(","):
        group, sign, path = part.partition("=")
        if not sign or group in found:
            why = "is given twice" if sign else "has no group; write GROUP=FILE,GROUP=FILE"
            raise DocumentError("profile", f"'{part}': {group if sign else 'it'} {why}")
        found[group] = _one_profile_for(graph, path)
    return found


def _one_profile_for(graph: ModelGraph, path: str) -> Profile:
    measured = document.read(Profile, path)
    if measured.calibration is not None and not measured.layers:
        return measured  # constants of the cluster hold for every model
    if measured.model_digest != graph.digest:
        raise DocumentError(
            "model_digest",
            f"is {measured.model_digest}, but {graph.name} has {graph.digest}; "
            "this profile was measured on another model: measure again",
            file=path,
        )
    return measured


def _machine(cluster: str, measured: Profiles) -> ClusterSpec:
    """Return a cluster, with the constants that runs on it told where a profile has them."""
    machine = resolve_cluster(cluster)
    each = (measured,) if isinstance(measured, Profile) else (measured or {}).values()
    for profile in each:
        machine = calibrated(machine, profile.calibration)
    return machine


def _check_devices(wanted: Plan, machine: ClusterSpec) -> None:
    if wanted.mesh.devices > machine.devices:
        raise DocumentError(
            "mesh",
            f"takes {wanted.mesh.devices} ranks, and {machine.name} has {machine.devices} devices; "
            "plan again for this cluster",
        )


def _is_plan(text: str) -> bool:
    """Whether a path holds a plan rather than a model."""
    if not text.endswith((".yaml", ".yml", ".json")) or not Path(text).is_file():
        return False
    try:
        data = document.plain(document.read_text(text))
    except DocumentError as error:
        raise error.in_file(text) from error
    return isinstance(data, dict) and "stages" in data


def answer_json(answer: Answer) -> dict[str, Any]:
    """Return what `plan --json` prints."""
    prediction = answer.prediction
    return {
        "plan": answer.plan.model_dump(mode="json", exclude_none=True),
        "layout": prediction.layout,
        "step_time_s": prediction.step_time_s,
        "step_time_low_s": prediction.step_time_low_s,
        "step_time_high_s": prediction.step_time_high_s,
        "tokens_per_s": prediction.tokens_per_s,
        "mfu": prediction.mfu,
        "fits": prediction.fits,
        "peak_memory_bytes": [
            {"total": stage.peak_memory_bytes, "parts": stage.memory_parts}
            for stage in prediction.stages
        ],
        "certificate": answer.certificate.model_dump(mode="json", exclude_none=True),
        "top": [
            {
                "layout": ranked.prediction.layout,
                "objective_s": ranked.objective_s,
                "step_time_s": ranked.prediction.step_time_s,
                "plan": ranked.plan.model_dump(mode="json", exclude_none=True),
            }
            for ranked in answer.top
        ],
        "search_s": answer.search_s,
    }


def run_json(run: Run) -> dict[str, Any]:
    """Return what `launch --json` prints."""
    return {
        "report": run.report.model_dump(mode="json", exclude_none=True),
        "prediction": run.prediction.model_dump(mode="json", exclude_none=True),
        "comparison": [
            {
                "quantity": row.quantity,
                "unit": row.unit,
                "predicted": row.predicted,
                "measured": row.measured,
                "error": row.error,
            }
            for row in run.rows
        ],
    }


def export_json(written: Exported) -> dict[str, Any]:
    """Return what `export --json` prints."""
    return {
        "checkpoint": str(written.checkpoint),
        "step": written.step,
        "folder": str(written.folder),
        "files": list(written.files),
        "parameters": written.parameters,
        "bytes": written.size_bytes,
    }


def as_json(data: object) -> str:
    """Return one JSON object as text."""
    return json.dumps(data, indent=2)
