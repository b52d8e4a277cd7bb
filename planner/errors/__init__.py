"""Every error this project raises on purpose.

    MeshwrightError
    ├── DocumentError     a document or argument does not say what it must; carries file and path
    ├── NoPlanFits        the search ended without a plan; carries the closest miss
    ├── LaunchError       the plan is fine, this machine or this run is not
    │   ├── HandedOver    a notice ended the run, and it is saved
    │   ├── Interrupted   Ctrl-C ended the run
    │   ├── PlanError     the plan is of another module or batch, or of other ranks
    │   └── EngineAttributeError    a name that torch's wrappers have and an Engine has not
    ├── RecordError       a module's forward cannot be recorded; carries the line of its code
    ├── BatchError        a batch, or what a loss made of it, is not what a step takes
    └── OptimizerError    an optimizer cannot be used under this plan

Anything else that escapes is a bug in Meshwright, and the command line says so.
"""

from __future__ import annotations

from meshwright.planner.errors.shown import one_line


class MeshwrightError(Exception):
    """Root of the errors a user can act on."""

    status = 1
    """Exit status of the process that the error ends."""
    is_printed = False
    """True if its message was printed when it came, and is not printed again at the end."""


class DocumentError(MeshwrightError):
    """A document is wrong at `path` (`stages[1].layers[3].recompute`), in `file` if it has one."""

    def __init__(self, path: str, message: str, *, file: str | None = None) -> None:
        self.path = path
        self.message = message
        self.file = file
        where = (one_line(part) for part in (file, path) if part)
        super().__init__(": ".join((*where, message) if message else where))

    def __reduce__(self) -> tuple[object, ...]:
        """Go to other processes as it is: its text alone would not make it again."""
        return _document_error, (self.path, self.message, self.file)

    def in_file(self, file: str) -> DocumentError:
        """Return the same error with the file it came from."""
        return DocumentError(self.path, self.message, file=file)


def _document_error(path: str, message: str, file: str | None) -> DocumentError:
    return DocumentError(path, message, file=file)


class NoPlanFits(MeshwrightError):  # noqa: N818 - reads as the sentence that it is
    """No plan in the space fits in memory; the message names the closest miss."""


class NoneFaster(NoPlanFits):
    """No plan takes less than what was asked for; the search did not check whether any fits."""


class LaunchError(MeshwrightError):
    """The plan is valid, but this machine or this run cannot carry it out."""


class HandedOver(LaunchError):  # noqa: N818 - reads as the sentence that it is
    """A notice ended the run after a step, and it is saved: start it again to go on."""

    status = 75
    """EX_TEMPFAIL: who tries again, succeeds."""


class Interrupted(LaunchError):  # noqa: N818 - reads as the sentence that it is
    """Ctrl-C ended a run; the message says after which step, and what was saved."""

    status = 130
    """Exit status that shells use for SIGINT."""


class PlanError(LaunchError):
    """A plan was made for another module, another batch or other ranks than are here."""


class EngineAttributeError(LaunchError, AttributeError):
    """An Engine has no such attribute; names what to write instead."""


class RecordError(MeshwrightError):
    """A module's forward cannot be recorded: what it does, where, and the way out."""

    def __init__(self, message: str, *, where: str | None = None) -> None:
        self.message = message
        self.where = where
        super().__init__(": ".join(part for part in (where, message) if part))


class BatchError(MeshwrightError):
    """A batch, or what a loss made of it, is not what a step takes; names the leaf."""


class OptimizerError(MeshwrightError):
    """An optimizer cannot be made, or not over parameters that are divided; names it."""
