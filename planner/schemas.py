"""JSON Schemas of the documents, for editors: `python -m meshwright.planner.schemas [FOLDER]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from meshwright.planner.catalog.imports import Rents
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.document import Document, schema, write_text
from meshwright.planner.documents.framework import Framework
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.prediction import Certificate, Prediction
from meshwright.planner.documents.profile import Profile
from meshwright.planner.solver.problem_document import Problem
from meshwright.planner.whatif.study import Study

DOCUMENTS: tuple[type[Document], ...] = (
    ModelGraph,
    ClusterSpec,
    Profile,
    Plan,
    Prediction,
    Certificate,
    Problem,
    Study,
    Rents,
    Framework,
)
FOLDER = Path("docs/schemas")


def texts() -> dict[str, str]:
    """Return the text of every schema by its file name."""
    return {
        f"{cls.kind_of_document}.json": json.dumps(schema(cls), indent=2, sort_keys=True) + "\n"
        for cls in DOCUMENTS
    }


def main(folder: Path = FOLDER) -> None:
    """Write every schema to a folder."""
    for name, text in texts().items():
        write_text(text, folder / name)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
