"""What device processes tell each other and later ones: notes by key; old ones are dropped.

A key may have a number between slashes ("shard/40/d1"): of each kind of such notes, those with the
newest few numbers stay. So a run of any length keeps a board of one size.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

KEPT = 4  # numbers of a kind; one commit is written at a time, and a replacement asks for two
NUMBERED = re.compile(r"([^/]+)/(\d+)/.+")


@dataclass
class Notes:
    """Notes by key."""

    notes: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, dict[int, list[str]]] = field(default_factory=dict)

    def post(self, key: str, text: str) -> list[str]:
        """Keep a note, in place of one of the same key; return the keys that were dropped."""
        is_new = key not in self.notes
        self.notes[key] = text
        match = NUMBERED.fullmatch(key)
        if match is None or not is_new:
            return []
        kind = self.numbers.setdefault(match[1], {})
        kind.setdefault(int(match[2]), []).append(key)
        dropped = []
        while len(kind) > KEPT:
            dropped += kind.pop(min(kind))
        for old in dropped:
            del self.notes[old]
        return dropped

    def forget_parts(self, after: int, names: int) -> None:
        """Forget what was said of things that are not whole, of numbers `after` one or the end.

        `names`: how many say something of a number before it is whole.
        """
        for numbers in self.numbers.values():
            for number in [n for n, keys in numbers.items() if n > after and len(keys) < names]:
                for key in numbers.pop(number):
                    del self.notes[key]
        for key in [key for key in self.notes if key.startswith("aside/")]:
            del self.notes[key]
