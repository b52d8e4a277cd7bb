"""Figures of a run as a table."""

import csv
from collections.abc import Mapping
from pathlib import Path


class Table:
    """Writes `table.csv` into the run's folder: a line a step."""

    def __init__(self, *, output: Path, first: int, config: Mapping[str, object]) -> None:
        """`first` is the step from which it is told, `config` the plan."""
        self._file = (output / "table.csv").open("w", newline="")
        self._lines = csv.writer(self._file)
        self._lines.writerow(["step", "loss"])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a step's loss."""
        self._lines.writerow([step, values["loss"]])

    def close(self) -> None:
        """Close the file."""
        self._file.close()
