"""Rents of today from the lists that SkyPilot's catalogue publishes, fetched on request.

Nothing else of Meshwright reads prices from the network.  Each list is kept for its day, so that
asking again the same day fetches nothing; without a network, `catalog prices --import` reads a
file.
"""

from __future__ import annotations

import datetime
import os
import statistics
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from meshwright.planner.catalog import Rent, rents
from meshwright.planner.catalog.imports import Rents, import_rents
from meshwright.planner.documents import document
from meshwright.planner.errors import DocumentError, MeshwrightError
from meshwright.planner.system.safe_files import replace_file

LISTS = "https://raw.githubusercontent.com/skypilot-org/skypilot-catalog/master/catalogs/v8"
PROVIDERS = ("lambda", "nebius", "runpod", "verda", "vast", "hyperstack", "oci")
"""Providers whose lists are fetched: they rent accelerators for training, and their lists are
small."""
MOST_BYTES = 32_000_000
TIMEOUT_S = 30.0
MOST_MOVES = 12
"""Largest number of prices with large changes that are named."""
MOVED = 0.01
"""Relative change from which a price has moved."""


def cache_folder() -> Path:
    """Return the folder of fetched lists."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "meshwright" / "prices"


def update_prices(
    output: str,
    *,
    say: Callable[[str], object],
    lists: str = LISTS,
    providers: Sequence[str] = PROVIDERS,
    folder: Path | None = None,
) -> tuple[Rents, list[str]]:
    """Fetch today's lists, write them as dated rents, and return them with what moved.

    `say` gets each address before it is fetched.
    """
    if Path(output).suffix not in (".yaml", ".yml"):
        raise DocumentError("output", f"is {output}; rents are YAML, as in rents.yaml")
    today = datetime.date.today().isoformat()
    kept = (folder or cache_folder()) / today
    listed: list[Rent] = []
    for provider in providers:
        path, address = kept / f"{provider}.csv", f"{lists}/{provider}/vms.csv"
        if path.is_file():
            say(f"kept of today: {path} ({address})")
        else:
            say(f"fetching {address}")
            replace_file(download(address), path)
        try:
            of_list = import_rents(str(path), provider=provider, date=today).rents
        except DocumentError as error:
            say(f"left out: {provider}, {error.message}")
            continue
        listed += (rent.model_copy(update={"source": address}) for rent in of_list)
    if not listed:
        raise MeshwrightError(
            f"no list under {lists} has a rent; read a file with `catalog prices --import`"
        )
    prices = Rents(format=1, rents=tuple(listed))
    document.write(prices, output)
    return prices, moved_texts(rents(), listed)


def download(address: str) -> str:
    """Return the text that an address has, of at most `MOST_BYTES`."""
    if not address.startswith(("https://", "http://127.0.0.1")):
        raise DocumentError(
            "update", f"reads lists over https; {address:.80} is none; leave --update out"
        )
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:
            content: bytes = answer.read(MOST_BYTES + 1)
    except (urllib.error.URLError, TimeoutError, OSError) as error:
        raise MeshwrightError(
            f"{address} cannot be read ({error}); where there is no network, read a file with "
            "`catalog prices --import FILE.csv --provider NAME --date 2026-11`"
        ) from error
    if len(content) > MOST_BYTES:
        raise MeshwrightError(f"{address} has more than {MOST_BYTES:,} bytes; it is no price list")
    return content.decode("utf-8", errors="replace")


def moved_texts(before: Iterable[Rent], now: Iterable[Rent]) -> list[str]:
    """Return the moves of a provider's on-demand prices by accelerator, the largest first."""
    old, new = _medians(before), _medians(now)
    moves = [
        (new[key] / old[key] - 1, *key)
        for key in new
        if old.get(key) and abs(new[key] / old[key] - 1) >= MOVED
    ]
    moves.sort(key=lambda move: -abs(move[0]))
    texts = [
        f"{name} at {provider}: {old[provider, name]:.2f} to {new[provider, name]:.2f} USD per "
        f"device-hour ({100 * share:+.0f} %)"
        for share, provider, name in moves[:MOST_MOVES]
    ]
    if len(moves) > MOST_MOVES:
        texts.append(f"and {len(moves) - MOST_MOVES} more")
    return texts


def _medians(listed: Iterable[Rent]) -> dict[tuple[str, str], float]:
    prices: dict[tuple[str, str], list[float]] = {}
    for rent in listed:
        if rent.on_demand_usd_per_device_hour is not None:
            key = rent.provider, rent.accelerator
            prices.setdefault(key, []).append(rent.on_demand_usd_per_device_hour)
    return {key: statistics.median(values) for key, values in prices.items()}
