"""Price lists of SkyPilot and gpuhunt."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.catalog.imports import import_rents
from meshwright.planner.errors import DocumentError

SKYPILOT = """InstanceType,AcceleratorName,AcceleratorCount,vCPUs,Price,SpotPrice,Region,Zone
p5.48xlarge,H100,8.0,192,55.04,20.0,us-east-1,us-east-1a
p5.48xlarge,H100,8.0,192,55.04,16.0,us-east-1,us-east-1b
p4de.24xlarge,A100-80GB,8.0,96,27.44,,us-east-1,us-east-1a
m5.large,,,2,0.096,0.03,us-east-1,us-east-1a
"""
GPUHUNT = """instance_name,location,price,cpu,memory,gpu_count,gpu_name,gpu_memory,spot,disk_size
8x,eu,16.0,96,1024,8,A100,80,False,
8x,eu,8.0,96,1024,8,A100,80,True,
4x,eu,2.0,48,256,4,RTX4090,24,False,
1x,eu,0.4,8,32,1,Unheard,24,False,
"""


def written(folder: Path, text: str) -> str:
    path = folder / "list.csv"
    path.write_text(text)
    return str(path)


def test_skypilots_prices_are_per_instance_and_the_lowest_spot_counts(tmp_path: Path) -> None:
    rents = import_rents(written(tmp_path, SKYPILOT), provider="aws", date="2026-11").rents
    assert [
        (r.accelerator, r.on_demand_usd_per_device_hour, r.spot_usd_per_device_hour) for r in rents
    ] == [
        ("a100-sxm-80gb", 3.43, None),
        ("h100-sxm-80gb", 6.88, 2.0),
    ]
    assert {rent.date for rent in rents} == {"2026-11"}


def test_gpuhunts_rows_of_spot_and_on_demand_are_one_offer(tmp_path: Path) -> None:
    rents = import_rents(written(tmp_path, GPUHUNT), provider="cloud", date="2026-11").rents
    assert [
        (r.accelerator, r.devices, r.on_demand_usd_per_device_hour, r.spot_usd_per_device_hour)
        for r in rents
    ] == [
        ("rtx-4090", 4, 0.5, None),
        ("a100-sxm-80gb", 8, 2.0, 1.0),
    ]


def test_spot_above_on_demand_is_refused(tmp_path: Path) -> None:
    wrong = SKYPILOT.replace("55.04,20.0", "15.04,20.0").replace("55.04,16.0", "15.04,16.0")
    with pytest.raises(DocumentError, match=r"spot 16 is above on-demand 15.04"):
        import_rents(written(tmp_path, wrong), provider="aws", date="2026-11")


def test_another_list_is_refused_with_the_columns_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="SkyPilot's has the columns InstanceType"):
        import_rents(written(tmp_path, "a,b\n1,2\n"), provider="x", date="2026-11")
