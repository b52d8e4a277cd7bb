"""Hostile inputs to every command, made from a seed, and the watch that is kept over each.

    python -m tests.meshwright.hostile --seed 0 --first 0 --count 3000

A case is a folder of files and the arguments of one command: documents and tables mutated, flags at
the ends of their ranges and beyond, names that no file has, files that are no files.  Options are
read from the command line's own parser, so a new option is tried without being named here.

Cases run in forked processes.  A case must end with 0, 1 or 2 and one of our messages, within
LIMIT_S of CPU and LIMIT_BYTES of address space, write nothing outside its folder, nothing where it
failed, leave nothing half-written, and run no code.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import inspect
import io
import json
import os
import random
import resource
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from typer.models import ArgumentInfo, ParameterInfo

from meshwright import cli
from meshwright.api.commands import plan
from meshwright.planner.documents import document
from meshwright.planner.search.answer import Answer
from meshwright.runtime.core import checksums
from tests.limits import PATIENCE_S
from tests.meshwright import hostile_configurations as configurations
from tests.meshwright import hostile_documents as documents

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 20
LIMIT_BYTES = 12 * 2**30
"""Address space, of which what libraries reserve is most."""
MOST_BYTES = 2**30
"""Memory in use."""
CANARY = "code-was-run"
EVIL = f"open({CANARY!r}, 'w').close()\n"
"""A file of code that nobody asked for."""

# Values ------------------------------------------------------------------------------------------

WHOLE = (
    "0", "-1", "1", "2", "3", "7", "64", "1000003", "16777216", "16777217", "9007199254740992",
    "18446744073709551616", "1000000000000000000", "9" * 5000, "٣", "1e3", "", " ", "nan",
)  # fmt: skip
REAL = (
    "0", "-1", "nan", "inf", "-inf", "1e308", "1e-308", "1e-320", "1e30", "1e-30", "1e18", "0.5",
    "1", "9" * 400, "٣", "", "1_000",
)  # fmt: skip
TEXTS = (
    "", " ", "x", "a\nb", "\x00", "\x1b[31mred", "\u202eabc", "\U0001f4a3", "é" * 130, "x" * 300,
    "x" * 5000, "folder/../../up", "/proc/self/environ", "~nobody/x", "~", "-", "--", "%s%n", "{n}",
    "${HOME}",
    "$(touch " + CANARY + ")", "`touch " + CANARY + "`", "'; touch " + CANARY + "; '",
    "[bold]x[/bold]", "=1+1", "a=b", "=", ",", "a,b", ":", "evil.py:f", "con", "\ud800",
)  # fmt: skip
VALUES: tuple[object, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**53, 2**53 + 1, 2**64, 10**400, -(2**63), 0.0,
    -0.0, 0.5, 1.0, 1.5, -1.5, 1e-320, 1e-308, 1e-30, 1e-9, 1e9, 1e30, 1e31, 1e308, float("inf"),
    float("nan"), [], {}, [[]], {"": 1}, [None], "1", "0", ".inf", *TEXTS,
)  # fmt: skip
FACTORS = (0.5, 2, 3, 10, 1e3, 1e6, 1e-3, 1e-6, -1, 1e12)
CLUSTERS = (
    "local", "local:2", "8xh100-sxm-80gb", "1xh100-sxm-80gb", "2x8xa100-sxm-80gb", "3xp5.48xlarge",
    "8xh100-sxm-80gb+8xa100-sxm-80gb", "cluster.yaml", "1000000xh100-sxm-80gb",
    "125000x8xh100-sxm-80gb", "0xh100-sxm-80gb", "local:0", "local:9999", "999999999999xa100",
    "8xh100-sxm-80gb+", "+", "8x8x8xh100", "8xcpu", "7xh100-sxm-80gb", "9" * 5000 + "xh100",
)  # fmt: skip
MODELS = (
    "gpt2", "demo-4m", "llama-3.2-1b", "config.json", "model.yaml", "mixtral-8x7b", ".", "folder",
    "no-such", "bert-base-uncased", "config.json:f", "evil.py", "evil.py:", "a.py:f",
)  # fmt: skip
PINS = (
    "tp", "pp", "dp", "cp", "ep", "zero", "shard", "micro_batch", "v", "schedule", "recompute",
    "activations", "offload", "gradients", "order", "nonsense", "",
)  # fmt: skip
PINNED = (
    "1", "2", "4", "8", "3", "full", "1f1b", "gpipe", "zbv", "interleaved", "dualpipe-v",
    "pipedream-2bw", "pp-tp-dp", "tp-tp", "offload", "compress", "keep", "none", "bf16",
    "powersgd",
)  # fmt: skip
SETTINGS = (
    "rank", "alpha", "targets", "learning_rate", "beta1", "beta2", "epsilon", "clip_norm",
    "weight_decay", "seed", "warmup_steps", "rate_schedule", "rate_steps", "floor", "lora.rank",
)  # fmt: skip
OUTPUTS = ("output", "html", "trace", "rows", "table", "cluster_output", "checkpoint")
JOBS = ("partition", "time", "account", "image", "volume", "namespace", "name", "gpus", "qos", "x")
REQUIRED = (
    "layers 0-3 on stage 0", "at most 9 layers on stage 1",
    "layers 0-1 together", "layers 0-3 recompute full", "at most 0 layers on each stage",
    "layers 9-1 on stage 0", "at most " + "9" * 5000 + " layers on stage 0",
    "layers 0 on stages 0-" + "9" * 12, "layers " + "9" * 5000 + " together",
    "layers ٣ on stage ٣",
)  # fmt: skip
RUNS = {
    "id": "r{n}", "source": "paper", "model": "gpt2", "layers": "12", "hidden_size": "768",
    "n_heads": "12", "n_kv_heads": "12", "head_dim": "64", "ffn_size": "3072", "seq_len": "1024",
    "vocab_size": "50257", "n_experts": "", "experts_per_token": "", "accelerator": "a100-sxm-80gb",
    "n_devices": "8", "devices_per_node": "8", "tp": "1", "pp": "1", "dp": "8", "cp": "1",
    "ep": "1", "micro_batch_size": "4", "global_batch_size": "64", "precision": "bf16",
    "framework": "megatron", "zero_stage": "1", "recompute": "none", "task": "pretrain",
    "offload": "", "step_time_s": "0.5", "peak_memory_gib": "20", "memory_kind": "reserved",
}  # fmt: skip
"""A row of a table of runs."""
SKYPILOT = "InstanceType,AcceleratorName,AcceleratorCount,Price,SpotPrice,Region"
GPUHUNT = "instance_name,location,price,gpu_count,gpu_name,gpu_memory,spot"

# Files -------------------------------------------------------------------------------------------

Make = Callable[[Path], object]
"""Makes one file at a path."""


def _text(content: bytes) -> Make:
    return lambda path: path.write_bytes(content)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound, contextlib.suppress(OSError):
        bound.bind(os.path.relpath(path))


KINDS: dict[str, Make] = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "socket": _socket,
    "loop": lambda path: path.symlink_to(path),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "nothing": lambda path: path.symlink_to("/dev/null"),
    "empty": _text(b""),
    "memory": lambda path: path.symlink_to("/proc/self/mem"),
    "binary": _text(bytes(range(256)) * 64),
    "zeros": _text(b"\0" * 5000),
    "long line": _text(b"a" * 3_000_000),
    "many lines": _text(b"a,b\n" * 200_000),
    "pickle": _text(b"cposix\nsystem\n(S'touch " + CANARY.encode() + b"'\ntR."),
    "newlines": _text(b"\n" * 1_000_000),
    "brackets": _text(b"[" * 100_000),
    "braces": _text(b'{"a":' * 100_000),
    "dashes": _text(b"- " * 100_000),
    "lists": _text(b"[" + b"[]," * 3_000_000 + b"[]]"),
    "objects": _text(b'{"a": [' + b"{}," * 3_000_000 + b"{}]}\n"),
    "line of lists": _text(b'{"text": ' + b"[" * 30 + b"[]," * 3_000_000 + b"0" + b"]" * 30 + b"}"),
    "gone": lambda path: None,
}


TRAPS: dict[str, Make] = {
    "a link": lambda path: path.symlink_to(PRECIOUS),
    "a hard link": lambda path: path.hardlink_to(PRECIOUS),
    "a linked folder": lambda path: path.symlink_to(PRECIOUS.parent),
    "a link to nothing": lambda path: path.symlink_to(PRECIOUS.with_name("made")),
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/full"),
}
PRECIOUS = Path("../elsewhere/thesis.txt")
"""A file of the user outside of the case's folder, seen from there."""


def _base(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def _problem() -> Any:
    text = (ROOT / "docs/reference/problem.md").read_text()
    return document.plain(text.partition("```yaml\n")[2].partition("```")[0])


def _sharded() -> Any:
    """Return a plan that every framework can run."""
    answer = plan(
        "llama-3.2-1b",
        "8xh100-sxm-80gb",
        seq_len=1024,
        global_batch=64,
        fix=["tp=1,pp=1,cp=1,zero=3,recompute=none"],
    )
    assert isinstance(answer, Answer)
    return answer.plan.model_dump(mode="json", exclude_none=True)


def _study() -> Any:
    span = {"value": 0.2, "low": 0.1, "high": 0.3, "source": "guess"}
    return {
        "name": "s",
        "models": ["gpt2"],
        "work": {
            "seq_len": 1024,
            "global_batch": 64,
            "tuning": "pretrain",
            "framework": "deepspeed",
        },
        "goal": {"tokens": 1e9, "deadline_days": 30.0, "budget_usd": 1e6, "by": "cost"},
        "offers": [
            {"cluster": "{n}x8xh100-sxm-80gb", "n": [1, 2], "change": {"memory": 1.5}},
            {"name": "own", "cluster": "8xa100-sxm-80gb", "buy": {}, "fix": ["tp=1"]},
            {"name": "spot", "cluster": "8xh200-sxm", "rent": {"commitment": "spot"}},
            {"name": "year", "cluster": "8xh200-sxm", "power_limit": 0.8, "rent": {
                "commitment": "reserved", "usd_per_device_hour": 2.0, "term_months": 12.0,
                "prepaid": 0.2, "currency": "EUR", "date": "2026-01", "source": "q"}},
            {"cluster": "{n}x8xa100-sxm-80gb", "solve": "afford", "buy": {}},
        ],
        "assumptions": {"owning": {"retained_a_year": span, "spares": span, "income_tax": 0.2},
                        "failures": {"restart_s": 600.0, "other": span}, "interest": 0.08,
                        "rent_change_a_year": -0.1, "years": 3.0, "goodput": span,
                        "currencies": {"EUR": {"usd": 1.1, "date": "2026-01", "source": "b"}},
                        "utilisation": 0.8, "lead_days": span, "country": "USA"},
        "marginal": {"changes": {"memory": [2.0], "devices": [1.5], "domain": [2.0]}},
        "curves": [{"change": "network", "factors": [0.5, 2.0]}],
    }  # fmt: skip


def _config() -> Any:
    return {
        "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "vocab_size": 512,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512,
        "max_position_embeddings": 1024, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
        "sliding_window": None, "attention_bias": False, "head_dim": 64, "rope_theta": 1e4,
    }  # fmt: skip


def _rents() -> Any:
    return {"format": 1, "rents": [{
        "provider": "p", "instance": "i", "accelerator": "h100-sxm-80gb", "devices": 8,
        "region": "us", "on_demand_usd_per_device_hour": 2.0, "spot_usd_per_device_hour": 1.0,
        "reserved_usd_per_device_hour": 1.5, "term_months": 12.0, "prepaid": 0.1, "fabric": "ib",
        "date": "2026-01", "source": "s", "confidence": "high",
    }]}  # fmt: skip


def _report() -> Any:
    return {
        "format": 1, "model": "demo-4m", "plan_digest": "sha256:0", "layout": "dp=2",
        "device": "cpu", "ranks": 2, "first_step": 1, "steps": 5, "stopped": "steps",
        "losses": [5.0, 4.0],
        "grad_norms": [1.0, 1.0], "step_s": [0.1, 0.1], "timed_steps": 2, "step_time_s": 1.0,
        "stages": [], "wall_s": 1.0, "output": "o", "metrics": "m", "logs": "l",
    }  # fmt: skip


READ = "read"
"""Stands for a command where a case reads a document that no argument names."""
CONFIGURATION = "configuration"
"""A configuration of the framework that `import` is asked to read."""
BASES: dict[str, Callable[[], Any]] = {
    "plan.yaml": lambda: _base("plans/demo-4m-on-local/plan.yaml"),
    "large.yaml": lambda: _base("plans/llama-3.1-8b-on-8xh100/plan.yaml"),
    "sharded.yaml": _sharded,
    "profile.yaml": lambda: _base("plans/demo-4m-on-local/profile.yaml"),
    "cluster.yaml": lambda: _base("plans/demo-4m-on-local/cluster.yaml"),
    "model.yaml": lambda: _base("plans/demo-4m-on-local/model.yaml"),
    "problem.yaml": _problem,
    "study.yaml": _study,
    "config.json": _config,
    "rents.yaml": _rents,
    "report.json": _report,
}
TABLES = {
    "runs.csv": (",".join(RUNS), ",".join(RUNS.values())),
    "prices.csv": (SKYPILOT, "p5.48xlarge,H100,8,98.3,40,us-east-1"),
    "hunt.csv": (GPUHUNT, "x,us,2.5,1,H100,80,false"),
}
ARGUMENTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "plan": (("@model", "--cluster", "@cluster"),),
    "predict": (("plan.yaml",), ("large.yaml",), ("@model", "--cluster", "@cluster")),
    "solve": (("problem.yaml",),),
    "launch": (
        ("plan.yaml", "--dry-run"),
        ("large.yaml", "--on", "slurm", "--dry-run"),
        ("plan.yaml", "--on", "kubernetes", "--job", "image=x", "--dry-run"),
        ("large.yaml",),
    ),
    "export": (
        ("sharded.yaml", "--to", "megatron"),
        ("sharded.yaml", "--to", "torchtitan"),
        ("sharded.yaml", "--to", "deepspeed"),
        ("sharded.yaml", "--to", "accelerate"),
        ("plan.yaml", "--to", "@word"),
        ("folder", "--to", "huggingface", "-o", "out"),
        ("folder", "--to", "peft", "-o", "out"),
    ),
    "import": (
        (CONFIGURATION, "--from", "@framework"),
        (CONFIGURATION, "--from", "@framework"),
        (CONFIGURATION, "--from", "@framework"),
        (CONFIGURATION, "--from", "@framework", "--json"),
        ("config.json", "--from", "deepspeed", "--cluster", "@cluster", "--model", "@model"),
        ("runs.csv", "--from", "megatron", "--cluster", "@cluster", "--model", "@model"),
    ),
    "tune": (
        ("@model", "--cluster", "@cluster", "--dry-run"),
        ("plan.yaml", "--cluster", "local:2", "--dry-run"),
        ("@model", "--cluster", "local:4", "--trial-cluster", "@cluster", "--dry-run"),
    ),
    "profile": (("@model", "--cluster", "local:2", "--dry-run"),),
    "show": (("plan.yaml",), ("large.yaml",)),
    "compare": (("plan.yaml", "large.yaml"), ("sharded.yaml", "plan.yaml")),
    "run": (
        ("--plan", "plan.yaml", "@word"),
        ("--plan", "plan.yaml", "--profile", "profile.yaml", "@word"),
        ("--plan", "plan.yaml", "--on", "slurm", "--dry-run", "@word"),
    ),
    "watch": (("folder", "--once"), ("folder", "--once", "--incident", "1", "--share")),
    "validate": (("runs.csv",),),
    "calibrate": (("runs.csv",), ("folder", "folder", "folder")),
    "whatif": (("study.yaml",), ("--model", "@model", "--clusters", "@cluster", "--tokens", "1e9")),
    "catalog": (
        ("prices", "--import", "prices.csv", "--date", "2026-01"),
        ("prices", "--import", "hunt.csv", "--date", "2026-01"),
        ("models",),
        ("accelerators",),
        ("--plugins",),
    ),
}
"""Of each command, arguments that are right; words with @ are drawn."""


@dataclass(kw_only=True)
class Case:
    """One command in a folder of its own."""

    number: int
    arguments: list[str]
    files: dict[str, Make] = field(default_factory=dict)
    what: list[str] = field(default_factory=list)
    """How it is hostile."""
    outputs: int = 0
    """Files to write; of several, some may stay where one cannot be written."""

    def __str__(self) -> str:
        """Say what it is, to be found again by its number."""
        shown = " ".join(ascii(word)[:60] for word in self.arguments)
        return f"case {self.number}: {shown} ({'; '.join(self.what)})"


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option or argument of a command."""

    name: str
    flag: str | None
    """None is an argument."""
    kind: type
    """bool, int, float, str or an enumeration."""


def commands() -> dict[str, list[Option]]:
    """Return all commands with their options, as the command line declares them."""
    every = {}
    for command in cli.app().registered_commands:
        assert command.callback is not None
        named = get_type_hints(command.callback, include_extras=True)
        hints = {
            name: named[name] if isinstance(of.annotation, str) else of.annotation
            for name, of in inspect.signature(command.callback).parameters.items()
        }
        every[command.name or command.callback.__name__] = [
            _of(name, hint) for name, hint in hints.items()
        ]
    return every


def _of(name: str, hint: Any) -> Option:
    kinds = [hint]
    told = None
    while (inner := [get_args(kind) for kind in kinds if get_args(kind)]) != []:
        kinds = [kind for kind in kinds if not get_args(kind)] + list(inner[0])
        told = next((kind for kind in kinds if isinstance(kind, ParameterInfo)), told)
    kind = next(kind for kind in kinds if isinstance(kind, type) and kind is not type(None))
    if isinstance(told, ArgumentInfo):
        return Option(name=name, flag=None, kind=kind)
    # typer takes the first name for a default until it builds its parser.
    names = (told.default, *(told.param_decls or ())) if told else ()
    declared = [name for name in names if isinstance(name, str) and name.startswith("--")]
    flag = declared[-1] if declared else "--" + name.replace("_", "-")
    return Option(name=name, flag=flag, kind=kind)


@cache
def _with_json() -> set[str]:
    """Return the commands whose answer can be JSON; options behind `run SCRIPT` are its own."""
    return {
        name for name, every in commands().items() if any(one.flag == "--json" for one in every)
    } - {"run"}


def case(seed: int, number: int) -> Case:
    """Return one case; the same numbers give the same."""
    rng = random.Random(f"{seed}/{number}")
    every = commands()
    name = sorted((*every, READ))[number % (len(every) + 1)]
    made = Case(number=number, arguments=[name])
    if name == READ:
        return _read(rng, made)
    shape = rng.choice(ARGUMENTS[name])
    for word in shape:
        made.arguments.append(_drawn(rng, word))
    ways = rng.choice([(1, 0), (1, 0), (0, 1), (0, 1), (0, 2), (1, 1), (0, 3)])
    if CONFIGURATION in shape:
        _configuration(rng, made, hostile=bool(ways[0]))
    _files(rng, made, hostile=ways[0])
    _traps(rng, made)
    if name in _with_json() and "--json" not in made.arguments and rng.random() < 0.3:
        made.arguments.append("--json")
    for _ in range(ways[1]):
        # A page that is served waits for its readers: hostile_requests.py asks it.
        option = rng.choice([of for of in every[name] if of.name != "serve"])
        words = _option(rng, option)
        made.outputs += option.name in OUTPUTS
        made.arguments += words
        made.what.append(" ".join(ascii(word)[:40] for word in words))
    return made


def _read(rng: random.Random, made: Case) -> Case:
    """Give a case a document that no command's argument names, and what the document speaks of."""
    name = rng.choice(list(documents.BASES))
    made.arguments.append(name)
    beside = [path for path in documents.BASES if path != name and _together(path, name)]
    made.files = {path: _text(content) for path, content in documents.DATA.items()}
    made.files |= {path: _text(_right(path)) for path in beside}
    about = [name, *beside, *(path for path in documents.DATA if _together(path, name))]
    if rng.random() < 0.2:
        path, kind = rng.choice(about), rng.choice(list(KINDS))
        made.what = [f"{path} is {kind}"]
        made.files[name] = _text(_right(name))
        made.files[path] = KINDS[kind]
        return made
    if name in documents.SEALED and rng.random() < 0.2:
        return _listed(rng, made, name)
    content, what = _document(rng, name, hostile=True)
    # Whoever changes a sealed document can seal it again.
    if name in documents.SEALED and rng.random() < 0.8:
        content = checksums.with_seal(content.decode(errors="replace")).encode()
    made.files[name] = _text(content)
    made.what = [what]
    return made


def _together(path: str, name: str) -> bool:
    """Whether two files lie in one folder, or in that of a checkpoint and of its parts."""
    folders = [str(Path(one).parent).removesuffix(".parts") for one in (path, name)]
    return folders[0] == folders[1]


def _listed(rng: random.Random, made: Case, name: str) -> Case:
    """Change a file that a sealed document lists, and list it as it is now."""
    data = copy.deepcopy(_loaded(name))
    files = [path for path in documents.DATA
             if _together(path, name) and Path(path).name in data["checksums"]]  # fmt: skip
    path = rng.choice(files or [next(iter(documents.DATA))])
    content, what = _damaged(rng, documents.DATA[path])
    data["checksums"][Path(path).name] = checksums.of_bytes(content)
    if "files" in data:
        data["files"][Path(path).name] = len(content)
    made.files[path] = _text(content)
    made.files[name] = _text(checksums.with_seal(json.dumps(data)).encode())
    made.what = [f"{path}: {what}, as listed"]
    return made


def _configuration(rng: random.Random, made: Case, *, hostile: bool) -> None:
    """Give a case a framework's configuration, the framework, its cluster and model."""
    of, text, row, what = configurations.drawn(rng, mutated, hostile=hostile)
    made.arguments[made.arguments.index("@framework")] = of
    made.arguments += ["--cluster", row.cluster]
    if row.model is not None:
        made.arguments += ["--model", "published.json" if row.model[:1] == "{" else row.model]
        made.files["published.json"] = _text(row.model.encode())
    made.files[CONFIGURATION] = _text(text.encode(errors="surrogatepass"))
    made.what += [f"{of}: {what}"] if what else []


def _traps(rng: random.Random, made: Case) -> None:
    """Put links and pipes where a command writes: an output, a run's folder, a checkpoint's."""
    if rng.random() > 0.2:
        return
    names = ("out.yaml", "out.csv", "run/.lock", "run/plan.yaml", "run/metrics.jsonl", "run/logs",
             "run/ranks", "launch.sbatch", "out/config.json")  # fmt: skip
    for name in rng.sample(names, k=2):
        kind = rng.choice(list(TRAPS))
        made.files[name] = TRAPS[kind]
        made.what.append(f"{name} is {kind}")


def _drawn(rng: random.Random, word: str) -> str:
    if word == "@model":
        return rng.choice(MODELS[:5])
    if word == "@cluster":
        return rng.choice(CLUSTERS[:8])
    return rng.choice(TEXTS) if word == "@word" else word


def _option(rng: random.Random, option: Option) -> list[str]:
    """Return an option with a value that its kind or its name suggests."""
    if option.kind is bool:
        return [option.flag or ""]
    if option.kind is int:
        value = rng.choice(WHOLE)
    elif option.kind is float:
        value = rng.choice(REAL)
    elif issubclass(option.kind, Enum):
        value = rng.choice([*(member.value for member in option.kind), *TEXTS[:6]])
    else:
        value = _word(rng, option.name)
    return [value] if option.flag is None else [option.flag, value]


def _word(rng: random.Random, name: str) -> str:
    """Return a word for an option of text."""
    number = rng.choice((*WHOLE, *REAL))
    junk = rng.choice(TEXTS)
    files = (
        *BASES,
        *TABLES,
        "folder",
        "thing",
        "nowhere",
        "/dev/zero",
        "/dev/null",
        "/",
        "/dev/stdin",
    )
    outputs = (
        "out.yaml", "out.csv", "deep/out.yaml", "", ".", "/", "folder", "/dev/full", "/proc/x/y",
        "plan.yaml/x", "x" * 300, "a\nb", "\x00", "out\x1b[1m.yaml",
    )  # fmt: skip
    pools: dict[str, Callable[[], str]] = {
        "cluster": lambda: rng.choice(CLUSTERS),
        "clusters": lambda: ",".join(rng.choices(CLUSTERS, k=rng.randint(1, 5))),
        "model": lambda: rng.choice((*MODELS, *BASES)),
        "layout": lambda: f"{rng.choice(PINS)}={rng.choice((number, *PINNED))}",
        "lora": lambda: f"{rng.choice(SETTINGS)}={rng.choice((number, junk))}",
        "job": lambda: f"{rng.choice(JOBS)}={rng.choice((number, junk))}",
        "require": lambda: rng.choice(REQUIRED),
        "allow": lambda: rng.choice(("offload", "stale", "compress", "stale,compress", junk)),
        "framework": lambda: rng.choice(
            ("native", "megatron", "torchtitan", "nanotron", "fsdp", junk)
        ),
        "profile": lambda: rng.choice(("profile.yaml", "a=profile.yaml,b=profile.yaml", *files)),
        "budget": lambda: rng.choice(("5min", "1e9h", "9" * 400 + "s", "0s", "٣min", junk, number)),
        "to": lambda: rng.choice(("megatron", "huggingface", "peft", junk)),
        "on": lambda: rng.choice(("slurm", "kubernetes", "local", junk)),
        # Two and more: a single host would be connected to.
        "hosts": lambda: rng.choice(
            ("a,b[0-3]", "b[", "b[3-1],c", "b[0-999999999]", "a,a", "a,-b")
        ),
        "rendezvous": lambda: rng.choice(("x:1", ":", "x:99999999", "[::1]:0", junk, number)),
    }
    pools["fix"] = pools["layout"]
    pools["training"] = pools["lora"]
    for output in OUTPUTS:
        pools[output] = lambda: rng.choice(outputs)
    likely = pools.get(name, lambda: rng.choice(files))
    word = rng.choice((likely, likely, likely, lambda: junk, lambda: rng.choice(files)))()
    # What a user names as an output is written there, wherever that is.
    return "out" if name in OUTPUTS and "../.." in word else word


def _files(rng: random.Random, made: Case, *, hostile: int) -> None:
    """Give a case its files; of `hostile` of those that it names, something is wrong."""
    named = [word for word in made.arguments if word in BASES or word in TABLES]
    if "folder" in made.arguments:
        named = ["folder/plan.yaml", "folder/model.yaml", "folder/report.json"]
        if made.arguments[0] == "watch":
            named = ["folder/plan.yaml", "folder/orders.yaml", "folder/events.jsonl"]
    bad = set(rng.sample(named, k=min(hostile, len(named))))
    others = [name for name in (*BASES, *TABLES) if name not in named]
    for path in (*others, *named):
        name = Path(path).name
        if path in bad and rng.random() < 0.15:
            kind = rng.choice(list(KINDS))
            made.files[path] = KINDS[kind]
            made.what.append(f"{path} is {kind}")
        elif name in TABLES:
            content, what = _table(rng, name, hostile=path in bad)
            made.files[path] = _text(content)
            made.what += [f"{path}: {what}"] if what else []
        else:
            content, what = _document(rng, name, hostile=path in bad)
            made.files[path] = _text(content)
            made.what += [f"{path}: {what}"] if what else []
    made.files["evil.py"] = _text(EVIL.encode() + b"def f():\n    return []\n")
    made.files["sitecustomize.py"] = made.files["yaml.py"] = _text(EVIL.encode())


# Mutations ---------------------------------------------------------------------------------------


class _Loose(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes aliases out."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _document(rng: random.Random, name: str, *, hostile: bool) -> tuple[bytes, str]:
    if not hostile:
        return _right(name), ""
    if rng.random() < 0.3 or isinstance(_loaded(name), bytes):
        return _damaged(rng, _right(name))
    data = copy.deepcopy(_loaded(name))
    said = [mutated(rng, data) for _ in range(rng.choice((1, 1, 1, 2, 4)))]
    return _dumped(data, name), "; ".join(said)


@cache
def _loaded(name: str) -> Any:
    return (BASES | documents.BASES)[name]()


@cache
def _right(name: str) -> bytes:
    """Return a document as it should be."""
    data = _loaded(name)
    content = data if isinstance(data, bytes) else _dumped(data, name)
    return checksums.with_seal(content.decode()).encode() if name in documents.SEALED else content


def _dumped(data: object, name: str) -> bytes:
    if name.endswith(".json"):
        return json.dumps(data).encode(errors="surrogatepass")
    if name.endswith(".jsonl"):
        lines = data if isinstance(data, list) else [data]
        return "".join(json.dumps(line) + "\n" for line in lines).encode()
    try:
        text = yaml.dump(data, Dumper=_Loose, sort_keys=False, width=100)
    except (yaml.YAMLError, RecursionError, ValueError):
        text = json.dumps(data)
    return text.encode(errors="surrogatepass")


def _places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """Yield every place of a document: its path, what holds it, its key there."""
    items = list(data.items()) if isinstance(data, dict) else list(enumerate(data))
    for key, value in items:
        yield (*path, key), data, key
        if isinstance(value, dict | list):
            yield from _places(value, (*path, key))


def mutated(rng: random.Random, data: Any) -> str:
    """Change one place of a document and say how."""
    every = list(_places(data))
    if not every:
        return "nothing left"
    path, holder, key = rng.choice(every)
    where = ".".join(map(str, path))[-60:]
    value = holder[key]
    way = rng.choice(("gone", "renamed", "repeated", "moved", "nested", "scaled", "scaled", *"vvv"))
    if way == "gone":
        del holder[key]
    elif way == "renamed" and isinstance(holder, dict):
        holder[rng.choice(TEXTS)] = holder.pop(key)
    elif way == "repeated" and isinstance(holder, list):
        holder.extend(copy.deepcopy(value) for _ in range(rng.choice((1, 1, 500))))
    elif way == "moved":
        _, from_holder, from_key = rng.choice(every)
        holder[key] = copy.deepcopy(from_holder[from_key])
    elif way == "nested":
        for _ in range(rng.choice((1, 39, 41, 200))):
            holder[key] = [holder[key]] if rng.random() < 0.5 else {"a": holder[key]}
    elif way == "scaled" and isinstance(value, int | float) and not isinstance(value, bool):
        changed = value * rng.choice(FACTORS)
        holder[key] = round(changed) if isinstance(value, int) else changed
        way = f"= {holder[key]}"
    else:
        holder[key] = copy.deepcopy(rng.choice(VALUES))
        way = f"= {ascii(holder[key])[:40]}"
    return f"{where} {way}"


def _damaged(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    """Change a document or table as text."""
    at = rng.randrange(len(content) + 1)
    junk = rng.randbytes(20)
    ways: dict[str, Callable[[], bytes]] = {
        "truncated": lambda: content[:at],
        "a zero byte": lambda: content[:at] + b"\0" + content[at:],
        "random bytes": lambda: content[:at] + junk + content[at:],
        "a mark first": lambda: b"\xef\xbb\xbf" + content,
        "UTF-16": lambda: content.decode(errors="replace").encode("utf-16"),
        "latin-1": lambda: content[:at] + "é".encode("latin-1") + content[at:],
        "CRLF": lambda: content.replace(b"\n", b"\r\n"),
        "CR": lambda: content.replace(b"\n", b"\r"),
        "tabs": lambda: content.replace(b"  ", b"\t"),
        "a bomb": lambda: b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n" + content,
        "a tag": lambda: (
            f"x: !!python/object/apply:os.system ['touch {CANARY}']\n".encode() + content
        ),
        "code in a tag": lambda: b"!!python/name:os.system\n" + content,
        "all twice": lambda: content + content,
        "two documents": lambda: content + b"\n---\n" + content,
        "a directive": lambda: b"%YAML 9.9\n---\n" + content,
        "depth": lambda: content + b"\nx: " + b"[" * 5000,
        "many keys": lambda: content + b"".join(b"\nk%d: 1" % n for n in range(20_000)),
        "a long word": lambda: content[:at] + b"x" * 300_000 + content[at:],
        "many digits": lambda: content[:at] + b"9" * 5000 + content[at:],
        "bombs and marks": lambda: content[:at] + "\u202e\U0001f4a3\u200b".encode() + content[at:],
        "as JSON": lambda: json.dumps(yaml.safe_load(content)).encode(),
        "NaN in JSON": lambda: json.dumps([yaml.safe_load(content), float("nan")]).encode(),
        "a bit flipped": lambda: _flipped(content, at),
        "a merge key": lambda: b"<<: {a: 1}\n" + content,
        "a date": lambda: content.replace(b"1", b"2001-01-01", 1),
    }  # fmt: skip
    what = rng.choice(list(ways))
    try:
        return ways[what](), what
    except (yaml.YAMLError, ValueError, RecursionError):
        return content[:at], "truncated"


def _flipped(content: bytes, at: int) -> bytes:
    changed = bytearray(content or b"\0")
    changed[at % len(changed)] ^= 1 << (at % 8)
    return bytes(changed)


def _table(rng: random.Random, name: str, *, hostile: bool) -> tuple[bytes, str]:
    header, row = TABLES[name]
    lines = [line.split(",") for line in (header, *(row.format(n=n) for n in range(3)))]
    if not hostile:
        return _joined(lines), ""
    if rng.random() < 0.3:
        return _damaged(rng, _joined(lines))
    said = []
    for _ in range(rng.choice((1, 1, 2, 5))):
        line = rng.choice([line for line in lines if line] or [[""]])
        column = rng.randrange(len(line))
        said.append(f"column {column} ")
        way = rng.randrange(6)
        if way == 0:
            del line[column:]
        elif way == 1:
            line += line
        else:
            line[column] = rng.choice((*WHOLE, *REAL, *TEXTS, '"', '"a\nb"', "8,8"))
        said[-1] += ascii(line[column])[:30] if column < len(line) else "gone"
    return _joined(lines), "; ".join(said)


def _joined(lines: list[list[str]]) -> bytes:
    return "\n".join(",".join(line) for line in lines).encode(errors="surrogatepass")


# Watch -------------------------------------------------------------------------------------------


def run(made: Case, parent: Path) -> str | None:
    """Run a case in a new folder; return what was wrong with how it ended."""
    folder = Path(tempfile.mkdtemp(dir=parent, prefix="case-"))
    work = folder / "work"
    (work / "folder").mkdir(parents=True)
    os.chdir(work)
    (folder / "elsewhere").mkdir()
    PRECIOUS.write_text("what a user has elsewhere")
    for path, make in made.files.items():
        if not Path(path).parent.exists():
            Path(path).parent.mkdir(parents=True)
        # A trap's name may be that of a file of the case, which it replaces.
        if make in TRAPS.values() and Path(path).is_file():
            Path(path).unlink()
        make(Path(path))
    before = _state(folder / "elsewhere")
    command, *arguments = made.arguments
    found = watched(
        lambda: documents.read(*arguments) if command == READ else cli.main(made.arguments),
        work,
        outputs=made.outputs,
        json_asked="--json" in made.arguments and made.arguments[0] != "run",
    )
    if found is None and _state(folder / "elsewhere") != before:
        return "a file of the user outside of the case's folder was touched"
    return found


def _state(folder: Path) -> list[tuple[str, int, int, str]]:
    return [(str(path), path.stat().st_mtime_ns, path.stat().st_mode, path.read_text())
            for path in sorted(folder.iterdir())]  # fmt: skip


def watched(
    command: Callable[[], int], work: Path, *, outputs: int = 1, json_asked: bool = False
) -> str | None:
    """Run a command where we stand, under audit; return what was wrong."""
    before = _listing(work)
    _forget_peak()
    written: list[str] = []
    out, err = io.StringIO(), io.StringIO()
    _AUDITED.append((work, written))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = command()
    except BaseException:  # whatever escapes is a finding
        return f"escaped:\n{traceback.format_exc()[-3000:]}"
    finally:
        _AUDITED.clear()
    said, new = err.getvalue(), sorted(_listing(work) - before)
    half = [path for path in new if Path(path).name.startswith(".")]
    wrong = {
        "code was run": any(Path(path).name == CANARY for path in new),
        f"wrote outside of its folder: {written[:3]}": written,
        f"ended with {code}: {said[-2000:]}": code not in (0, 1, 2) or "Traceback" in said,
        f"said nothing but {said[-500:]!r}": code == 1 and "meshwright: " not in said,
        f"ended with {code} and left {new[:5]}": code and new and outputs < 2,
        f"left {half[:5]} half-written": half,
        f"took {_peak_bytes() >> 20} MiB": _peak_bytes() > MOST_BYTES,
        f"printed no JSON alone: {out.getvalue()[:80]!r}": json_asked
        and not (_is_json(out.getvalue()) or (code and not out.getvalue())),
    }
    return next((text for text, seen in wrong.items() if seen), None)


def _is_json(text: str) -> bool:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


def _forget_peak() -> None:
    """Count the most memory of this process from now on."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    """Return the most memory of this process since; 0 where the system does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0


def _listing(work: Path) -> set[str]:
    return {os.path.join(parent, name)  # noqa: PTH118 - names may be no text
            for parent, folders, names in os.walk(work) for name in (*folders, *names)}  # fmt: skip


_AUDITED: list[tuple[Path, list[str]]] = []
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Note each file opened to be written, or moved, outside of the case's folder."""
    if not _AUDITED:
        return
    work, written = _AUDITED[0]
    path: object = None
    if (event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES) or event in (
        "os.mkdir",
        "os.remove",
        "os.rmdir",
        "os.chmod",
        "os.truncate",
        "os.symlink",
    ):
        path = arguments[0]
    elif event == "os.rename":
        path = arguments[1]
    if not isinstance(path, str | bytes | os.PathLike):
        return
    place = os.path.realpath(os.fsdecode(path))
    if not place.startswith((str(work), os.environ["MESHWRIGHT_CACHE"], "/dev", "/proc")):
        written.append(f"{event} {place}")


def _limits(limit_s: int) -> None:
    """End this process where it takes more CPU or memory than a case may, or waits for ever.

    It says where it was.
    """
    for number, timer, most_s in (
        (signal.SIGPROF, signal.ITIMER_PROF, limit_s),
        (signal.SIGALRM, signal.ITIMER_REAL, PATIENCE_S),
    ):
        faulthandler.register(number, chain=True)
        signal.setitimer(timer, most_s)
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _batch(seed: int, numbers: list[int], parent: Path, told: int) -> None:
    """Run cases one by one in this process, telling each one's begin and end."""
    sys.addaudithook(_audit)
    for number in numbers:
        made = case(seed, number)
        os.write(told, json.dumps(["begin", number]).encode() + b"\n")
        _limits(LIMIT_S)
        began_s = os.times().user
        found = run(made, parent)
        took_s = os.times().user - began_s
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        line = ["end", number, found and f"{made}\n{found}", round(took_s, 2), _peak_bytes() >> 20]
        os.write(told, json.dumps(line).encode() + b"\n")


def findings(seed: int, first: int, count: int, *, batch: int = 50) -> dict[str, Any]:
    """Run cases in forked processes; a case that ends its process is a finding."""
    waiting = list(range(first, first + count))
    found: dict[int, str] = {}
    seconds: dict[int, float] = {}
    mebibytes: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as parent:
        # The user's own cache, where what a machine measured is kept.
        os.environ["MESHWRIGHT_CACHE"] = os.path.realpath(Path(parent, "cache"))
        while waiting:
            now, reading = waiting[:batch], os.pipe()
            child = os.fork()
            if child == 0:
                os.close(reading[0])
                _batch(seed, now, Path(parent), reading[1])
                os._exit(0)
            os.close(reading[1])
            with os.fdopen(reading[0]) as told:
                lines = [json.loads(line) for line in told]
            _, status = os.waitpid(child, 0)
            ended = [line for line in lines if line[0] == "end"]
            found |= {line[1]: line[2] for line in ended if line[2]}
            print("\n".join(line[2] for line in ended if line[2]), file=sys.stderr)
            seconds |= {line[1]: line[3] for line in ended}
            mebibytes |= {line[1]: line[4] for line in ended}
            if len(ended) < len(now):
                bad = now[len(ended)]
                signalled = (
                    signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "?"
                )
                found[bad] = f"{case(seed, bad)}\nended its process: {signalled}"
                ended.append([])
            waiting = waiting[len(ended) :]
    slowest = sorted(seconds.items(), key=lambda item: -item[1])[:5]
    return {
        "cases": count,
        "findings": found,
        "slowest": slowest,
        "largest": sorted(mebibytes.items(), key=lambda item: -item[1])[:5],
        "cpu_s": sum(seconds.values()),
    }


def main() -> None:
    """Run cases and print what was found as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    asked = parser.parse_args()
    os.environ |= {"COLUMNS": "140", "TERM": "dumb"}
    json.dump(findings(asked.seed, asked.first, asked.count), sys.stdout, indent=1)


if __name__ == "__main__":
    main()
