"""The options of a plan: one record, which Python, the command line and tuning read."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ParamSpec, Protocol, TypeVar

from meshwright.planner.documents.cluster import ClusterSpec, Precision
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.profile import Profiles
from meshwright.planner.documents.training import MasterWeights, Objective, Optimizer
from meshwright.planner.errors import DocumentError
from meshwright.planner.requests.lengths import Batching, LengthsOfJob, lengths_of_job
from meshwright.planner.requests.pins import read_pins
from meshwright.planner.requests.request import SURE_TO_FIT, Request
from meshwright.planner.search.plan_preference import Prefer
from meshwright.planner.solver.requirements import read_requirements

MOST_TOP = 1_000
"""Plans of other meshes that one command names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Options of the training job; None takes the default that suits model and devices."""

    seq_len: int | None = None
    """Tokens of a sample."""
    document_len: int | None = None
    """Mean over tokens of the length of a token's document, where samples hold several."""
    lengths: str | None = None
    """Lengths of samples that vary: a file with one on each line, or `mean,p95,max`."""
    batching: Batching | None = None
    """Form of batches of such samples: `packed` (the default), padded to the `longest`, or
    `exact`."""
    global_batch: int | None = None
    """Samples of a step."""
    precision: Precision | None = None
    lora: Sequence[str] = ()
    """Settings of adapters, which are then the only trained parameters: `rank=16`,
    `weights=nf4`."""
    optimizer: Optimizer | Callable[[Any], Any] | None = None
    """Optimizer: `adamw-8bit`, `adafactor`, `muon`; None: `adamw`.  For a user's own module it is a
    factory."""
    masters: MasterWeights = "fp32"
    """`none` trains the 16-bit weights themselves, without an fp32 copy."""
    objective: Objective = "sft"
    """`dpo` and `reward` train on pairs, `dpo` and `grpo` beside a frozen reference model."""

    def lengths_of_job(self) -> LengthsOfJob:
        """Return the lengths of the job's samples."""
        return lengths_of_job(
            self.lengths, self.batching, seq_len=self.seq_len, document_len=self.document_len
        )

    def of_request(self) -> dict[str, Any]:
        """Return the job as `Request.create` takes it."""
        of_job = self.lengths_of_job()
        return {
            "seq_len": of_job.seq_len,
            "document_len": of_job.document_len,
            "global_batch": self.global_batch,
            "precision": self.precision,
            "lora": self.lora,
            "optimizer": self.optimizer if isinstance(self.optimizer, str) else "adamw",
            "masters": self.masters,
            "objective": self.objective,
        }

    def given(self) -> dict[str, Any]:
        """Return the options of the job that are not their defaults."""
        values = {field.name: getattr(self, field.name) for field in fields(JobOptions)}
        usual = {field.name: field.default for field in fields(JobOptions)} | {"lora": []}
        return {
            name: value
            for name, value in values.items()
            if value is not None and value != usual[name] and value != ()
        }

    def refuse_beside_plan(self) -> None:
        """Refuse a job beside a plan, which has one already."""
        for name in self.given():
            raise DocumentError(
                name.replace("_", "-"), "a plan has its own already; give a model instead"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictOptions(JobOptions):
    """A job, a layout and who trains by it."""

    layout: str | None = None
    """Degrees and choices: `tp=2,dp=4,zero=1`."""
    profile: str | None = None
    """File of measurements; GROUP=FILE,GROUP=FILE where devices differ."""
    framework: str = "native"
    """Framework that trains: layouts are priced by its accounting rules."""
    offline: bool = False
    """Fetch no model's config.json from the Hugging Face hub."""

    def refuse_beside_plan(self) -> None:
        """Refuse what a plan has already."""
        for name, value, usual in (
            ("layout", self.layout, None),
            ("framework", self.framework, "native"),
        ):
            if value != usual:
                raise DocumentError(name, f"a plan has its {name} already; give a model instead")
        JobOptions.refuse_beside_plan(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(JobOptions):
    """Job, space and proof of a plan; None takes the default that suits model and devices."""

    profile: str | None = None
    """File of measurements; GROUP=FILE,GROUP=FILE where devices differ."""
    fix: Sequence[str] = ()
    """Choices that are pinned: `tp=8`."""
    allow: Sequence[str] = ()
    """Choices beyond the usual space: `offload`; `stale`, `compress` and `quantized` (frozen
    weights in 4 bits beside adapters), which change training."""
    require: Sequence[str] = ()
    """Constraints of stages in words, as meshwright.planner.solver.requirements reads them."""
    solver: str = "exact"
    top: int = 1
    """Number of best plans of different meshes."""
    framework: str = "native"
    """Framework that trains: its own space is searched, priced as it trains."""
    prefer: Prefer = "simplest"
    gap: float | None = None
    """Share of the step to which the proof closes, as 0.01; None: as far as is quick."""
    fit_probability: float = SURE_TO_FIT
    """Least probability that a plan fits in memory."""

    def __post_init__(self) -> None:
        if not 1 <= self.top <= MOST_TOP:
            raise DocumentError(
                "top", f"is {self.top}; it is a whole number from 1 to {MOST_TOP:,}"
            )
        if self.gap is not None and not 0 <= self.gap < 1:
            raise DocumentError("gap", f"is {self.gap:g}; it lies between 0 and 1, as 0.01")

    def request(
        self, graph: ModelGraph, machine: ClusterSpec, measured: Profiles, *, called: str
    ) -> Request:
        """Return the request for a model on a cluster that plans name `called`."""
        names = [name for name, _ in graph.chain]
        return Request.create(
            graph,
            machine,
            **self.of_request(),
            pins=replace(
                read_pins(self.fix, self.allow), require=read_requirements(self.require, names)
            ),
            profile=measured,
            framework=self.framework,
            called=called,
            fit_probability=self.fit_probability,
        )


Options = ParamSpec("Options")
Record_contra = TypeVar("Record_contra", contravariant=True)
Made = TypeVar("Made")
Model_contra = TypeVar("Model_contra", contravariant=True)
Result_co = TypeVar("Result_co", covariant=True)
Cluster_contra = TypeVar("Cluster_contra", contravariant=True)


class RecordFunction(Protocol[Model_contra, Cluster_contra, Record_contra, Result_co]):
    """A function of a model, a cluster and a record of options."""

    __name__: str

    def __call__(
        self, model: Model_contra, cluster: Cluster_contra, *, options: Record_contra
    ) -> Result_co:
        """Call the function."""
        ...


class OptionsFunction(Protocol[Model_contra, Cluster_contra, Options, Result_co]):
    """A function of a model and a cluster with the fields of a record as keyword arguments."""

    def __call__(
        self,
        model: Model_contra,
        cluster: Cluster_contra = ...,
        *args: Options.args,
        **options: Options.kwargs,
    ) -> Result_co:
        """Call the function with a record of these options."""
        ...


def keyword_options(
    record: Callable[Options, Made],
) -> Callable[
    [RecordFunction[Model_contra, Cluster_contra, Made, Result_co]],
    OptionsFunction[Model_contra, Cluster_contra, Options, Result_co],
]:
    """Return a decorator: the fields of `record` become the keyword arguments of a function.

    >>> @keyword_options(PlanOptions)
    ... def mesh(model: str, cluster: str, *, options: PlanOptions) -> str:
    ...     return f"{model} on {cluster}: {options.fix}"
    >>> mesh("gpt2", "local:2", fix=["tp=2"])
    "gpt2 on local:2: ['tp=2']"
    >>> mesh("gpt2", "local:2", fixed=["tp=2"])
    Traceback (most recent call last):
    TypeError: mesh() got an unexpected keyword argument 'fixed'
    """
    names = {field.name for field in fields(record)}  # type: ignore[arg-type]

    def decorate(
        function: RecordFunction[Model_contra, Cluster_contra, Made, Result_co],
    ) -> OptionsFunction[Model_contra, Cluster_contra, Options, Result_co]:
        signature = inspect.signature(function)
        *arguments, _ = signature.parameters.values()
        positions = {argument.name for argument in arguments}

        @functools.wraps(function)
        def with_keywords(*positional: Any, **named: Any) -> Result_co:
            given = {name: named.pop(name) for name in names & named.keys()}
            unknown = next((name for name in named if name not in positions), None)
            if unknown is not None:
                raise TypeError(
                    f"{function.__name__}() got an unexpected keyword argument '{unknown}'"
                )
            return function(*positional, **named, options=record(**given))  # type: ignore[call-arg]

        with_keywords.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*arguments, *inspect.signature(record).parameters.values()]
        )
        with_keywords.__annotations__ = {
            name: parameter.annotation
            for name, parameter in inspect.signature(with_keywords).parameters.items()
        } | {"return": signature.return_annotation}
        return with_keywords

    return decorate
