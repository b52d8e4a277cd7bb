"""`python -m meshwright` is `meshwright`."""

import sys


def main() -> int:
    """Run the command of this process; Ctrl-C ends it without a traceback while it loads too."""
    try:
        if sys.argv[1:] == ["--version"]:  # which needs no command
            from meshwright.api.version import version  # noqa: PLC0415 - other commands need none

            print(version())
            return 0
        from meshwright.cli import main as run  # noqa: PLC0415 - what is interrupted

        return run()
    except KeyboardInterrupt:
        print("meshwright: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
