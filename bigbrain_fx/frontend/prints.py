"""Prints of a model file while its model runs repeatedly: once, then a count.

A split runs a model some dozens of times. Lines that differ in numbers only are printed a few times
and then counted; exceptions, warnings and logs, which go to stderr, are all there.
"""

from __future__ import annotations

import io
import re
import sys
from collections import Counter

ALIKE = 3  # lines that are printed of those that differ in numbers only
ROOM = 10_000  # lines that are remembered
_NUMBER = re.compile(r"\d+")


class Prints(io.TextIOWrapper):
    """A stream in the place of another one, which drops text that was printed before.

    Attributes:
        left_out: number of dropped lines.
    """

    def __init__(self, stream: io.TextIOWrapper) -> None:
        super().__init__(stream.buffer, stream.encoding, stream.errors, write_through=True)
        self.left_out = 0
        self._before = stream  # it has the same bytes, and must not close them
        self._lines = set[str]()
        self._alike = Counter[str]()
        self._begun = ""

    def write(self, text: str) -> int:
        """Take text; each line is printed, or counted, when it has ended."""
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._print(f"{line}\n")
        return len(text)

    def finish(self, name: str) -> None:
        """Say how many lines of a file were left out."""
        if self._begun:
            self._print(self._begun)
            self._begun = ""
        if self.left_out:
            super().write(f"{name} printed {self.left_out} more lines like these\n")
        self.left_out = 0
        self.flush()

    def _print(self, line: str) -> None:
        alike = _NUMBER.sub("0", line)
        if line in self._lines or self._alike[alike] >= ALIKE:
            self.left_out += 1
            return
        if len(self._lines) < ROOM:
            self._lines.add(line)
            self._alike[alike] += 1
        super().write(line)


def printed_once() -> Prints | None:
    """Let this process print so from now on; None where it has no stdout of its own."""
    if not isinstance(sys.stdout, io.TextIOWrapper):
        return None
    sys.stdout = found = Prints(sys.stdout)
    return found
