"""The command `bigbrain-fx`, and `python -m bigbrain_fx`: Ctrl-C is told in a word from the start.

The command line takes a moment to import; `cli.main` looks after what comes later.
"""

import sys


def main() -> None:
    """Import the command line and run it."""
    try:
        from bigbrain_fx.cli import main as run
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
