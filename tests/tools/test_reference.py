"""Pages of docs/reference say what the code says; `python -m tools.reference`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import bigbrain_fx
from tools import cluster_page, figures_page
from tools.reference import (
    API,
    CLUSTER,
    COMPATIBILITY,
    FIGURES,
    FILES,
    ROOMS,
    api_page,
    compatibility_page,
    files_page,
)

PAGES: dict[Path, Callable[[], str]] = {
    API: api_page,
    FILES: files_page,
    COMPATIBILITY: compatibility_page,
    CLUSTER: cluster_page.page,
    FIGURES: lambda: figures_page.page(figures_page.ROWS.read_text()),
}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_is_that_of_the_code(path: Path) -> None:
    assert path.read_text() == PAGES[path](), "run `python -m tools.reference`"


def test_every_public_name_is_on_it() -> None:
    listed = {line[5:-1] for line in api_page().splitlines() if line.startswith("### `")}
    assert listed == set(bigbrain_fx.__all__) - {"__version__"}


def test_every_copied_file_has_its_line() -> None:
    page = FILES.read_text()
    for room in ("runtime", "supervisor"):
        for file in (ROOMS / room).glob("*.py"):
            row = next(line for line in page.splitlines() if line.startswith(f"| `{file.name}` |"))
            assert row.split("|")[2].strip().endswith("."), row
