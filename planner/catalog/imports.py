"""Rents from the price lists that SkyPilot and gpuhunt publish as CSV, as our own dated offers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

from meshwright.planner.catalog import Rent, accelerators
from meshwright.planner.documents.document import Document, read_table
from meshwright.planner.documents.units import MOST_DEVICES
from meshwright.planner.errors import DocumentError

SKYPILOT = ("InstanceType", "AcceleratorName", "AcceleratorCount", "Price", "SpotPrice", "Region")
GPUHUNT = ("instance_name", "location", "price", "gpu_count", "gpu_name", "gpu_memory", "spot")
NAMES: dict[str, str] = {
    "v100": "v100-sxm-16gb",
    "v100-32gb": "v100-sxm-32gb",
    "a100": "a100-sxm-40gb",
    "a100-80gb": "a100-sxm-80gb",
    "h100": "h100-sxm-80gb",
    "h100-80gb": "h100-sxm-80gb",
    "h100-mega": "h100-sxm-80gb",
    "h200": "h200-sxm",
    "rtx4090": "rtx-4090",
    "rtx3090": "rtx-3090",
    "rtx5090": "rtx-5090",
    "a6000": "rtx-a6000",
    "rtxa6000": "rtx-a6000",
    "rtxpro6000": "rtx-pro-6000",
    "rtx6000ada": "rtx-6000-ada",
}
"""Catalogue names of accelerators by their names in the lists, where these differ."""
SKYPILOT_NAMES = {
    "v100-sxm-16gb": "V100",
    "v100-sxm-32gb": "V100-32GB",
    "a100-sxm-40gb": "A100",
    "a100-sxm-80gb": "A100-80GB",
    "h100-sxm-80gb": "H100",
    "h200-sxm": "H200",
    "rtx-4090": "RTX4090",
    "rtx-a6000": "RTXA6000",
    **{name.lower(): name for name in ("T4", "L4", "A10", "A10G", "L40S", "B200", "B300")},
    "mi300x": "MI300X",
}
"""SkyPilot's own names of accelerators by their names in the catalogue."""


_Rent = dict[str, object]
"""Rent as plain data, not yet validated."""
MOST = float(MOST_DEVICES)
"""Largest number of devices, gigabytes or dollars an hour in a cell; a larger one is invalid."""


class Rents(Document):
    """Dated rents in a file of their own."""

    kind_of_document: ClassVar[str] = "list of rents"
    schema_file: ClassVar[str | None] = "rents.json"

    rents: tuple[Rent, ...]
    """Offers."""


def import_rents(path: str, *, provider: str, date: str) -> Rents:
    """Return the offers of a CSV file; rows of accelerators that the catalogue lacks are left out.

    Neither list contains its date or the source of each row: `provider` and `date` do, where a row
    has no provider of its own.
    """
    for name, value, as_in in (("provider", provider, "aws"), ("date", date, "2026-01-31")):
        if not value.strip():
            raise DocumentError(name, f"is empty; write it as in {as_in}")
    header, rows = read_table(path)
    columns = set(header)
    if set(SKYPILOT) <= columns:
        offers = _of_skypilot(rows, provider, date, path)
    elif set(GPUHUNT) <= columns:
        offers = _of_gpuhunt(rows, provider, date, path)
    else:
        raise DocumentError(
            "",
            f"is no price list that is known: SkyPilot's has the columns {', '.join(SKYPILOT)}, "
            f"gpuhunt's {', '.join(GPUHUNT)}",
            file=path,
        )
    rents = list(offers)
    if not rents:
        raise DocumentError(
            "",
            "has no row with a known accelerator and a price; "
            "see `meshwright catalog accelerators` for the names that are known",
            file=path,
        )
    try:
        return Rents.of({"rents": rents})
    except DocumentError as error:
        raise error.in_file(path) from error


def _of_skypilot(
    rows: list[dict[str, str]], provider: str, date: str, path: str
) -> Iterator[_Rent]:
    best: dict[tuple[str, str, str], tuple[float | None, float | None, int]] = {}
    for row in rows:
        name = _accelerator(row["AcceleratorName"], None)
        count = _number(row["AcceleratorCount"])
        if name is None or not count or count < 1:
            continue
        key = (row["InstanceType"] or f"{int(count)}x {name}", name, row["Region"] or "all")
        price, spot = _number(row["Price"]), _number(row["SpotPrice"])
        before = best.get(key, (None, None, int(count)))
        best[key] = (_lower_price(before[0], price), _lower_price(before[1], spot), int(count))
    yield from _rents(best, provider, date, path)


def _of_gpuhunt(rows: list[dict[str, str]], provider: str, date: str, path: str) -> Iterator[_Rent]:
    best: dict[tuple[str, str, str], tuple[float | None, float | None, int]] = {}
    for row in rows:
        memory, count = _number(row["gpu_memory"]), _number(row["gpu_count"])
        name = _accelerator(row["gpu_name"], memory)
        price = _number(row["price"])
        if name is None or not count or count < 1 or price is None:
            continue
        key = (row["instance_name"], name, row["location"] or "all")
        on_demand, spot, _ = best.get(key, (None, None, 0))
        if row["spot"].strip().lower() == "true":
            spot = _lower_price(spot, price)
        else:
            on_demand = _lower_price(on_demand, price)
        best[key] = (on_demand, spot, int(count))
    yield from _rents(best, provider, date, path)


def _rents(
    best: Mapping[tuple[str, str, str], tuple[float | None, float | None, int]],
    provider: str,
    date: str,
    path: str,
) -> Iterator[_Rent]:
    for (instance, name, region), (price, spot, count) in sorted(best.items()):
        if price is None and spot is None:
            continue
        if price is not None and spot is not None and spot > price:
            raise DocumentError(
                instance, f"spot {spot:g} is above on-demand {price:g}; a column slipped", file=path
            )
        yield {
            "provider": provider,
            "instance": instance,
            "accelerator": name,
            "devices": count,
            "region": region,
            "on_demand_usd_per_device_hour": None if price is None else price / count,
            "spot_usd_per_device_hour": None if spot is None else spot / count,
            "date": date,
            "source": Path(path).name,
            "confidence": "medium",
        }


def _accelerator(text: str, memory_gb: float | None) -> str | None:
    """Return the catalogue's name of an accelerator of a list, if it has one."""
    short = text.strip().lower().replace(" ", "").replace("_", "-")
    if memory_gb is not None and short in ("a100", "v100", "h100"):
        sized = f"{short}-{memory_gb:.0f}gb"
        short = sized if sized in NAMES else short
    name = NAMES.get(short, short)
    return name if name in accelerators() else None


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value <= MOST else None


def _lower_price(first: float | None, other: float | None) -> float | None:
    values = [value for value in (first, other) if value is not None]
    return min(values) if values else None
