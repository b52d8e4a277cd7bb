"""The command line: translate arguments, call one function, show the answer.

Results go to stdout, talk and progress bars to stderr; `--json` prints one JSON object and nothing
else.  Exit 0 done, 1 the user must act, 2 wrong usage; a traceback is our bug.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from importlib import metadata
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli import figures, plans, runs, tunes
from meshwright.cli.console import say
from meshwright.examples import epilog
from planner.errors import MeshwrightError
from planner.errors.shown import lines
from planner.process.descriptors import results_apart

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

START = """\b
First plan:
  meshwright plan llama-3.1-8b --cluster 8xh100-sxm-80gb -o plan.yaml

Options that are not given come from MESHWRIGHT_CLUSTER, MESHWRIGHT_BACKEND, MESHWRIGHT_PRECISION,
MESHWRIGHT_PRICES, else from ~/.config/meshwright/defaults.yaml; the answer lists them.
"""

app = typer.Typer(
    help="Finds the fastest way to train your model on your machines that fits in memory, "
    "proves it, and runs it.",
    no_args_is_help=True,
    epilog=START,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        print(f"meshwright {metadata.version('meshwright')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and end"
        ),
    ] = False,
) -> None:
    """Find the fastest way to train your model on your machines, prove it, and run it."""


COMMANDS: dict[str, Callable[..., None]] = {
    "plan": plans.plan,
    "compare": plans.compare,
    "import": plans.import_,
    "predict": plans.predict,
    "solve": plans.solve,
    "tune": tunes.tune,
    "launch": runs.launch,
    "run": runs.run,
    "export": plans.export,
    "profile": runs.profile,
    "show": plans.show,
    "validate": figures.validate,
    "calibrate": figures.calibrate,
    "whatif": figures.whatif,
    "catalog": figures.catalog,
}
"""In the order of the help."""

for _name, _command in COMMANDS.items():
    # Behind `run SCRIPT` come the script's own options.
    _settings = {"allow_interspersed_args": _name != "run"}
    app.command(_name, epilog=epilog(_name), context_settings=_settings)(_command)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; 0 means done, 1 the user must act, 2 wrong usage, 75 start it again."""
    # No process that it starts imports modules that lie in the current folder.
    os.environ["PYTHONSAFEPATH"] = "1"
    words = sys.argv[1:] if arguments is None else arguments
    apart = results_apart() if "--json" in words else contextlib.nullcontext()
    try:
        with apart:
            app(args=arguments, standalone_mode=True, prog_name="meshwright")
    except MeshwrightError as error:
        say(str(error))
        return error.status
    except KeyboardInterrupt:
        say("interrupted")
        return 1
    except BrokenPipeError:
        return 1
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except Exception:
        sys.excepthook = _bug  # what is raised may quote a document
        raise
    return 0


def _bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback, which is our bug, as text."""
    print(lines("".join(traceback.format_exception(kind, error, trace))), file=sys.stderr, end="")
