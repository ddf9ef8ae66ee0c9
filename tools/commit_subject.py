"""Check the message of a commit: the subject's length, its area and its first word.

    python -m tools.commit_subject FILE     the hook `commit-msg` of pre-commit calls this

FILE has the message as git passes it to the hook. The exit code is 1 where a rule is broken.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

MOST_CHARACTERS = 72
# Git writes these itself; a fixup is squashed before it is merged.
WRITTEN_BY_GIT = ("Merge ", 'Revert "', "fixup! ", "squash! ")

_AREA = re.compile(r"[a-z][\w.-]*(?:, [a-z][\w.-]*)*: (?P<change>\S.*)")
# Words that begin a statement about the world in place of a change (words.md, rule 1).
_NO_BEGINNING = re.compile(
    r"(?:what|who|whoever|whatever|that|those|these|so|nor|how|where|whether)\b", re.IGNORECASE
)


def message_faults(message: str) -> Iterator[str]:
    """Yield the rules that a commit message breaks; git's comment lines do not count."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject, *body = "\n".join(lines).strip().splitlines() or [""]
    if subject.startswith(WRITTEN_BY_GIT):
        return
    if len(subject) > MOST_CHARACTERS:
        yield f"the subject has {len(subject)} characters, at most {MOST_CHARACTERS} are allowed"
    match = _AREA.fullmatch(subject)
    if match is None:
        yield "the subject begins with no area, such as `runtime: name the lost device`"
    elif _NO_BEGINNING.match(match["change"]):
        yield f"begin with a verb, not with {match['change'].split()[0]!r}"
    if subject.endswith("."):
        yield "the subject ends with a full stop"
    if body and body[0].strip():
        yield "a blank line is missing between subject and body"


def main(arguments: list[str]) -> int:
    """Print the faults of the message in a file and return the exit code."""
    if len(arguments) != 1:
        print("usage: python -m tools.commit_subject FILE", file=sys.stderr)
        return 2
    faults = list(message_faults(Path(arguments[0]).read_text(encoding="utf-8")))
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
