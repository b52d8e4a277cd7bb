"""Forty plans, read by each framework's own parser and validator: `docs/results/exports.md`.

python benchmarks/exports/run.py FOLDER      installs the frameworks there, reads, writes the page
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from page import write_page

from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.configuration import configuration, in_the_script
from meshwright.planner.framework_configs.torchtitan import REGISTERED
from plans import Case, planned

HERE = Path(__file__).parent


class Reader(NamedTuple):
    """A framework's own parser: which export it reads, and where it is from."""

    to: str
    script: str
    package: str
    """As pip names it, or a tag of a repository: `URL@TAG`."""
    suffix: str
    beside: tuple[str, ...] = ()
    """Packages that it needs, without their own requirements."""


MEGATRON = "https://github.com/NVIDIA/Megatron-LM@core_v0.19.0"
BRIDGE = "https://github.com/NVIDIA-NeMo/Megatron-Bridge@v0.6.0"
NANOTRON = "https://github.com/huggingface/nanotron@main"
"""Its releases are of 2024 and do not know what is recomputed."""
_OMEGA = ("omegaconf", "hydra-core", "antlr4-python3-runtime==4.9.3")
_TITAN = (
    "spmd_types==0.2.3",
    "tyro",
    "docstring-parser",
    "shtab",
    "typeguard",
    "torchdata",
    "einops",
)
READERS = (
    Reader(
        "torchtitan", "torchtitan", "torchtitan==0.3.0", ".py", (*_TITAN, "torch_checkpointing")
    ),
    Reader("torchtitan@0.2", "torchtitan", "torchtitan==0.2.2", ".toml", (*_TITAN, "tomli")),
    Reader("megatron", "megatron", MEGATRON, ".args", ("einops", "six")),
    Reader("megatron-bridge", "megatron_bridge", BRIDGE, ".yaml", (*_OMEGA, "einops")),
    Reader(
        "deepspeed",
        "deepspeed",
        "deepspeed==0.19.8",
        ".json",
        ("hjson", "py-cpuinfo", "msgpack", "ninja", "einops"),
    ),
    Reader("accelerate", "accelerate", "accelerate==1.15.0", ".yaml"),
    Reader("transformers", "transformers", "transformers==5.24.0", ".yaml"),
    Reader("nanotron", "nanotron", NANOTRON, ".yaml", ("dacite",)),
    Reader("fsdp", "fsdp", "torch", ".py"),
)
CHECKED = ("tensor", "pipeline", "context", "expert", "data", "micro_batch", "micro_batches")


def figures(model: ModelGraph) -> dict[str, Any]:
    """Return what frameworks ask of a model beside its training."""
    a = model.architecture
    assert a is not None
    return {
        "layers": a.layers,
        "hidden_size": a.hidden_size,
        "heads": a.heads,
        "kv_heads": a.kv_heads,
        "ffn_size": a.ffn_size,
        "vocab_size": a.vocab_size,
        "experts": a.experts.count if a.experts else 0,
        "active": a.experts.per_token if a.experts else 0,
    }


def asked(plan: Plan) -> dict[str, int]:
    """Return what a framework must make of a plan."""
    layout = plan.layout
    return {
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "context": layout.context,
        "expert": layout.expert,
        "data": layout.data,
        "micro_batch": plan.micro_batch,
        "micro_batches": plan.micro_batches,
        "seq_len": plan.seq_len,
        "virtual_stages": plan.virtual_stages,
        "zero": plan.zero,
    }


def environment(plan: Plan, model: ModelGraph, to: str, case: Case) -> dict[str, str]:
    """Return the variables that are named beside a configuration."""
    said = in_the_script(plan, model, to, resolve_cluster(case.cluster))
    found = [re.match(r"([A-Z_]+)=(\S+) in the environment", line) for line in said]
    return {match[1]: match[2] for match in found if match}


def installed(reader: Reader, folder: Path) -> tuple[Path, dict[str, str]]:
    """Return an interpreter with a framework, over this one's packages, and its variables."""
    home = folder / reader.to.replace("@", "-")
    python = home / "bin" / "python"
    if not python.exists():
        venv.create(home, with_pip=True)
        site = next((home / "lib").glob("python3*")) / "site-packages"
        own = [path for path in sys.path if path.endswith("site-packages")]
        (site / "meshwright-environment.pth").write_text("\n".join(own) + "\n")
        wanted = list(reader.beside)
        if reader.package.startswith("https:") or reader.package == "torch":
            pass
        else:
            wanted.append(reader.package)
        if wanted:
            pip = [str(python), "-m", "pip", "install", "-q", "--no-deps", *wanted]
            subprocess.run(pip, check=True)
    paths = [str(Path(__file__).parents[2])]
    variables: dict[str, str] = {}
    if reader.to.startswith("megatron"):
        source = cloned(MEGATRON, folder)
        paths.append(str(source))
        variables["MEGATRON_LM"] = str(source / "megatron")
    if reader.to == "megatron-bridge":
        variables["MEGATRON_BRIDGE"] = str(cloned(BRIDGE, folder) / "src" / "megatron")
    if reader.to == "nanotron":
        paths.append(str(cloned(NANOTRON, folder) / "src"))
    return python, {**variables, "PYTHONPATH": ":".join(paths)}


def cloned(repository: str, folder: Path) -> Path:
    """Return the files of a repository's tag."""
    url, _, tag = repository.rpartition("@")
    target = folder / f"{url.rpartition('/')[2]}-{tag}"
    if not target.exists():
        clone = ["git", "clone", "-q", "--depth", "1", "--branch", tag, url, str(target)]
        subprocess.run(clone, check=True)
    return target


def release_of(reader: Reader, folder: Path) -> str:
    """Return what a framework's release is called; of a branch, its commit and that one's date."""
    if reader.package == "torch":
        return f"torch {version('torch')}, fully_shard"
    release = reader.package.rpartition("@")[2].rpartition("==")[2]
    if reader.package != NANOTRON:
        return release
    show = ["git", "-C", str(cloned(NANOTRON, folder)), "log", "-1", "--format=%h of %cs"]
    commit = subprocess.run(show, check=True, capture_output=True, text=True).stdout.strip()
    return f"{release}, {commit}"


class Outcome(NamedTuple):
    """What became of one plan with one framework."""

    accepted: bool
    refused: str | None
    """Why we do not write it."""
    rejected: str | None
    """Why the framework does not take what we wrote, or what it makes of it instead."""


def outcomes(
    reader: Reader, cases: list[tuple[Case, Plan, ModelGraph]], folder: Path
) -> list[Outcome]:
    """Write all plans that can be, and have the framework read them."""
    work = folder / "work" / reader.to
    work.mkdir(parents=True, exist_ok=True)
    found: list[Outcome | None] = []
    written = []
    for number, (case, plan, model) in enumerate(cases):
        try:
            text = configuration(plan, model, reader.to, resolve_cluster(case.cluster))
        except DocumentError as error:
            found.append(Outcome(False, error.message.partition(": ")[2], None))
            continue
        file = work / f"{number}{reader.suffix}"
        file.write_text(text)
        found.append(None)
        written.append(
            {
                "number": number,
                "file": str(file),
                "world": plan.mesh.devices,
                "seq_len": plan.seq_len,
                "model": figures(model),
                "environment": environment(plan, model, reader.to, case),
                "function": REGISTERED.get(plan.model.name, (None, None))[1],
            }
        )
    source, target = work / "cases.json", work / "results.json"
    source.write_text(json.dumps(written))
    python, variables = installed(reader, folder)
    script = HERE / "readers" / f"read_{reader.script}.py"
    command = [str(python), str(script), str(source), str(target)]
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{reader.to} cannot be read:\n{done.stderr[-3000:]}")
    for told, result in zip(written, json.loads(target.read_text()), strict=True):
        found[told["number"]] = Outcome(*_judged(result, asked(cases[told["number"]][1])))
    assert all(found)
    return [one for one in found if one]


def _judged(result: dict[str, Any], wanted: dict[str, int]) -> tuple[bool, None, str | None]:
    if "error" in result:
        return False, None, result["error"]
    got = result["found"]
    wrong = [
        f"{name} {got[name]} for {wanted[name]}"
        for name in (*CHECKED, "seq_len", "virtual_stages")
        if name in got and got[name] != wanted[name]
    ]
    return not wrong, None, "; ".join(wrong) or None


HEAD = """# Exports, read by the frameworks themselves

Written on {date} by `python benchmarks/exports/run.py FOLDER`. It installs each framework without
compiling its CUDA parts (queries about CUDA are answered as on a node of eight H100), exports 40
plans, and lets the framework's own parser and validator read the files. *Accepted*: the framework
reads the file, and its degrees, batch sizes and stages are those of the plan. *Refused*:
Meshwright does not write the file, and says why. *Rejected*: Meshwright writes the file, and the
framework does not accept it.

"""


def page(
    cases: list[tuple[Case, Plan, ModelGraph]], table: dict[str, list[Outcome]], folder: Path
) -> str:
    """Return the table and its reasons."""
    lines = ["| framework | release | accepted | refused | rejected |", "|---|---|---:|---:|---:|"]
    for reader in READERS:
        if reader.to in table:
            found = table[reader.to]
            refused = sum(one.refused is not None for one in found)
            rejected = sum(one.rejected is not None for one in found)
            accepted = sum(one.accepted for one in found)
            release = release_of(reader, folder)
            lines.append(f"| {reader.to} | {release} | {accepted} | {refused} | {rejected} |")
    lines += ["", "## Each plan", "", "a: accepted, -: refused, **R**: rejected", ""]
    names = list(table)
    lines.append("| plan | of | " + " | ".join(names) + " |")
    lines.append("|---|---|" + "---|" * len(names))
    for number, (case, plan, _) in enumerate(cases):
        marks = [_mark(table[name][number]) for name in names]
        lines.append(
            f"| {case.model}, {case.cluster}, {plan.layout.text()} | {case.framework} | "
            + " | ".join(marks)
            + " |"
        )
    lines += ["", "## Why plans are refused", ""]
    for name in names:
        reasons: dict[str, int] = {}
        for one in table[name]:
            for reason in (one.refused or "").split("; "):
                if reason:
                    reasons[reason] = reasons.get(reason, 0) + 1
        told = "; ".join(f"{reason} ({count})" for reason, count in sorted(reasons.items()))
        lines += [f"{name}: {told}.", ""]
    rejected = [
        f"{name}, {cases[number][0]}: {one.rejected}"
        for name in names
        for number, one in enumerate(table[name])
        if one.rejected
    ]
    if rejected:
        lines += ["## Rejected", "", *rejected, ""]
    head = HEAD.format(date=datetime.date.today().isoformat())
    return head + "\n".join(lines).rstrip() + "\n"


def _mark(one: Outcome) -> str:
    return "a" if one.accepted else "-" if one.refused else "**R**"


def main() -> None:
    """Write the page; with names of frameworks, print what becomes of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="Where frameworks are installed")
    parser.add_argument("only", nargs="*", help="Frameworks, instead of the page of all")
    given = parser.parse_args()
    folder = given.folder.resolve()
    cases = list(planned())
    chosen = [reader for reader in READERS if not given.only or reader.to in given.only]
    table = {}
    for reader in chosen:
        table[reader.to] = outcomes(reader, cases, folder)
        bad = [(n, one.rejected) for n, one in enumerate(table[reader.to]) if one.rejected]
        good = sum(one.accepted for one in table[reader.to])
        print(f"{reader.to}: {good} accepted, {len(bad)} rejected", *bad, sep="\n  ")
    if not given.only:
        write_page(page(cases, table, folder))
    sys.exit(any(one.rejected for found in table.values() for one in found))


if __name__ == "__main__":
    main()
