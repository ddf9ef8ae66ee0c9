"""The page of figures, made of docs/reference/figures.json; `tools.reference` writes it.

    page(text)      docs/reference/figures.md, of the text of figures.json

A row has `what`, `figure`, `command`, `commit` and `date` (when the figure was written down), and
may have `details`: the page that has all rows.
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "docs/reference/figures.json"
MOST = 25
INTRODUCTION = """\
# Figures

Written by `python -m tools.reference` from `figures.json`. Measured on shared 2-core machines with
torch 2.13 on the CPU, where a row says nothing else. `tools.studies.unlike` and
`tools.studies.fidelity` need Linux and root. `--data DIR` is a folder of published rows that are
not ours to ship. Studies have their question, command, commit and machine in their README
(`tools/studies/NAME`); older rows are in [all figures](../../tools/studies/figures.md).

| what | figure | command | written |
|---|---|---|---|
"""


def page(text: str) -> str:
    """Return the page."""
    rows = json.loads(text)
    assert len(rows) <= MOST, f"{len(rows)} rows: keep {MOST}, the others belong to their studies"
    return INTRODUCTION + "".join(map(_line, rows))


def _line(row: dict[str, str]) -> str:
    details = f" ([all rows]({row['details']}))" if "details" in row else ""
    return (
        f"| {row['what']} | {row['figure']}{details} | `{row['command']}` "
        f"| {row['date']}, {row['commit']} |\n"
    )
