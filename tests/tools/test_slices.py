"""Slices of the nightly tests, the cases of the gate, and the run that CI does of today's slice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from tests.support import nightly, recording
from tests.support.examples import quick
from tests.support.slices import LONGEST_S, Slice, SliceError, parsed, rotated, selected

ROOT = Path(__file__).resolve().parents[2]
TESTS = [f"tests/test_{file}.py::test_it[{case}]" for file in range(9) for case in range(file + 1)]
SECONDS = {f"tests/test_{file}.py": 40.0 * file for file in range(9)}


@pytest.mark.parametrize(
    "text",
    ["", "3", "3/", "/8", "3/8/9", "-1/8", "1.5/8", "a/b", "3 / 8", "0/8", "9/8", "1/0"],
)
def test_a_slice_that_is_malformed_or_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(SliceError) as caught:
        parsed(text)
    assert text in str(caught.value)


def test_make_refuses_a_slice_with_a_sentence() -> None:
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--slice=9/8", str(ROOT)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "slice 9/8 does not exist" in done.stderr


@quick(100)
@given(
    st.integers(1, 12),
    st.integers(0, 5),
    st.dictionaries(st.sampled_from(sorted(SECONDS)), st.floats(0, 2000)),
)
def test_every_test_is_in_exactly_one_slice(
    count: int, turn: int, seconds: dict[str, float]
) -> None:
    parts = [selected(TESTS, Slice(number + 1, count, turn), seconds) for number in range(count)]
    assert Counter(test for part in parts for test in part) == Counter(TESTS)


def test_slices_are_balanced_and_files_stay_together() -> None:
    parts = [selected(TESTS, Slice(number, 3), SECONDS) for number in (1, 2, 3)]
    each = {file: SECONDS[file] / sum(file in test for test in TESTS) for file in SECONDS}
    files = [Counter(test.partition("::")[0] for test in part) for part in parts]
    short = [file for file, seconds in SECONDS.items() if seconds <= LONGEST_S]
    assert all(sum(file in part for part in files) == 1 for file in short)
    loads = [sum(count * each[file] for file, count in part.items()) for part in files]
    assert max(loads) - min(loads) <= LONGEST_S


def test_a_turn_begins_elsewhere_and_leaves_nothing_out() -> None:
    files = list(range(10))
    first = {rotated(files, turn)[0] for turn in range(20)}
    assert all(sorted(rotated(files, turn)) == files for turn in range(20))
    assert first == set(files)


def test_recorded_files_exist() -> None:
    known = recording.durations()
    assert [file for file in known if not (ROOT / file).is_file()] == []
    assert all(kinds.keys() <= {"gate", "nightly"} for kinds in known.values())


def test_durations_are_renewed_by_file_and_kind() -> None:
    known = {"a.py": {"gate": 1.0, "nightly": 5.0}, "gone.py": {"gate": 2.0}}
    found = recording.by_file(
        {
            "a.py::test_x": {"outcome": "passed", "seconds": 1.24, "nightly": False},
            "a.py::test_y": {"outcome": "failed", "seconds": 1.0, "nightly": False},
            "b.py::test_z": {"outcome": "late", "seconds": 9.0, "nightly": True},
            "c.py::test_z": {"outcome": "passed", "seconds": 3.0, "nightly": True},
        }
    )
    assert recording.renewed(known, found, ["a.py", "b.py", "c.py"]) == {
        "a.py": {"gate": 2.2, "nightly": 5.0},
        "c.py": {"nightly": 3.0},
    }


class FakePytest:
    """In place of pytest: writes what a run of a slice recorded, then answers for each test."""

    def __init__(self, tests: recording.Tests, alone: dict[str, int | None]) -> None:
        self.tests, self.alone = tests, alone
        self.runs: list[Sequence[str]] = []

    def __call__(self, words: Sequence[str], clock: nightly.Clock) -> int | None:
        self.runs.append(words)
        record = [word.partition("=")[2] for word in words if word.startswith("--record=")]
        if record:
            Path(record[0]).write_text(json.dumps(self.tests))
            return 1
        return self.alone[words[-1]]


def outcome(name: str, seconds: float = 1.0) -> recording.Outcome:
    return {"outcome": name, "seconds": seconds, "nightly": True}


@pytest.mark.parametrize(("alone", "code"), [(0, 0), (1, 1), (None, 0)])
def test_a_test_that_fails_counts_if_it_fails_twice(
    alone: int | None,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tests = {"a": outcome("passed"), "b": outcome("failed"), "c": outcome("late")}
    fake = FakePytest(tests, {"b": alone})
    monkeypatch.setattr(nightly, "run", fake)
    assert nightly.main(["--day", "11"]) == code
    assert "--slice=4/8" in fake.runs[0]
    assert "--turn=1" in fake.runs[0]
    assert fake.runs[1] == ("-n", "0", "b")
    shown = capsys.readouterr().out
    assert "not reached in the time: 1" in shown
    assert ("no time to run it again: b" in shown) == (alone is None)


CONFTEST = "from tests.conftest import *\nfrom tests.conftest import _part\n"
SUITE = """
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.nightly
def test_passes():
    pass


def test_is_flaky():
    seen = HERE / "seen"
    there = seen.exists()
    seen.touch()
    assert there


@pytest.mark.gate("2")
@pytest.mark.parametrize("number", [1, 2, 3])
def test_has_cases(number):
    assert number
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A project with the options of this one, and tests of its own."""
    markers = "markers = ['nightly', 'gate']\n"
    (tmp_path / "pyproject.toml").write_text(
        f"[tool.pytest.ini_options]\npythonpath = [{str(ROOT)!r}]\n{markers}"
    )
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_own.py").write_text(SUITE)
    return tmp_path


def ran(suite: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command,
        cwd=suite,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.nightly
@pytest.mark.parametrize("always", [False, True])
def test_a_slice_runs_and_what_fails_runs_again(suite: Path, always: bool) -> None:
    if always:
        (suite / "test_own.py").write_text(SUITE + "\n\ndef test_fails():\n    assert False\n")
    done = ran(suite, "-m", "tests.support.nightly", "--day", "8")
    assert done.returncode == int(always), done.stdout + done.stderr
    assert "failed once, passed alone: test_own.py::test_is_flaky" in done.stdout
    assert ("failed twice: test_own.py::test_fails" in done.stdout) == always


@pytest.mark.nightly
def test_no_test_starts_after_the_time(suite: Path) -> None:
    record = suite / "tests.json"
    ran(suite, "-m", "pytest", "-q", "--until=1", f"--record={record}")
    assert {test["outcome"] for test in recording.read(record).values()} == {"late"}


@pytest.mark.nightly
def test_the_gate_runs_the_cases_that_it_names(suite: Path) -> None:
    record = suite / "tests.json"
    ran(suite, "-m", "pytest", "-q", "-m", "not nightly", f"--record={record}")
    assert set(recording.read(record)) == {
        "test_own.py::test_is_flaky",
        "test_own.py::test_has_cases[2]",
    }


@pytest.mark.nightly
def test_a_case_that_does_not_exist_is_refused(suite: Path) -> None:
    (suite / "test_own.py").write_text(SUITE.replace('gate("2")', 'gate("4")'))
    done = ran(suite, "-m", "pytest", "-q")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "test_own.py::test_has_cases[4]" in done.stderr
