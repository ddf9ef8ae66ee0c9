"""A model of the zoo divided inside its ops, and what the page says of rows made by hand."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner

from tools import coverage_shards
from tools.coverage_shards import Row, Shared, main, page, run_case
from tools.zoo import find

NEAR, FAR = {"float32": 1e-7, "float64": 1e-15}, {"float32": 1e-7, "float64": 1e-9}
ROWS = [
    Row("a", "plain", "equal", shared={"2:1": Shared({"hidden": 2}, 0.5, 10, NEAR)}),
    Row("b", "plain", "failed", "2:1, float64: 1.0e-09", {"2:1": Shared({"hidden": 1}, 1, 4, FAR)}),
    Row("c", "plain", "refused", "model.py:3: no\nsecond line"),
]


@pytest.mark.nightly
@pytest.mark.filterwarnings("default")  # libraries of models deprecate their own
def test_a_model_is_divided_and_equal() -> None:
    row = run_case(find("moe"), 120.0)
    assert row.status == "equal", row.detail
    assert list(row.shared) == ["2:1", "2:1, sequence", "3:2:1", "3:2:1, sequence"]
    assert all(each.axes["hidden"] > 1 and each.work > 0.9 for each in row.shared.values())


def test_what_a_wrong_rule_would_give_is_no_rounding() -> None:
    judged = coverage_shards._judged({"2:1": Shared({"hidden": 1}, 1.0, 4, FAR)})
    assert judged == {"status": "failed", "detail": "2:1, float64: 1.0e-09"}
    assert coverage_shards._judged({"2:1": Shared({})})["status"] == "whole"
    nothing = Shared({"hidden": 1}, 1.0, 4, {"float32": float("nan"), "float64": 0.0})
    assert coverage_shards._judged({"2:1": nothing})["status"] == "failed"


def test_the_page_has_every_model() -> None:
    text = page(ROWS)
    assert "3 models: 1 equal, 0 whole, 1 refused, 1 failed; 14 gradients compared" in text
    assert "| a | 2:1 | 2 hidden | 50% | 10 | 1.0e-07 | 1.0e-15 |" in text
    assert "- c: refused. model.py:3: no\n" in text


def test_rows_at_hand_are_not_made_again(tmp_path: Path) -> None:
    out, written = tmp_path / "rows.jsonl", tmp_path / "page.md"
    known = [Row(name, "plain", "equal", shared=ROWS[0].shared) for name in ("moe", "conv-net")]
    out.write_text("".join(json.dumps(asdict(row)) + "\n" for row in known))
    words = ["--case", "moe", "--case", "conv-net", "--out", str(out), "--write", str(written)]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert "2 models: 2 equal" in written.read_text()
    assert len(out.read_text().splitlines()) == 2
