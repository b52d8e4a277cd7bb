"""Flags of the command that trains in a shell script.  The script is read, never run.

`planner.framework_configs.bash` follows it; here its commands are distinguished.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath

from meshwright.planner.errors import DocumentError
from meshwright.planner.errors.shown import one_line
from meshwright.planner.framework_configs.bash.interpreter import (
    ScriptEnvironment,
    ScriptPath,
    ways,
)
from meshwright.planner.framework_configs.readers.input_limits import check_size, is_toml_or_module
from meshwright.planner.framework_configs.readers.parsed_config import ParsedConfig

_DIRECTIVE = re.compile(r"^#SBATCH\s+(--?[\w-]+)(?:[=\s]+(\S+))?", re.MULTILINE)
_TRAINS = re.compile(
    r"pretrain|train|finetun|fine_tun|torchtitan|sft|dpo|ppo|grpo|run_clm|swift|axolotl|main\.py|llamafactory|^lmf$|litgpt|^trl$|^megatron$|main_ppo"
)


def parsed(
    text: str,
    of: str,
    parse: Callable[[list[str]], ParsedConfig],
    surroundings: ScriptEnvironment | None = None,
) -> ParsedConfig:
    """Return the result of `parse` for the words of the command that trains.

    DocumentError names the conditions by which a script trains in several ways.
    """
    check_size(text, of)
    if is_yaml(text):
        raise DocumentError(of, NO_SCRIPT)
    arguments = _as_arguments(text)
    if arguments is not None:
        text = arguments
    all_ways = ways(text, surroundings, of)
    followed = [way for way in all_ways if _candidates(way)]
    if not followed:
        unfollowed = all_ways[0].unfollowed
        others = [name for way in all_ways for name in map(_use_of_weights, way.commands) if name]
        if others:
            raise DocumentError(
                of, f"runs '{others[0]}', which trains nothing; give the command that trains"
            )
        also = f", and {unfollowed[0]:.60} is not there" if unfollowed else ""
        raise DocumentError(
            of,
            f"runs no command that is known to train{also}; give the script that starts it, or "
            "set its arguments: --set '@=FIRST SECOND', --set NAME=VALUE",
        )
    for word in (word for way in followed for command in way.commands for word in command):
        if re.fullmatch(r"--[A-Za-z][\w-]*(,|\])", word):
            raise DocumentError(
                of,
                f"has '{word:.60}', an option in a list of another language; give the command as a "
                "shell script",
            )
    errors: dict[str, DocumentError] = {}
    configs = [(way, _config_of(way, of, parse, errors)) for way in followed]
    first = configs[0][1]
    if any(config != first for _, config in configs[1:]):
        raise DocumentError(of, _which(configs, first))
    if isinstance(first, DocumentError):
        raise first
    absent = dict.fromkeys(name for way in followed for name in way.unfollowed)
    first.unknown += [f"{name} (another script)" for name in absent]
    return first


NO_SCRIPT = (
    "runs no command that is known to train: it is YAML, not a shell script; give the command that "
    "it starts as a script, or name the reader of its framework with --from"
)
_YAML_KEY = re.compile(r"[A-Za-z_][\w.-]*:(\s|$)")


def is_yaml(text: str) -> bool:
    """Return whether a text begins as a YAML document with keys does, and as no script."""
    lines = (line for line in text.splitlines() if line.strip() and not line.startswith("#"))
    first = next(lines, "")
    if text.startswith("#!"):
        return False
    return _YAML_KEY.match(first if first.strip() != "---" else next(lines, "")) is not None


def is_script(text: str) -> bool:
    """Tell whether a text is a shell script, and no document of settings.

    >>> is_script("swift sft --model Qwen/Qwen3-8B"), is_script("stage: sft")
    (True, False)
    """
    if _SHELL.match(text) or _DIRECTIVE.search(text):
        return True
    return not is_yaml(text) and _STARTS.search(text) is not None and not is_toml_or_module(text)


def _config_of(
    way: ScriptPath,
    of: str,
    parse: Callable[[list[str]], ParsedConfig],
    errors: dict[str, DocumentError],
) -> ParsedConfig | DocumentError:
    """Return the configuration of a way through a script, or its refusal: once for each reason."""
    words = _training_words(way, of)
    try:
        config = parse(words)
    except DocumentError as error:
        return errors.setdefault(str(error), error)
    config.unknown += loose_variables(words)
    environment = way.environment.get(tuple(words), {})
    if config.devices is None:
        config.devices = _devices_of(environment)
    settings = [f"{name}={value}" for name, value in environment.items()]
    config.unknown += [text[:80] for text in (*settings, *words) if _DECIDES.match(text)]
    return config


_DECIDES = re.compile(
    r"(ACCELERATE|FSDP|DEEPSPEED|PARALLELISM_CONFIG|MEGATRON_LM|TORCHDYNAMO|TORCH_COMPILE)_\w+=[^\s]"
    r"|NVTE_(FLASH|FUSED)_ATTN=0|XLA_FLAGS="
)
"""Variables of the environment by which launchers and libraries decide what is trained and how."""


def _devices_of(environment: Mapping[str, str]) -> int | None:
    """Return how many devices variables of the environment give a job; None if they do not say.

    >>> _devices_of({"NPROC_PER_NODE": "4", "NNODES": "2"}), _devices_of({})
    (8, None)
    >>> _devices_of({"CUDA_VISIBLE_DEVICES": "0,1,2"})
    3
    """
    each = environment.get("NPROC_PER_NODE", "")
    if re.fullmatch(r"\d{1,5}", each):
        nodes = environment.get("NNODES", "1")
        return int(each) * int(nodes) if re.fullmatch(r"\d{1,5}", nodes) else None
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    if "NNODES" in environment or not re.fullmatch(r"\d{1,3}(,\d{1,3})*", visible):
        return None
    return len(visible.split(","))


def _which(
    configs: Sequence[tuple[ScriptPath, ParsedConfig | DocumentError]],
    first: ParsedConfig | DocumentError,
) -> str:
    """Return the conditions that decide what is trained."""
    deciding = []
    texts = dict.fromkeys(text for way, _ in configs for text, _ in way.decisions)
    for text in texts:
        sides = [
            [config for way, config in configs if (text, side) in way.decisions]
            for side in (True, False)
        ]
        if any(a != b for a in sides[0] for b in sides[1]) or not all(sides):
            deciding.append(text)
    names = dict.fromkeys(name for text in deciding for name in re.findall(r"\$\{(\w+)\}", text))
    how = " ".join(f"--set {name}=VALUE" for name in list(names)[:3])
    shown = "; ".join(one_line(text)[:60] for text in deciding[:3])
    if not how and deciding:
        how = f"--set '{one_line(deciding[0])[:60]}=yes' (or no)"
    return f"trains in several ways, and nothing in it says which: {shown} decides; add {how}"


def _as_arguments(text: str) -> str | None:
    """Return arguments that are listed one a line as one line; None if it is a script."""
    lines = [line.strip() for line in text.splitlines()]
    plain = [line for line in lines if line and not line.startswith("#")]
    if not plain or not all(line.startswith("--") for line in plain):
        return None
    return " ".join(line.removesuffix("\\") for line in plain)


def words(text: str, surroundings: ScriptEnvironment | None = None) -> list[str]:
    """Return the words of the command that trains, of a script that has one way through it."""
    [way] = ways(_as_arguments(text) or text, surroundings)
    return _training_words(way, "script")


def _candidates(way: ScriptPath) -> list[tuple[str, ...]]:
    return [
        command
        for command in way.commands
        if _use_of_weights(command) is None
        and (
            any(re.match(r"--[A-Za-z]", word) for word in command)
            or any(word.endswith((".py", ".yaml", ".yml")) for word in command)
            or any(word.startswith("verl.") for word in command)
        )
    ]


_USES: dict[str, str] = {
    "swift": "app deploy eval export infer merge-lora rollout sample web-ui webui",
    "megatron": "export",
    **dict.fromkeys(("llamafactory-cli", "lmf"), "api chat eval export webchat webui version env"),
    "axolotl": "inference merge-lora merge-sharded-fsdp-weights preprocess evaluate quantize "
    "vllm-serve fetch lm-eval delinearize-llama4",
    "trl": "chat env vllm-serve",
    "litgpt": "chat convert convert_from_litgpt convert_pretrained_checkpoint "
    "convert_to_litgpt download evaluate generate merge_lora serve",
    "vllm": "serve bench chat complete",
}
"""Commands of programs that use weights and train none."""
_SHELL = re.compile(r"#!.*\b(ba|da|k|z)?sh\b")
_PROGRAMS = "|".join((*_USES, "accelerate", "torchrun", "python3?"))
_STARTS = re.compile(
    r"^[ \t]*(?!//|#)[\w$\"'./{}~-]+(=\S+)?([ \t]+[^\n#{[(]*)?[ \t](--[A-Za-z]|\\$)"
    rf"|^[ \t]*({_PROGRAMS})[ \t]",
    re.MULTILINE,
)
"""A command with an option, or that goes on in the next line."""
_USING_MODULES = frozenset(
    [
        "axolotl.cli.inference",
        "axolotl.cli.preprocess",
        "axolotl.cli.merge_lora",
        "sglang.launch_server",
        "vllm.entrypoints.openai.api_server",
        "verl.model_merger",
        "lm_eval",
    ]
)


def _use_of_weights(command: Sequence[str]) -> str | None:
    """Return the words by which a command uses weights; None if it may train.

    >>> _use_of_weights(("swift", "infer", "--model", "x")), _use_of_weights(("swift", "sft"))
    ('swift infer', None)
    """
    for at, word in enumerate(command):
        name = PurePosixPath(word).name
        following = command[at + 1] if at + 1 < len(command) else ""
        if following and following in _USES.get(name, "").split():
            return f"{name} {following}"
        if at and command[at - 1] in ("-m", "--module") and word in _USING_MODULES:
            return word
        if word.endswith(".py") and _USES_WEIGHTS.search(name) and not _TRAINS.search(name):
            return name
    return None


_USES_WEIGHTS = re.compile(
    r"(^|_)(infer|inference|generate|generation|export|convert|converter|eval|evaluate|deploy"
    r"|serve|server|preprocess|tokenize)(_|\.)"
)


def _training_words(way: ScriptPath, of: str) -> list[str]:
    """Return the words of the one command that trains."""
    candidates = _candidates(way)
    training = [command for command in candidates if _trains(command)] or candidates
    # Where nodes are started one after the other, each with its number, one represents all.
    training = list({_without_rank(command): command for command in reversed(training)}.values())
    training.reverse()
    if len(training) > 1:
        shown = ", ".join(" ".join(command)[:50] for command in training[:3])
        raise DocumentError(
            of, f"starts {len(training)} commands that may train ({shown} ...); give one of them"
        )
    return list(training[0]) if training else []


_RANK = re.compile(r"--(node|machine)[_-]rank(=.*)?")


def _without_rank(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command without the number of its node."""
    words = []
    behind = False
    for word in command:
        match = _RANK.fullmatch(word)
        if match is None and not behind:
            words.append(word)
        behind = match is not None and match[2] is None
    return tuple(words)


def _trains(command: tuple[str, ...]) -> bool:
    """Return True if a command names a script, a module or a program that trains."""
    for at, word in enumerate(command):
        if word.startswith("-"):
            continue
        named = word.endswith(".py") or at == 0 or command[at - 1] in ("-m", "--module", ";")
        if (
            (named or not word.startswith("/"))
            and not word.endswith((".json", ".txt"))
            and _TRAINS.search(PurePosixPath(word).name)
        ):
            return True
    return command[0].startswith("--")


def flags(words: list[str]) -> dict[str, str | bool | list[str]]:
    """Return flags by name with `-` for `_`: True without a value, a list of several."""
    values: dict[str, list[str]] = {}
    name = None
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            name, sign, value = word[2:].partition("=")
            name = name.replace("_", "-")
            values[name] = [value] if sign else []
        elif word in ("&&", "||", ";", "|", "\\") or word.startswith((">", "<", "2>")):
            name = None
        elif name is not None and not (values[name] and _is_variable(word)):
            values[name].append(word)
    return {
        name: True if not several else several[0] if len(several) == 1 else several
        for name, several in values.items()
    }


def loose_variables(words: list[str]) -> list[str]:
    """Return variables that nothing sets and that are words of their own."""
    loose, room = [], False
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            room = "=" not in word
        elif _is_variable(word) and not room:
            loose.append(word)
        else:
            room = False
    return loose


def _is_variable(word: str) -> bool:
    return re.fullmatch(r"\$\{[^}]*\}|\$\(.*", word, re.DOTALL) is not None


def directives(text: str) -> dict[str, str]:
    """Return a Slurm script's requests to its scheduler, by long names."""
    short = {"-N": "--nodes", "-n": "--ntasks", "-G": "--gpus"}
    return {
        short.get(match[1], match[1]).removeprefix("--"): match[2] or ""
        for match in _DIRECTIVE.finditer(text)
    }


def device_count(text: str | None) -> int | None:
    """Return a count of `8`, `gpu:8` or `gpu:h100:8`; None for anything else.

    >>> device_count("gpu:h100:8"), device_count("2-4")
    (8, None)
    """
    last = (text or "").rpartition(":")[2]
    return int(last) if last.isdecimal() and len(last) < 8 else None
