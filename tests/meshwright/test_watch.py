"""`watch`: what a run's folder says of it, in a terminal, as JSON, as a page, to be shared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright import cli
from meshwright.launch.watch import slowness_text
from meshwright.planner.documents.document import json_line, write
from meshwright.planner.documents.events import (
    Attempt,
    AttemptEnded,
    Decision,
    Drift,
    Event,
    Expected,
    Incident,
    Paced,
    PhaseDone,
    RankPart,
    Saved,
    StepDone,
    StepRecord,
)
from meshwright.planner.report import run_page
from meshwright.planner.whatif.run_status import run_view
from meshwright.runtime.run.run_folder import (
    RankOrders,
    events_file,
    evidence_folder,
    orders_file,
    plan_file,
)
from tests.runtime.rooms import plan_of

EVIDENCE = (
    "rank 1 waits for others at node7.corp.local:29500 <script>: all_reduce at "
    "/home/ann/gradients.py:280; /data/secret/saved is complete"
)


def step(number: int, at_s: float) -> StepDone:
    record = StepRecord(step=number, loss=5.0 - number / 10, grad_norm=1.0, step_s=2.0, epoch=0)
    return StepDone(at_unix_s=at_s, record=record, predicted_s=1.5)


# Five steps of 2 s, rank 1 hangs, steps 4 and 5 are done again 24 s after the last step.
HAPPENED: list[Event] = [
    Expected(
        at_unix_s=100.0,
        seconds={"steps": 120.0, "start": 10.0},
        failures=0.01,
        goodput=0.5,
        goodput_low=0.4,
        goodput_high=0.6,
    ),
    Attempt(at_unix_s=100.0, plan="p", devices=2),
    *[step(number, 110.0 + 2 * number) for number in range(1, 6)],
    Saved(at_unix_s=120.0, step=3, blocked_s=0.25, written_s=1.0),
    Drift(
        at_unix_s=120.0,
        cause="data",
        rank=1,
        stage=0,
        after_step=5,
        measured_s=2.0,
        predicted_s=1.5,
        text="steps take 2 s, and 1 s to 1.6 s were predicted: rank 1 reads a batch in 500 ms",
    ),
    Paced(
        at_unix_s=120.0,
        after_step=5,
        ranks=(RankPart(rank=1, data_s=0.5, work_s=1.25, step_s=2.0),),
    ),
    Incident(at_unix_s=134.0, cause="hang", rank=1, after_step=5, evidence=EVIDENCE),
    Decision(
        at_unix_s=135.0, reaction="restart", why="it happened once here", predicted_s=9.0, devices=2
    ),
    Attempt(at_unix_s=136.0, plan="p", devices=2, after_step=3),
    PhaseDone(at_unix_s=142.0, phase="start", measured_s=6.0, predicted_s=9.0),
    *[step(number, 146.0 + 2 * (number - 4)) for number in range(4, 7)],
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "night"
    folder.mkdir()
    events_file(folder).write_text("".join(map(json_line, HAPPENED)))
    write(plan_of(data=2), plan_file(folder))
    orders = RankOrders(
        token="t", output=folder, corpus=folder, device="cpu", started_unix_s=0.0, steps=9
    )
    write(orders, orders_file(folder))
    kept = evidence_folder(folder, 1)
    kept.mkdir(parents=True)
    (kept / "rank-00001.stack").write_text('File "/home/ann/gradients.py", line 280 in measured')
    (kept / "other").write_text("not ours")
    return folder


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["watch", *words]) == 0
    return capsys.readouterr().out


def test_a_run_is_told_with_what_was_predicted(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, str(run), "--once")

    assert "tiny, 2 devices, tp=1 pp=1 dp=2" in text
    assert "state     silent for" in text
    assert "step      6 of 9, loss 4.4000" in text
    assert "2 s a step, 1.5 s predicted" in text
    # 12 s of steps that count in 50 s.
    assert "24.0 %, 50.0 % predicted (40.0 to 60.0)" in text
    assert "1 hang; 2 steps done again" in text
    assert "rank 1 (stage 0): reads a batch in 500 ms, works 1.25 s" in text
    assert "restart" in text and "28.0 s, 2 steps again" in text


def test_what_was_not_predicted_is_not_said_to_take_no_time(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = [one for one in HAPPENED if not isinstance(one, Expected)]
    events_file(run).write_text("".join(map(json_line, told)))

    text = said(capsys, str(run), "--once")

    seconds = text[text.index("Seconds") :]
    assert "-" in seconds and "0 µs" not in seconds


def test_json_has_the_figures(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(said(capsys, str(run), "--json"))

    assert (found["step"], found["steps"], found["steps_lost"]) == (6, 9, 2)
    assert found["goodput"] == pytest.approx(12 / 50)
    assert found["seconds"]["restarts"] == 24.0
    assert found["tables"]["Incidents"] == [
        {
            "no.": "1",
            "after step": "5",
            "cause": "hang",
            "where": "rank 1",
            "done": "restart",
            "lost": "28.0 s, 2 steps again",
        }
    ]


def test_an_incident_is_a_report_with_stacks_and_what_is_to_do(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = " ".join(said(capsys, str(run), "--incident", "1").split())

    assert "1970-01-01 00:02:14 UTC, after step 5" in text
    assert "restart, because it happened once here" in text
    assert "training should go on in 9 s" in text
    assert "Stack of rank 1 File" in text
    assert "If it comes again on this rank, its node is bad" in text
    assert "not ours" not in text


def test_a_page_stands_alone_and_is_read_again_only_while_the_run_lives(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = run.parent / "page.html"
    said(capsys, str(run), "--incident", "1", "-o", str(page))
    incident = page.read_text()
    said(capsys, str(run), "--once", "-o", str(page))
    html = page.read_text()

    assert "&lt;script&gt;" in incident and "<script" not in incident + html
    assert "http-equiv" not in html
    assert "<figure" in html and "Seconds a step" in html
    ended = AttemptEnded(at_unix_s=200.0, stopped="steps", after_step=9)
    with events_file(run).open("a") as lines:
        lines.write(json_line(ended))
    assert "ended after step 9 (steps)" in said(capsys, str(run), "-o", str(page))


def test_what_is_shared_names_no_host_no_user_and_no_path(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = run.parent / "page.html"
    shown = said(capsys, str(run), "--incident", "1", "--share", "-o", str(page))
    told = said(capsys, str(run), "--share", "--json")

    for text in (shown, page.read_text(), told):
        assert not {word for word in ("ann", "secret", "corp", "/data", "/home") if word in text}
    assert "gradients.py" in shown
    assert "rank 1" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["."], "has no events.jsonl; name the folder of a run"),
        (["night", "--incident", "7"], "incident is 7; those of this run are 1"),
    ],
)
def test_what_is_no_run_or_no_incident_is_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    words: list[str], message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(run.parent)

    assert cli.main(["watch", *words, "--once"]) == 1
    assert message in capsys.readouterr().err


def test_what_is_lost_before_the_first_step_is_counted_from_the_begin() -> None:
    crash = Incident(at_unix_s=109.0, cause="crash", rank=1, after_step=0, evidence="killed")
    again = Attempt(at_unix_s=110.0, plan="p", devices=2)

    (case,) = run_view([*HAPPENED[:2], crash, again, step(1, 120.0)]).cases

    assert case.lost_s == 120.0 - 2.0 - 100.0


def test_a_run_that_was_stopped_is_not_silent(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    crash = Incident(at_unix_s=160.0, cause="crash", rank=1, after_step=6, evidence="killed")
    stop = Decision(at_unix_s=161.0, reaction="stop", why="it ended 3 times after the same step")
    with events_file(run).open("a") as file:
        file.writelines(json_line(event) for event in (crash, stop))

    text = said(capsys, str(run), "--once")

    assert "state     stopped after step 6" in text


def test_a_run_that_is_many_times_slower_is_shouted_above_everything() -> None:
    """By hand: 28 s for 1 s are 28 times; twice as slow is within what ranges allow."""
    slow = slowness_text(28.0, 1.0)
    html = run_page.page(run_page.RunReading(title="a run", facts=(), alarm=slow))
    near = slowness_text(2.0, 1.0)
    calm = run_page.page(run_page.RunReading(title="a run", facts=(), alarm=near))

    assert html.index('role="alert">28 times slower') < html.index('aria-label="State"')
    assert 'role="alert"' not in calm
