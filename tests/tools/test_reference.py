"""Pages of docs/reference say what the code says; `python -m tools.reference`."""

from __future__ import annotations

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


def test_the_api_page_is_that_of_the_code() -> None:
    assert API.read_text() == api_page(), "run `python -m tools.reference`"


def test_every_public_name_is_on_it() -> None:
    listed = {line[5:-1] for line in api_page().splitlines() if line.startswith("### `")}
    assert listed == set(bigbrain_fx.__all__) - {"__version__"}


def test_every_copied_file_has_its_line() -> None:
    page = files_page()
    assert FILES.read_text() == page, "run `python -m tools.reference`"
    for room in ("runtime", "supervisor"):
        for file in (ROOMS / room).glob("*.py"):
            row = next(line for line in page.splitlines() if line.startswith(f"| `{file.name}` |"))
            assert row.split("|")[2].strip().endswith("."), row


def test_the_page_of_compatibility_is_that_of_the_rules() -> None:
    assert COMPATIBILITY.read_text() == compatibility_page(), "run `python -m tools.reference`"


def test_the_page_of_the_cluster_file_is_that_of_its_models() -> None:
    assert CLUSTER.read_text() == cluster_page.page(), "run `python -m tools.reference`"


def test_the_page_of_figures_is_that_of_its_rows() -> None:
    rows = figures_page.ROWS.read_text()
    assert FIGURES.read_text() == figures_page.page(rows), "run `python -m tools.reference`"
