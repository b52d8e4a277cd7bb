"""Plans that no prediction tells apart are called ties, and the simpler one is named."""

from meshwright.planner.documents.prediction import Certificate, Finalist, Loser, Prediction
from meshwright.planner.report.text import parts, tie_text, ties


def test_simulated_plans_within_the_bar_tie() -> None:
    prediction = Prediction(
        layout="best",
        step_time_s=1.0,
        step_time_low_s=0.8,
        step_time_high_s=1.5,
        step_parts={"forward": 0.5, "data communication": 0.5},  # 10 % and 15 % of these
        tokens_per_s=1.0,
        mfu=0.1,
        fits=True,
        stages=(),
    )
    certificate = Certificate(
        statement="s",
        model="m",
        solver="exact",
        optimal=True,
        objective_s=1.0,
        lower_bound_s=1.0,
        gap=0.0,
        configurations=3,
        counts={},
        runners_up=(Loser(layout="bounded", lower_bound_s=1.0, reason="bound"),),
        finalists=(
            Finalist(layout="best", closed_form_s=2.0, step_time_s=1.0),
            Finalist(layout="near", closed_form_s=2.0, step_time_s=1.12),
            Finalist(layout="far", closed_form_s=2.0, step_time_s=1.13),
        ),
    )

    assert ties(prediction, certificate) == ["near"]


def test_the_simpler_of_ties_is_named_only_where_it_is_simpler() -> None:
    best, plain = (
        "tp=2 pp=4 dp=8 zero=1 1f1b micro_batch=1x8",
        "tp=1 pp=1 dp=64 zero=3 micro_batch=1x1",
    )

    told = tie_text(best, [plain], 1.0, 2.0)

    assert plain in told
    assert parts(plain) < parts(best)
    assert "simplest" not in tie_text(plain, [best], 1.0, 2.0)
    assert tie_text(best, [], 1.0, 2.0) == ""
