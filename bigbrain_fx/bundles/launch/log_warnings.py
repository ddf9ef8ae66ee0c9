"""What a run without a supervisor warns of: its leading process says it in a log, and people here.

A commit that is missed ends no training, so nobody would look into the log before it is too late.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

MISSED = "WARNING: no commit at step"
AGAIN = "commits are written again"


class LogWarnings:
    """Pass on the warnings in a device's log; of commits that are missed in a row, the first."""

    def __init__(self, log: Path, device: str, say: Callable[[str], None]) -> None:
        self.log = log
        self.say = say
        self._lines = re.compile(rf"{re.escape(device)}: ((?:WARNING: |warning: |{AGAIN}).*)")
        self._read = 0  # bytes
        self._misses = False

    def look(self) -> None:
        """Read what has been written since the last look; a log that is gone says nothing."""
        new = b""
        with suppress(OSError), self.log.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            found = self._lines.fullmatch(line)
            if found is not None:
                self._hear(found[1])

    def _hear(self, text: str) -> None:
        is_miss = text.startswith(MISSED)
        if not (is_miss and self._misses):
            self.say(text)
        self._misses = is_miss or (self._misses and not text.startswith(AGAIN))
