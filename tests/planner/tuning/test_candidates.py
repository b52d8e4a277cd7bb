"""Candidates are plans that may be faster than the one predicted fastest, of different kinds."""

from typing import Any

import pytest

from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.requests.pins import read_pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.answer import Answer
from meshwright.planner.search.search import search
from meshwright.planner.tuning import candidates as module
from meshwright.planner.tuning.candidates import CHANCE, candidates


def request_on(cluster: str, fix: str) -> Request:
    return Request.create(
        resolve_model("demo-4m"),
        resolve_cluster(cluster),
        seq_len=128,
        global_batch=16,
        pins=read_pins([fix]),
    )


def test_candidates_may_win_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VARIED", 1)
    request = request_on("4xa100-sxm-80gb", "compile=none,loss=full")
    answer = search(request)

    found = candidates(request, answer)

    assert found[0].plan == answer.plan
    assert len({one.plan.digest for one in found}) == len(found) > 3
    chances = module._chances([one.option for one in found])
    assert min(chances[1:]) >= CHANCE / 2  # among all of them at least CHANCE
    assert len({one.option.family for one in found}) > 2
    one = answer.plan
    varied = list(module._variants(request.pins, one))
    assert {pins.micro_batch for pins in varied} == {one.micro_batch // 2, None}  # 8 is too many
    assert [pins.recompute for pins in varied if pins.micro_batch is None] == ["full"]
    assert {pins.data for pins in varied} == {one.layout.data}


def test_searches_for_candidates_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VARIED", 1)
    request = request_on("2x2xa100-sxm-80gb", "compile=none,loss=full,pp=2")
    answer = search(request)
    answers: list[Answer] = []

    def watched(*arguments: Any, **named: Any) -> Answer:
        answers.append(search(*arguments, **named))
        return answers[-1]

    monkeypatch.setattr(module, "search", watched)
    candidates(request, answer)

    assert len(answers) > 2
    assert any(answer.certificate.looked_at.values())
    assert not any(count for one in answers for count in one.certificate.looked_at.values())


def test_the_first_of_each_family_comes_before_the_second_of_any() -> None:
    class Fake:
        def __init__(self, family: str) -> None:
            self.option = type("O", (), {"family": family})

    every = [Fake(name) for name in "aabac"]

    order = module._diverse(every, [0, 1, 2, 3, 4])  # type: ignore[arg-type]

    assert "".join(every[at].option.family for at in order) == "abcaa"
