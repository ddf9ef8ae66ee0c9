"""The table of faults has every row of the matrix, and two cheap rows hold end to end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.conformance.faults import matrix
from tools.conformance.faults.bundle import BUNDLES, Fault
from tools.conformance.faults.chaos import drawn
from tools.conformance.faults.jobs import Run
from tools.conformance.faults.matrix import ROWS, Result, Row, results
from tools.conformance.faults.report import (
    summary,
)
from tools.conformance.faults.verdicts import (
    BROKEN,
    KEPT,
    NOT_BUILT,
    SKIPPED,
    Ground,
    Verdict,
    ground,
    judged,
    survivors_kept,
)

ROW = Row(1, "SIGKILL", "forward", "1 s", lambda _: Verdict(KEPT, "replayed"))


@pytest.fixture(scope="module")
def here() -> Iterator[Ground]:
    with ground() as made:
        yield made


def finished(**changes: object) -> Run:
    """A run of two devices and two steps."""
    lines = {
        (name, pid): [{"step": s, "forwards": 4 * (s + 1), "hashes": {"p": name}} for s in range(2)]
        for name, pid in (("d0", 10), ("d1", 11))
    }
    whole = {
        "folder": Path("/nowhere"),
        "code": 0,
        "said": "",
        "events": (),
        "struck": {},
        "lines": lines,
        "losses": {0: 1.0, 1: 0.5},
        "orphans": (),
        "started_s": 0.0,
        "ended_s": 1.0,
    }
    return Run(**{**whole, **changes})  # type: ignore[arg-type]


# --------------------------------------------------------------------------- two rows


@pytest.mark.nightly
def test_a_kill_with_a_cold_replacement(here: Ground) -> None:
    (found,) = results(here, [9])
    assert found.verdict.same_bits, found.verdict.problems
    assert found.verdict.survivors_kept, found.verdict.problems
    (strike,) = found.verdict.strikes
    assert strike.device == "d1"
    assert strike.formed_s is not None
    assert strike.detected_s is not None
    assert 0 < strike.detected_s < strike.formed_s
    assert json.loads(json.dumps(found.facts()))["row"] == 9


def test_row_24_says_why_it_is_skipped(tmp_path: Path) -> None:
    (found,) = results(Ground(tmp_path, tmp_path, ()), [24])
    assert found.verdict.status == SKIPPED
    assert "no GPU" in found.verdict.outcome


@pytest.mark.nightly
def test_ctrl_c_leaves_nothing(here: Ground) -> None:
    (found,) = results(here, [22])
    problems = [text for text in found.verdict.problems if " s is over " not in text]
    assert not problems


# --------------------------------------------------------------------------- the table


def test_every_row_of_the_matrix_is_there_once() -> None:
    assert [row.number for row in ROWS] == list(range(1, 39))
    assert all(row.run.__doc__ for row in ROWS)


def test_a_row_that_raises_never_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(_: Ground) -> Verdict:
        raise OSError("no such disk")

    for status in (BROKEN, NOT_BUILT):
        row = Result(ROW, Verdict(status, "no"), 1.0)
        assert summary([Result(ROW, Verdict(KEPT, "yes"), 1.0), row])["passed"] is False
    monkeypatch.setattr(matrix, "ROWS", (Row(2, "f", "p", "-", late),))
    (found,) = results(Ground(tmp_path, tmp_path, ()))
    assert found.verdict.status == BROKEN
    assert found.verdict.problems == ("OSError: no such disk",)


LEFT_OUT = [*(("2bw", row) for row in range(32, 39)), *(("offload", n) for n in (34, 35, 36, 38))]


@pytest.mark.parametrize(("name", "number"), LEFT_OUT)
def test_rows_that_a_bundle_cannot_have_are_left_out(
    name: str, number: int, tmp_path: Path
) -> None:
    struck = Ground(tmp_path, tmp_path, (), options=BUNDLES[name])
    (result,) = results(struck, [number])
    assert result.verdict.status == SKIPPED
    assert "does not go with --" in result.verdict.outcome


# --------------------------------------------------------------------------- judging


def test_a_run_that_is_the_same_is_kept() -> None:
    assert judged(finished(), finished(), (), "").status == KEPT


@pytest.mark.parametrize(
    "changes",
    [
        {"code": 1},
        {"orphans": (7,)},
        {"losses": {0: 1.5, 1: 0.5}},
        {"lines": {("d0", 10): [{"step": 1, "forwards": 4, "hashes": {"p": "x"}}]}},
    ],
    ids=["exit", "orphans", "losses", "bits"],
)
def test_a_difference_breaks_a_row(changes: dict[str, object]) -> None:
    assert judged(finished(**changes), finished(), (), "").status == BROKEN


def test_a_fault_that_did_not_strike_breaks_a_row() -> None:
    verdict = judged(finished(), finished(), [Fault("d0", 1, "forward")], "")
    assert verdict.problems == ("faults [0] did not strike",)


def test_survivors_do_nothing_twice_and_keep_their_process() -> None:
    whole = finished()
    again = dict(whole.lines)
    again["d1", 11] = [{**entry, "forwards": entry["forwards"] + 1} for entry in again["d1", 11]]
    assert not survivors_kept(finished(lines=again), whole)
    replaced = {**whole.lines, ("d1", 12): whole.lines["d1", 11][1:]}
    assert not survivors_kept(finished(lines=replaced), whole)
    died = ({"event": "died", "device": "d1", "time": 0.5},)
    assert survivors_kept(finished(lines=replaced, events=died), whole)


def test_random_kills_come_from_their_seed() -> None:
    most = {"d0": 5, "d1": 7}
    faults = drawn(most, 9, 4, 3)
    assert faults == drawn(most, 9, 4, 3) != drawn(most, 9, 4, 4)
    assert len({(f.device, f.step, f.nth) for f in faults}) == 9
    assert all(f.nth < most[f.device] and f.step < 4 for f in faults)
