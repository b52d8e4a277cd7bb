"""`make demo`: profile this machine, plan, train on real text, compare with the prediction.

Everything that the commands print a user of the tool would see; everything they write lies in
`demo/`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from meshwright.api import commands
from meshwright.launch import launch as launches
from meshwright.launch.attempt import LaunchResult
from meshwright.planner.documents import document
from meshwright.planner.documents.units import seconds_text
from meshwright.planner.errors import MeshwrightError
from meshwright.planner.errors.shown import lines
from meshwright.planner.report.terminal import Terminal
from meshwright.planner.report.text import time_text
from meshwright.planner.search.answer import Answer
from meshwright.render.text import comparison_cells, comparison_table, plan_text
from meshwright.runtime.run.launch_options import LaunchRun

MODEL, CLUSTER = "demo-4m", "local:2"
SEQ_LEN, GLOBAL_BATCH, STEPS = 128, 16, 30
FOLDER = Path("demo")

out = Terminal()


def main() -> int:
    """Run the demonstration; 0 means that it trained and compared."""
    started = time.monotonic()
    try:
        _demonstrate()
    except MeshwrightError as error:
        print(f"meshwright: {lines(str(error))}", file=sys.stderr)
        return 1
    out.print(f"\nall of it took {seconds_text(time.monotonic() - started)}")
    return 0


def _demonstrate() -> None:
    profile, plan = str(FOLDER / "profile.yaml"), str(FOLDER / "plan.yaml")

    out.rule("1. profile: what this machine does with this model")
    measured = commands.profile(
        MODEL, CLUSTER, seq_len=SEQ_LEN, global_batch=GLOBAL_BATCH, output=profile
    )
    out.print(
        f"{len(measured.layers)} layer settings and {len(measured.collectives)} collective curves "
        f"on {measured.birth.device} -> {profile}"
    )

    out.rule("2. plan: the fastest way, with proof")
    answer = commands.plan(
        MODEL, CLUSTER, profile=profile, seq_len=SEQ_LEN, global_batch=GLOBAL_BATCH, output=plan
    )
    assert isinstance(answer, Answer)
    document.write(answer.certificate, FOLDER / "certificate.yaml")
    document.write(answer.prediction, FOLDER / "prediction.yaml")
    out.print(plan_text(answer))
    out.print(f"-> {plan}")

    out.rule("3. launch: train by the plan on Python's own sources")
    run = launches.launch(plan, LaunchRun(steps=STEPS, output=FOLDER / "run"), profile=profile)
    assert isinstance(run, LaunchResult)
    losses = run.report.losses
    shown = [losses[i] for i in range(0, len(losses), max(1, len(losses) // 6))]
    out.print("loss " + " -> ".join(f"{loss:.3f}" for loss in [*shown, losses[-1]]))

    out.rule("4. prediction beside measurement")
    out.print(comparison_table(run.rows))
    out.print(f"predicted {time_text(run.prediction)}")
    page = commands.show(
        plan,
        profile=profile,
        html=str(FOLDER / "report.html"),
        certificate=answer.certificate,
        measured_rows=[comparison_cells(row) for row in run.rows],
    )
    out.print(f"report {page.html}, plan {plan}, profile {profile}, metrics {run.report.metrics}")


if __name__ == "__main__":
    sys.exit(main())
