"""What the padding of experts over many ranks takes is said, with the ranks that do without."""

import re

import pytest
import torch

from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.predict import layout_prediction
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request, pinned_layout


@pytest.mark.parametrize("nodes", [1, 7, 8, 16, 64])
def test_the_note_says_how_many_rows_torch_gives_each_rank(nodes: int) -> None:
    """It has 32 experts of 2,880 hidden dims, along which ranks divide them where they can."""
    ranks = 8 * nodes
    request = Request.create(
        resolve_model("gpt-oss-20b"),
        resolve_cluster(f"{nodes}x8xh100-sxm-80gb"),
        seq_len=1024,
        global_batch=ranks,
        pins=Pins(data=ranks, zero=3, micro_batch=1),
    )
    notes = " ".join(layout_prediction(request, pinned_layout(request)).notes)
    rows, hidden = torch.empty(32, 0), torch.empty(2880, 0)
    times = rows.chunk(ranks)[0].shape[0] * ranks / 32
    if [len(part) for part in hidden.chunk(ranks)] == [2880 / ranks] * ranks:
        times = 1
    assert ("padding of experts" in notes) == (times > 1)
    if times > 1:
        assert f"{times:.3g} x as large" in notes
        fewer = re.search(r"shard=(\d+) does without", notes)
        assert fewer is not None
        assert 2880 % int(fewer[1]) == 0 or 32 % int(fewer[1]) == 0
