"""The catalogue: accelerators, node types, models, frameworks and rents by name; facilities.

The figures stand in the YAML files beside this one, each with its source; this module only reads
them.  Every function returns the same values each time; of files with many entries those alone are
read that somebody asks for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from meshwright.planner.catalog.entries import (
    E,
    LazyValues,
    V,
    aliases_of,
    entry_texts,
    with_installed,
)
from meshwright.planner.documents.cluster import (
    Accelerator,
    AcceleratorKind,
    DeviceCurve,
    KernelRates,
    LinkTier,
    Precision,
)
from meshwright.planner.documents.document import Document, Part, nearest, plain
from meshwright.planner.documents.framework import Framework, framework_of, with_options
from meshwright.planner.documents.plugins import installed_entries
from meshwright.planner.documents.units import (
    Amount,
    Count,
    Devices,
    Flag,
    Fraction,
    Name,
    Overhead,
    Positive,
    Proportion,
    Rate,
    Share,
    Text,
)
from meshwright.planner.errors import DocumentError

D = TypeVar("D", bound=Document)


class AcceleratorEntry(Part):
    """An accelerator and its usual node."""

    aliases: tuple[Text, ...] = ()
    driver_names: tuple[Text, ...] = ()
    """Names of the accelerator in `nvidia-smi`."""
    vendor: Text
    kind: AcceleratorKind = "cuda"
    memory_bytes: Positive
    memory_range_bytes: tuple[Positive, Positive] | None = None
    """Smallest and largest total that CUDA may report, in bytes, where no log of it was found."""
    peak_flops: dict[Precision, Rate]
    memory_bytes_per_s: Rate
    tdp_w: Amount | None = None
    multiprocessors: Positive | None = None
    curve: DeviceCurve
    kernels: KernelRates = KernelRates.model_construct()
    architecture: Name | None = None
    devices_per_node: Devices = 8
    host_devices: Devices | None = None
    """Devices of one host, where the links of a node join several hosts: 4 of the 72 of NVL72."""
    tiers: tuple[LinkTier, ...] = ()
    """Link tiers inside a node."""
    bridge: LinkTier | None = None
    """A bridge between pairs of cards that a node may have and usually has not."""
    host_link_bytes_per_s: Rate | None = None
    network_bytes_per_s: Rate | None = None
    """Bytes per second of one device between nodes, in its usual node."""
    note: Text | None = None
    sources: dict[str, Text] = Field(default_factory=dict)

    def accelerator(self, name: str) -> Accelerator:
        """Return the device alone, its sources written out."""
        return Accelerator(
            name=name,
            kind=self.kind,
            memory_bytes=self.memory_bytes,
            peak_flops=self.peak_flops,
            memory_bytes_per_s=self.memory_bytes_per_s,
            curve=self.curve,
            kernels=self.kernels,
            architecture=self.architecture,
            tdp_w=self.tdp_w,
            multiprocessors=self.multiprocessors,
            sources=self.sources,
        )


class NodeEntry(Part):
    """A node type: a server or a cloud instance."""

    aliases: tuple[Text, ...] = ()
    accelerator: Text
    devices_per_node: Devices
    host_memory_bytes: Count | None = None
    network: LinkTier | None = None
    """`devices` is not used: the cluster knows how many there are."""
    note: Text | None = None
    sources: dict[str, Text] = Field(default_factory=dict)


class ModelEntry(Part):
    """A model, by the figures of its Hugging Face configuration."""

    aliases: tuple[Text, ...] = ()
    parameters: Amount | None = None
    """Number of parameters as published, with its rounding."""
    source: Text
    config: dict[str, Any]


Market = Literal["specialist", "hyperscaler"]
HYPERSCALERS = frozenset({"aws", "azure", "gcp", "oci"})
"""Providers of general clouds; other providers rent accelerators only, or are marketplaces of
such."""


class Rent(Part):
    """Price that a provider asked for an instance on a date; never a quote for today."""

    provider: Text
    """Provider."""
    instance: Text
    """Name of the instance."""
    accelerator: Text
    """Accelerator of the instance."""
    devices: Devices
    """Number of devices of the instance."""
    region: Text
    """Region of the offer."""
    on_demand_usd_per_device_hour: Amount | None = None
    """Dollars of a device for an hour, on demand."""
    spot_usd_per_device_hour: Amount | None = None
    """Lowest spot price seen; a lower bound, not an offer."""
    reserved_usd_per_device_hour: Amount | None = None
    """Price under a contract, paid for every hour of its term."""
    term_months: Rate | None = None
    """Term of the contract in months."""
    prepaid: Proportion = 0.0
    """Share of the contract that is paid on the first day."""
    whole_node: Flag = True
    """False where the host is rented separately and is not in the price."""
    host_usd_per_device_hour: Amount | None = None
    """Price of the host where it is rented separately."""
    divisible: Flag = False
    """True if any number of the instance's devices is available at the same price each."""
    fabric: Text | None = None
    """Network that joins several instances for training; None where none is known."""
    most_devices: Devices | None = None
    """Largest number of devices that are available at once, where it is known."""
    date: Text
    """Date of the offer."""
    source: Text
    """Source of the offer."""
    confidence: Literal["high", "medium", "low"]
    """Quality of the source."""
    note: Text | None = None
    """Note on the offer."""

    @property
    def market(self) -> Market:
        """Kind of the provider; prices of the two kinds differ by a factor of two and more."""
        return "hyperscaler" if self.provider in HYPERSCALERS else "specialist"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        on_demand, spot = self.on_demand_usd_per_device_hour, self.spot_usd_per_device_hour
        if on_demand is None and spot is None and self.reserved_usd_per_device_hour is None:
            raise ValueError("has no price; give on_demand, spot or reserved")
        if (self.reserved_usd_per_device_hour is None) != (self.term_months is None):
            raise ValueError("reserved_usd_per_device_hour and term_months go together")
        if on_demand is not None and spot is not None and spot > on_demand:
            raise ValueError(f"spot {spot} is above on-demand {on_demand}; a column has slipped")
        return self


class PurchasePrice(Part):
    """Price for which a device was sold on a date."""

    accelerator: Text
    usd_per_device: Amount
    low: Amount | None = None
    high: Amount | None = None
    with_node: Flag
    """True if the price includes the device's share of the server."""
    date: Text
    source: Text
    confidence: Literal["high", "medium", "low"]
    note: Text | None = None

    @property
    def ends(self) -> tuple[float, float]:
        """Ends of the price's range; the price itself for an unknown end."""
        return self.low or self.usd_per_device, self.high or self.usd_per_device

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        low, high = self.ends
        if not low <= self.usd_per_device <= high:
            raise ValueError(f"usd_per_device {self.usd_per_device} is not in {low} to {high}")
        return self


class Quantity(Part):
    """A figure with the range that its sources span; a plain number is one without a range."""

    value: Amount
    """Most likely value."""
    low: Amount
    """Low end of the range."""
    high: Amount
    """High end of the range."""
    source: Text
    """Source of the figure."""

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, data: Any) -> Any:
        if isinstance(data, int | float) and not isinstance(data, bool):
            number = float(data)
            return {"value": number, "low": number, "high": number, "source": "the study"}
        return data

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the schema of the record or of a plain number."""
        return {"anyOf": [handler(core), {"type": "number"}]}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"value {self.value} is not between {self.low} and {self.high}")
        return self


class ShareQuantity(Quantity):
    """A part of a whole that leaves something: what is lost of hours."""

    value: Share
    """Most likely value."""
    low: Share
    """Low end of the range."""
    high: Share
    """High end of the range."""


class ProportionQuantity(Quantity):
    """A part of a whole, from nothing to all of it."""

    value: Proportion
    """Most likely value."""
    low: Proportion
    """Low end of the range."""
    high: Proportion
    """High end of the range."""


class FractionQuantity(Quantity):
    """A part of a whole, and never nothing."""

    value: Fraction
    """Most likely value."""
    low: Fraction
    """Low end of the range."""
    high: Fraction
    """High end of the range."""


class OverheadQuantity(Quantity):
    """A factor by which the whole exceeds a part of it."""

    value: Overhead
    """Most likely value."""
    low: Overhead
    """Low end of the range."""
    high: Overhead
    """High end of the range."""


class Carbon(Part):
    """Grams of CO2 per kWh of electricity, by country (ISO 3166)."""

    source: Text
    by_country: dict[Text, Amount]


class Facility(Part):
    """Cost of running devices beside their rent.

    Energy of a job: devices x TDP x node_power_over_tdp, plus the network, times the power usage
    effectiveness, times hours.
    """

    node_power_over_tdp: Quantity
    network_w_per_device: Quantity
    power_usage_effectiveness: OverheadQuantity
    electricity_usd_per_kwh: Quantity
    carbon_g_per_kwh: Carbon


class _Accelerators(Document):
    kind_of_document: ClassVar[str] = "list of accelerators"
    accelerators: dict[str, AcceleratorEntry]


class _NodesFile(Document):
    kind_of_document: ClassVar[str] = "list of node types"
    nodes: dict[str, NodeEntry]


class _Models(Document):
    kind_of_document: ClassVar[str] = "list of models"
    models: dict[str, ModelEntry]


class _RentsFile(Document):
    kind_of_document: ClassVar[str] = "list of rents"
    rents: tuple[Rent, ...]


class _Purchases(Document):
    kind_of_document: ClassVar[str] = "list of purchases"
    purchases: tuple[PurchasePrice, ...]
    network: Quantity


class _FacilityFile(Document):
    kind_of_document: ClassVar[str] = "facility"
    facility: Facility


class _Sources(Document):
    kind_of_document: ClassVar[str] = "list of sources"
    sources: dict[str, Text]


@cache
def accelerators() -> Mapping[str, AcceleratorEntry]:
    """Return every accelerator by name, those of installed packages too."""

    def build_accelerator(name: str, data: object) -> AcceleratorEntry:
        return _Accelerators.of({"format": 1, "accelerators": {name: data}}).accelerators[name]

    shipped = _entries("accelerators.yaml", build_accelerator)
    return with_installed(shipped, installed_entries("accelerators", shipped, build_accelerator))


def pcie(entry: AcceleratorEntry) -> tuple[LinkTier, ...]:
    """Return the links over the host that join cards without their NVLink, or with none."""
    tiers = tuple(tier for tier in entry.tiers if tier.name == "pcie")
    if tiers or entry.host_link_bytes_per_s is None:
        return tiers
    usual = accelerators()["rtx-pro-6000"].tiers[0]
    return (
        usual.model_copy(
            update={
                "bytes_per_s": entry.host_link_bytes_per_s,
                "provenance": "quoted",
                "source": "host link; fractions as rtx-pro-6000",
            }
        ),
    )


@cache
def nodes() -> LazyValues[NodeEntry]:
    """Return every node type by name."""
    return _entries(
        "nodes.yaml",
        lambda name, data: _NodesFile.of({"format": 1, "nodes": {name: data}}).nodes[name],
    )


def nodes_of(accelerator: str) -> Iterator[NodeEntry]:
    """Yield the node types with an accelerator, as the catalogue names it."""
    line = f"    accelerator: {accelerator}\n"
    return (nodes()[name] for name, text in nodes().texts.items() if line in text)


@cache
def models() -> Mapping[str, ModelEntry]:
    """Return every model by name."""
    return _entries(
        "models.yaml",
        lambda name, data: _Models.of({"format": 1, "models": {name: data}}).models[name],
    )


@cache
def frameworks() -> Mapping[str, Framework]:
    """Return all frameworks by name: one file each in `frameworks/`, and those of packages."""
    data = _data_of(resources.files(__package__).joinpath("frameworks"))
    frameworks_of_catalogue = _frameworks(data)

    def build_framework(name: str, entry: dict[str, Any]) -> Framework:
        if entry.get("name") != name:
            raise DocumentError(
                "name", f"is not '{name}', the name of its entry point; rename one of them"
            )
        return framework_of(entry, data)

    return with_installed(
        frameworks_of_catalogue,
        installed_entries("frameworks", frameworks_of_catalogue, build_framework),
    )


def read_frameworks(folder: Traversable) -> Mapping[str, Framework]:
    """Return the frameworks of a folder by name, each with what it extends filled in."""
    return _frameworks(_data_of(folder))


def _data_of(folder: Traversable) -> LazyValues[dict[str, Any]]:
    """Return the data of files by their names, which are those of frameworks."""
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    texts = {
        file.name.removesuffix(".yaml"): file.read_text(encoding="utf-8")
        for file in files
        if file.name.endswith(".yaml")
    }

    def read_data(name: str, text: str) -> dict[str, Any]:
        content = plain(text)
        assert isinstance(content, dict), name
        assert content["name"] == name, name
        return content

    return LazyValues(texts, read_data)


def _frameworks(data: LazyValues[dict[str, Any]]) -> LazyValues[Framework]:
    def read_framework(name: str, _: str) -> Framework:
        try:
            return framework_of(data[name], data)
        except DocumentError as error:
            raise error.in_file(f"{name}.yaml") from error

    return LazyValues(data.texts, read_framework)


def framework(text: str) -> Framework:
    """Return the framework that a name or alias stands for; DocumentError with the nearest if none.

    >>> framework("fsdp2+compiled").name, framework("fsdp2+compiled").kernels.norm
    ('fsdp+compiled', 'fused')
    """
    name, *options = text.split("+")
    return with_options(frameworks()[framework_name(name)], options)


def native() -> Framework:
    """Return the framework of this project's own runtime."""
    return frameworks()["native"]


@cache
def rents() -> tuple[Rent, ...]:
    """Return all dated rents."""
    return _with_sources(_RentsFile, "prices.yaml").rents


@cache
def purchases() -> dict[str, PurchasePrice]:
    """Return dated purchase prices by accelerator."""
    return {price.accelerator: price for price in _bought().purchases}


@cache
def network_purchase() -> Quantity:
    """Return the cost of switches and cables for each device, in US dollars."""
    return _bought().network


def _bought() -> _Purchases:
    return _with_sources(_Purchases, "purchases.yaml")


@cache
def facility() -> Facility:
    """Return power, electricity and carbon figures."""
    return _with_sources(_FacilityFile, "facility.yaml").facility


@cache
def sources() -> dict[str, str]:
    """Return the meanings of the capital words in sources."""
    return _Sources.parse(_text("sources.yaml"), file="sources.yaml").sources


def model_config(name: str) -> dict[str, Any]:
    """Return the Hugging Face configuration of a model of the catalogue.

    >>> model_config("gpt2")["n_layer"]
    12
    """
    return dict(models()[model_name(name)].config)


def accelerator_name(text: str) -> str:
    """Return the name that a name or alias stands for; DocumentError with the nearest if none."""
    return _entry_name(text, accelerators(), what="accelerator")


def node_name(text: str) -> str:
    """Return the name that a node type's name or alias stands for."""
    return _entry_name(text, nodes(), what="node type")


def model_name(text: str) -> str:
    """Return the name that a model's name or alias stands for.

    >>> model_name("meta-llama/Llama-3.1-8B")
    'llama-3.1-8b'
    """
    return _entry_name(text, models(), what="model")


def source_text(text: str) -> str:
    """Return a source with its capital words written out.

    >>> source_text("LEV")
    'stanford-crfm/levanter @9263f81 (2025-09-26), src/levanter/utils/flop_utils.py'
    """
    catalogued = sources()
    return re.sub(
        r"[A-Z][A-Z0-9_]+", lambda word: source_text(catalogued.get(word[0], "")) or word[0], text
    )


def framework_name(text: str) -> str:
    """Return the framework that a name or alias stands for, written in any of the usual ways.

    >>> framework_name("Megatron-LM"), framework_name("fsdp2"), framework_name("native")
    ('megatron', 'fsdp', 'native')
    """
    return _entry_name(re.sub(r"[\s_]+", "-", text.strip()), frameworks(), what="framework")


def carbon_of(country: str) -> float:
    """Return grams of CO2 per kWh; DocumentError with the known countries."""
    by_country = facility().carbon_g_per_kwh.by_country
    if country not in by_country:
        raise DocumentError(
            "assumptions.country",
            f"is '{country:.20}'; known are {', '.join(by_country)}; or give carbon_g_per_kwh",
        )
    return by_country[country]


def _entry_name(text: str, entries: Mapping[str, E], *, what: str) -> str:
    if text in entries:
        return text
    names = {name.lower(): name for name in entries}
    names |= {alias.lower(): name for alias, name in aliases_of(entries).items()}
    match = names.get(text.lower())
    if match is None:
        raise DocumentError("", f"there is no {what} '{text:.60}'; {nearest(text, list(names))}")
    return match


def _entries(file: str, build: Callable[[str, object], V]) -> LazyValues[V]:
    """Return the entries of a file, the words of their sources written out."""

    def read(name: str, text: str) -> V:
        try:
            return build(name, _written_out(plain(text), inside=""))
        except DocumentError as error:
            raise error.in_file(file) from error

    return LazyValues(entry_texts(_text(file)), read)


def _with_sources(cls: type[D], file: str) -> D:
    data = _written_out(plain(_text(file)), inside="")
    try:
        return cls.of(data)
    except DocumentError as error:
        raise error.in_file(file) from error


def _written_out(data: object, *, inside: str) -> object:
    """Write out the capital words of every `source`, and of every value in `sources`."""
    if isinstance(data, dict):
        return {
            key: _written_out(value, inside="source" if inside == "sources" else key)
            for key, value in data.items()
        }
    if isinstance(data, list):
        return [_written_out(item, inside=inside) for item in data]
    return source_text(data) if isinstance(data, str) and inside == "source" else data


def _text(file: str) -> str:
    return resources.files(__package__).joinpath(file).read_text(encoding="utf-8")
