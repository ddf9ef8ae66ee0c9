"""Which tests a run takes: `gate` names the cases of a test that the gate runs; slices; the order.

`@pytest.mark.nightly` leaves a test, or one case of it (`pytest.param(..., marks=...)`), out of
`make test`. `@pytest.mark.gate("gpt-2", "moe-2")` leaves out every case but these, by the id in
brackets; it is for parameters that are crossed, or that come from a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from tests.support.recording import durations
from tests.support.slices import Slice, selected


def mark_cases(items: Iterable[pytest.Item]) -> None:
    """Mark as nightly the cases that no `gate` of their test names."""
    for item in items:
        marker = item.get_closest_marker("gate")
        if marker is not None and case(item.nodeid) not in marker.args:
            item.add_marker(pytest.mark.nightly)


def unknown_cases(items: Iterable[pytest.Item]) -> list[str]:
    """Return the ids in `gate` that are no case of their test; `items` are all of whole files."""
    named: dict[str, set[str]] = {}
    cases: dict[str, set[str]] = {}
    for item in items:
        test = item.nodeid.partition("[")[0]
        for marker in item.iter_markers("gate"):
            named.setdefault(test, set()).update(marker.args)
        cases.setdefault(test, set()).add(case(item.nodeid))
    return [f"{test}[{i}]" for test, ids in named.items() for i in sorted(ids - cases[test])]


def case(nodeid: str) -> str:
    """Return the id in the brackets of a node id."""
    return nodeid.partition("[")[2].removesuffix("]")


def of_slice(
    items: Sequence[pytest.Item], part: Slice
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the items of a slice in the order to run them, and the others."""
    seconds = {file: sum(kinds.values()) for file, kinds in durations().items()}
    by_id = {item.nodeid: item for item in items}
    mine = [by_id.pop(test) for test in selected(list(by_id), part, seconds)]
    return mine, list(by_id.values())


def longest_first(items: list[pytest.Item]) -> None:
    """Order whole files by their recorded seconds in the gate, so that workers end together."""
    known = durations()
    items.sort(key=lambda item: -known.get(_file(item), {}).get("gate", 0.0))


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]
