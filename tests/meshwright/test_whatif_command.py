"""`whatif` by flags: own machines, quotes, purchases, and the study that they become."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.planner.documents import document
from meshwright.planner.errors import DocumentError
from meshwright.planner.whatif.candidates import candidates_of
from meshwright.planner.whatif.study import Study
from meshwright.studies import study_command as studies
from meshwright.studies.study_command import study_of


def test_flags_become_offers_on_their_terms() -> None:
    asked = study_of(
        model="gpt2",
        clusters=["8xh200-sxm"],
        owned=["8xa100-sxm-80gb"],
        reserved=["8xh100-sxm-80gb=2.10/36"],
        buy=["8xh200-sxm=38000", "8xb200"],
        electricity=0.08,
        utilisation=0.6,
    )

    rented, own, reserved, bought, listed = candidates_of(asked)

    assert rented.priced.hourly is not None and own.priced.owned
    assert reserved.priced.reservation is not None
    assert reserved.priced.reservation.years == 3.0
    # 2.10 of every hour is 3.50 of a used one at 60 %.
    assert reserved.priced.hourly is not None
    assert reserved.priced.hourly.useful_hour_usd(0.6).value == pytest.approx(3.5)
    assert bought.priced.purchase is not None and listed.priced.purchase is not None
    # (38,000 + 1,882 + 600) x 1.03.
    assert bought.priced.purchase.hardware_usd.value == pytest.approx(41_696.46)
    # 8 A100 draw (1.23 x 400 + 60) x 1.3 = 717.6 W each, at 8 cents 0.057408 an hour, of which a
    # quarter is drawn while they wait too.
    assert own.priced.hourly is not None
    assert own.priced.hourly.used.value == pytest.approx(0.75 * 0.057408)


def test_what_is_written_is_the_same_study_and_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studies, "run", lambda question, **_: question)
    said = {"model": "gpt2", "reserved": ["8xh100-sxm-80gb=2.10/36"], "buy": ["8xh200-sxm"]}
    said["electricity"] = 0.08
    path = tmp_path / "study.yaml"

    found = studies.whatif(write=str(path), **said)

    again = document.read(Study, path)
    assert again == study_of(**said) == found
    assert "goodput" not in path.read_text()  # defaults are not written
    assert again.offers[0].rent is not None
    assert again.offers[0].rent.date == datetime.date.today().isoformat()


def test_a_number_of_nodes_is_asked_for_where_it_is_left_open() -> None:
    asked = study_of(model="gpt2", clusters=["{n}x8xa10g", "8xl4"], solve="need", deadline_days=3.0)

    assert [offer.solve for offer in asked.offers] == ["need", None]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--reserved", "8xh100-sxm-80gb=2.10"],
            "reserved is '8xh100-sxm-80gb=2.10'; write a quote",
        ),
        (["--buy", "8xh200-sxm=cheap"], "buy is '8xh200-sxm=cheap'; write a price"),
        (["--clusters", "8xa10g", "--electricity", "-1"], "electricity"),
        (["--clusters", "8xa10g", "--utilisation", "1.5"], "utilisation"),
        (["--clusters", "8xa10g", "--precision", "fp7"], "precision"),
        (["--clusters", "{n}x8xa10g"], "cluster has {n}"),
        ([], "give a STUDY.yaml, or --model and --clusters"),
        (["--clusters", "8xa10g", "--lead-days", "0"], "lead-days: changes nothing without --buy"),
        (["--clusters", "8xa10g", "--quota", "4"], "quota: changes nothing without --solve"),
        (["--buy", "8xh200-sxm", "--wait-months", "6"], "wait-months: changes nothing without"),
        (["--clusters", "8xa10g", "--rent-change", "-0.2"], "rent-change: changes nothing"),
        (["--clusters", "8xa10g", "--solve", "need"], "solve: changes nothing without {n}"),
        (["--clusters", "8xa10g", "--wait-months", "-3"], "wait-months is -3"),
    ],
)
def test_wrong_flags_are_refused_by_name(
    flags: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["whatif", "--model", "gpt2", *flags]) == 1
    assert message in capfd.readouterr().err


def test_a_study_says_everything_itself(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="leave out --write"):
        studies.whatif("study.yaml", write=str(tmp_path / "other.yaml"))
