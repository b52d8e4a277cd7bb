"""A layout of a model priced by another framework's stack, as the Prediction of `predict`."""

from __future__ import annotations

from planner.backends.estimate import estimate
from planner.backends.placed import priced
from planner.backends.runs import Run
from planner.backends.stacks import stack_of_run
from planner.backends.step import stage_seconds
from planner.costs.compute import peak_flops
from planner.errors import DocumentError
from planner.layers.arithmetic import step_flops
from planner.model import ModelGraph
from planner.plan import Layout
from planner.prediction import Assumption, Prediction, StagePrediction
from planner.request import Request


def backend_prediction(request: Request, layout: Layout) -> Prediction:
    """Return what a layout should do under a framework's stack, all blocks recomputed alike."""
    return run_prediction(_run(request, layout), request.model, layout.text())


def run_prediction(run: Run, model: ModelGraph, layout: str) -> Prediction:
    """Return what a run should do by its framework's stack; `layout` is how it is written."""
    stack, _ = stack_of_run(run)
    result = estimate(run)
    recompute = run.recompute or "none"
    seconds = stage_seconds(priced(run, stack), recompute)
    accelerator = run.cluster.groups[0].accelerator
    flops = step_flops(
        model,
        seq_len=run.seq_len,
        global_batch=run.global_batch,
        frozen=run.task in ("lora", "qlora"),
    )
    peak = run.devices * peak_flops(accelerator, run.precision)
    range_of = "its own residuals"
    if result.beyond:
        range_of = f"sources left out of the fit, since outside it are {', '.join(result.beyond)}"
    sources = [f"stack {stack.name}; range of {range_of} (docs/accuracy.md)"]
    return Prediction(
        layout=f"{layout} {run.framework}",
        step_time_s=result.step_time_s,
        step_time_low_s=result.low_s,
        step_time_high_s=result.high_s,
        step_parts=result.step_parts,
        tokens_per_s=run.global_batch * run.seq_len / result.step_time_s,
        mfu=flops / (result.step_time_s * peak),
        fits=result.fits,
        stages=tuple(
            StagePrediction(
                forward_s=forward_s,
                backward_s=backward_s,
                peak_memory_bytes=stage.device_bytes,
                memory_capacity_bytes=float(accelerator.memory_bytes),
                memory_parts={
                    **stage.memory_parts,
                    "slack": stage.reserved_bytes - stage.allocated_bytes,
                    "context": stage.device_bytes - stage.reserved_bytes,
                },
            )
            for stage, (forward_s, backward_s) in zip(result.stages, seconds, strict=True)
        ),
        assumptions=tuple(
            Assumption(what=what, provenance="quoted", source=f"backend {run.framework}")
            for what in (*sources, *result.assumptions)
        ),
    )


def _run(request: Request, layout: Layout) -> Run:
    model, cluster, job, backend = request.model, request.cluster, request.job, request.stack.name
    if model.architecture is None or model.architecture.patches or model.architecture.classes:
        raise DocumentError(
            "backend", f"{backend} trains language models; {model.name} is none: use native"
        )
    if layout.devices > cluster.devices:
        raise DocumentError(
            "layout", f"takes {layout.devices} devices, and {cluster.name} has {cluster.devices}"
        )
    if layout.pipeline > model.architecture.layers:
        raise DocumentError(
            "layout",
            f"{layout.pipeline} stages need as many blocks; the model has "
            f"{model.architecture.layers}",
        )
    return Run(
        architecture=model.architecture,
        cluster=cluster,
        task="pretrain",
        framework=backend,
        seq_len=job.seq_len,
        global_batch=job.global_batch,
        micro_batch=layout.micro_batch,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        context=layout.context,
        expert=layout.expert,
        data=layout.data,
        zero=layout.zero,
        recompute=request.pins.recompute or "none",
        precision=job.precision,
    )
