"""One rank of a script: `python -m runtime.script_rank train.py ARGS`, with RANK around it.

It dies with its launcher, says in a file why it stopped, and otherwise is the script itself.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import sys
import time
import traceback
from pathlib import Path

from runtime.rank import die_with_launcher

PLAN_VARIABLE = "MESHWRIGHT_PLAN"
"""Names the plan's file for a script's Engine."""
OUTPUT_VARIABLE = "MESHWRIGHT_OUTPUT"
"""Names the folder where a script's Engine writes its metrics."""


def main() -> int:
    """Run the script that the command line names, as if it had been started by itself."""
    die_with_launcher()
    faulthandler.enable()
    script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code in (None, 0):
            return 0
        print(ended.code if isinstance(ended.code, str) else "", file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else 1
    except BaseException as error:
        traceback.print_exc()
        _say(error)
        return 1
    return 0


def _say(error: BaseException) -> None:
    from runtime import run  # noqa: PLC0415 - what imports pydantic comes behind the script

    rank = int(os.environ["RANK"])
    failure = run.Failure(
        rank=rank, kind=type(error).__name__, message=str(error), at_unix_s=time.time()
    )
    run.write_json(failure, run.failure_file(Path(os.environ[OUTPUT_VARIABLE]), rank))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of communication libraries may wait for peers that are gone; nothing is left to do.
    os._exit(status)
