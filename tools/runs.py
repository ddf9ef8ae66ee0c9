"""One entry for several commands: `python -m tools.conformance`, `python -m tools.bench`.

Without a name it lists them; with one it runs that module with the words behind the name.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping


def main(package: str, commands: Mapping[str, str]) -> None:
    """Run the command that the first word names, or list all of them.

    Args:
        package: the package that has a module for each command.
        commands: a sentence about each, by name.
    """
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in commands:
        print(listing(package, commands))
        sys.exit(0 if name in ("", "--help") else 2)
    sys.argv[:2] = [f"{package} {name}"]
    runpy.run_module(f"{package}.{name}", run_name="__main__", alter_sys=True)


def listing(package: str, commands: Mapping[str, str]) -> str:
    """Return the commands of a package, a line for each."""
    lines = [f"  {name:<15} {sentence}" for name, sentence in commands.items()]
    return "\n".join([f"usage: python -m {package} COMMAND [--help]", "", *lines])
