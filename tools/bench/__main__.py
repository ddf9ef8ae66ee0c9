"""The command `python -m tools.bench`."""

from tools.bench import COMMANDS
from tools.runs import main

if __name__ == "__main__":
    main("tools.bench", COMMANDS)
