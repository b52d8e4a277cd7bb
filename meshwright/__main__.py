"""`python -m meshwright` is `meshwright`."""

import sys


def main() -> int:
    """Run the command of this process; Ctrl-C ends it without a traceback while it loads too."""
    try:
        from meshwright.cli import main as run  # noqa: PLC0415 - what is interrupted

        return run()
    except KeyboardInterrupt:
        print("meshwright: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
