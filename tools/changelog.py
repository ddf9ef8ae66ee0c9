"""Rules of CHANGELOG.md and of the news fragments in changes/.

    python -m tools.changelog     list the faults of both; exit with 1 where there is one

A release joins fragments to CHANGELOG.md with `towncrier build`. Sections of released versions
never change: `RELEASED` has the digest of each.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TYPES = ("added", "changed", "fixed", "removed")
MOST_CHARACTERS = 200
NO_FRAGMENTS = ("README.md", "template.md.jinja")
# The SHA-256 of each released section, without the blank lines at its end.
RELEASED = {
    "0.2.0": "81ed0019b14d0c57b0845dbc5d83265c35f16823f1f6d9c33007ead8df541687",
    "0.3.0": "93c596d64157722ab5b7f717bbe4008781a281611dccc5f9f41a10791d6fa846",
}

_HEADING = re.compile(r"^## \[([^\]]+)\].*$", re.MULTILINE)
_NAME = re.compile(rf"[a-z0-9][a-z0-9_-]*\.(?:{'|'.join(TYPES)})\.md")
_ENTRY = re.compile(r"- [a-z][\w.-]*: \S.*\.")
_SENTENCE_END = re.compile(r"[.!?] +[A-Z]")


def sections(text: str) -> dict[str, str]:
    """Return the text of each version's section in a changelog, headings included."""
    found = list(_HEADING.finditer(text))
    ends = [*(match.start() for match in found[1:]), len(text)]
    return {
        match[1]: text[match.start() : end].rstrip("\n")
        for match, end in zip(found, ends, strict=True)
    }


def digest(section: str) -> str:
    """Return the digest by which `RELEASED` knows a section."""
    return hashlib.sha256(section.encode()).hexdigest()


def fragment_faults(name: str, text: str) -> Iterator[str]:
    """Yield the rules that a news fragment breaks, by its file name and its text."""
    sentence = text.strip()
    if not _NAME.fullmatch(name):
        yield f"{name}: the name is not <slug>.<{'|'.join(TYPES)}>.md"
    if not sentence:
        yield f"{name}: the fragment is empty"
        return
    if len(sentence) > MOST_CHARACTERS:
        yield f"{name}: {len(sentence)} characters, at most {MOST_CHARACTERS} are allowed"
    if "\n" in sentence or _SENTENCE_END.search(sentence) or not sentence.endswith("."):
        yield f"{name}: one sentence in one line is expected, with a full stop"


def unreleased_faults(section: str) -> Iterator[str]:
    """Yield the lines of an unreleased section that are no entry `- area: sentence.`."""
    for line in section.splitlines()[1:]:
        if not line or line.startswith(("### ", "<!-- ")):
            continue
        if len(line) > MOST_CHARACTERS or not _ENTRY.fullmatch(line):
            yield f"CHANGELOG.md: no entry of one line: {line}"


def released_faults(found: dict[str, str]) -> Iterator[str]:
    """Yield the versions whose section differs from the released one, is missing or unknown."""
    released = found.keys() - {"Unreleased"}
    for version in sorted(released | RELEASED.keys()):
        if version not in found:
            yield f"CHANGELOG.md: the section of {version} is missing"
        elif version not in RELEASED:
            fresh = digest(found[version])
            yield f"tools/changelog.py: RELEASED lacks {version}; of the text here it is {fresh}"
        elif digest(found[version]) != RELEASED[version]:
            yield f"CHANGELOG.md: the section of {version} differs from the released one"


def faults(root: Path = ROOT) -> list[str]:
    """Return the faults of the changelog and of all fragments below a checkout's root."""
    found = sections((root / "CHANGELOG.md").read_text(encoding="utf-8"))
    fragments = sorted(
        path for path in (root / "changes").iterdir() if path.name not in NO_FRAGMENTS
    )
    broken = [
        fault
        for path in fragments
        for fault in fragment_faults(path.name, path.read_text(encoding="utf-8"))
    ]
    unreleased = found.get("Unreleased", "")
    return [*broken, *unreleased_faults(unreleased), *released_faults(found)]


def main() -> int:
    """Print the faults of this checkout and return the exit code."""
    broken = faults()
    print("\n".join(broken) or "CHANGELOG.md and changes/ are well formed")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
