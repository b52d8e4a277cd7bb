"""JSON Schemas of the documents, for editors: `python -m planner.schemas [FOLDER]` writes them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from planner.catalog.imports import Rents
from planner.documents.cluster import ClusterSpec
from planner.documents.document import Document, schema, write_text
from planner.documents.model import ModelGraph
from planner.documents.plan import Plan
from planner.documents.prediction import Certificate, Prediction
from planner.documents.profile import Profile
from planner.documents.stack import Stack
from planner.solver.problem import Problem
from planner.whatif.study import Study

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
    Stack,
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
