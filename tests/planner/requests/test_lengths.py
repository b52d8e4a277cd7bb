"""Lengths that vary: distributions against draws, and what a plan makes of them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from statistics import NormalDist

import pytest

import meshwright
from meshwright.planner.errors import DocumentError
from meshwright.planner.requests.lengths import Lengths, lengths_of_job, read_lengths


def test_three_numbers_are_a_log_normal_distribution_of_that_mean() -> None:
    lengths = read_lengths("600,1800,10000")

    assert lengths.mean == pytest.approx(600, rel=0.03)
    assert lengths.percentile(0.95) == pytest.approx(1800, rel=0.03)
    deviation = NormalDist().inv_cdf(0.95) - math.sqrt(
        NormalDist().inv_cdf(0.95) ** 2 - 2 * math.log(3)
    )
    assert lengths.percentile(0.5) == pytest.approx(600 * math.exp(-(deviation**2) / 2), rel=0.02)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_the_longest_of_a_micro_batch_is_that_of_draws(count: int) -> None:
    rng = random.Random(0)
    tokens = sorted(rng.randint(10, 4000) for _ in range(200))
    draws = [max(rng.choices(tokens, k=count)) for _ in range(20000)]

    assert Lengths(tuple(tokens)).longest_of(count) == pytest.approx(
        sum(draws) / len(draws), rel=0.01
    )


def test_a_file_has_a_sample_on_each_line(tmp_path: Path) -> None:
    file = tmp_path / "lengths.jsonl"
    rows = [{"length": 30}, {"input_ids": [1] * 10}, 20]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    assert read_lengths(str(file)).tokens == (10, 20, 30)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nowhere.jsonl", "is no file; name one"),
        ("600,300,4096", "do not rise"),
        ("100,3000,4096", "the most of a log-normal distribution"),
    ],
)
def test_what_is_no_distribution_is_refused(text: str, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        read_lengths(text)


def test_a_line_without_a_length_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "lengths.jsonl"
    file.write_text('{"text": "words"}\n')

    with pytest.raises(DocumentError, match="line 1 has no number of tokens"):
        read_lengths(str(file))


def test_longer_samples_are_cut_and_packed_ones_see_themselves() -> None:
    packed = lengths_of_job("100,200,900", None, seq_len=512, document_len=None)
    padded = lengths_of_job("100,200,900", "longest", seq_len=None, document_len=None)

    assert packed.lengths is not None
    assert (packed.seq_len, packed.lengths.longest) == (512, 512)
    assert packed.document_len == round(packed.lengths.of_token)
    assert (padded.seq_len, padded.document_len) == (960, None)
    with pytest.raises(DocumentError, match="follows from the lengths"):
        lengths_of_job("100,200,900", None, seq_len=None, document_len=100)


def test_a_plan_tells_the_mean_step_from_the_longest() -> None:
    answer = meshwright.search(
        "llama-3.2-1b", "1xa100-sxm-80gb", lora=["rank=8"], lengths="600,1800,4096",
        batching="longest", global_batch=16,
    )  # fmt: skip
    [mean] = [note for note in answer.prediction.notes if "step of mean samples" in note]

    assert answer.plan.seq_len == 4096
    assert "padding; time and memory above are those of the longest" in mean
    unpadded = meshwright.search(
        "llama-3.2-1b", "1xa100-sxm-80gb", lora=["rank=8"], lengths="600,1800,4096",
        global_batch=16,
    )  # fmt: skip
    assert unpadded.plan.document_len is not None
    assert unpadded.prediction.step_time_s < answer.prediction.step_time_s
