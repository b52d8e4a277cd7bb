"""Ranks exchange data, never objects: JSON in tensors, each message of a bounded size."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.planner.errors import LaunchError
from meshwright.runtime.core import object_collectives as exchange
from meshwright.runtime.core.object_collectives import all_gather_json, broadcast_json
from tests.runtime.ranks import Crew

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[3]
PICKLED = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}


def of_rank(rank: int) -> Any:
    return {"rank": rank, "s": [0.1 * rank, 1e-17, math.inf], "name": "é" * 1000 * rank}


def exchanged() -> tuple[list[Any], Any]:
    rank = dist.get_rank()
    return all_gather_json(of_rank(rank)), broadcast_json(of_rank(rank), source=1)


def refusals() -> list[str]:
    """Return what a rank says where rank 1 sends too much, no JSON, or nesting without end."""
    said = []
    honest, limit = exchange._encode, exchange.MAX_BYTES
    for sent in (b"[" + b"1" * 4000 + b"]", b"\x80\x04cos\nsystem\n", b"[" * 3000):
        exchange.MAX_BYTES = 3500
        if dist.get_rank() == 1:
            exchange._encode = lambda _, sent=sent: torch.frombuffer(  # type: ignore[misc]
                bytearray(sent), dtype=torch.uint8
            )
        try:
            all_gather_json("fine")
        except LaunchError as error:
            said.append(str(error))
        exchange._encode, exchange.MAX_BYTES = honest, limit
    return said


def test_every_rank_hears_all_and_what_cannot_be_read_is_named_by_its_rank() -> None:
    with Crew(3) as crew:
        heard = crew.do(exchanged)
        refused = crew.do(refusals)

    assert heard == [([of_rank(0), of_rank(1), of_rank(2)], of_rank(1))] * 3
    for said in refused:
        assert [text.partition(":")[0] for text in said] == ["rank 1"] * 3
        assert "4002 bytes" in said[0]
        assert "not JSON" in said[1]
        assert "not JSON" in said[2]


def test_no_module_calls_a_collective_that_unpickles() -> None:
    named = re.compile(rf"[.](?:{'|'.join(PICKLED)})\b")
    offenders = [
        f"{file.relative_to(ROOT)}: {found}"
        for package in ("planner", "runtime", "profiler", "meshwright")
        for file in (ROOT / package).rglob("*.py")
        for found in named.findall(file.read_text())
    ]

    assert offenders == []


def test_numbers_arrive_to_the_last_bit() -> None:
    numbers = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308]

    assert json.loads(bytes(exchange._encode(numbers).tolist())) == numbers
