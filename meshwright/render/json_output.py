"""Answers of commands with --json."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.api.commands import ImportedPlan, PlanImprovement
    from meshwright.launch.attempt import LaunchResult
    from meshwright.launch.schedulers import Submission
    from meshwright.planner.documents.prediction import Prediction
    from meshwright.planner.search.answer import Alternative, Answer
    from meshwright.profiler.profile import ProfileAgenda
    from meshwright.runtime.checkpoint.weight_export import Exported


def answer_json(answer: Answer) -> dict[str, Any]:
    """Return the output of `plan --json`."""
    prediction = answer.prediction
    return {
        "plan": answer.plan.model_dump(mode="json", exclude_none=True),
        "layout": prediction.layout_text,
        "step_time_s": prediction.step_time_s,
        "step_time_low_s": prediction.step_time_low_s,
        "step_time_high_s": prediction.step_time_high_s,
        "tokens_per_s": prediction.tokens_per_s,
        "mfu": prediction.mfu,
        "fits": prediction.fits,
        "idle_devices": prediction.idle_devices,
        "notes": list(prediction.notes),
        "peak_memory_bytes": [
            {"total": stage.peak_memory_bytes, "parts": stage.memory_parts}
            for stage in prediction.stages
        ],
        "certificate": answer.certificate.model_dump(mode="json", exclude_none=True),
        "top": [
            {
                "layout": ranked.prediction.layout_text,
                "closed_form_s": ranked.objective_s,
                "step_time_s": ranked.prediction.step_time_s,
                "plan": ranked.plan.model_dump(mode="json", exclude_none=True),
            }
            for ranked in answer.top
        ],
        "choices": choices_json(answer.choices),
        "search_s": answer.search_s,
    }


def run_json(run: LaunchResult) -> dict[str, Any]:
    """Return the output of `launch --json`."""
    return {
        "report": run.report.model_dump(mode="json", exclude_none=True),
        "prediction": run.prediction.model_dump(mode="json", exclude_none=True),
        "comparison": [
            {
                "quantity": row.quantity,
                "unit": row.unit,
                "predicted": row.predicted,
                "measured": row.measured,
                "error": row.error,
            }
            for row in run.rows
        ],
    }


def job_json(written: Submission) -> dict[str, Any]:
    """Return the output of `launch --on slurm --json`."""
    file = None if written.file is None else str(written.file)
    return {"job": written.text, "file": file, "said": written.said}


def export_json(written: Exported) -> dict[str, Any]:
    """Return the output of `export --json`."""
    return {
        "checkpoint": str(written.checkpoint),
        "step": written.step,
        "folder": str(written.folder),
        "files": list(written.files),
        "parameters": written.parameters,
        "bytes": written.size_bytes,
    }


def as_json(data: object) -> str:
    """Return one JSON object as text."""
    return json.dumps(data, indent=2)


def agenda_json(agenda: ProfileAgenda) -> dict[str, Any]:
    """Return the output of `profile --dry-run --json`."""
    return {
        "cluster": agenda.machine.name,
        "ranks_of_nodes": list(agenda.counts),
        "budget_s": {
            "each_group": agenda.budget.group_s,
            "pairs_of_nodes": agenda.budget.pairs_s,
            "layers": agenda.budget.layers_s,
        },
        "groups": [
            {"tier": g.tier, "ranks": g.ranks, "stride": g.stride, "inner": g.inner}
            for g in agenda.groups
        ],
        "layers": [
            {
                "tensor": w.tensor,
                "micro_batch": w.micro_batch,
                "recompute": w.recompute,
                "value": w.value,
            }
            for w in agenda.wishes
        ],
    }


def choices_json(choices: Sequence[Alternative]) -> list[dict[str, Any]]:
    """Return plans beside the fastest as plain data; `more` is time beyond its, relatively."""
    return [
        {
            "what": choice.what,
            "layout": choice.prediction.layout_text if choice.prediction else None,
            "step_time_s": choice.prediction.step_time_s if choice.prediction else None,
            "more": choice.more,
            "peak_memory_bytes": choice.peak_bytes,
            "fits": choice.prediction.fits if choice.prediction else None,
            "notes": list(choice.prediction.notes) if choice.prediction else [],
            "why": choice.why,
        }
        for choice in choices
    ]


def improved_json(improved: PlanImprovement) -> dict[str, Any]:
    """Return the output of `compare --best --json`; seconds, bytes."""
    sides = {
        "mine": (improved.mine, improved.prediction),
        "best": (improved.best.plan, improved.best.prediction),
    }
    return {
        **{
            name: {
                "layout": prediction.layout_text,
                "step_time_s": prediction.step_time_s,
                "step_time_low_s": prediction.step_time_low_s,
                "step_time_high_s": prediction.step_time_high_s,
                "step_parts": prediction.step_parts,
                "peak_memory_bytes": _peak(prediction),
                "fits": prediction.fits,
                "notes": list(prediction.notes),
            }
            for name, (plan, prediction) in sides.items()
        },
        "changes": [
            {
                "what": change.what,
                "saved_s": change.saved_s,
                "step_time_s": change.prediction.step_time_s,
                "peak_memory_bytes": _peak(change.prediction),
                "fits": change.prediction.fits,
            }
            for change in improved.changes
        ],
        "warnings": list(improved.warnings),
    }


def _peak(prediction: Prediction) -> float:
    """Return memory of the fullest device."""
    return max(stage.peak_memory_bytes for stage in prediction.stages)


def imported_json(imported: ImportedPlan) -> dict[str, Any]:
    """Return the output of `import --json`."""
    return {
        "plan": imported.plan.model_dump(mode="json", exclude_none=True),
        "layout": imported.prediction.layout_text,
        "assumed": list(imported.assumed),
        "unknown": list(imported.unknown),
        "without_effect": list(imported.without_effect),
        "not_understood": list(imported.not_understood),
        "prediction": imported.prediction.model_dump(mode="json", exclude_none=True),
    }
