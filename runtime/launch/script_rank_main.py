"""One rank of a script: `python -m meshwright.runtime.launch.script_rank_main train.py ARGS`.

It dies with its launcher, says in a file why it stopped, and otherwise is the script itself.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.planner.errors import HandedOver
from meshwright.runtime.resilience.heartbeat import BEACONS
from meshwright.runtime.run import preemption as notice
from meshwright.runtime.run.environment import (
    CHECKPOINT_VARIABLE,
    OUTPUT_VARIABLE,
    room_beside,
)
from meshwright.runtime.run.rank_exit import die_with_launcher, leave, report_failure
from meshwright.runtime.run.run_folder import handed_over

if TYPE_CHECKING:
    from meshwright.runtime.launch.script_keeper import ScriptKeeper


def main() -> int:
    """Run the script that the command line names, as if it had been started by itself."""
    die_with_launcher()
    notice.wait_for_launcher(notice.OF_SCRIPTS)
    faulthandler.enable()
    script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    keepers = _let_state_be_kept()
    try:
        runpy.run_path(script, run_name="__main__")
        for keeper in keepers:
            keeper.finish()
    except SystemExit as ended:
        if ended.code in (None, 0):
            return 0
        code = ended.code if isinstance(ended.code, int) else 1
        message = "" if isinstance(ended.code, int) else str(ended.code)
        if message:
            print(message, file=sys.stderr)
        report_failure("SystemExit", message, **_place())
        return code
    except HandedOver as ended:
        _hand_over(str(ended))
    except BaseException as error:
        _report_error(error, script)
        return 1
    return 0


def _let_state_be_kept() -> list[ScriptKeeper]:
    """Let the first Engine be kept where the launcher looks or saves; return its keeper, then."""
    keepers: list[ScriptKeeper] = []
    if CHECKPOINT_VARIABLE not in os.environ and BEACONS not in os.environ:
        return keepers
    from meshwright.runtime.engine.engine_state import keep_first_engine_by  # noqa: PLC0415 - imports torch
    from meshwright.runtime.launch.script_keeper import ScriptKeeper  # noqa: PLC0415
    from meshwright.runtime.resilience.heartbeat import answer_with_stack  # noqa: PLC0415

    if BEACONS in os.environ:
        place = _place()
        answer_with_stack(place["output"], place["rank"])

    def keeper_of(engine: Any) -> ScriptKeeper:
        keepers.append(ScriptKeeper(engine))
        return keepers[-1]

    keep_first_engine_by(keeper_of)
    return keepers


def _hand_over(reason: str) -> None:
    from meshwright.planner.errors import DocumentError  # noqa: PLC0415
    from meshwright.planner.system.safe_files import open_below, replace_file  # noqa: PLC0415

    place = _place()
    message = handed_over(**place)
    try:
        with open_below(message, within=place["output"]) as file:
            file.write(reason.encode())
    except (DocumentError, OSError):
        beside = room_beside(message)
        if beside is None:
            raise
        replace_file(reason, beside)


def _place() -> dict[str, Any]:
    return {"rank": int(os.environ["RANK"]), "output": Path(os.environ[OUTPUT_VARIABLE])}


def _report_error(error: BaseException, script: str) -> None:
    """Print where the script failed, and tell the launcher."""
    from meshwright.planner.system.safe_files import open_below  # noqa: PLC0415
    from meshwright.runtime.launch.rank_processes import blames_a_peer  # noqa: PLC0415
    from meshwright.runtime.run import run_folder as run  # noqa: PLC0415 - what imports pydantic comes behind the script

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(error.with_traceback(trace or error.__traceback__)))
    failure = report_failure(type(error).__name__, str(error), **_place())
    if failure.rank == 0 and blames_a_peer(failure):
        # The console has what rank 0 prints, and shall have the cause: the other rank's end.
        output = Path(os.environ[OUTPUT_VARIABLE])
        with open_below(run.log_file(output, 0), within=output, append=True) as log:
            log.write(text.encode(errors="replace"))
    else:
        print(text, end="", file=sys.stderr)


if __name__ == "__main__":
    leave(main())
