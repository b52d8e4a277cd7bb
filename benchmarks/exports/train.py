"""Three steps by each framework from its export, beside ours: `docs/results/exports.md`.

python benchmarks/exports/train.py FOLDER      where `run.py` installed the frameworks

Every plan trains on two processor ranks over gloo: by `meshwright launch`, and by the framework's
own engine from the exported file (`trainers/`, which import nothing of this project), from the same
weights with the same tokens.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from page import write_section
from run import READERS, environment, installed

from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.documents.document import write
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.training import Training
from meshwright.planner.framework_configs.configuration import configuration
from meshwright.planner.requests.pins import read_pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.search import search
from meshwright.runtime.data import corpus as data
from meshwright.runtime.launch import launch as launching
from meshwright.runtime.launch.launch_config import Launch
from meshwright.runtime.run import run_folder as run
from meshwright.runtime.run.launch_options import LaunchRun
from plans import Case
from tests.runtime.ports import free_port

HERE = Path(__file__).parent
TEXT = HERE.parent.parent / "LICENSE"
STEPS, SEQ_LEN, SAMPLES = 3, 32, 8
TRAINING = Training(learning_rate=3e-3)
MOST_S = 900
BOUND = 1e-5
"""Relative, of any loss: only the order of sums differs."""
MODEL = transformers.LlamaConfig(
    vocab_size=272,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    bos_token_id=None,
    eos_token_id=None,
)


class Trained(NamedTuple):
    """A plan of ours that a framework trains too."""

    to: str
    fix: str


CASES = (
    *(Trained("torchtitan", f"dp=2,zero={zero}") for zero in (3, 2, 0)),
    Trained("torchtitan", "tp=2"),
    *(Trained("deepspeed", f"dp=2,zero={zero}") for zero in (1, 2, 3)),
    *(Trained("accelerate", f"dp=2,zero={zero}") for zero in (0, 2, 3)),
    *(Trained("transformers", f"dp=2,zero={zero}") for zero in (0, 3)),
    *(Trained("fsdp", f"dp=2,zero={zero}") for zero in (2, 3)),
    Trained("fsdp", "dp=2,zero=3,recompute=full"),
)


def published(folder: Path) -> Path:
    """Write a model of random weights as models are published."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODEL)
    model.save_pretrained(folder)
    return folder


def planned(case: Trained, model: ModelGraph) -> Plan:
    """Return the plan of a case for our runtime."""
    fix = f"{case.fix},micro_batch=2" + ("" if "recompute" in case.fix else ",recompute=none")
    request = Request.create(
        model,
        resolve_cluster("local:2"),
        called="local:2",
        seq_len=SEQ_LEN,
        global_batch=SAMPLES,
        precision="fp32",
        pins=read_pins([fix], ["offload"] if "offload" in fix else []),
    )
    return search(request).plan.model_copy(update={"training": TRAINING})


def our_losses(plan: Plan, weights: Path, folder: Path) -> list[float]:
    """Launch a plan as the command does; return the losses [step]."""
    write(plan, folder / "plan.yaml")
    launching.launch(
        Launch(
            folder / "plan.yaml",
            LaunchRun(data=TEXT, weights=weights, steps=STEPS, output=folder / "run"),
            device="cpu",
            quiet=True,
        )
    )
    return [record.loss for record in run.read_records(run.metrics_file(folder / "run"))]


def their_losses(
    case: Trained, plan: Plan, model: ModelGraph, weights: Path, batches: Path, folder: Path
) -> list[float]:
    """Let two ranks of a framework train from its configuration; return the losses [step]."""
    folder.mkdir(parents=True)
    cluster = resolve_cluster("local:2")
    reader = next(one for one in READERS if one.to == case.to)
    target = folder / f"planned{reader.suffix}"
    target.write_text(configuration(plan, model, case.to, cluster))
    told = {
        "config": str(target),
        "model": str(weights),
        "batches": str(batches),
        "losses": str(folder / "losses.json"),
        "seq_len": plan.seq_len,
        "data": plan.layout.data,
        "micro_batch": plan.micro_batch,
        "micro_batches": plan.micro_batches,
        "training": plan.training.model_dump(mode="json"),
    }
    (folder / "case.json").write_text(json.dumps(told))
    python, variables = installed(reader, folder.parents[1])
    variables["PYTHONPATH"] += f":{HERE / 'readers'}"
    own = environment(plan, model, case.to, Case(model.name, "local:2"))
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    script = HERE / "trainers" / f"train_{reader.script}.py"
    ranks = []
    for rank in range(plan.mesh.devices):
        named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": plan.mesh.devices}
        with (folder / f"rank{rank}.log").open("w") as log:
            one = subprocess.Popen(
                [str(python), str(script), str(folder / "case.json")],
                env={**os.environ, **variables, **own, **place, **_texts(named)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        ranks.append(one)
    try:
        codes = [rank.wait(MOST_S) for rank in ranks]
    finally:
        for one in ranks:
            one.kill()
    if any(codes):
        raise RuntimeError(f"ended with {codes}, see {folder}")
    return list(json.loads(Path(told["losses"]).read_text()))


HEAD = f"""`python benchmarks/exports/train.py FOLDER` trains a Llama of four blocks on two
CPU ranks over gloo, {STEPS} steps of {SAMPLES} samples of {SEQ_LEN} tokens in fp32: once by
`meshwright launch`, and once by the framework's own engine from the exported file, with the same
weights and tokens ({datetime.date.today().isoformat()}, torch {torch.__version__}). *Apart* is the
largest relative difference of a loss; the script fails above {BOUND:g}.

Queries for an accelerator are answered with the CPU; everything else is the framework's own code.
accelerate and transformers shard only over the device types that they list; `cpu` is added to the
list. torchtitan assumes CUDA where it finds no accelerator; it gets `cpu`. There it uses torch's
`scaled_dot_product_attention` instead of FlexAttention, and `spmd_backend` is `partial_dtensor`,
since its default needs a newer torch than 2.13. FSDP sums gradients without a scale factor, since
gloo has no scaled sum.

Not trained in this way:

- torchtitan 0.3 with a pipeline, on torch 2.13. Its trainer passes micro-batches to the schedule,
  which this torch takes for keyword arguments of the model ("Expecting 4 arg_mbs but got 2"). With
  the micro-batches passed to `_step_microbatches`, two ranks over gloo did not end within 300 s.
- Megatron-LM, Megatron-Bridge and nanotron: parameters, buffers and timers are on CUDA devices by
  name (344 lines of `megatron/core` and `megatron/training`, 161 lines of nanotron); no setting
  moves training to the CPU.
"""


def text(rows: dict[str, dict[str, Any]]) -> str:
    """Return the section of the page."""
    lines = [
        HEAD,
        "| framework | release | plan | losses of three steps | losses of `launch` | apart |",
        "|---|---|---|---|---|---:|",
    ]
    for case, row in sorted(rows.items()):
        recomputed = ", recompute full" if "recompute=full" in case else ""
        told = [", ".join(f"{loss:.6f}" for loss in row[who]) for who in ("theirs", "ours")]
        lines.append(
            f"| {row['to']} | {row['release']} | {row['plan']}{recomputed} | {told[0]} | {told[1]} "
            f"| {row['apart']:.1e} |"
        )
    return "\n".join(lines)


def _texts(named: dict[str, int]) -> dict[str, str]:
    return {name: str(value) for name, value in named.items()}


def main() -> None:
    """Train, and write the section after every plan; with frameworks named, theirs again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="Where frameworks are installed")
    parser.add_argument("only", nargs="*", help="Frameworks; the others' rows stay as they are")
    given = parser.parse_args()
    work = given.folder.resolve() / "trained"
    kept = work.parent / "trained.json"
    rows = json.loads(kept.read_text()) if kept.exists() else {}
    shutil.rmtree(work, ignore_errors=True)
    weights = published(work / "model")
    model = resolve_model(str(weights))
    corpus = data.prepare(data.files(TEXT), cache=work)
    samples = data.CorpusSamples(corpus, seq_len=SEQ_LEN, seed=TRAINING.seed)
    fed = [torch.from_numpy(samples.batch(n * SAMPLES, SAMPLES).tokens) for n in range(STEPS)]
    torch.save(torch.stack(fed), work / "batches.pt")
    failed = False
    launched: dict[str, list[float]] = {}
    for number, case in enumerate(CASES):
        if given.only and case.to not in given.only:
            continue
        plan = planned(case, model)
        folder = work / f"{number}-{case.to}"
        try:
            theirs = their_losses(case, plan, model, weights, work / "batches.pt", folder)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{case.to}, {case.fix}: {error}", flush=True)
            failed = True
            continue
        if case.fix not in launched:
            launched[case.fix] = our_losses(plan, weights, folder / "ours")
        ours = launched[case.fix]
        apart = max(abs(a - b) / b for a, b in zip(theirs, ours, strict=True))
        failed |= apart > BOUND
        reader = next(one for one in READERS if one.to == case.to)
        rows[f"{case.to}, {case.fix}"] = {
            "to": case.to,
            "release": torch.__version__ if case.to == "fsdp" else reader.package.split("==")[1],
            "plan": plan.layout.text(),
            "theirs": theirs,
            "ours": ours,
            "apart": apart,
        }
        print(f"{case.to}, {case.fix}: {apart:.1e}", flush=True)
        kept.write_text(json.dumps(rows))
        write_section("Three steps on CPUs", text(rows))
    sys.exit(failed)


if __name__ == "__main__":
    main()
