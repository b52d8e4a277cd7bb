"""A configuration of another framework as a plan: what it says, and what had to be assumed.

The settings of a configuration are taken over; what it leaves open is what that framework does
then, or what is assumed, which is named.  Its layers are divided among stages by the framework's
own rule.

A batch script: whose command it runs, on how many ranks.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import PurePosixPath
from typing import Any

from pydantic import ValidationError

from meshwright.planner.architectures.parameters import graph_of
from meshwright.planner.catalog import hub, models
from meshwright.planner.catalog.expressions import model_alike, resolve_model
from meshwright.planner.documents import document
from meshwright.planner.documents.axes import AXIS_NAMES
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.document import first_error, nearest
from meshwright.planner.documents.model import FIGURES, Architecture, ModelGraph
from meshwright.planner.documents.plan import (
    MOST_WORDS,
    Mesh,
    PlacedLayer,
    Plan,
    PlannedModel,
    Stage,
)
from meshwright.planner.documents.profile import ChunkedLoss
from meshwright.planner.documents.training import Training
from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.bash.interpreter import ScriptEnvironment
from meshwright.planner.framework_configs.harmless_words import not_understood
from meshwright.planner.framework_configs.reader_choice import reader_of
from meshwright.planner.framework_configs.readers import (
    accelerate,
    deepspeed,
    finetuning,
    fsdp,
    litgpt,
    megatron,
    nanotron,
    nemo,
    shell,
    torchtitan,
    transformers,
    verl,
)
from meshwright.planner.framework_configs.readers import input_limits as limits
from meshwright.planner.framework_configs.readers.parsed_config import ParsedConfig, named_file
from meshwright.planner.framework_configs.torchtitan import REGISTERED
from meshwright.planner.frameworks.stage_rules import by_products, ends_of
from meshwright.planner.requests.request import Request
from meshwright.planner.schedules import PLAIN
from meshwright.planner.schedules.schedule import obstacle


def read_batch_script(text: str, surroundings: ScriptEnvironment | None = None) -> ParsedConfig:
    """Return the settings of the script's command, by its form."""
    return shell.parsed(
        text, "slurm", lambda words: _of_words(words, text, surroundings), surroundings
    )


def _of_words(words: list[str], text: str, surroundings: ScriptEnvironment | None) -> ParsedConfig:
    flags = shell.flags(words)
    asked = shell.directives(text)
    each, nodes = _plain_count(flags, "nproc-per-node", "num-gpus", "gpus-per-node"), None
    nodes = _plain_count(flags, "nnodes", "num-machines", "num-nodes", "nodes")
    processes = _plain_count(flags, "num-processes")
    words, started = _started_by_accelerate(words, surroundings)
    flags = shell.flags(words)
    launch = [name for name in flags if name in _OF_LAUNCH]
    arguments = {name: value for name, value in flags.items() if name not in launch}
    tuner = next((name for word in words for name in _names_of(word) if name in _TUNERS), None)
    if words[:1] == ["megatron"]:  # of ms-swift
        tuner = "swift"
    if tuner is not None:
        config = _TUNERS[tuner](words, arguments, text, surroundings)
    elif any(name.startswith("parallelism.") for name in flags) or any(
        "torchtitan" in word for word in words
    ):
        config = torchtitan.of_flags(arguments, surroundings)
    elif "tensor-model-parallel-size" in flags or any("pretrain_" in word for word in words):
        config = megatron.of_words(words, text, surroundings)
    elif "stage" in flags and {"finetuning-type", "template", "cutoff-len"} & set(flags):
        data = _plain_values({key.replace("-", "_"): value for key, value in arguments.items()})
        config = finetuning.of_llama_factory(data, surroundings)
    elif "per-device-train-batch-size" in flags:
        config = transformers.of_flags(arguments, surroundings, trl=_is_trl(words))
    elif (read := _reader_of_file(words, surroundings)) is not None:
        config = _of_file(read, "the command")(words, arguments, text, surroundings)
    else:
        raise DocumentError(
            "slurm",
            "runs no command that is known: Megatron, torchtitan, a Hugging Face trainer, "
            "LLaMA-Factory, axolotl, ms-swift, TRL, verl; "
            "give the command's own file, or its configuration",
        )
    if started is not None:
        config = _started_by(config, started, says_type=bool({"bf16", "fp16"} & set(flags)))
    for stage in _other_stages(words):
        objective = OBJECTIVES.get(_program(stage))
        if objective is not None:
            transformers.learns(config, objective)
        elif _program(stage) != "rlhf" or "objective" not in config.training:
            config.unknown.append(stage)
    config.devices = processes or megatron.ranks_of(asked, nodes, each) or config.devices
    config.unknown = [key for key in config.unknown if key.removeprefix("--") not in _OF_LAUNCH]
    return config


def _started_by_accelerate(
    words: list[str], surroundings: ScriptEnvironment | None
) -> tuple[list[str], ParsedConfig | None]:
    """Return the words of what accelerate starts, and the settings that it is given itself."""
    if "launch" not in words or not any(_program(word) == "accelerate" for word in words):
        return words, None
    begin = words.index("launch") + 1
    ends = (at for at in range(begin, len(words)) if _is_started(words[at]))
    end = next(ends, len(words))
    flags = shell.flags(words[begin:end])
    file = flags.pop("config-file", None)
    data: dict[str, Any] = {}
    if file is not None:
        named = file[0] if isinstance(file, list) else file
        name, inside = named_file("--config_file", named, surroundings)
        data = limits.settings(inside, name)
    data = accelerate.with_flags(data, flags)
    started = accelerate.of_settings(data, surroundings) if data else None
    return [*words[:begin], *words[end:]], started


def _is_started(word: str) -> bool:
    """Tell whether what accelerate starts begins here: a script, a program, or `-m MODULE`."""
    return word.endswith(".py") or word in ("-m", "--module") or _program(word) in _TUNERS


def _names_of(word: str) -> tuple[str, str]:
    """Return the name of a program, and that of the package whose command a script is.

    >>> _names_of("/src/swift/cli/sft.py"), _names_of("/bin/swift")
    (('sft', 'swift'), ('swift', ''))
    """
    parts = PurePosixPath(word).parts
    is_command = word.endswith(".py") and len(parts) > 2 and parts[-2] == "cli"
    return _program(word), parts[-3] if is_command else ""


def _program(word: str) -> str:
    """Return the name of a program, or of a module of Python."""
    return PurePosixPath(word).name.removesuffix(".py")


_STAGES = re.compile(r"(online_)?(dpo|grpo|ppo|kto|orpo|cpo|rloo|xpo|gkd|rlhf|reward|rm|prm)(_.*)?")
"""Stages of training with more than one forward of one model for each backward."""


OBJECTIVES = {
    **dict.fromkeys(("dpo", "dpo_trainer", "run_dpo"), "dpo"),
    **dict.fromkeys(("reward", "reward_modeling", "reward_trainer", "run_reward"), "reward"),
    **dict.fromkeys(("grpo", "grpo_trainer", "run_grpo"), "grpo"),
}
"""Training objectives of TRL's commands and scripts, by their names."""


def _other_stages(words: Sequence[str]) -> list[str]:
    """Return the words of a command that name such a stage: a script, or a program's command."""
    named = [word for word in words if word.endswith(".py")]
    named += [word for before, word in pairwise(words) if _program(before) in ("trl", "swift")]
    return [word for word in named if _STAGES.fullmatch(_program(word))]


def _reader_of_file(
    words: Sequence[str], surroundings: ScriptEnvironment | None
) -> Callable[..., ParsedConfig] | None:
    """Return the reader of the file of a trainer's script, by its settings."""
    behind = next((at for at, word in enumerate(words) if word.endswith(".py")), len(words))
    files = [word for word in words[behind:] if word.endswith((".yaml", ".yml"))]
    if not files:
        return None
    name, inside = named_file("slurm", files[-1], surroundings)
    keys = set(limits.settings(inside, name))
    if keys & {"finetuning_type", "stage"}:
        return finetuning.of_llama_factory
    if "base_model" in keys:
        return finetuning.of_axolotl
    return transformers.of_settings if "model_name_or_path" in keys else None


def _is_trl(words: Sequence[str]) -> bool:
    """Return True if a command runs one of TRL's scripts, by their names."""
    return any("trl" in PurePosixPath(word).parts for word in words if word.endswith(".py"))


def _of_file(read: Callable[..., ParsedConfig], program: str) -> Callable[..., ParsedConfig]:
    """Return a parser of the file that a program is given, without flags beside it."""

    def parse(
        words: list[str],
        arguments: dict[str, Any],
        _text: str,
        surroundings: ScriptEnvironment | None,
    ) -> ParsedConfig:
        files = [word for word in words if word.endswith((".yaml", ".yml", ".json"))]
        if not files:
            raise DocumentError("slurm", f"{program} is given no file; give its configuration")
        name, inside = named_file(program, files[-1], surroundings)
        given = {key.replace("-", "_"): value for key, value in arguments.items()}
        given.pop("config", None)
        data = {**limits.settings(inside, name), **_plain_values(given)}
        data |= _plain_values(dict(word.split("=", 1) for word in words if _SETTING.match(word)))
        return read(data, surroundings)

    return parse


_SETTING = re.compile(r"[a-z_0-9]+=")


def _plain_values(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of flags as a YAML document has them."""
    values = {key: value[0] if isinstance(value, list) else value for key, value in flags.items()}
    return {
        key: document.plain(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value
        for key, value in values.items()
    }


_NUMBER = re.compile(r"-?\d{1,18}(\.\d+)?|true|false", re.IGNORECASE)


def _of_swift(
    words: list[str], arguments: dict[str, Any], text: str, surroundings: ScriptEnvironment | None
) -> ParsedConfig:
    """Return the settings in ms-swift's arguments, of its own trainer or of Megatron's."""
    data = {key.replace("-", "_"): value for key, value in arguments.items()}
    if "megatron" in map(_program, words):
        return finetuning.of_ms_swift_megatron(arguments, text)
    if not data:
        return _of_file(finetuning.of_ms_swift, "swift")(words, arguments, text, surroundings)
    return finetuning.of_ms_swift(data, surroundings)


def _of_trl(
    words: list[str], arguments: dict[str, Any], text: str, surroundings: ScriptEnvironment | None
) -> ParsedConfig:
    """Return the settings in the arguments of TRL's command, or in its file."""
    if "config" in arguments:
        return _of_file(transformers.of_trl, "trl")(words, arguments, text, surroundings)
    return transformers.of_flags(arguments, surroundings, trl=True)


_TUNERS: dict[str, Callable[..., ParsedConfig]] = {
    "llamafactory-cli": _of_file(finetuning.of_llama_factory, "llamafactory-cli"),
    "lmf": _of_file(finetuning.of_llama_factory, "lmf"),
    "axolotl": _of_file(finetuning.of_axolotl, "axolotl"),
    "axolotl.cli.train": _of_file(finetuning.of_axolotl, "axolotl"),
    "litgpt": _of_file(lambda data, _: litgpt.of_settings(data), "litgpt"),
    "swift": _of_swift,
    "trl": _of_trl,
    "verl.trainer.main_ppo": lambda words, _flags, _text, _files: verl.of_words(words),
}
"""Programs and modules that train, by their names."""


def _started_by(config: ParsedConfig, started: ParsedConfig, *, says_type: bool) -> ParsedConfig:
    """Return a trainer's settings under those of accelerate's launcher."""
    if started.framework == "megatron":
        raise DocumentError(
            "--config_file",
            "starts Megatron in a trainer, which is not followed; "
            "give the script that runs it alone",
        )
    accumulated = started.micro_batches
    if accumulated is not None and accumulated != config.micro_batches:
        word = f"accelerate's gradient_accumulation_steps={accumulated}"
        config = replace(config, unknown=[*config.unknown, word])
    if config.zero:
        return replace(config, devices=started.devices, unknown=[*config.unknown, *started.unknown])
    return replace(
        config,
        framework="deepspeed" if started.framework == "deepspeed" else config.framework,
        devices=started.devices,
        tensor=started.tensor,
        context=started.context,
        data_replicate=started.data_replicate,
        data_shard=started.data_shard,
        zero=started.zero,
        offload=started.offload,
        recompute=started.recompute if config.recompute == "none" else config.recompute,
        compile=started.compile if config.compile == "none" else config.compile,
        precision=config.precision if says_type or not started.precision else started.precision,
        assumed=[*config.assumed, *started.assumed],
        without_effect=[*config.without_effect, *started.without_effect],
        unknown=[*config.unknown, *started.unknown],
        understood=config.understood + started.understood,
    )


_OF_LAUNCH = {
    "nproc-per-node", "nnodes", "node-rank", "master-addr", "master-port", "rdzv-endpoint",
    "rdzv-backend", "rdzv-id", "num-processes", "num-machines", "machine-rank", "main-process-ip",
    "main-process-port", "num-gpus", "num-nodes", "gpus-per-node", "nodes", "ntasks-per-node",
    "cpus-per-task", "gres", "ntasks", "standalone", "config-file", "hostfile", "label",
    "kill-on-bad-exit",
}  # fmt: skip
"""Flags of launchers."""


def _plain_count(flags: dict[str, str | bool | list[str]], *names: str) -> int | None:
    for name in names:
        value = flags.get(name)
        first = value[0] if isinstance(value, list) else value
        if isinstance(first, str) and first.isdecimal() and len(first) < 8:
            return int(first)
    return None


READERS: dict[str, Callable[..., ParsedConfig]] = {
    "megatron": megatron.read,
    "megatron-bridge": megatron.read_bridge,
    "torchtitan": torchtitan.read,
    "torchtitan@0.2": torchtitan.read,
    "deepspeed": deepspeed.read,
    "accelerate": accelerate.read,
    "transformers": transformers.read,
    "nanotron": nanotron.read,
    "fsdp": fsdp.read,
    "trl": transformers.read_trl,
    "llama-factory": finetuning.read_llama_factory,
    "axolotl": finetuning.read_axolotl,
    "ms-swift": finetuning.read_ms_swift,
    "litgpt": litgpt.read,
    "verl": verl.read,
    "nemo": nemo.read,
    "slurm": read_batch_script,
}
"""Readers by the framework, or the kind of file, that is imported from."""
_LOOK_AROUND = (
    *("megatron", "torchtitan", "torchtitan@0.2", "accelerate", "transformers", "trl"),
    *("llama-factory", "axolotl", "ms-swift", "slurm", "nemo", "verl", "megatron-bridge"),
)
"""Readers that follow variables and other files."""
_OF_DOCUMENTS = READERS.keys() - {"megatron", "slurm"}
"""Readers of settings; a script that starts their framework is read by its command."""
_FRAMEWORKS = {"megatron-bridge": "megatron"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A plan, and its differences from the configuration."""

    plan: Plan
    assumed: tuple[str, ...]
    """Choices that the configuration does not contain, or that plans do not have."""
    unknown: tuple[str, ...]
    """Keys that were not understood, or that do not concern training of the model."""
    without_effect: tuple[str, ...] = ()
    """Keys without effect beside the others."""

    @property
    def not_understood(self) -> tuple[str, ...]:
        """Unknown words that may change seconds or bytes, the most decisive first."""
        return self.plan.not_understood


def import_plan(
    text: str,
    of: str | None,
    cluster: ClusterSpec,
    *,
    model: ModelGraph | None = None,
    called: str | None = None,
    seq_len: int | None = None,
    global_batch: int | None = None,
    surroundings: ScriptEnvironment | None = None,
) -> Imported:
    """Return the plan of a configuration's text; DocumentError names the reason if there is none.

    `of` is None where its settings are to tell the framework.
    `model` is needed where the configuration names none of the catalogue.  `surroundings` are the
    values of a script's variables, and the files beside it.
    """
    is_said, of = of is not None, of or reader_of(text)
    if of not in READERS:
        raise DocumentError("from", f"is '{of:.40}'; {nearest(of, list(READERS))}")
    reader = "slurm" if of in _OF_DOCUMENTS and shell.is_script(text) else of
    config = _config_of(text, of, reader, surroundings)
    kind = "a script (--from slurm)" if of == "slurm" else f"{of}'s (--from)"
    assumed = [*([] if is_said else [f"it is read as {kind}"]), *config.assumed]
    graph = model if model is not None else _model(config, assumed)
    names = str(config.model.get("registered", ""))
    if model is not None and names and _catalogue_name(names) != graph.name:
        assumed.append(f"the model is {graph.name} (--model); the configuration names {names:.60}")
    if _OTHER_PARTS.search(names) or (_FEWER_BITS.search(names) and not _packs_weights(config)):
        config.unknown.append(f"model={PurePosixPath(names).name:.60}")
    _check_figures(config, graph)
    request = Request.create(
        graph,
        cluster,
        seq_len=seq_len or config.seq_len,
        precision=cluster.precision_for(config.precision),  # type: ignore[arg-type]
    )
    if config.seq_len is None and seq_len is None:
        assumed.append(f"{request.job.seq_len} tokens a sample (--seq-len)")
    if config.precision is None:
        assumed.append(f"precision {request.job.precision}")
    replicate, shard, zero = _data(config, cluster, assumed)
    data = replicate * shard
    ranks = data * config.context * config.tensor
    if config.expert > 1 and ranks % (config.expert * config.expert_tensor):
        raise DocumentError(
            "mesh",
            f"expert {config.expert} x expert tensor {config.expert_tensor} does not divide the "
            f"{ranks} ranks of a pipeline stage; change a degree, or the number of ranks",
        )
    if data * config.context == 1:
        config.without_effect += config.words_of_replicas
    elif not config.overlaps_reduction:
        assumed.append("gradients are reduced beside backwards, as with --overlap-grad-reduce")
    micro_batch, micro_batches = _batches(config, data, global_batch, request, assumed)
    stages = _stages(config, graph, assumed)
    pipelined = config.pipeline > 1
    local = config.samples_of_schedule
    if pipelined and local is not None and local != micro_batch * micro_batches:
        # Several schedules a step, each with its bubble.
        config.unknown.append(f"training.local_batch_size={local}")
    schedule = (config.schedule if pipelined else None) or PLAIN
    virtual = config.virtual_stages if pipelined else 1
    reason = obstacle(
        schedule, stages=len(stages), micro_batches=micro_batches, virtual_stages=virtual
    )
    if pipelined and reason:
        raise DocumentError(reason[0], reason[1])
    training = _training(config)
    unknown = tuple(dict.fromkeys(config.unknown))
    framework = "+".join(
        [_FRAMEWORKS.get(config.framework, config.framework), *dict.fromkeys(config.options)]
    )
    try:
        plan = Plan(
            model=PlannedModel.of(graph),
            cluster=called or cluster.name,
            framework=framework,
            seq_len=request.job.seq_len,
            global_batch=micro_batch * micro_batches * data,
            precision=request.job.precision,
            mesh=Mesh(
                tensor=config.tensor,
                context=config.context,
                data_shard=shard,
                data_replicate=replicate,
                pipeline=config.pipeline,
                expert=config.expert,
                expert_tensor=config.expert_tensor,
                sequence_parallel=config.sequence_parallel or config.tensor == 1,
            ),
            zero=zero,
            schedule=schedule,
            virtual_stages=virtual,
            micro_batch=micro_batch,
            micro_batches=micro_batches,
            **{axis: getattr(config, axis) for axis in AXIS_NAMES if hasattr(config, axis)},
            **_loss_of(config, micro_batch * request.job.seq_len),
            **config.axes,
            training=training,
            stages=stages,
            read_from=reader,
            not_understood=tuple(word[:200] for word in not_understood(unknown, reader))[
                :MOST_WORDS
            ],
        )
    except ValidationError as error:
        raise first_error(error) from error
    plan.check_model(graph)
    return Imported(
        plan=plan,
        assumed=tuple(assumed),
        unknown=unknown,
        without_effect=tuple(dict.fromkeys(config.without_effect)),
    )


def _config_of(
    text: str, of: str, reader: str, surroundings: ScriptEnvironment | None
) -> ParsedConfig:
    """Return what a reader makes of a text; DocumentError if it understands no setting."""
    config = (
        READERS[reader](text, surroundings) if reader in _LOOK_AROUND else READERS[reader](text)
    )
    if not config.understood:
        unread = ", ".join(config.unknown[:3])
        also = f" (it has {unread})" if unread else ""
        raise DocumentError(
            of, f"no setting was understood{also}; give the file that the framework reads"
        )
    if reader != of:
        config.assumed.append("a script: the command that it starts is read (--from slurm)")
    return config


def _words_of(unknown: Sequence[str], reader: str) -> tuple[str, ...]:
    """Return the words that may change seconds or bytes, as a plan keeps them."""
    return tuple(word[:200] for word in not_understood(unknown, reader))[:MOST_WORDS]


def _model(config: ParsedConfig, assumed: list[str]) -> ModelGraph:
    """Return the model of the catalogue that a configuration means, by its name or its figures."""
    name = str(config.model.get("registered", ""))
    wanted = _catalogue_name(name)
    if wanted is not None:
        return resolve_model(wanted)
    if hub.is_hub_name(name):
        with contextlib.suppress(DocumentError):
            return resolve_model(name)
    figures = {key: config.model[key] for key in _FIGURES if key in config.model}
    if {"layers", "hidden_size"} <= set(figures):
        alike = [
            graph
            for graph in map(resolve_model, models())
            if graph.architecture is not None and not _differences(figures, graph)
        ]
        if alike:
            others = ", ".join(graph.name for graph in alike[1:])
            also = f"; so have {others}" if others else ""
            assumed.append(f"the model is {alike[0].name}, which has its figures{also} (--model)")
            return alike[0]
    if "architecture" in config.model:
        return _own_model(config.framework, config.model["architecture"], assumed)
    stated = ", ".join(f"{key} {value}" for key, value in figures.items())
    lacks = config.model.get("lacks")
    also = f", or add {lacks} to its arguments" if lacks else ""
    raise DocumentError(
        "model",
        f"is not known from the configuration ({name or stated or 'it names none'}); name it with "
        f"--model{also}",
    )


def _own_model(framework: str, architecture: Architecture, assumed: list[str]) -> ModelGraph:
    """Return a decoder of a configuration's own figures, which the plan carries."""
    name = f"{framework}-{architecture.layers}x{architecture.hidden_size}"
    graph = graph_of(architecture, name=name, source=f"{FIGURES}{name}")
    assumed.append(
        f"the model is a decoder of {graph.parameters / 1e9:.3g} billion parameters, by the "
        f"figures of this file ({architecture.vocab_size:,} tokens; --model names another)"
    )
    return graph


_FEWER_BITS = re.compile(
    r"(?<![a-z])(awq|gptq|aqlm|gguf|exl2|bnb|nvfp4|mxfp[48]|nf4|fp[48]|int[48]|[48]-?bits?|w\d+a\d+)"
    r"(?![a-z])",
    re.IGNORECASE,
)
"""Words in a model's name by which its weights have fewer bits."""
_OTHER_PARTS = re.compile(r"(?<![a-z])(vl|omni|vision|llava)(?![a-z])", re.IGNORECASE)
"""Words in a model's name by which it has parts beside a decoder."""


def _packs_weights(config: ParsedConfig) -> bool:
    """Return whether the weights beside adapters have 4 or 8 bits."""
    return bool(config.training.get("lora", {}).get("weights", "full") != "full")


def _catalogue_name(name: str) -> str | None:
    """Return the model of the catalogue that a name means, by itself or as torchtitan has it."""
    by_function = [model for model, (_, function) in REGISTERED.items() if function == name]
    if by_function:
        return by_function[-1]
    return model_alike(name, hub.shape_name)


_FIGURES = (
    *("layers", "hidden_size", "heads", "kv_heads", "ffn_size", "vocab_size", "head_dim"),
    *("experts", "per_token", "expert_ffn_size", "shared_ffn_size", "dense_layers"),
    *("q_rank", "kv_rank", "rope_head_dim", "nope_head_dim", "value_head_dim", "is_latent"),
    *("gated_mlp", "tied_embeddings", "qkv_bias", "mlp_bias", "qk_norm", "norm", "positions"),
)
"""Figures of a configuration that a model of the catalogue has too."""


def _figure(a: Architecture, name: str) -> Any:
    """Return a figure of a model; 0 where it has no such part."""
    if name == "experts":
        return a.experts.count if a.experts else 0
    if name == "is_latent":
        return a.latent is not None
    if name == "shared_ffn_size" and a.experts is not None:
        return a.experts.shared_ffn_size or a.experts.shared * a.experts.ffn_size
    part = next((part for part, names in _PARTS.items() if name in names), None)
    if part is None:
        return getattr(a, name)
    return getattr(getattr(a, part), name.removeprefix("expert_"), 0)


_PARTS = {
    "experts": ("per_token", "expert_ffn_size", "shared_ffn_size", "dense_layers"),
    "latent": ("q_rank", "kv_rank", "rope_head_dim", "nope_head_dim", "value_head_dim"),
}


def _differs(a: Architecture, name: str, value: Any) -> bool:
    """Return True if a figure is another model's, but for padding and the MLP of experts."""
    have = _figure(a, name)
    if name == "vocab_size":
        return not have <= value <= 1.02 * have + 1024
    return bool(have != value) and not (name == "ffn_size" and a.experts is not None)


def _differences(figures: dict[str, Any], graph: ModelGraph) -> list[str]:
    a = graph.architecture
    if a is None:
        return []
    return [
        f"{name} {value}, and {graph.name} has {_figure(a, name)}"
        for name, value in figures.items()
        if _differs(a, name, value)
    ]


def _check_figures(config: ParsedConfig, graph: ModelGraph) -> None:
    figures = {key: config.model[key] for key in _FIGURES if key in config.model}
    differing = _differences(figures, graph)
    if differing:
        raise DocumentError("model", f"has {'; '.join(differing)}; name its own with --model")


def _data(config: ParsedConfig, cluster: ClusterSpec, assumed: list[str]) -> tuple[int, int, int]:
    """Return data-parallel groups, ranks of each that shard, and the ZeRO stage."""
    devices = config.devices or cluster.devices
    others = config.tensor * config.pipeline * config.context
    experts = config.expert * config.expert_tensor

    def divides(ranks: int) -> bool:
        return not (ranks % others or ranks // config.pipeline % experts)

    if not divides(devices) and divides(cluster.devices):
        assumed.append(f"all {cluster.devices} devices of the cluster: {devices} ranks are started")
        devices = cluster.devices
    if devices > cluster.devices:
        raise DocumentError(
            "cluster", f"has {cluster.devices} devices, and the configuration starts {devices}"
        )
    if devices % others:
        raise DocumentError(
            "mesh",
            f"tensor {config.tensor} x pipeline {config.pipeline} x context {config.context} "
            f"does not divide {devices} ranks; "
            "change a degree, or the number of ranks",
        )
    data = devices // others
    replicate, shard = config.data_replicate, config.data_shard
    if shard == 0:
        shard = cluster.groups[0].devices_per_node
        replicate = None
    if replicate is not None and shard == -1:
        shard = max(1, data // replicate)
    if shard is None:
        shard = (data // (replicate or 1)) if config.zero else 1
    replicate = replicate or max(1, data // shard)
    if replicate * shard != data:
        raise DocumentError(
            "mesh",
            f"data_replicate {replicate} x data_shard {shard} x {others} are not {devices} ranks; "
            "change a degree, or the number of ranks",
        )
    zero = config.zero
    if zero and shard * config.context == 1:
        zero = 0
        if data == 1 and config.framework not in ("torchtitan", "fsdp"):
            assumed.append("ZeRO without data parallelism shards nothing")
    if not zero:
        replicate, shard = data, 1
    return replicate, shard, zero


def _loss_of(config: ParsedConfig, tokens: int) -> dict[str, Any]:
    """Return the field of a chunked loss; empty if a micro-batch uses all its logits at once."""
    if config.loss_chunks is None:
        return {}
    rows = -(-tokens // (config.context * config.loss_chunks))
    return {"loss": ChunkedLoss(rows=rows)}


def _batches(
    config: ParsedConfig, data: int, wanted: int | None, request: Request, assumed: list[str]
) -> tuple[int, int]:
    """Return samples of a forward, and forwards of a rank and step."""
    micro_batch, count = config.micro_batch, config.micro_batches
    whole = config.global_batch or wanted
    if micro_batch is None and whole and count:
        micro_batch = max(1, whole // (data * count))
    if micro_batch is None:
        micro_batch = 1
        assumed.append("1 sample a micro-batch")
    if whole is None:
        if count is None and config.framework in ("megatron", "megatron-bridge", "torchtitan"):
            count = config.pipeline if config.framework == "torchtitan" else 1
        if count is None:
            whole = request.job.global_batch
            count = max(1, whole // (micro_batch * data))
            assumed.append(f"{micro_batch * count * data} samples a step (--global-batch)")
        return micro_batch, count
    if whole % (micro_batch * data):
        raise DocumentError(
            "global_batch",
            f"is {whole}, which {data} data-parallel ranks and micro-batches of {micro_batch} do "
            "not divide; "
            "change either",
        )
    accumulation = whole // (micro_batch * data)
    if count is not None and count != accumulation:
        raise DocumentError(
            "global_batch",
            f"is {whole}: {accumulation} micro-batches of {micro_batch} on {data} ranks, and "
            f"{count} are accumulated; "
            "change the batch, or what is accumulated",
        )
    return micro_batch, accumulation


def _stages(config: ParsedConfig, graph: ModelGraph, assumed: list[str]) -> tuple[Stage, ...]:
    """Return the stages with their layers, and which of those are recomputed."""
    before, blocks, behind = ends_of(graph)
    names = [name for name, _ in graph.chain]
    counts = _blocks(config, graph, blocks)
    if sum(counts) != blocks or min(counts) < 0:
        raise DocumentError(
            "stages", f"of {', '.join(map(str, counts))} blocks; {graph.name} has {blocks}"
        )
    sizes = list(counts)
    sizes[0] += before
    sizes[-1] += behind
    cuts = [0, *accumulate(sizes)]
    listed = config.model.get("recomputed_blocks")
    again = set(range(blocks)) if listed is None else set(listed)
    stages, block = [], 0
    for stage, (first, last) in enumerate(pairwise(cuts)):
        layers = []
        seen = 0
        for place in range(first, last):
            inside = before <= place < before + blocks
            chosen = config.recompute if inside and block in again else "none"
            chosen = chosen if (seen + 1) % config.recompute_every == 0 else "none"
            if inside and config.recomputed is not None and seen >= config.recomputed:
                chosen = "none"
            seen += inside
            block += inside
            layers.append(PlacedLayer(layer=names[place], recompute=chosen))
        if not layers:
            raise DocumentError(
                "stages", f"stage {stage} has no layer; give it one, or name fewer stages"
            )
        stages.append(Stage(layers=tuple(layers)))
    return tuple(stages)


def _blocks(config: ParsedConfig, graph: ModelGraph, blocks: int) -> list[int]:
    """Return blocks of each stage, as the framework divides them."""
    if config.pipeline == 1:
        return [blocks]
    if config.blocks is not None:
        return config.blocks
    if config.framework == "nanotron" and graph.architecture is not None:
        return by_products(graph.architecture, config.pipeline)
    first, last = config.lighter
    per_stage = config.model.get("blocks_of_virtual_stage")
    if per_stage:
        config.virtual_stages = -(-(blocks + first + last) // (config.pipeline * per_stage))
    each = config.model.get("blocks_of_stage")
    if each:
        config.virtual_stages = max(1, -(-(blocks + first + last) // each) // config.pipeline)
    stages = config.pipeline * config.virtual_stages
    if stages > blocks + len(config.ends):
        raise DocumentError("stages", f"are {stages}; {graph.name} has {blocks} blocks")
    if config.ends != (None, None):
        return _with_ends(config, blocks, stages)
    fewest, more = divmod(blocks + first + last, stages)
    if more and config.framework.startswith("megatron"):
        raise DocumentError(
            "stages",
            f"{stages} do not divide {blocks + first + last} blocks; change the number of stages",
        )
    counts = [fewest + (stage < more) for stage in range(stages)]
    counts[0] -= first
    counts[-1] -= last
    return counts


def _with_ends(config: ParsedConfig, blocks: int, stages: int) -> list[int]:
    """Return blocks of stages where the first or the last has its own number."""
    first, last = config.ends
    inner = stages - (first is not None) - (last is not None)
    left = blocks - (first or 0) - (last or 0)
    if inner and left % inner:
        raise DocumentError(
            "stages",
            f"{inner} do not divide {left} blocks between the ends; "
            "change the number of stages, or of layers at the ends",
        )
    middle = [left // inner] * inner if inner else []
    return [*([first] if first is not None else []), *middle, *([last] if last is not None else [])]


def _training(config: ParsedConfig) -> Training:
    """Return the optimizer's settings; plans' defaults stand for missing settings."""
    values: Sequence[tuple[str, Any]] = list(config.training.items())
    try:
        return Training.model_validate(dict(values))
    except ValidationError as error:
        message = first_error(error)
        raise DocumentError(f"training.{message.path}", message.message) from error
