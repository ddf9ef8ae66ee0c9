"""Lines by test: what nothing covers, and which tests add no line to the others."""

from __future__ import annotations

import pytest

from tools.line_coverage import (
    Recorded,
    by_package,
    node_of,
    redundant_tests,
    uncovered_lines,
)

A, B = "bigbrain_fx/plan/a.py", "partitioners/b.py"


def _recorded() -> Recorded:
    tests = {"t::one": frozenset({(A, 1), (A, 2)}), "t::two": frozenset({(A, 2)})}
    return Recorded(tests, frozenset({(A, 1), (A, 2), (A, 3), (B, 1)}))


def test_shares_are_of_statements_by_package() -> None:
    plan, partitioners, every = by_package(_recorded())
    assert plan.split() == ["bigbrain_fx/plan", "2", "of", "3", "66.7", "%"]
    assert partitioners.split() == ["partitioners", "0", "of", "1", "0.0", "%"]
    assert every.split()[-2] == "50.0"


def test_uncovered_lines_are_listed_by_file() -> None:
    assert [*uncovered_lines(_recorded())] == [f"{A}: 3", f"{B}: 1"]


def test_redundant_tests_are_those_whose_lines_the_rest_still_run() -> None:
    same = frozenset({(A, 1)})
    found = [*redundant_tests({"t::a": same, "t::b": same, "t::c": frozenset({(A, 2)})})]
    assert [line.split()[1] for line in found] == ["t::a"]


@pytest.mark.parametrize(
    ("context", "test"),
    [
        ("none|tests/a.py::b[1 (x)]|run", "tests/a.py::b[1 (x)]"),
        ("tests/a.py::b (call)", "tests/a.py::b"),
        ("none", "none"),
    ],
)
def test_processes_count_under_the_test_that_started_them(context: str, test: str) -> None:
    assert node_of(context) == test
