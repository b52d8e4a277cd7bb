"""Study: a question about hardware, as a document: models, work, goal, candidates, assumptions."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, model_validator

from meshwright.planner.catalog import (
    Facility,
    FractionQuantity,
    Market,
    OverheadQuantity,
    ProportionQuantity,
    Quantity,
    ShareQuantity,
    facility,
    source_text,
)
from meshwright.planner.costs.compute import (
    POWER_BASIS,
    POWER_EXPONENT,
    POWER_EXPONENT_RANGE,
)
from meshwright.planner.documents.cluster import PowerLimit, Precision
from meshwright.planner.documents.document import Document, Part
from meshwright.planner.documents.training import Lora, MasterWeights, Objective, Optimizer
from meshwright.planner.documents.units import (
    Amount,
    Devices,
    Factor,
    Flag,
    Fraction,
    Line,
    Overhead,
    Positive,
    Proportion,
    Rate,
    Samples,
    SampleTokens,
    Share,
    Text,
)
from meshwright.planner.requests.request import SURE_TO_FIT

Q = TypeVar("Q", bound=Quantity)
P = TypeVar("P", bound=Part)
RELEASED = datetime.date(2026, 11, 23)
"""No clock that shows an earlier day is right."""


def _no_future(text: str) -> str:
    """Refuse a date that has not come; text that names none passes."""
    today = max(datetime.date.today(), RELEASED)
    for year, month, day in re.findall(r"\b(\d{4})-(\d\d)(?:-(\d\d))?\b", text):
        if (int(year), int(month), int(day or 1)) > (today.year, today.month, today.day):
            raise ValueError(f"is {text[:40]}, which is in the future; a price has been asked")
    return text


DateLine = Annotated[Line, AfterValidator(_no_future)]
"""When a price was asked, as in 2026-11 or 2026-11-20."""
Years = Annotated[float, Field(ge=0.01, le=100, strict=True, allow_inf_nan=False)]
Interest = Annotated[float, Field(ge=0, le=10, strict=True, allow_inf_nan=False)]
RentChange = Annotated[float, Field(ge=-0.9, le=10, strict=True, allow_inf_nan=False)]

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
"""Changes and their factors where a study does not say."""
Tuning = Literal["pretrain", "full", "lora", "qlora"]
Order = Literal["cost", "time", "energy", "carbon", "weighted"]
Commitment = Literal["on_demand", "reserved", "spot"]
Sizing = Literal["need", "power", "afford"]
YEAR = "a year of jobs"
EXACT_FIT = 1e-6
"""Least risk that is asked for: no plan has to be surer than 1 - EXACT_FIT to fit."""
PUBLIC = "public"
"""Name that stands for the public framework that is fastest there."""


class Work(Part):
    """One training step."""

    seq_len: SampleTokens | None = None
    """Tokens of a sequence; None: the model's own, 4,096 at most."""
    global_batch: Samples | None = None
    """Sequences of a step; None: about 4 million tokens."""
    precision: Precision | Literal["auto"] | None = None
    """Precision of training; None: bf16 or fp16, as each cluster has units; `auto` tries fewer bits
    where device and framework have them."""
    document_len: SampleTokens | None = None
    """Mean over tokens of the length of the token's document; None: samples are not packed."""
    tuning: Tuning = "pretrain"
    """Kind of training: pretraining, full fine-tuning, or adapters (lora, qlora)."""
    lora: Lora | None = None
    """Adapters where `tuning` is lora or qlora; None: rank 16."""
    optimizer: Optimizer = "adamw"
    """Optimizer of the training."""
    master_weights: MasterWeights = "fp32"
    """Number type of the master weights."""
    objective: Objective = "sft"
    """Objective of fine-tuning, such as sft or dpo."""
    fit_probability: Fraction | None = None
    """Least probability that a plan fits memory; None: 0.95, and more where `goal.confidence` is
    above 0.8."""
    framework: Text = PUBLIC
    """Framework that trains: a name, or `public` for the fastest public one."""


class Goal(Part):
    """Aim of a study: tokens or hours to reach, and the limits of days and money."""

    tokens: Rate | None = None
    """Tokens to train on."""
    tokens_per_parameter: Rate | None = None
    """Tokens per parameter of the model, instead of `tokens`; 20 is compute-optimal."""
    epochs: Rate | None = None
    """Passes over a data set, instead of `tokens`."""
    dataset_tokens: Rate | None = None
    """Tokens of one epoch."""
    deadline_days: Rate | None = None
    """Longest duration in days."""
    budget_usd: Rate | None = None
    """Largest cost in dollars."""
    power_cap_w: Rate | None = None
    """Largest power in watts."""
    emission_cap_kg: Rate | None = None
    """Largest emission in kg of CO2."""
    confidence: Fraction = 0.8
    """Least probability of keeping each of these limits.  A candidate that keeps one only at its
    midpoint is ranked behind those that keep all so surely."""
    by: Order = "cost"
    """Criterion by which candidates are ranked; those without a price come last.  `weighted` adds
    the value of days (`day_usd`) to the cost."""
    day_usd: Rate | None = None
    """Dollars that a result a day earlier is worth."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        amounts = (self.tokens, self.tokens_per_parameter, self.epochs)
        if sum(figure is not None for figure in amounts) > 1:
            raise ValueError(
                "tokens, tokens_per_parameter and epochs exclude each other; leave one"
            )
        if (self.epochs is None) != (self.dataset_tokens is None):
            raise ValueError("epochs and dataset_tokens go together; give both")
        if self.by == "weighted" and (self.day_usd is None or self.tokens_of(1.0) is None):
            raise ValueError("by: weighted weighs days against money; give day_usd and tokens")
        return self

    def tokens_of(self, parameters: float) -> float | None:
        """Return the tokens to train a model of this size on; None if left open."""
        if self.epochs is not None and self.dataset_tokens is not None:
            return self.epochs * self.dataset_tokens
        if self.tokens_per_parameter is not None:
            return self.tokens_per_parameter * parameters
        return self.tokens


class JobOfYear(Part):
    """A kind of training that comes again through a year, at random times.

    One job at a time has the whole cluster.
    """

    name: Line
    """Name of the job."""
    model: Line
    """Model, as on the command line."""
    tokens: Rate
    """Tokens of one run."""
    runs_a_year: Rate
    """Number of runs in a year."""
    tuning: Tuning = "pretrain"
    """Kind of training."""
    seq_len: SampleTokens | None = None
    """Tokens of a sequence; None: that of `work`."""
    global_batch: Samples | None = None
    """Sequences of a step; None: that of `work`."""


class Rental(Part):
    """A rent per device and hour; the catalogue's dated offers where no figure is given."""

    usd_per_device_hour: Rate | None = None
    """Rent in dollars of a device for an hour; None: the catalogue's dated offers."""
    low: Rate | None = None
    """Low end of the rent."""
    high: Rate | None = None
    """High end of the rent."""
    commitment: Commitment = "on_demand"
    """Terms of the rent: on demand, reserved or spot."""
    term_months: Rate | None = None
    """Months of a reservation; every hour of it is paid, used or not."""
    prepaid: Proportion | None = None
    """Share of a reservation that is paid on the first day."""
    minimum_hours: Amount = 1.0
    """Fewest hours that are paid for a run."""
    currency: Line = "USD"
    """Currency of the rent."""
    market: Market | None = None
    """Kind of provider in the catalogue: specialists or hyperscalers; None: the cheaper kind."""
    provider: Line | None = None
    """Provider in the catalogue; None: any."""
    region: Line | None = None
    """Region in the catalogue; None: any."""
    each_provider: Flag = False
    """True: one candidate for each provider, at the median of its offers."""
    date: DateLine | None = None
    """Date of the rent, such as 2026-11."""
    source: Text | None = None
    """Source of the rent."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        value = self.usd_per_device_hour
        if self.each_provider and (self.provider is not None or value is not None):
            raise ValueError("each_provider goes with neither provider nor a price; leave it out")
        if self.commitment != "reserved" and (self.term_months or self.prepaid):
            raise ValueError(
                "term_months and prepaid describe a reservation; use commitment: reserved"
            )
        _check_price(value, self.low, self.high, self.date, self.source, "usd_per_device_hour")
        if value is None:
            return self
        if any(choice is not None for choice in (self.market, self.provider, self.region)):
            raise ValueError(
                "market, provider and region choose among the catalogue's offers; a price needs "
                "none"
            )
        if self.commitment == "reserved" and self.term_months is None:
            raise ValueError("a reservation needs its term_months; add them")
        return self


def _check_price(
    value: float | None,
    low: float | None,
    high: float | None,
    date: str | None,
    source: str | None,
    name: str,
) -> None:
    if value is None:
        if low is not None or high is not None:
            raise ValueError(f"low and high are the range of {name}; give it too")
        return
    if date is None or source is None:
        raise ValueError("a price has its date and source; add both")
    if not (low or value) <= value <= (high or value):
        raise ValueError(f"{value} is not between {low} and {high}")


class Loan(Part):
    """Loan for a purchase, paid back in equal parts each month."""

    interest: Interest
    """Interest of the loan a year; what a dollar costs later is `assumptions.interest`."""
    months: Annotated[int, Field(ge=1, le=600, strict=True)]
    """Months over which the loan is paid back."""
    share: Proportion = 1.0
    """Share of the price that is borrowed."""


class Lease(Part):
    """Devices with nodes, network, storage and spares that are given back in the end."""

    usd_per_device_month: Rate
    """Dollars of a device for a month."""
    low: Rate | None = None
    """Low end of the price."""
    high: Rate | None = None
    """High end of the price."""
    term_months: Annotated[int, Field(ge=1, le=600, strict=True)]
    """Fewest months that are paid."""
    currency: Line = "USD"
    """Currency of the price."""
    date: DateLine
    """Date of the price."""
    source: Text
    """Source of the price."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_price(
            self.usd_per_device_month,
            self.low,
            self.high,
            self.date,
            self.source,
            "usd_per_device_month",
        )
        return self


class Buying(Part):
    """A purchase per device, node included; the catalogue's dated price where none is given."""

    of: tuple[Line, ...] = ()
    """Accelerators that are bought, in a cluster with several; the others are owned or rented."""
    loan: Loan | None = None
    """Loan for the purchase; None: the price is paid on the first day."""
    lease: Lease | None = None
    """Lease instead of a purchase; hosting, staff, support, insurance and power are paid in
    addition."""

    usd_per_device: Rate | None = None
    """Price in dollars of a device with its share of the node; None: the catalogue's dated
    price."""
    low: Rate | None = None
    """Low end of the price."""
    high: Rate | None = None
    """High end of the price."""
    currency: Line = "USD"
    """Currency of the price."""
    date: DateLine | None = None
    """Date of the price."""
    source: Text | None = None
    """Source of the price."""
    network_usd_per_device: Amount | None = None
    """Dollars of the network for a device; None: the catalogue's figure."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_price(
            self.usd_per_device, self.low, self.high, self.date, self.source, "usd_per_device"
        )
        if self.loan is not None and self.lease is not None:
            raise ValueError("loan and lease exclude each other; make an offer of each")
        if self.of and self.lease is not None:
            raise ValueError("a lease covers whole clusters; leave out `of`")
        return self


class Exchange(Part):
    """Worth of a unit of another currency on a date."""

    usd: Rate
    """Dollars that one unit of the currency is worth."""
    date: DateLine
    """Date of the rate."""
    source: Text
    """Source of the rate."""


def _assumed_quantity(cls: type[Q], value: float, low: float, high: float, why: str) -> Q:
    return cls(value=value, low=low, high=high, source=f"assumed: {why}")


def _sourced_quantity(cls: type[Q], value: float, low: float, high: float, source: str) -> Q:
    return cls(value=value, low=low, high=high, source=source_text(source))


FAILURE_RATES: Mapping[str, float] = {
    "RSC2": 2.34 / (1000 * 24 * 8),
    "LLAMA3": 419 / (54 * 24 * 16384),
    "TR11": 1.5 / (7 * 24 * 384),
    "RSC1": 6.5 / (1000 * 24 * 8),
    "OPT175": 105 / (60 * 24 * 992),
    "MTTF1024": 1 / (7.9 * 1024),
}
"""Failures of a device an hour that end a run, by entries of sources.yaml: of 1,000 days of nodes
of 8, of 54 days, of a week (1 or 2), of 2 months, and of the 7.9 hours that jobs of 1,024 devices
go without one."""


class Failures(Part):
    """Failures that take time from training; `pricing/goodput.py` has the arithmetic."""

    per_device_hour: Quantity = _sourced_quantity(
        Quantity,
        FAILURE_RATES["LLAMA3"],
        min(FAILURE_RATES.values()),
        max(FAILURE_RATES.values()),
        "LLAMA3; low RSC2; high MTTF1024; between them TR11, RSC1 and OPT175",
    )
    """Failures of a device in an hour that end a run until it is restarted."""
    spot_per_node_hour: Quantity = _sourced_quantity(
        Quantity, 0.01, 3e-4, 0.1, "geometric mean of ADVISOR, 3e-4, and BAMBOO, 0.1"
    )
    """Interruptions of a spot instance in an hour, in addition."""
    restart_s: Quantity = _assumed_quantity(
        Quantity, 600.0, 300.0, 1800.0, "minutes where machines restart a run, more by hand"
    )
    """Seconds until a run continues from its checkpoint."""
    checkpoint_bytes_per_parameter: Quantity = _sourced_quantity(
        Quantity, 12.0, 12.0, 14.0, "weights and two moments in fp32, as this runtime saves them"
    )
    """Bytes of a checkpoint per parameter."""
    store_bytes_per_s_per_device: Quantity = _sourced_quantity(
        Quantity, 1.22e8, 5e7, 1e9, "LLAMA3, 2 TB/s over 16,384; a node with disks of its own more"
    )
    """Bytes per second per device that storage takes, behind training."""
    copy_bytes_per_s_per_device: Quantity = _assumed_quantity(
        Quantity, 1e10, 5e7, 2.5e10, "a copy to the host; low: training waits for the store"
    )
    """Bytes per second per device of a checkpoint's copy to host memory, while training waits."""
    checkpoint_stall_s: Quantity = _sourced_quantity(
        Quantity, 0.8, 0.1, 6.3, "high PTASYNC; low assumed, value their geometric mean"
    )
    """Seconds that training waits at each checkpoint beside the copy: ranks agree on what is whole,
    list their tensors and take memory."""
    other: ShareQuantity = _sourced_quantity(
        ShareQuantity,
        0.2,
        0.02,
        0.4,
        "LLAMA3; BLOOM_HOURS; high OPT_DAYS; geometric mean of hours over steps' hours without "
        "failures, 1.03, 1.16 and 1.65",
    )
    """Share of hours lost at any size, between steps and whole runs: evaluation, data, warm-up,
    stragglers, an idle queue, steps done again."""


class Owning(Part):
    """Costs of bought devices beside their price.  Shares are of the price of the hardware."""

    retained_a_year: FractionQuantity = _sourced_quantity(
        FractionQuantity, 0.67, 0.46, 0.79, "RESALE; range assumed: a tenth to half after three"
    )
    """Share of its value that hardware keeps from one year to the next."""
    residual_by_age: tuple[Proportion, ...] = ()
    """Shares of the price that the hardware sells for after 1, 2, ... years, instead of
    `retained_a_year`."""
    storage_usd_per_device: Quantity = _assumed_quantity(
        Quantity, 600.0, 200.0, 2000.0, "a petabyte of flash for about 500 devices"
    )
    """Dollars of storage for a device."""
    spares: ProportionQuantity = _assumed_quantity(
        ProportionQuantity, 0.03, 0.01, 0.06, "a spare in 32"
    )
    """Share of the hardware bought in addition."""
    support_a_year: ProportionQuantity = _assumed_quantity(
        ProportionQuantity, 0.04, 0.02, 0.08, "contracts of vendors differ"
    )
    """Share of the price of the hardware paid for support in a year."""
    insurance_a_year: ProportionQuantity = _assumed_quantity(
        ProportionQuantity, 0.005, 0.002, 0.01, "no public quote was found"
    )
    """Share of the price of the hardware paid for insurance in a year."""
    staff_usd_per_device_year: Quantity = _assumed_quantity(
        Quantity, 500.0, 150.0, 2000.0, "an engineer for 400 devices; small clusters need one too"
    )
    """Dollars of staff for a device in a year."""
    hosting_usd_per_kw_month: Quantity = _sourced_quantity(
        Quantity, 190.0, 130.0, 280.0, "COLO_RATES; range COLO; power is metered apart"
    )
    """Dollars of hosting for a kilowatt in a month, without electricity."""
    idle_power: ProportionQuantity = _assumed_quantity(
        ProportionQuantity, 0.25, 0.15, 0.4, "share of the power in use; hosts and fans stay on"
    )
    """Share of the power in use that idle devices draw."""
    sales_tax: Proportion = 0.0
    """Share of the price added as sales tax."""
    income_tax: Share = 0.0
    """Share of income paid as tax.  Rents, running costs and depreciation lower it; figures are
    before tax."""
    depreciation_years: Years = 5.0
    """Years of straight-line depreciation."""


class Data(Part):
    """Storage and transfers, which a run pays beside its devices."""

    stored_tb: Amount = 0.0
    """Terabytes of data and checkpoints beside rented clusters while a run lasts; bought and owned
    clusters have storage of their own."""
    usd_per_tb_month: Quantity = _assumed_quantity(
        Quantity, 23.0, 7.0, 80.0, "list prices of object stores, 20 to 23; file systems cost more"
    )
    """Dollars of a terabyte stored for a month."""
    moved_tb: Amount = 0.0
    """Terabytes that leave a cloud for a run: data to the cluster, checkpoints from it."""
    usd_per_tb_moved: Quantity = _assumed_quantity(
        Quantity, 60.0, 20.0, 90.0, "list prices of hyperscalers; specialists often ask nothing"
    )
    """Dollars of a terabyte that leaves a cloud."""


class Assumptions(Part):
    """Figures that no plan knows; each default names its source."""

    goodput: FractionQuantity | None = None
    """Share of the wall clock that trains; None: computed from `failures` for each size."""
    failures: Failures = Failures()
    """Failures and what they cost in time."""
    owning: Owning = Owning()
    """Costs of owning hardware."""
    data: Data = Data()
    """Storage and transfers."""
    utilisation: Fraction = 0.8
    """Share of the hours of what is bought or reserved that are used, by all work on it.  Where a
    study leaves it out, a run pays a commitment whole and a year of jobs the year."""
    utilisation_factor: Overhead = 1.25
    """80 of 100 times the share of hours used will lie between the given one over it and times it;
    assumed.  All that is bought or reserved is used alike."""
    quota_devices: Devices = 512
    """Largest number of devices that a provider rents at once, on demand or spot, where a size is
    solved for: 64 nodes of eight, as Lambda's 1-Click Clusters (BLOCKS)."""
    years: Years = 3.0
    """Years until bought devices are sold, over which purchases and rents are compared."""
    interest: Interest = 0.08
    """Discount rate a year."""
    rent_change_a_year: RentChange = 0.0
    """Relative change a year of rents without a contract: -0.2 is a fifth less each year."""
    lead_days: Quantity = _sourced_quantity(Quantity, 180, 30, 365, "LEADS; low: what is in stock")
    """Days until bought devices can be used."""
    start_hours: Quantity = _assumed_quantity(
        Quantity, 0.5, 0.1, 3.0, "nodes boot, images, weights and data are fetched, a run is tried"
    )
    """Hours before a run trains, paid on all its devices."""
    electricity_usd_per_kwh: Quantity | None = None
    """Dollars of a kWh; None: the catalogue's figure."""
    power_usage_effectiveness: OverheadQuantity | None = None
    """Power of the site over that of its devices; None: the catalogue's figure."""
    node_power_over_tdp: Quantity | None = None
    """Power of a node over the design power of its devices; None: the catalogue's figure."""
    network_w_per_device: Quantity | None = None
    """Watts of the network for a device; None: the catalogue's figure."""
    power_limit_exponent: Quantity = _sourced_quantity(
        Quantity, POWER_EXPONENT, *POWER_EXPONENT_RANGE, POWER_BASIS
    )
    """Exponent p: at a power limit of share x, matrix products run at x**p of their rate."""
    country: Line = "USA"
    """Country of the site, ISO 3166, for the carbon of its grid."""
    carbon_g_per_kwh: Amount | None = None
    """Grams of CO2 of a kWh; None: those of the country's grid."""
    currencies: dict[Line, Exchange] = Field(default_factory=dict)
    """Exchange rates by currency code."""
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
        overrides = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return facility().model_copy(update=overrides)

    def but(self, other: Assumptions | None) -> Assumptions:
        """Return these with what `other` says in its place."""
        return self if other is None else _merge_parts(self, other)


def _merge_parts(base: P, other: P) -> P:
    """Return a part with every field that another was given, parts within parts too."""
    fields = {}
    for name in other.model_fields_set:
        mine, its = getattr(base, name), getattr(other, name)
        nested = isinstance(its, Failures | Owning | Data)
        fields[name] = _merge_parts(mine, its) if nested else its
    return base.model_copy(update=fields)


class Offer(Part):
    """Clusters to compare, and on which terms they can be had."""

    name: Line | None = None
    """Name of the candidate; None: composed of cluster and terms."""
    cluster: Line
    """Cluster, as on the command line; `{n}` stands for each of `n`."""
    n: tuple[Devices, ...] = ()
    """Numbers of devices to try."""
    largest: bool = False
    """True: only the largest of `n` whose power keeps the goal's cap."""
    solve: Sizing | None = None
    """Rule by which the number of devices is solved for: the fewest that meet the deadline (need),
    the most that the power cap feeds (power), or the most that the budget pays (afford)."""
    rent: Rental | None = None
    """Terms of rent."""
    buy: Buying | None = None
    """Terms of purchase."""
    owned: bool | tuple[Line, ...] = False
    """True: the hardware is paid for and only running it costs.  Names of accelerators: these are
    owned and the others rented."""
    tuning: Tuning | None = None
    """Kind of training; None: that of `work`."""
    host_memory_bytes: Positive | None = None
    """Bytes of memory of a node; None: those of the cluster."""
    change: dict[ChangeName, Factor] = Field(default_factory=dict)
    """Factors on figures of the cluster, for hardware that does not exist yet."""
    fix: tuple[Line, ...] = ()
    """Choices that are fixed, as on the command line: tp=1, zero=3."""
    allow: tuple[Line, ...] = ()
    """Techniques that are allowed, as on the command line: offload, compress, stale."""
    power_limit: PowerLimit = 1.0
    """Share of its design power that each device may draw."""
    wait_months: Amount = 0.0
    """Months until the order.  The price moves by `rent_change_a_year`, has the range of that age,
    and the result comes so much later."""
    assumptions: Assumptions | None = None
    """Assumptions that differ for this candidate, such as its price of electricity."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if ("{n}" in self.cluster) != (bool(self.n) or self.solve is not None):
            raise ValueError(
                "cluster has {n} where n lists numbers, and only there; add n or leave {n} out"
            )
        if self.solve is not None and self.n:
            raise ValueError("solve finds n; list no numbers")
        if self.name is not None and "{n}" in self.name and "{n}" not in self.cluster:
            raise ValueError("name has {n}, and cluster does not; n numbers both")
        part_owned = isinstance(self.owned, tuple)
        part_bought = self.buy is not None and len(self.buy.of) > 0
        if part_owned and self.buy is not None and not part_bought:
            raise ValueError("some is owned; name in buy.of what is bought of the rest")
        ways = sum((self.rent is not None, self.buy is not None, bool(self.owned)))
        if ways - (part_owned or part_bought) > 1:
            raise ValueError("rent, buy and owned exclude each other; make an offer of each")
        if self.largest and not self.n:
            raise ValueError("largest chooses among n; list numbers")
        return self


class Curve(Part):
    """One candidate, re-planned with one figure changed step by step."""

    change: ChangeName
    """Figure that changes."""
    factors: tuple[Factor, ...]
    """Factors on the figure."""
    offer: Line | None = None
    """Name of the candidate; None: the best one."""


class Marginal(Part):
    """One candidate, re-planned with one thing changed at a time."""

    offer: Line | None = None
    """Name of the candidate; None: the best one."""
    changes: dict[ChangeName, tuple[Factor, ...]] = Field(default_factory=lambda: dict(USUAL))
    """Factors to try on each figure."""


class Study(Document):
    """Candidates for some training, and what decides between them."""

    kind_of_document: ClassVar[str] = "study"
    schema_file: ClassVar[str | None] = "study.json"

    name: Line
    """Name of the study."""
    question: Text | None = None
    """Question that the study answers, in words."""
    models: tuple[Line, ...] = ()
    """Models, as on the command line: names of the catalogue, or configurations."""
    jobs: tuple[JobOfYear, ...] = ()
    """All jobs of a year, instead of models."""
    work: Work = Work()
    """The training step."""
    goal: Goal = Goal()
    """Amount of training, its limits, and the criterion of the ranking."""
    offers: tuple[Offer, ...]
    """Candidates."""
    assumptions: Assumptions = Assumptions()
    """Figures that no plan contains."""
    marginal: Marginal | None = None
    """One candidate, planned again with one figure changed at a time."""
    curves: tuple[Curve, ...] = ()
    """Candidates planned again while one figure changes step by step."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not (self.models or self.jobs):
            raise ValueError("models is empty; name at least one, or jobs")
        if self.jobs:
            self._check_jobs()
        if not self.offers:
            raise ValueError("offers is empty; name at least one cluster")
        return self

    def _check_jobs(self) -> None:
        """Refuse what is of one training beside a year of jobs."""
        goal = self.goal
        one_run = (goal.tokens_of(1.0), goal.deadline_days, goal.budget_usd, goal.day_usd)
        if self.models or any(figure is not None for figure in one_run):
            raise ValueError(
                "jobs name models and tokens; models, tokens, deadline_days, budget_usd and "
                "day_usd describe one training; leave them out"
            )
        changed = any(offer.solve or offer.tuning for offer in self.offers)
        if changed or self.marginal or self.curves:
            raise ValueError(
                "jobs go with neither solve, an offer's tuning, marginal nor curves; leave them out"
            )
        if len({job.name for job in self.jobs}) < len(self.jobs):
            raise ValueError("two jobs have one name; rename one")

    @property
    def fit_probability(self) -> float:
        """Least probability that plans fit: as the work says, or 95 % and more.

        Where goals are to be met surely, memory may spoil a quarter of what may go wrong.
        """
        if self.work.fit_probability is not None:
            return min(self.work.fit_probability, 1 - EXACT_FIT)
        return max(SURE_TO_FIT, 1 - (1 - min(self.goal.confidence, 1 - EXACT_FIT)) / 4)

    @property
    def rows(self) -> tuple[str, ...]:
        """Rows that candidates are ranked for: each model, or a year of all jobs."""
        return (YEAR,) if self.jobs else self.models

    def tokens_of(self, parameters: float) -> float | None:
        """Return the tokens to train a model of this size on, or those of a year."""
        if self.jobs:
            return sum(job.tokens * job.runs_a_year for job in self.jobs)
        return self.goal.tokens_of(parameters)
