"""Published trainings are read, tuned where they say nothing, and held in their own units."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.public_facts import ratios_text, trainings_text
from benchmarks.whole_trainings import Outcome, framework_words, model_flops, outcome
from meshwright.planner.catalog.expressions import resolve_model

ROW = {
    "name": "llama-3.1-8b-torchtitan-bf16-eager",
    "model": "llama-3.1-8b",
    "accelerator": "h100-hbm2e-96gb",
    "nodes": "1",
    "devices_per_node": "8",
    "precision": "bf16",
    "seq_len": "8192",
    "global_batch": "16",
    "tokens": "1000000000",
    "measure": "step_s",
    "value": "2.844",
    "layout": "zero=3,dp=8,micro_batch=2,recompute=selective",
    "certainty": "sure",
    "source": "torchtitan, published benchmarks",
}


@pytest.fixture(scope="module")
def held() -> Outcome:
    """The row, in seconds of a step."""
    return outcome(ROW)


def test_one_training_in_every_unit(held: Outcome) -> None:
    """Units are definitions: hours are steps times seconds times devices, rates their inverse."""
    step_s, tokens = held.predicted, 16 * 8192
    hours = outcome({**ROW, "measure": "device_hours", "value": "1"})
    assert hours.predicted == pytest.approx(1e9 / tokens * step_s * 8 / 3600)
    rate = outcome({**ROW, "measure": "tokens_per_s_per_device", "value": str(tokens / 8 / 2.844)})
    assert rate.predicted == pytest.approx(tokens / 8 / step_s)
    # A rate below the published one and a step above it are the same error.
    assert rate.error == pytest.approx(held.error)
    assert rate.in_range == held.in_range


def test_megatron_counts_half_of_attention() -> None:
    """Published: 1,602 tokens/s and 719 TFLOP/s on the same device, Llama-3-70B at 8,192 tokens
    (Megatron Bridge, performance summary 25.11)."""
    model = resolve_model("llama-3-70b")
    causal = model_flops(model, 8192, 1, causal=True) / 8192
    assert causal * 1602 / 1e12 == pytest.approx(719, rel=0.005)
    assert model_flops(model, 8192, 1, causal=False) / 8192 > 1.06 * causal


def test_frameworks_of_their_day() -> None:
    """A name, a source or a layout tells the framework; a column does so before them."""
    assert framework_words(ROW)[0] == "torchtitan"
    old = {"name": "gpt3-zero3", "source": "Narayanan et al. (SC21)", "layout": "zero=3"}
    assert framework_words(old)[0].startswith("deepspeed")
    assert framework_words({**old, "name": "gpt3-ptdp"})[0] == "megatron"
    assert framework_words({**old, "framework": "nanotron"})[0] == "nanotron"
    assert framework_words({"name": "x", "source": "a paper", "layout": ""})[0] == ""


def test_what_is_told_is_kept_and_what_is_open_is_tuned(held: Outcome) -> None:
    """An open micro-batch is never slower than one that is told."""
    assert "micro_batch=2" in held.layout
    open_ = outcome({**ROW, "layout": "zero=3,dp=8"})
    assert open_.predicted <= held.predicted


def test_tables(held: Outcome) -> None:
    """Scores are of the rows shown, and ratios of seconds are turned round."""
    far = replace(held, name="far", published=held.predicted / 2)
    text = trainings_text([held, far], {"lost": "no such thing"})
    assert "| far | torchtitan" in text and "+100.0%" in text
    assert "1 of 2 above 35%" in text
    assert "far (+100%" in text and "no mechanism is known" in text
    assert "not predicted: no such thing" in text
    early = replace(held, name="gpt3-175b-ptdp-384", predicted=4.0, published=4.0)
    late = replace(held, name="gpt3-175b-ptdp-1536", predicted=1.0, published=2.0)
    assert "| 2.00 times | 4.00 times | +100% |" in ratios_text([early, late])
    # Half of the samples for each device: half of the rate.
    fewer = replace(late, samples=late.samples / 2)
    assert "| 1.00 times | 2.00 times | +100% |" in ratios_text([early, fewer])
    assert ratios_text([early]) == ""


@pytest.mark.matrix
def test_published_gains_of_eight_bits_and_of_wider_memory() -> None:
    """torchtitan's and torchao's tables: each within 20 %, ratios within 10.

    But for cards of limited power or, of MI300X, of a curve that was quoted, which are held by
    ratios alone; and for rows scaled under tensor parallelism, whose rate their authors call low.
    """
    with Path("benchmarks/public_trainings.csv").open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["name"].startswith("torch")]
    rows = [row for row in rows if "-cp" not in row["name"]]  # rings of 2024, docs say how far off

    found = {row["name"]: outcome(row) for row in rows}

    assert len(found) == 31
    known = {
        name for name in found if any(card in name for card in ("b200", "mi300x", "blackwell"))
    }
    far = {name: each.error for name, each in found.items() if abs(each.error) > 0.2}
    assert set(far) <= known
    low = {"torchtitan-70b-256-rowwise", "torchtitan-8b-64-tp8-rowwise"}
    found = {name: each for name, each in found.items() if name not in low}
    table = ratios_text(list(found.values()))
    off = [abs(int(line.split("|")[-2].strip(" %"))) for line in table.splitlines()[2:]]
    assert len(off) == 18
    assert max(off) <= 10
    peaks = [
        each.peak_bytes / each.published_peak_bytes - 1
        for each in found.values()
        if each.published_peak_bytes
    ]
    # Reserved bytes, of FSDP alone and with tensor parallelism.
    assert max(abs(peak) for peak in peaks) <= 0.15
    assert len(peaks) == 9


@pytest.mark.matrix
def test_published_ratios_of_devices_and_of_counts_hold_within_a_tenth() -> None:
    """MLPerf Training 5.0 and 5.1, Llama-3.1-405B: H200, B200 and GB200 against H100, and 512 to
    8,192 devices; none of these runs was fitted to."""
    with Path("benchmarks/public_trainings.csv").open(newline="") as lines:
        rows = [
            row for row in csv.DictReader(lines) if row["name"].startswith("llama-3.1-405b-nemo")
        ]

    found = [outcome(row) for row in rows]

    assert len(found) == 15
    assert {each.name: each.error for each in found if abs(each.error) > 0.15} == {}
    table = ratios_text(found).splitlines()[2:]
    assert len(table) == 9
    assert [line for line in table if abs(int(line.split("|")[-2].strip(" %"))) > 10] == []
