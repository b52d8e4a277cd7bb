"""Arguments and options that several commands share, with their help.

A command that takes a record (`runtime.run.launch_options.LaunchRun`) has an option for each of its
fields, named and described there: `with_records` makes them, and `meshwright.api.option_words` is
the way back.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from meshwright.api.option_words import flag
from meshwright.planner.documents.document import Part, first_error
from meshwright.planner.errors import DocumentError


class Precision(StrEnum):
    """Number formats of the arithmetic."""

    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"


class OptimizerName(StrEnum):
    """Optimizers."""

    ADAMW = "adamw"
    ADAMW_BF16 = "adamw-bf16"
    ADAMW_8BIT = "adamw-8bit"
    ADAMW_8BIT_PAGED = "adamw-8bit-paged"
    ADAFACTOR = "adafactor"
    LION = "lion"
    MUON = "muon"
    SGD = "sgd"


class BatchingName(StrEnum):
    """Forms of batches of samples with several lengths."""

    PACKED = "packed"
    LONGEST = "longest"
    EXACT = "exact"


class ObjectiveName(StrEnum):
    """Training objectives."""

    SFT = "sft"
    DPO = "dpo"
    REWARD = "reward"
    GRPO = "grpo"


class MasterCopies(StrEnum):
    """Types of the weights that are trained in place of 16-bit weights."""

    FP32 = "fp32"
    NONE = "none"


class Solver(StrEnum):
    """Methods of solving the partition problem of each layout."""

    EXACT = "exact"
    ILP = "ilp"


class Preferred(StrEnum):
    """Preferences among plans: near the fastest one, or of parts of the cluster."""

    SIMPLEST = "simplest"
    FASTEST = "fastest"
    ENERGY = "energy"
    COST = "cost"


ModelArgument = Annotated[
    str,
    typer.Argument(
        help="A name of the catalogue or of the Hugging Face hub, a config.json or its folder, "
        "file.py:factory"
    ),
]
Offline = Annotated[
    bool,
    typer.Option(
        "--offline",
        help="Fetch no model's config.json from the Hugging Face hub",
    ),
]
CLUSTERS = "8xh100-sxm-80gb, 16x8xh100-sxm-80gb, 4xp5.48xlarge, local:2, cluster.yaml"
ClusterOption = Annotated[
    str | None,
    typer.Option("--cluster", help=f"{CLUSTERS}; default: MESHWRIGHT_CLUSTER, file of defaults"),
]
OfPlan = Annotated[
    str | None, typer.Option("--cluster", help="Predict for this cluster instead of the plan's")
]
SeqLen = Annotated[
    int | None,
    typer.Option("--seq-len", help="Tokens per sample; default: 4096, or what the model takes"),
]
DocumentLen = Annotated[
    int | None,
    typer.Option(
        "--document-len",
        help="Packed samples: mean over tokens of the length of the token's document",
    ),
]
GlobalBatch = Annotated[
    int | None,
    typer.Option("--global-batch", help="Samples per step; default: about 4 million tokens"),
]
PrecisionOption = Annotated[
    Precision | None,
    typer.Option(
        "--precision", help="Number format of the arithmetic; default: bf16 where devices have it"
    ),
]
FrameworkOption = Annotated[
    str | None,
    typer.Option(
        "--framework",
        help="Framework that trains: native (default), megatron, torchtitan, deepspeed, nanotron, "
        "fsdp, accelerate; see 'catalog frameworks'",
    ),
]
SolverOption = Annotated[
    Solver,
    typer.Option(
        "--solver", help="exact: dynamic programming; ilp: integer program, for comparison"
    ),
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        help="Measurements made by 'meshwright profile'; GROUP=FILE,GROUP=FILE if devices differ",
    ),
]
LoraOption = Annotated[
    list[str] | None,
    typer.Option(
        "--lora", help="Train adapters only: rank=16, alpha=32, targets=[q_proj], weights=nf4"
    ),
]
_OPTIMIZERS = (
    "What updates weights: adamw (default), adamw-bf16, adamw-8bit, adamw-8bit-paged, adafactor, "
    "lion, muon, sgd"
)
OptimizerOption = Annotated[
    OptimizerName | None,
    typer.Option("--optimizer", metavar="WORD", help=_OPTIMIZERS),
]
MastersOption = Annotated[
    MasterCopies,
    typer.Option("--masters", help="fp32 copies of 16-bit weights, or none: those are trained"),
]
JOB_OPTIONS: dict[str, tuple[Any, Any]] = {
    "seq_len": (SeqLen, None),
    "document_len": (DocumentLen, None),
    "lengths": (
        Annotated[
            str | None,
            typer.Option(
                "--lengths", help="Lengths that vary: MEAN,P95,MAX or a file, a sample on each line"
            ),
        ],
        None,
    ),
    "batching": (
        Annotated[
            BatchingName | None,
            typer.Option(
                "--batching", help="packed (default), padded to the longest, or exact: unpadded"
            ),
        ],
        None,
    ),
    "global_batch": (GlobalBatch, None),
    "precision": (PrecisionOption, None),
    "lora": (LoraOption, None),
    "optimizer": (OptimizerOption, None),
    "masters": (MastersOption, MasterCopies.FP32),
    "objective": (
        Annotated[
            ObjectiveName,
            typer.Option("--objective", help="dpo and reward: samples are pairs; grpo: one each"),
        ],
        ObjectiveName.SFT,
    ),
}
"""Each field of meshwright.api.plan_options.JobOptions as an option."""
STEP_OPTIONS = {
    name: option
    for name, option in JOB_OPTIONS.items()
    if name not in ("seq_len", "global_batch", "precision")
}
"""Options of the job that say what a step does."""
PLAN_OPTIONS: dict[str, tuple[Any, Any]] = {
    **JOB_OPTIONS,
    "profile": (ProfileOption, None),
    "fix": (
        Annotated[
            list[str] | None,
            typer.Option("--fix", help="Pin a choice: tp=8, schedule=zbv, order=pp-tp"),
        ],
        None,
    ),
    "allow": (
        Annotated[
            list[str] | None,
            typer.Option(
                "--allow",
                help="offload to the host, async-tensor, graphs (of micro-batches), "
                "framework-options (what its libraries may have); stale, compress or quantized "
                "(frozen weights beside --lora), which change training",
            ),
        ],
        None,
    ),
    "require": (
        Annotated[
            list[str] | None,
            typer.Option(
                "--require", help="'layers 0-3 on stage 0', 'at most 9 layers on stage 1'"
            ),
        ],
        None,
    ),
    "solver": (SolverOption, Solver.EXACT),
    "top": (
        Annotated[
            int, typer.Option("--top", min=1, help="Show the K best plans with different meshes")
        ],
        1,
    ),
    "framework": (FrameworkOption, None),
    "prefer": (
        Annotated[
            Preferred,
            typer.Option(
                "--prefer",
                help="simplest within 1.5 % of the fastest (6 % of another framework), fastest; "
                "least energy or rent a step",
            ),
        ],
        Preferred.SIMPLEST,
    ),
    "gap": (
        Annotated[
            float | None,
            typer.Option(
                "--gap", help="Prove until no plan is faster by more than this, as 0.01: minutes"
            ),
        ],
        None,
    ),
    "fit_probability": (
        Annotated[
            float | None,
            typer.Option(
                "--fit-probability",
                help="Least probability that a plan fits; 0.5: memory as predicted; default: 0.95",
            ),
        ],
        None,
    ),
}
"""Each field of meshwright.api.plan_options.PlanOptions as an option, with its default in help."""


Html = Annotated[str | None, typer.Option("--html", help="Write a page here")]
Output = Annotated[str | None, typer.Option("-o", "--output", help="Write the plan here")]
Nodes = Annotated[
    int | None, typer.Option("--nodes", help="Number of nodes; run the same command on each")
]
Node = Annotated[int | None, typer.Option("--node", help="Number of this node, from 0")]
Rendezvous = Annotated[str | None, typer.Option("--rendezvous", help="HOST:PORT of node 0")]
TrustCode = Annotated[
    bool,
    typer.Option("--trust-code", help="Run a document's file.py as it is, whatever its digest"),
]
Explain = Annotated[bool, typer.Option("--explain", help="Print details, proof and sources")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else")]


def with_options(
    taken: Mapping[str, tuple[Any, Any]],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator: `options` of a command are a mapping of those that were given.

    Options that are not given are left out, so that the record's own defaults count.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = typing.get_type_hints(command, include_extras=True)
        parameters: list[inspect.Parameter] = []
        for name, parameter in inspect.signature(command).parameters.items():
            if name != "options":
                parameters.append(parameter.replace(annotation=hints[name]))
                continue
            parameters += [
                inspect.Parameter(
                    field, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=hint
                )
                for field, (hint, default) in taken.items()
            ]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            given = {name: values.pop(name) for name in taken}
            options = {
                name: value.value if isinstance(value, StrEnum) else value
                for name, value in given.items()
                if value is not None
            }
            command(options=options, **values)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def with_records(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that has an option for each field of the records that it takes."""
    hints = typing.get_type_hints(command, include_extras=True)
    records: dict[str, type[Part]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        hint = hints[name]
        if not (isinstance(hint, type) and issubclass(hint, Part)):
            parameters.append(parameter.replace(annotation=hint))
            continue
        records[name] = hint
        for field, info in hint.model_fields.items():
            parameters.append(
                inspect.Parameter(
                    field,
                    inspect.Parameter.POSITIONAL_OR_KEYWORD,
                    default=info.default,
                    annotation=_option(field, info),
                )
            )

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, record in records.items():
            fields = {field: values.pop(field) for field in record.model_fields}
            try:
                values[name] = record(**fields)
            except ValidationError as error:
                wrong = first_error(error)
                raise DocumentError(wrong.path.replace("_", "-"), wrong.message) from None
        command(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _option(field: str, info: FieldInfo) -> Any:
    """Return the annotation by which typer reads a field."""
    names = ("-o", flag(field)) if field == "output" else (flag(field),)
    kind: Any = info.annotation
    if kind == Path | None:
        kind = str | None
    elif kind == tuple[str, ...]:
        kind = list[str]
    return Annotated[kind, typer.Option(*names, help=info.description)]
