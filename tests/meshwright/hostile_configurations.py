"""Published configurations of every framework that is read, changed by an attacker or an accident.

Settings are changed where they stand: values of another type, sections moved into each other, lists
repeated.  Python, TOML and shell scripts are changed by token, and get the statements that made
readers of such text run out of time or memory.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import yaml

from tests.planner.framework_configs import public_configurations as public

PUBLISHED: dict[str, list[public.Row]] = {
    "megatron": public.MEGATRON,
    "slurm": public.MEGATRON,
    "megatron-bridge": public.MEGATRON_BRIDGE,
    "torchtitan@0.2": public.TORCHTITAN,
    "torchtitan": public.TORCHTITAN_PYTHON,
    "deepspeed": public.DEEPSPEED,
    "accelerate": public.ACCELERATE,
    "transformers": public.TRANSFORMERS,
    "nanotron": public.NANOTRON,
    "fsdp": public.FSDP,
    **public.TUNING,
}
DATA = (
    *("megatron-bridge", "deepspeed", "accelerate", "transformers", "nanotron"),
    *public.TUNING,
)
SHELL = ("megatron", "slurm")

_NUMBERS = ("0", "-1", "1", "3", "1e3", "1e308", "1e400", "9" * 400, "9" * 5000, "0x" + "f" * 9000,
            "1000000000000", "999999999999999999999", "0.5", "-0.0", "nan", "inf",
            "1_0")  # fmt: skip
_PYTHON = (
    *_NUMBERS, "None", "True", "'x'", "''", "b'x'", "...", "()", "[]", "{}", "{1: 2}", "{None: 1}",
    "(1,)", "(1, 2, 3)", "['a', 1]", "{'a': {'b': 1}}", "{*()}", "x", "x.y", "f()", "f()()", "-x",
    "lambda: 1", "f'{x}'", "1j", "10**10**10", "(1" + "+1" * 3000 + ")", "[" * 150 + "]" * 150,
    "'x' * 10**12", "range(10**18)", "range(0, -1)", "range('a')", "range(*x)", "a" + ".a" * 4000,
    "f" + "()" * 4000, "-" * 9000 + "1", "float('inf')", "float('nan')", "*x", "yield", "\ud800",
)  # fmt: skip
_PYTHON_LINES = (
    "REPLICAS, SHARDS = 0, 0", "REPLICAS, SHARDS = 'a', 1.5", "REPLICAS = SHARDS = 2**99",
    "REPLICAS, SHARDS = 10**6, 10**6", "RECOMPUTED = range(0, 10**9)", "RECOMPUTED = ()",
    "CLIP_NORM = 10**400", "CLIP_NORM = 1" + "0" * 400, "AdamW(lr='x', betas=1)",
    "AdamW(betas=(1, 2, 3), **x)", "torch.optim.AdamW(p, betas='ab', lr=1" + "0" * 400 + ")",
    "x.AdamW(lr=[])", "f()()(AdamW)()", "config.training.steps = {1: [2]}",
    "config.parallelism.module_fqns_per_model_part = [1, 2]",
    "config.parallelism.module_fqns_per_model_part = []", "config.optimizer.betas = 7",
    "config.optimizer.betas = ('a', 'b')", "config.lr_scheduler.decay_ratio = 1e308",
    "config.activation_checkpoint = None", "config.quantize.linear = 3",
    "ParamGroupConfig(optimizer_kwargs={1: 2, **KW}, pattern='.*')", "KW = {f(): 1}", "KW = {**a}",
    "Float8LinearConverter.Config(recipe_name=[1], filter_fqns=1)", "MXFP8LinearConverter()()",
    "ParallelismConfig(**{'a': 1}, data_parallel_shard_degree=None)",
    "TrainingConfig(*a, steps=f(x))",
    "config_registry.nothing()", "def registered(): pass",
    "import os; os.system('touch code-was-run')",
    "while True: pass", "pass;" * 30_000, "x = [" + "1," * 50_000 + "]", "# " + "x" * 240_000,
    "x = '" + "y" * 300_000 + "'", "\x00", "x = {" + "'a': {" * 70 + "}" * 71,
    "match x:\n  case 1: pass",
)  # fmt: skip
_TOML = (
    *_NUMBERS, "true", '"x"', '""', "[]", "[1, 2]", '["a", 1]', "{}", "{a = 1}", "2001-01-01",
    "0001-01-01T00:00:00Z", "12:00:00", "[" * 300 + "]" * 300, "{a = " * 300 + "1" + "}" * 300,
    "0b" + "1" * 9000, "0o7", "'''x\ny'''", "inf", "nan", "-inf",
)  # fmt: skip
_TOML_LINES = (
    "[training]", "[a" + ".a" * 3000 + "]", "a" + ".a" * 3000 + " = 1", "[[parallelism]]",
    "[training.steps]", "x = 1\nx = 2", "steps = 0x" + "f" * 9000, "betas = [1, 2, 3]",
    'betas = ["a", "b"]', "max_norm = inf", "decay_ratio = inf", "converters = [[1], {a = 1}]",
    "module_fqns_per_model_part = [1, 2]", "filter_fqns = 3", "lr = 1e400", "\x00",
)  # fmt: skip
_WORDS = (
    *_NUMBERS, "", "$X", "${X:-4}", "${X:-${Y}}", "$((2*3))", "$((1/0))", "$((9**9))", "$(touch x)",
    "`touch x`", "'", '"', "\\", "--", "--x=", "auto", "null", "x" * 5000, "@", "²", "٣", "|", ";",
    "(t*9999)*9999", "((t*9999)*9999)*9999", "t|" * 9000, "Et*3|t*4|t*0L", "{", '{"a": 1}',
    "[1, 2]",
    "{broken", '{"warmup_num_steps": ' + "9" * 400 + "}",
)  # fmt: skip
_STATEMENTS = (
    'A=1234567890\n' + 'A+="$A$A"\n' * 60, 'A=xxxxxxxxxx\n' + 'A="$A$A$A$A"\n' * 40 + 'echo "$A"',
    'A=9\n' + 'A=$((A*A))\n' * 60 + 'torchrun --x $A', 'A=(a b)\n' + 'A+=("${A[@]}")\n' * 50,
    'echo "' + "x\n" * 60_000, "echo '" + "x" * 200_000, "X=(\n" + "a\n" * 60_000,
    "echo " + "${A:-" * 20_000, "echo " + "$a:-" * 40_000, "echo " + "$((" * 40_000,
    "echo " + "$((1+(" * 20_000, "echo $((" + "(" * 100 + "1" + ")" * 100 + "))",
    "echo $((" + "1+" * 60_000 + "1))", "A=$((" + "-" * 50_000 + "1))", "#SBATCH " + "-" * 100_000,
    "#SBATCH --nodes=" + "9" * 5000, "#SBATCH" + "\n" * 60_000, "#SBATCH --gres=gpu:" + "9" * 7,
    "A=${A:-$A}\n" * 2000 + "echo $A", "A='$B'\nB='$A'\necho $A$B", "echo \\\n" * 30_000,
    "torchrun --x " + "w " * 90_000, "export X=$X$X\n" * 5000, "--a " * 50_000,
    "# " + "x" * 240_000,
    "$A" * 100_000, 'A="$(' + "(" * 5000, "A" * 200_000 + "=1", "'\\\n" * 40_000,
    "for i in 1; do A+=$A$A; done\n" * 3000, "\x0b\x0c\x85\u2028" * 30_000, "touch code-was-run",
)  # fmt: skip

_VALUES = re.compile(r"(?:=\s*|(?<![\w.-])--[\w.-]+[ =])([^\s,=(){}\[\]]+)")
"""Of `key = value`, `key=value` and `--key value`, what stands behind."""
Change = Callable[[random.Random, Any], str]
"""Changes data in one place, and says how."""


def drawn(rng: random.Random, change: Change, *, hostile: bool) -> tuple[str, str, public.Row, str]:
    """Return a framework, its configuration, the row it was made from, and what was changed."""
    of = rng.choice(list(PUBLISHED))
    row = rng.choice(PUBLISHED[of])
    if not hostile:
        return of, row.text, row, ""
    text, what = row.text, []
    for _ in range(rng.choice((1, 1, 2, 3))):
        text, way = _changed(rng, of, text, change)
        what.append(way)
    if rng.random() < 0.1:  # what it is not
        of = rng.choice(list(PUBLISHED))
        what.append(f"read as {of}")
    return of, text, row, "; ".join(what)


def _changed(rng: random.Random, of: str, text: str, change: Change) -> tuple[str, str]:
    if of in DATA:
        return _of_data(rng, text, change, as_json=of == "deepspeed")
    values, lines = {
        "torchtitan@0.2": (_TOML, _TOML_LINES), "torchtitan": (_PYTHON, _PYTHON_LINES),
        "fsdp": (_PYTHON, _PYTHON_LINES),
    }.get(of, (_WORDS, _STATEMENTS))  # fmt: skip
    if rng.random() < 0.35:
        line = rng.choice(lines)
        whole = text.splitlines(keepends=True)
        at = rng.randrange(len(whole) + 1)
        indent = " " * rng.choice((0, 0, 4))
        return "".join([*whole[:at], f"{indent}{line}\n", *whole[at:]]), f"line {line[:30]!r}"
    places = [match.span(1) for match in _VALUES.finditer(text)]
    others = [match.span() for match in re.finditer(r"[\w.]+|[^\w\s]", text)]
    begin, end = rng.choice(places if places and rng.random() < 0.8 else others or [(0, 0)])
    value = rng.choice(values)
    return text[:begin] + value + text[end:], f"{text[begin:end][:20]!r} = {value[:30]!r}"


def _of_data(rng: random.Random, text: str, change: Change, *, as_json: bool) -> tuple[str, str]:
    try:
        data = json.loads(text) if as_json else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError, RecursionError):  # changed before
        return text, "as it was"
    if not isinstance(data, dict | list):
        return text, "as it was"
    what = change(rng, data)
    try:
        return (json.dumps(data) if as_json else yaml.safe_dump(data)), what
    except (ValueError, yaml.YAMLError, RecursionError, TypeError):
        return json.dumps(data, default=str), what
