"""`python -m meshwright` is `meshwright`."""

import atexit
import gc
import io
import sys

from meshwright.planner.system.gc_pause import pause_collector
from meshwright.planner.system.stdout_guard import stdout_is_lost


def main() -> int:
    """Run the command of this process; Ctrl-C ends it without a traceback while it loads too."""
    # Python ends by looking for cycles among all objects, which end with the process anyway.
    atexit.register(gc.freeze)
    if isinstance(sys.stdout, io.TextIOWrapper):  # its locale may lack a letter, as in µs
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if sys.argv[1:] == ["--version"]:  # which needs no command
            from meshwright.api.version import version  # noqa: PLC0415 - other commands need none

            try:
                print(version())
            except OSError:
                return 1
            return int(stdout_is_lost())
        with pause_collector():  # which would go through what is loaded again and again
            from meshwright.cli import main as run  # noqa: PLC0415 - what is interrupted

        status = run()
        return status or int(stdout_is_lost())
    except KeyboardInterrupt:
        print("meshwright: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
