"""Study: a question about hardware, as a document: models, work, goal, candidates, assumptions."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import Field, model_validator

from planner.catalog import (
    Facility,
    FractionQuantity,
    OverheadQuantity,
    ProportionQuantity,
    Quantity,
    ShareQuantity,
    facility,
)
from planner.cluster import Precision
from planner.document import Document, Part
from planner.units import (
    Amount,
    Devices,
    Factor,
    Fraction,
    Line,
    Positive,
    Rate,
    Samples,
    SampleTokens,
    Text,
)

Q = TypeVar("Q", bound=Quantity)
Years = Annotated[float, Field(ge=0.01, le=100, strict=True, allow_inf_nan=False)]
Interest = Annotated[float, Field(ge=0, le=10, strict=True, allow_inf_nan=False)]

ChangeName = Literal[
    "memory",
    "memory_bandwidth",
    "compute",
    "node_links",
    "network",
    "domain",
    "host_memory",
    "devices",
]
USUAL: dict[ChangeName, tuple[float, ...]] = {
    "memory": (1.25, 1.5, 2.0),
    "memory_bandwidth": (1.5,),
    "compute": (1.1,),
    "node_links": (2.0,),
    "network": (2.0,),
    "domain": (2.0,),
    "host_memory": (2.0,),
    "devices": (0.9, 1.1),
}
"""What is changed where a study does not say."""
Tuning = Literal["pretrain", "full", "lora", "qlora"]
Order = Literal["cost", "time", "energy"]


class Work(Part):
    """One training step."""

    seq_len: SampleTokens | None = None
    """As `plan` has it where it is not given: the model's own, 4,096 at most."""
    global_batch: Samples | None = None
    """Sequences; as `plan` has it where it is not given: about 4 million tokens."""
    precision: Precision | None = None
    """What each cluster has units for, bf16 or fp16, where it is not given."""
    tuning: Tuning = "pretrain"
    backend: Text = "native"
    """The stack that trains, where the whole model is."""


class Goal(Part):
    """What is to be reached, and within what."""

    tokens: Rate | None = None
    tokens_per_parameter: Rate | None = None
    """Instead of tokens, where models of several sizes are compared: 20 is compute-optimal."""
    epochs: Rate | None = None
    """Instead of tokens: passes over a data set."""
    dataset_tokens: Rate | None = None
    """Of one epoch."""
    deadline_days: Rate | None = None
    budget_usd: Rate | None = None
    power_cap_w: Rate | None = None
    emission_cap_kg: Rate | None = None
    by: Order = "cost"
    """What candidates are ranked by; those without a price come last."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        said = (self.tokens, self.tokens_per_parameter, self.epochs)
        if sum(figure is not None for figure in said) > 1:
            raise ValueError("tokens, tokens_per_parameter and epochs exclude each other")
        if (self.epochs is None) != (self.dataset_tokens is None):
            raise ValueError("epochs and dataset_tokens go together")
        return self

    def tokens_of(self, parameters: float) -> float | None:
        """Return the tokens to train a model of so many parameters on; None if left open."""
        if self.epochs is not None and self.dataset_tokens is not None:
            return self.epochs * self.dataset_tokens
        if self.tokens_per_parameter is not None:
            return self.tokens_per_parameter * parameters
        return self.tokens


class Rental(Part):
    """A rent per device and hour; the catalogue's dated offers where no figure is given."""

    usd_per_device_hour: Rate | None = None
    low: Rate | None = None
    high: Rate | None = None
    commitment: Literal["on_demand", "reserved", "spot"] = "on_demand"
    provider: Line | None = None
    each_provider: bool = False
    """A candidate for each provider in the catalogue, at the median of its own offers."""
    date: Line | None = None
    source: Text | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        value = self.usd_per_device_hour
        if self.each_provider and (self.provider is not None or value is not None):
            raise ValueError("each_provider goes with neither provider nor a price")
        if value is None:
            if self.low is not None or self.high is not None:
                raise ValueError("low and high are the range of usd_per_device_hour; give it too")
            return self
        if self.provider is not None:
            raise ValueError("provider chooses among the catalogue's offers; a price needs none")
        if self.date is None or self.source is None:
            raise ValueError("a price needs its date and source")
        if not (self.low or value) <= value <= (self.high or value):
            raise ValueError(f"{value} is not between {self.low} and {self.high}")
        return self


class Buying(Part):
    """A purchase per device, node included; the catalogue's dated price where none is given."""

    usd_per_device: Rate | None = None
    low: Rate | None = None
    high: Rate | None = None
    date: Line | None = None
    source: Text | None = None
    network_usd_per_device: Amount | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        value = self.usd_per_device
        if value is not None and (self.date is None or self.source is None):
            raise ValueError("a price needs its date and source")
        if value is not None and not (self.low or value) <= value <= (self.high or value):
            raise ValueError(f"{value} is not between {self.low} and {self.high}")
        return self


class Offer(Part):
    """Clusters to compare, and on which terms they can be had."""

    name: Line | None = None
    cluster: Line
    """As on the command line; `{n}` stands for each of `n`."""
    n: tuple[Devices, ...] = ()
    largest: bool = False
    """Of `n`, only the largest that keeps the goal's power cap."""
    rent: Rental | None = None
    buy: Buying | None = None
    owned: bool | tuple[Line, ...] = False
    """Nothing is paid but power; where accelerators are named, for those, and rent for others."""
    tuning: Tuning | None = None
    """Instead of the study's own."""
    host_memory_bytes: Positive | None = None
    """Of a node, where the cluster does not say or says otherwise."""
    change: dict[ChangeName, Factor] = Field(default_factory=dict)
    """The cluster as it could be: factors on its figures."""
    fix: tuple[Line, ...] = ()
    """As on the command line: tp=1, zero=3."""
    allow: tuple[Line, ...] = ()
    """As on the command line: offload, compress, stale."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if ("{n}" in self.cluster) != bool(self.n):
            raise ValueError("cluster holds {n} where n lists numbers, and only there")
        in_part = isinstance(self.owned, tuple)
        if in_part and self.buy is not None:
            raise ValueError("what is not owned of a cluster can be rented; buy is for whole ones")
        if sum((self.rent is not None, self.buy is not None, bool(self.owned))) - in_part > 1:
            raise ValueError("rent, buy and owned exclude each other; make an offer of each")
        if self.largest and not self.n:
            raise ValueError("largest chooses among n; list numbers")
        return self


def _assumed(cls: type[Q], value: float, low: float, high: float, why: str) -> Q:
    return cls(value=value, low=low, high=high, source=f"assumed: {why}")


class Assumptions(Part):
    """Figures that no plan knows; each default names its source."""

    goodput: FractionQuantity = _assumed(
        FractionQuantity,
        0.9,
        0.8,
        0.97,
        "no public rate of failures by size was found; measure your own",
    )
    """Share of the wall clock that trains: failures, restarts, checkpoints, evaluation."""
    spot_lost: ShareQuantity = _assumed(
        ShareQuantity, 0.15, 0.05, 0.4, "interruptions differ by region and month"
    )
    """Share of spot hours lost to restarts."""
    utilisation: Fraction = 0.8
    """Share of a bought device's hours that are used."""
    years: Years = 3.0
    """Until bought devices are sold."""
    residual: ProportionQuantity = _assumed(
        ProportionQuantity, 0.3, 0.1, 0.5, "no resale prices by age were found"
    )
    """Share of the price that they are sold for then."""
    interest: Interest = 0.08
    """A year."""
    lead_days: Quantity = _assumed(
        Quantity, 60, 14, 180, "delivery times differ by product and month"
    )
    """Until bought devices can be used."""
    electricity_usd_per_kwh: Quantity | None = None
    power_usage_effectiveness: OverheadQuantity | None = None
    node_power_over_tdp: Quantity | None = None
    network_w_per_device: Quantity | None = None
    country: Line = "USA"
    carbon_g_per_kwh: Amount | None = None
    """Of the country's grid where it is not given."""
    tie: Fraction = 0.15
    """Candidates that differ by no more than this share are tied."""

    @property
    def facility(self) -> Facility:
        """The catalogue's figures, with the study's own in their place."""
        names = (
            "node_power_over_tdp",
            "network_w_per_device",
            "power_usage_effectiveness",
            "electricity_usd_per_kwh",
        )
        own = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return facility().model_copy(update=own)


class Curve(Part):
    """One candidate, re-planned with one figure changed step by step."""

    change: ChangeName
    factors: tuple[Factor, ...]
    offer: Line | None = None
    """Its name; the best candidate where it is not given."""


class Marginal(Part):
    """One candidate, re-planned with one thing changed at a time."""

    offer: Line | None = None
    changes: dict[ChangeName, tuple[Factor, ...]] = Field(default_factory=lambda: dict(USUAL))


class Study(Document):
    """Candidates for some training, and what decides between them."""

    kind_of_document: ClassVar[str] = "study"

    name: Line
    question: Text | None = None
    models: tuple[Line, ...]
    """As on the command line: catalogue names, configurations."""
    work: Work = Work()
    goal: Goal = Goal()
    offers: tuple[Offer, ...]
    assumptions: Assumptions = Assumptions()
    marginal: Marginal | None = None
    curves: tuple[Curve, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.models:
            raise ValueError("models is empty; name at least one")
        if not self.offers:
            raise ValueError("offers is empty; name at least one cluster")
        return self
