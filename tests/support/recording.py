"""Outcome and duration of each test of a run, as a JSON file, and sums of them by file.

With pytest-xdist only the process that hands out the tests records. `python -m
tests.support.recording FILE...` renews `tests/durations.json` by what such runs recorded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import pytest

DURATIONS = Path(__file__).resolve().parents[1] / "durations.json"
LATE = "no time is left for it in this run"


class Outcome(TypedDict):
    """`passed`, `failed`, `skipped`, or `late` for a test that the time did not reach."""

    outcome: str
    seconds: float
    nightly: bool


Tests = dict[str, Outcome]
Seconds = dict[str, dict[str, float]]  # by file, then `gate` and `nightly`


@dataclass(eq=False)  # a plug-in is looked up by its hash
class Recorder:
    """A plug-in of pytest that writes the outcome of each test, by node id."""

    path: Path
    tests: Tests = field(default_factory=dict)
    collected: set[str] = field(default_factory=set)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collected.update(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.collected.update(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        nightly = "nightly" in report.keywords
        found = self.tests.setdefault(
            report.nodeid, {"outcome": "passed", "seconds": 0.0, "nightly": nightly}
        )
        found["seconds"] += report.duration
        if found["outcome"] == "passed" and report.outcome != "passed":
            found["outcome"] = "late" if LATE in str(report.longrepr) else report.outcome

    def pytest_sessionfinish(self) -> None:
        """Write all; a test without a report is one that an interrupted run did not reach."""
        for test in sorted(self.collected - set(self.tests)):
            self.tests[test] = {"outcome": "late", "seconds": 0.0, "nightly": False}
        self.path.write_text(json.dumps(self.tests, indent=0), encoding="utf-8")


def read(path: Path) -> Tests:
    """Read what a `Recorder` wrote; nothing where the run ended before that."""
    if not path.is_file():
        return {}
    found: Tests = json.loads(path.read_text(encoding="utf-8"))
    return found


def with_outcome(tests: Tests, outcome: str) -> list[str]:
    """Return the tests of one outcome, the quickest first."""
    found = [test for test, record in tests.items() if record["outcome"] == outcome]
    return sorted(found, key=lambda test: (tests[test]["seconds"], test))


def by_file(tests: Tests) -> Seconds:
    """Sum the seconds of the tests that ran by file and by kind, `gate` or `nightly`."""
    sums: Seconds = {}
    for test, record in tests.items():
        if record["outcome"] in ("passed", "failed"):
            kinds = sums.setdefault(test.partition("::")[0], {})
            kind = "nightly" if record["nightly"] else "gate"
            kinds[kind] = kinds.get(kind, 0.0) + record["seconds"]
    return sums


def renewed(
    known: Mapping[str, Mapping[str, float]], found: Seconds, files: Iterable[str]
) -> Seconds:
    """Renew recorded durations by those of a run; only files that still exist stay."""
    both = {file: {**known.get(file, {}), **found.get(file, {})} for file in sorted(files)}
    rounded = {f: {k: round(s, 1) for k, s in sorted(kinds.items())} for f, kinds in both.items()}
    return {file: kinds for file, kinds in rounded.items() if kinds}


def durations() -> Seconds:
    """Return the recorded seconds, by file and kind."""
    found: Seconds = json.loads(DURATIONS.read_text(encoding="utf-8"))
    return found


def main(records: Iterable[str]) -> None:
    """Renew the recorded durations by those of runs; of a test in several, by the last."""
    tests: Tests = {}
    for record in records:
        tests |= read(Path(record))
    root = DURATIONS.parents[1]
    files = [str(path.relative_to(root)) for path in DURATIONS.parent.rglob("test_*.py")]
    text = json.dumps(renewed(durations(), by_file(tests), files), indent=1)
    DURATIONS.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
