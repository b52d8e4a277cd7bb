"""The cases of suite.py on several ranks: collectives, losses, seconds, two launchers, failures.

Each is a generator of rows, as in suite_cases.py.  Without devices ranks talk over gloo on a CPU,
where seconds say nothing: a dry run proves the program and what it predicts.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import queue
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.single_device import LEFT_OUT, most_bytes
from benchmarks.gpu.suite_cases import Row, Rows, Setting, alone, losses
from meshwright.planner.architectures.parameters import graph_of
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.collectives import Level, collective_s
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.document import write
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Mesh, PlacedLayer, Plan, PlannedModel, Stage
from meshwright.runtime.launch.training_loop import token_engine

SILENT_S = {"cuda": 60.0, "cpu": 180.0}
"""By kind of device, after which ranks that say nothing hang."""
SHARING = 2
"""Ranks of one device."""
CHOICES = ("prefetch", "reshard_after_forward", "loss", "compile", "tensor_overlap")
"""Fields of a plan that a layout may say as they are."""
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"mesh": {"data_shard": 2}, "zero": 3},
    {"mesh": {"tensor": 2}},
    {"mesh": {"pipeline": 2}},
    {"mesh": {"context": 2}},
    {"mesh": {"data_replicate": 2}},
    {"mesh": {"data_shard": 2}, "zero": 3, "precision": "bf16"},
    {"mesh": {"pipeline": 2}, "precision": "bf16"},
    {"mesh": {"data_shard": 2}, "zero": 3, "compile": "block", "prefetch": 1},
    {"mesh": {"data_shard": 2}, "zero": 3, "reshard_after_forward": 1, "loss": {"rows": 100}},
    {"mesh": {"pipeline": 2}, "schedule": "zb-h1", "compile": "block"},
    # From here on ranks have devices of their own.
    {"mesh": {"tensor": 2}, "precision": "bf16", "compile": "block", "tensor_overlap": "async"},
    {"mesh": {"data_shard": 4}, "zero": 3, "reshard_after_forward": 2, "prefetch": 2},
    {"mesh": {"data_shard": 2, "tensor": 2}, "zero": 3},
    {"mesh": {"pipeline": 2, "data_shard": 2}, "zero": 1},
    {"mesh": {"data_shard": 4, "tensor": 2}, "zero": 3},
)


def layout_plan(
    model: ModelGraph,
    layout: dict[str, Any],
    seq_len: int = 128,
    *,
    batch: int = 8,
    cluster: str = "local",
) -> Plan:
    """Return the plan of a layout: a batch of samples, layers spread over its stages."""
    mesh = Mesh(**layout["mesh"])
    names = [name for name, _ in model.chain]
    cuts = [len(names) * at // mesh.pipeline for at in range(mesh.pipeline + 1)]
    data = mesh.data_shard * mesh.data_replicate
    micro_batches = 4 if mesh.pipeline > 1 else 2
    samples = max(1, batch // data // micro_batches)
    return Plan(
        model=PlannedModel.of(model),
        cluster=cluster,
        seq_len=seq_len,
        global_batch=data * micro_batches * samples,
        precision=layout.get("precision", "fp32"),
        mesh=mesh,
        zero=layout.get("zero", 0),
        schedule=layout.get("schedule", "1f1b"),
        micro_batch=samples,
        micro_batches=micro_batches,
        stages=tuple(
            Stage(layers=tuple(PlacedLayer(layer=name) for name in names[a:b]))
            for a, b in itertools.pairwise(cuts)
        ),
        timeout_s=60.0,
        **{name: layout[name] for name in CHOICES if name in layout},
    )


def _rank(
    rank: int,
    world: int,
    backend: str,
    device: str,
    store: str,
    work: Any,
    arguments: Any,
    out: Any,
) -> None:
    try:
        own = torch.device("cpu")
        if device == "cuda":
            own = torch.device("cuda", 0 if backend == "gloo" else rank)
            torch.cuda.set_device(own)
        torch.set_num_threads(1)
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            device_id=own if "nccl" in backend else None,
        )
        out.put((rank, work(*arguments, own)))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        out.put((rank, {"failed": traceback.format_exc()[-1500:]}))


def on_ranks(
    world: int, at: Setting, work: Callable[..., Any], *arguments: Any, shared: bool = False
) -> list[Any]:
    """Run one function on ranks of their own and return what each gives, rank by rank."""
    context = multiprocessing.get_context("spawn" if at.kind == "cuda" else "fork")
    backend = "gloo" if shared or at.kind == "cpu" else "cpu:gloo,cuda:nccl"
    out = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        how = (world, backend, at.kind, f"{folder}/store", work, arguments, out)
        ranks = [context.Process(target=_rank, args=(rank, *how)) for rank in range(world)]
        for process in ranks:
            process.start()
        found: dict[int, Any] = {}
        try:
            while len(found) < world and not any(map(_failed, found.values())):
                rank, result = out.get(timeout=SILENT_S[at.kind])
                found[rank] = result
        except queue.Empty:
            lacking = sorted(set(range(world)) - found.keys())
            raise TimeoutError(
                f"no word of ranks {lacking} after {SILENT_S[at.kind]:.0f} s"
            ) from None
        finally:
            for process in ranks:
                process.join(timeout=10 if len(found) == world else 1)
                if process.is_alive():
                    process.kill()
    for result in filter(_failed, found.values()):
        raise RuntimeError(result["failed"])
    return [found[rank] for rank in range(world)]


def _failed(result: Any) -> bool:
    return isinstance(result, dict) and "failed" in result


def _compared(at: Setting, layout: dict[str, Any], *, shared: bool) -> Row:
    model = graph_of(at.small, name="small")
    plan = layout_plan(model, layout)
    whole = layout_plan(model, {"mesh": {}, "precision": "fp32"})
    whole = whole.model_copy(
        update={
            "global_batch": plan.global_batch,
            "micro_batch": plan.global_batch // whole.micro_batches,
        }
    )
    expected = alone(lambda: losses(whole, model, at.device))
    found = on_ranks(plan.mesh.devices, at, losses, plan, model, shared=shared)
    worst = max(abs(a / b - 1) for of in found for a, b in zip(of, expected, strict=True))
    return {"alone": expected, "ranks": found, "worst": worst}


def shared_device(at: Setting) -> Rows:
    """Yield losses of two ranks on one device, which talk over the host, against one process.

    Data parallelism alone: gloo has sums, gathers and scatters of tensors on a device, but hangs in
    the collectives of tensor and context groups and ends in sends between stages.
    """
    layouts = [of for of in LAYOUTS if of["mesh"].keys() <= {"data_shard", "data_replicate"}]
    for layout in layouts[:1] if at.tiny else layouts:
        if Mesh(**layout["mesh"]).devices == SHARING:
            yield json.dumps(layout), lambda of=layout: _compared(at, of, shared=True)


def ranks(at: Setting) -> Rows:
    """Yield losses of ranks on devices of their own against one process."""
    for layout in LAYOUTS[: 2 if at.tiny else None]:
        if Mesh(**layout["mesh"]).devices <= at.devices:
            yield json.dumps(layout), lambda of=layout: _compared(at, of, shared=False)


def _curves(tiny: bool, device: torch.device) -> list[Row]:
    from meshwright.profiler import links  # noqa: PLC0415

    sizes = (links.KIB, links.MIB) if tiny else links.sizes_up_to(2**30)
    curves = links.curves(
        links.groups_of(dist.get_world_size(), "links"),
        device=device,
        sizes_bytes=sizes,
        budget_s=1.0 if tiny else 15.0,
    )
    return [curve.model_dump(mode="json") for curve in curves]


def collectives(at: Setting) -> Rows:
    """Yield seconds of collectives by size, measured and predicted, for two ranks, four, eight."""
    for world in (2, 4, 8):
        if world > at.devices:
            continue

        def row(world: int = world) -> Row:
            curves = on_ranks(world, at, _curves, at.tiny)[0]
            tiers = resolve_cluster(f"local:{at.devices}").tiers
            tier = next(tier for tier in tiers if tier.devices >= world)
            for curve in curves:
                for point in curve["points"]:
                    seconds = collective_s(
                        curve["operation"], point["size_bytes"], (Level(tier, world),)
                    )
                    point["predicted_s"] = float(seconds)
            return {"tier": tier.name, "curves": curves}

        yield f"{world} ranks", row


def measured_layouts(devices: int) -> list[tuple[str, str, dict[str, Any]]]:
    """Return names, models and layouts whose steps are measured, most valuable first.

    >>> [name for name, _, _ in measured_layouts(2)][:2]
    ['ZeRO-3', 'tensor, async']
    """
    dense, mixture = "llama-3.2-1b", "qwen1.5-moe-a2.7b"
    half = max(1, devices // 2)
    shards = {"data_shard": half, "zero": 3 if half > 1 else 0}

    def layout(zero: int = 0, **mesh: Any) -> dict[str, Any]:
        mesh.setdefault("data_shard", 1)
        choices = {name: mesh.pop(name) for name in CHOICES if name in mesh}
        choices = {"compile": "block", "precision": "bf16"} | choices
        return {"mesh": mesh, "zero": zero} | choices

    return [
        ("ZeRO-3", dense, layout(zero=3, data_shard=devices, prefetch=1)),
        ("tensor, async", dense, layout(tensor=2, tensor_overlap="async", **shards)),
        ("pipeline", dense, layout(pipeline=2, **shards | {"zero": min(1, half - 1)})),
        ("experts", mixture, layout(zero=2, data_shard=devices, expert=2, compile="none")),
        ("context", dense, layout(context=2, **shards)),
        ("tensor", dense, layout(tensor=2, **shards)),
    ]


def layouts(at: Setting) -> Rows:
    """Yield seconds and bytes of steps on all devices, as predicted and as measured."""
    for name, model_name, layout in measured_layouts(at.devices):

        def row(name: str = model_name, layout: dict[str, Any] = layout) -> Row:
            model, layout = _sized(name, layout, at)
            text = f"local:{at.devices}"
            plan = layout_plan(model, layout, 128 if at.tiny else 2048, batch=16, cluster=text)
            prediction = predict(plan, model, resolve_cluster(text))
            stages = on_ranks(at.devices, at, _rank_steps, plan, model, at.tiny)
            parts = [stage.memory_parts for stage in prediction.stages]
            sizes = [sum(v for k, v in of.items() if k not in LEFT_OUT) for of in parts]
            return {
                "layout": layout,
                "predicted_s": prediction.step_time_s,
                "range_s": [prediction.step_time_low_s, prediction.step_time_high_s],
                "predicted_bytes": max(sizes),
                "measured_s": [max(s) for s in zip(*(of["seconds"] for of in stages), strict=True)],
                "allocated_bytes": max(of["bytes"] for of in stages),
            }

        yield name, row


def _sized(name: str, layout: dict[str, Any], at: Setting) -> tuple[ModelGraph, dict[str, Any]]:
    """Return a model and layout as large as this machine is worth.

    Four layers of the mixture have as many parameters as one device of 80 GB trains; a dry run has
    a small model of the same family, in fp32 and eager.
    """
    model = resolve_model(name)
    architecture = model.architecture
    assert architecture is not None
    if at.tiny:
        update: dict[str, Any] = {"layers": 2, "hidden_size": 64, "head_dim": 16, "vocab_size": 512}
        update |= {"heads": 4, "kv_heads": 4, "ffn_size": 128}
        if architecture.experts is not None:
            small = {"count": 4, "per_token": 2, "ffn_size": 32, "shared_ffn_size": 64}
            update["experts"] = architecture.experts.model_copy(update=small)
        overlap = {"tensor_overlap": "none"} if "tensor_overlap" in layout else {}
        layout = layout | {"precision": "fp32", "compile": "none"} | overlap
        return graph_of(architecture.model_copy(update=update), name=f"small {name}"), layout
    if architecture.experts is not None:
        few = architecture.model_copy(update={"layers": 4})
        return graph_of(few, name=f"{name} of 4 layers"), layout
    return model, layout


def _rank_steps(plan: Plan, model: ModelGraph, tiny: bool, device: torch.device) -> Row:
    """Return seconds of this rank's steps behind two that are not counted, and its most bytes."""
    engine = token_engine(plan, model, device=device)
    vocabulary = model.architecture.vocab_size if model.architecture else 256
    generator = torch.Generator().manual_seed(0)
    shape = (plan.global_batch, plan.seq_len + 1)
    samples = plan.samples_of(engine.slice_rank)
    tokens = torch.randint(vocabulary, shape, generator=generator)[samples.start : samples.stop]

    def step_s() -> float:
        dist.barrier()
        begin_s = time.perf_counter()
        engine.step(tokens)  # its report waits for the device
        return time.perf_counter() - begin_s

    seconds = [step_s() for _ in range(3 if tiny else 8)][1 if tiny else 2 :]
    return {"seconds": seconds, "bytes": most_bytes(engine, lambda: engine.step(tokens))}


def two_nodes(at: Setting) -> Rows:
    """Yield a run of two launchers, each with half of the devices, as two nodes would be started.

    Both are on this machine, so that links are those of one node; the rendezvous, the launchers'
    agreement and the ranks' numbers are those of two.
    """

    if at.devices < 2:
        return
    half = at.devices // 2
    layout = {"mesh": {"data_shard": 2 * half}, "zero": 3, "compile": "block", "precision": "bf16"}
    machine = resolve_cluster(f"local:{2 * half}").model_dump(mode="json", exclude_none=True)
    machine["name"] = "two"
    machine["groups"][0] |= {"nodes": 2, "devices_per_node": half}
    cluster = ClusterSpec.of(machine)

    def row() -> Row:
        model, chosen = _sized("llama-3.2-1b", layout, at)
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            write(cluster, folder / "two.yaml")
            write(model, folder / "model.yaml")
            (folder / "text.txt").write_text("All happy families are alike. " * 20000)
            path = str(folder / "two.yaml")
            plan = layout_plan(model, chosen, 128 if at.tiny else 2048, batch=16, cluster=path)
            source = plan.model.model_copy(update={"source": str(folder / "model.yaml")})
            write(plan.model_copy(update={"model": source}), folder / "plan.yaml")
            begin_s = time.monotonic()
            with socket.create_server(("127.0.0.1", 0)) as server:
                port = server.getsockname()[1]
            launchers = [_node_launcher(at, folder, node, half, port) for node in range(2)]
            try:
                said = [launcher.communicate(timeout=150)[1][-700:] for launcher in launchers]
            finally:
                for launcher in launchers:
                    launcher.kill()
            if any(launcher.returncode for launcher in launchers):
                return {"failed": "\n".join(said)}
            report = json.loads((folder / "out" / "report.json").read_text())
            return {
                "predicted_s": predict(plan, model, cluster).step_time_s,
                "measured_s": report["step_s"][2:],
                "run_s": time.monotonic() - begin_s,
            }

    yield "ZeRO-3", row


def _node_launcher(
    at: Setting, folder: Path, node: int, devices: int, port: int
) -> subprocess.Popen[str]:
    """Start the launcher of a node, which sees its own devices alone."""
    command = [sys.executable, "-m", "meshwright", "launch", str(folder / "plan.yaml")]
    command += ["--steps", "8", "--data", str(folder / "text.txt"), "-o", str(folder / "out")]
    command += ["--nodes", "2", "--node", str(node), "--rendezvous", f"127.0.0.1:{port}"]
    first = node * devices
    visible = ",".join(str(device) for device in range(first, first + devices))
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": visible} if at.kind == "cuda" else {})
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    )


def ends(at: Setting) -> Rows:
    """Yield what a launch says when a rank is killed, and when one hangs."""
    import signal  # noqa: PLC0415

    for name, number in (("killed", signal.SIGKILL), ("hung", signal.SIGSTOP)):

        def row(number: int = number) -> Row:
            model = graph_of(at.small, name="small")
            plan = layout_plan(model, {"mesh": {"data_shard": 2}, "zero": 3})
            with tempfile.TemporaryDirectory() as text:
                folder = Path(text)
                source = plan.model.model_copy(update={"source": str(folder / "model.yaml")})
                update = {"timeout_s": 20.0, "model": source}
                write(plan.model_copy(update=update), folder / "plan.yaml")
                write(model, folder / "model.yaml")
                (folder / "text.txt").write_text("All happy families are alike. " * 2000)
                command = [sys.executable, "-m", "meshwright", "launch", str(folder / "plan.yaml")]
                command += ["--steps", "100000", "--data", str(folder / "text.txt")]
                command += ["--output", str(folder / "out")]
                with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as launcher:
                    metrics = folder / "out" / "metrics.jsonl"
                    begin = time.monotonic()
                    while not (metrics.exists() and metrics.read_text().count("\n") > 2):
                        if launcher.poll() is not None or time.monotonic() - begin > 90:
                            launcher.kill()
                            return {"failed": (launcher.communicate()[1] or "")[-1500:]}
                        time.sleep(0.2)
                    victim = _rank_process(launcher.pid)
                    stopped = time.monotonic()
                    os.kill(victim, number)
                    _, said = launcher.communicate(timeout=180)
                    return {
                        "seconds": time.monotonic() - stopped,
                        "code": launcher.returncode,
                        "said": said[-1500:],
                    }

        yield name, row


def _rank_process(launcher: int) -> int:
    """Return the process of rank 1 of a launch."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            variables = (folder / "environ").read_bytes().split(b"\0")
            if parent == launcher and b"RANK=1" in variables:
                return int(folder.name)
    raise RuntimeError("rank 1 is not there")
