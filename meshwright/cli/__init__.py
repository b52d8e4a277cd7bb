"""The command line: translate arguments, call one function, show the answer.

Results go to stdout, messages and progress bars to stderr; `--json` prints one JSON object and
nothing else, `{"error": ...}` of a failure.  Exit 0 done, 1 the user must act, 2 wrong usage; a
traceback is our bug.  A command's module names its options; what it needs is imported when it runs.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
import traceback
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.console import print_message, refuse
from meshwright.cli.examples import epilog
from meshwright.planner.errors import DocumentError, Interrupted, MeshwrightError
from meshwright.planner.errors.shown import lines
from meshwright.planner.system.stdout_guard import results_apart, stdout_is_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

START = """\b
First plan:
  meshwright plan llama-3.1-8b --cluster 8xh100-sxm-80gb -o plan.yaml

Options that are not given come from MESHWRIGHT_CLUSTER, MESHWRIGHT_FRAMEWORK, MESHWRIGHT_PRECISION,
MESHWRIGHT_PRICES, else from ~/.config/meshwright/defaults.yaml; the answer lists them.
"""


def _version(asked: bool) -> None:
    if asked:
        from meshwright.api.version import version

        print(version())
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and end"
        ),
    ] = False,
) -> None:
    """Find the fastest way to train your model on your machines, prove it, and run it."""


COMMANDS = {
    "plan": "plans.plan",
    "compare": "plans.compare",
    "import": "plans.import_",
    "predict": "plans.predict",
    "solve": "plans.solve",
    "tune": "measured_runs.tune",
    "launch": "runs.launch",
    "run": "runs.run",
    "watch": "runs.watch",
    "export": "plans.export",
    "profile": "runs.profile",
    "show": "plans.show",
    "validate": "measured_runs.validate",
    "calibrate": "measured_runs.calibrate",
    "whatif": "hardware.whatif",
    "catalog": "hardware.catalog",
}
"""Commands in the order of the help, each with its function."""
INTERRUPTED = Interrupted.status
"""Exit status of a command that Ctrl-C ended."""
LOST = (errno.EPIPE, errno.ENOSPC)
"""Errors of an output without a reader, or without room."""
WRONG_USAGE: Any = typer.BadParameter.__mro__[1]
"""All errors of arguments; typer names this one of them."""

WRITTEN = {
    "int_parsing": "is not a whole number; write all digits, as in 32768",
    "int_from_float": "is not a whole number; write all digits, as in 32768",
    "float_parsing": "is not a number; write it as in 0.5 or 1e-4",
    "bool_parsing": "is neither true nor false; write one of them",
}
"""What a refused value of an option is, and how it is written, by the kind of pydantic's error."""


def command_of(name: str) -> Callable[..., None]:
    """Return the function of a command."""
    module, function = COMMANDS[name].split(".")
    command: Callable[..., None] = getattr(
        importlib.import_module(f"meshwright.cli.{module}"), function
    )
    return command


def app(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """Return the command line with some of its commands, whose modules are imported."""
    line = typer.Typer(
        help="Finds the fastest way to train your model on your machines that fits in memory, "
        "proves it, and runs it.",
        no_args_is_help=True,
        epilog=START,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    line.callback()(_options)
    for name in names:
        # Behind `run SCRIPT` come the script's own options.
        settings = {"allow_interspersed_args": name != "run"}
        line.command(name, epilog=epilog(name), context_settings=settings)(command_of(name))
    return line


def main(arguments: list[str] | None = None) -> int:
    """Run one command; 0 means done, 1 the user must act, 2 wrong usage, 75 start it again."""
    # No process that it starts imports modules that lie in the current folder.
    os.environ["PYTHONSAFEPATH"] = "1"
    words = sys.argv[1:] if arguments is None else arguments
    json = "--json" in words and words[0] != "run"  # whose words are its script's
    apart = results_apart() if json else contextlib.nullcontext()
    try:
        with apart:
            try:
                called = words[:1] if words[:1] and words[0] in COMMANDS else COMMANDS
                status = (
                    app(called)(args=arguments, standalone_mode=False, prog_name="meshwright") or 0
                )
            finally:
                hub = sys.modules.get("meshwright.planner.catalog.hub")
                while hub and hub.FETCHED:
                    print_message(str(hub.FETCHED.pop(0)))
        if status == INTERRUPTED:
            print_message("interrupted")
            _fail(json, "Interrupted", "interrupted", INTERRUPTED)
    except MeshwrightError as error:
        if not error.is_printed:
            refuse(str(error))
        return _fail(json, type(error).__name__, str(error), error.status, _place(error))
    except WRONG_USAGE as error:
        _show_value(error)
        error.show()
        return _fail(json, "UsageError", error.format_message(), error.exit_code)
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except Exception as error:
        if isinstance(error, OSError) and (stdout_is_lost() or error.errno in LOST):
            return 1
        _fail(json, "Bug", f"{type(error).__name__}: {error}", 1)
        sys.excepthook = _bug  # what is raised may quote a document
        raise
    return status


def _show_value(error: Any) -> None:
    """Say which value of an option was refused, and how it is written."""
    findings = getattr(error.__cause__, "errors", None)
    if findings is None:
        return
    first = findings()[0]
    way_out = WRITTEN.get(first["type"], f"is refused: {first['msg']}")
    error.message = f"'{first['input']!s:.60}' {way_out}"


def _fail(
    json: bool, kind: str, message: str, status: int, place: dict[str, str] | None = None
) -> int:
    """Return the status; with `json`, the failure is the one object that is printed."""
    if json:
        from meshwright.render.json_output import as_json

        failure = {"kind": kind, "message": message, "status": status, **(place or {})}
        with contextlib.suppress(OSError):  # nobody reads it
            print(as_json({"error": failure}), flush=True)
    return status


def _place(error: MeshwrightError) -> dict[str, str]:
    """Return the place of an error in a document: its file, and the path in it."""
    if not isinstance(error, DocumentError):
        return {}
    place = {"file": error.file, "path": error.path}
    return {name: value for name, value in place.items() if value}


def _bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback, which is our bug, as text."""
    print(lines("".join(traceback.format_exception(kind, error, trace))), file=sys.stderr, end="")
