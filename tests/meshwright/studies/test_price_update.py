"""Lists of prices are fetched when asked for, once a day, with their address shown."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from meshwright.planner.catalog import Rent
from meshwright.planner.errors import DocumentError, MeshwrightError
from meshwright.studies.price_update import moved_texts, update_prices

HEADER = "InstanceType,AcceleratorName,AcceleratorCount,Price,SpotPrice,Region\n"
LISTS = {"/nebius/vms.csv": HEADER + "gpu-h100,H100,8,45.0,,eu\n", "/odd/vms.csv": "a,b\n1,2\n"}
ASKED: list[str] = []


class Lists(BaseHTTPRequestHandler):
    """A server of price lists."""

    def do_GET(self) -> None:
        """Answer with a list, or 404."""
        ASKED.append(self.path)
        text = LISTS.get(self.path)
        self.send_response(404 if text is None else 200)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Lists)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    ASKED.clear()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_lists_are_fetched_once_a_day_with_their_address_shown(
    address: str, tmp_path: Path
) -> None:
    """By hand: 45 USD for 8 devices are 5.625; the catalogue has 4.50 of nebius: 25 % more."""
    shown: list[str] = []
    output = str(tmp_path / "rents.yaml")
    for _ in range(2):
        fetched, moved = update_prices(
            output,
            say=shown.append,
            lists=address,
            providers=("nebius", "odd"),
            folder=tmp_path / "kept",
        )

    assert ASKED == ["/nebius/vms.csv", "/odd/vms.csv"]  # once, in two rounds
    assert shown[0] == f"fetching {address}/nebius/vms.csv"
    assert any(text.startswith("left out: odd") for text in shown)
    assert any(text.startswith("kept of today") for text in shown)
    [rent] = fetched.rents
    assert rent.on_demand_usd_per_device_hour == 5.625
    assert rent.source == f"{address}/nebius/vms.csv"
    assert moved == ["h100-sxm-80gb at nebius: 4.50 to 5.62 USD per device-hour (+25 %)"]
    assert Path(output).is_file()


def test_without_a_network_a_file_is_the_other_way(address: str, tmp_path: Path) -> None:
    output = str(tmp_path / "rents.yaml")
    with pytest.raises(MeshwrightError, match="catalog prices --import"):
        update_prices(output, say=len, lists=f"{address}/gone", folder=tmp_path / "kept")
    with pytest.raises(DocumentError, match="over https"):
        update_prices(output, say=len, lists="ftp://example", folder=tmp_path / "kept")
    assert not Path(output).exists()


def test_what_moved_most_comes_first() -> None:
    def rents_at(usd: float, other: float) -> list[Rent]:
        base = {
            "instance": "a node",
            "devices": 8,
            "region": "all",
            "date": "2026-11",
            "source": "by hand",
            "confidence": "high",
        }
        return [
            Rent.model_validate(
                {**base, "provider": p, "accelerator": "b200", "on_demand_usd_per_device_hour": u}
            )
            for p, u in (("a", usd), ("b", other))
        ]

    assert moved_texts(rents_at(4.0, 4.0), rents_at(4.4, 2.0)) == [
        "b200 at b: 4.00 to 2.00 USD per device-hour (-50 %)",
        "b200 at a: 4.00 to 4.40 USD per device-hour (+10 %)",
    ]
