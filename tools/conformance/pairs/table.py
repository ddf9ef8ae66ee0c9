"""Expected outcomes of all pairs: `table.txt`, a row each, and their page.

    R+Z1 | bitwise
    R+Ab | refused | what the refusal says | the options that follow its advice

It reads; it runs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tools.conformance.pairs.features import FEATURES, Pair, one_of_a_kind, pairs

TABLE = Path(__file__).with_name("table.txt")
HEADING = "# Every pair of features"
SIGNS = {"bitwise": "=", "reference": "≈"}
OPENING = Path(__file__).with_name("page.txt")


@dataclass(frozen=True)
class Row:
    """Expected outcome of a pair; `remedy` has the options instead of a refused pair."""

    pair: str
    status: str
    says: str = ""
    remedy: str = ""


@cache
def expected() -> Mapping[str, Row]:
    """Return the table, by pair."""
    rows = (Row(*line.split(" | ")) for line in TABLE.read_text().splitlines())
    return {row.pair: row for row in rows}


def page(micro_batches: int, steps: int) -> str:
    """Return the table as a page."""
    rows = expected()
    sentences = list(dict.fromkeys(row.says for row in rows.values() if row.says))
    counts = Counter(row.status for row in rows.values())
    said = ", ".join(f"{counts[status]} {status}" for status in ("bitwise", "reference", "refused"))
    opening = OPENING.read_text().format(
        heading=HEADING,
        micro_batches=micro_batches,
        steps=steps,
        summary=f"{len(rows)} pairs: {said}.",
    )
    tables = (*_features(), "", *_grid(sentences), "", *_refusals(sentences), "")
    return "\n".join((opening, *tables))


def _features() -> Iterator[str]:
    yield "| | what it is | asked for by |"
    yield "|---|---|---|"
    for each in FEATURES:
        words = " ".join(f"--{name} {value}" for name, value in each.words.items())
        asked = f"`{words or each.lines}`" if words or each.lines else ""
        yield f"| {each.letter} | {each.title} | {asked} |"


def _grid(sentences: list[str]) -> Iterator[str]:
    letters = [each.letter for each in FEATURES]
    yield f"| | {' | '.join(letters[1:])} |"
    yield "|---" * len(letters) + "|"
    for at, first in enumerate(letters[:-1]):
        cells = [_cell(f"{first}+{second}", sentences) for second in letters[at + 1 :]]
        yield f"| {first} | {' | '.join([*[''] * at, *cells])} |"


def _cell(pair: str, sentences: list[str]) -> str:
    row = expected().get(pair)
    if row is None:
        return ""
    return SIGNS.get(row.status) or str(sentences.index(row.says) + 1)


def _refusals(sentences: list[str]) -> Iterator[str]:
    yield "| | what is said | tried instead, for the first pair |"
    yield "|---|---|---|"
    first = {row.says: row for row in reversed(list(expected().values())) if row.says}
    for number, sentence in enumerate(sentences, 1):
        row = first[sentence]
        tried = f"`{row.remedy}`" if row.remedy else "one of the two"
        yield f"| {number} | {sentence} | {row.pair}: {tried} |"


def complete() -> list[str]:
    """Return pairs that the table lacks, or has though they cannot be asked for."""
    known = {pair.name for pair in pairs()}
    return sorted((known ^ expected().keys()) | (set(one_of_a_kind()) & expected().keys()))


def fault(pair: Pair, status: str, detail: str) -> str:
    """Say how a pair's outcome differs from the table, or nothing."""
    row = expected()[pair.name]
    if status != row.status:
        return f"{pair.name}: expected {row.status}, found {status}: {detail}"
    if row.says not in detail:
        return f"{pair.name}: expected {row.says!r}, found {detail!r}"
    return ""
