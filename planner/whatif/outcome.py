"""Outcome: what became of one model on one candidate."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from meshwright.planner.costs.uncertainty import link_seconds
from meshwright.planner.documents.plan import Plan
from meshwright.planner.whatif.pricing.economics import at_least, terms_begun
from meshwright.planner.whatif.uncertain_value import UncertainValue, exact, product, total

UNMEASURED_ABOVE = 0.3
"""Logarithm: what a step may take more on devices without measured kernels, of which the framework
has no published run.  MI355X is the pair that is known: MLPerf Training 5.1 has it 18 % behind
B200, and data sheets 20 % ahead of it, 1.4 times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class YearlyRun:
    """A job of a year on one candidate."""

    name: str
    runs_a_year: float
    hours: float
    """Hours of one run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateOutcome:
    """Outcome of one model on one candidate; fields of time and cost are None if none fits."""

    candidate: str
    model: str
    devices: int
    accelerator: str
    fits: bool
    binding: str
    """The limit of the plan in words; the reason why nothing fits if nothing does."""
    layout: str = ""
    framework: str = ""
    """Who trains."""
    native_step_s: float | None = None
    """Seconds of a step of our own runtime's best plan there, where it was planned too."""
    step_s: UncertainValue | None = None
    tokens_per_s: UncertainValue | None = None
    tokens_per_step: float = 0.0
    mfu: float = 0.0
    step_parts: dict[str, float] = field(default_factory=dict)
    memory_parts: tuple[dict[str, float], ...] = ()
    peak_bytes: float = 0.0
    capacity_bytes: float = 0.0
    fit_probability: float = 1.0
    """Probability that its plan fits; part of that of each goal, and of being the first."""
    host_bytes: float = 0.0
    """Bytes of a node's memory, at most."""
    parameters: int = 0
    tokens: float | None = None
    """To train in all."""
    tokens_in_budget: float | None = None
    """Tokens that budget and deadline leave room for."""
    goodput: UncertainValue | None = None
    """Share of the wall clock that trains."""
    hours: UncertainValue | None = None
    """Hours of the run with its start; of a year of jobs, those that they take."""
    start_hours: UncertainValue | None = None
    """Hours of all runs before they train, included in `hours`."""
    jobs: tuple[YearlyRun, ...] = ()
    """One entry for each of a year of jobs."""
    lead_days: UncertainValue | None = None
    """Until bought devices are there and a run can begin."""
    usd: UncertainValue | None = None
    usd_per_device_hour: UncertainValue | None = None
    fixed_usd_per_device_hour: UncertainValue | None = None
    """Price of every hour, used or not."""
    used_usd_per_device_hour: UncertainValue | None = None
    """Price of an hour that is used, beside what is fixed."""
    share_used: UncertainValue | None = None
    """Share of a commitment's hours that all work on it uses, where the study says it."""
    term_hours: float | None = None
    """Hours of what is paid whole, since this work alone uses it: a year of jobs, or a contract.
    None where other work shares what is fixed."""
    term_renews: bool = False
    """A run that takes longer begins another such term, as of a contract; else it just goes on."""
    contract_hours: float | None = None
    """Hours of a term of its contract: each term that the run begins leaves a budget."""
    day_usd: float | None = None
    """Dollars that the result is worth more, a day sooner, where the goal says it."""
    price: str = ""
    """Commitment, date and source of the price, in words."""
    price_cause: str = ""
    """The quotes that it rests on: prices of the same quotes move together."""
    price_moves_weight: float = 0.0
    """Part of its quotes' deviation that comes between now and the order; squares add up to 1."""
    price_quote_weight: float = 1.0
    """Share of the price's deviation that is its quotes'; the rest is what owning costs."""
    capital_usd: float | None = None
    """Dollars bound by signing: a purchase, or a contract's whole term."""
    minimum_hours: float = 0.0
    """Hours that are paid at least."""
    stored_usd_per_hour: UncertainValue | None = None
    """Price of data that lies beside a rented cluster while the run lasts."""
    moved_usd: UncertainValue | None = None
    """Cost of transfers of data; of a year of jobs, storage too."""
    outlay_usd: UncertainValue | None = None
    """Dollars that a budget has to hold: a purchase and what its years cost, a contract's whole
    term, or the rent of the run."""
    watts: UncertainValue | None = None
    energy_kwh: UncertainValue | None = None
    carbon_kg: UncertainValue | None = None
    grams_per_kwh: float | None = None
    """Grams of CO2 of the grid that it is planned on."""
    misses: tuple[str, ...] = ()
    """Goals that it does not meet."""
    chances: dict[str, float] = field(default_factory=dict)
    """By goal, the probability that it is met."""
    hypothetical: bool = False
    """No such product is sold."""
    idle: int = 0
    """Devices that the plan leaves out, since it is faster without them."""
    provenance: dict[str, int] = field(default_factory=dict)
    """Numbers of measured, fitted, quoted and assumed figures behind the prediction."""
    optimal: bool = False
    not_understood: tuple[str, ...] = ()
    """Notes that name settings of the model which were not understood."""
    unmeasured: bool = False
    """No published run has its accelerator under its framework, and no kernel of it was timed."""
    plan: Plan | None = None

    @property
    def chance(self) -> float:
        """The least probability of fitting and of meeting each goal."""
        return min([self.fit_probability, *self.chances.values()])

    @property
    def arrivals(self) -> list[tuple[float, float]]:
        """Runs a year, and hours of a run, of each job."""
        return [(job.runs_a_year, job.hours) for job in self.jobs]

    @property
    def fixed_hours(self) -> UncertainValue | None:
        """Hours whose fixed price is paid whole; None where other work shares it.

        Jobs have their year, whatever hours they take.  A run has each term of a contract that it
        begins, and of a purchase its year or more.
        """
        if self.term_hours is None or self.hours is None:
            return None
        if self.jobs:
            return exact(max(self.term_hours, self.hours.value))
        if not self.term_renews:
            return at_least(self.hours, self.term_hours)
        return terms_begun(self.hours, self.term_hours).times(self.term_hours)

    @property
    def unused_factor(self) -> UncertainValue:
        """The price of a useful hour over its value, as more or fewer hours are used."""
        share = self.share_used
        if share is None:
            return exact(1.0)
        low, high = (
            1 + self.waiting_share * (share.value / end - 1) for end in (share.high, share.low)
        )
        return UncertainValue(value=1.0, low=low, high=high)

    @property
    def waiting_share(self) -> float:
        """Share of the price of a useful hour that is paid for every hour, used or not."""
        fixed, price, share = (
            self.fixed_usd_per_device_hour,
            self.usd_per_device_hour,
            self.share_used,
        )
        if fixed is None or price is None or share is None or price.value == 0:
            return 0.0
        return fixed.value / share.value / price.value

    @property
    def hourly_share(self) -> float:
        """Share of the cost that grows with the hours of the run: all but what is paid whole."""
        fixed, hours = self.fixed_usd_per_device_hour, self.fixed_hours
        if fixed is None or hours is None or self.usd is None or self.usd.value == 0:
            return 1.0
        return max(0.0, 1 - fixed.value * hours.value * self.devices / self.usd.value)

    @property
    def result_hours(self) -> UncertainValue | None:
        """Hours from signing to the result: delivery and the run."""
        if self.hours is None or self.lead_days is None:
            return self.hours
        return total([self.lead_days.times(24), self.hours])

    @property
    def data_usd(self) -> UncertainValue:
        """Dollars of storage and transfers, in `usd` too."""
        stored, moved = self.stored_usd_per_hour, self.moved_usd
        parts = [] if stored is None or self.hours is None else [product([stored, self.hours])]
        return total([*parts, *([] if moved is None else [moved])])

    @property
    def weighted_usd(self) -> float | None:
        """Dollars that it costs and its days until the result are worth; None if one is unknown."""
        if self.usd is None or self.day_usd is None or self.result_hours is None:
            return None
        return self.usd.value + self.day_usd * self.result_hours.value / 24

    @property
    def utilisation(self) -> UncertainValue:
        """MFU with the range of the step."""
        if self.step_s is None:
            return exact(0.0)
        return self.step_s.inverse.times(self.mfu * self.step_s.value)

    @property
    def link_share(self) -> float:
        """Share of a step that waits for links between devices."""
        step_s = sum(self.step_parts.values())
        return link_seconds(self.step_parts) / step_s if step_s else 0.0

    @property
    def headroom_bytes(self) -> float:
        """Memory left on the fullest device; none where its allocator must compact."""
        return max(0.0, self.capacity_bytes - self.peak_bytes)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, the plan as its document."""
        result: dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, UncertainValue):
                value = value.as_dict()
            elif name == "jobs":
                value = [asdict(job) for job in self.jobs]
            elif isinstance(value, Plan):
                value = value.model_dump(mode="json", exclude_none=True)
            result[name] = value
        return {
            **result,
            "headroom_bytes": self.headroom_bytes,
            "link_share": self.link_share,
        }
