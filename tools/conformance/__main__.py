"""The command `python -m tools.conformance`."""

from tools.conformance import COMMANDS
from tools.runs import main

if __name__ == "__main__":
    main("tools.conformance", COMMANDS)
