"""`simulate --trace` in lines and in JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bigbrain_fx.cli.tracing import print_trace
from tests.plan.test_explain import hand_made_costs, placed, stack, two

__all__ = ["hand_made_costs"]  # a fixture, used by all tests here


def test_a_trace_is_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = replace(two(), prices=(("a", 1.0), ("b", 2.0)))
    plan = replace(placed(stack(), "aabbb", two()), cluster=where)  # 4 rows in 18 s
    path = tmp_path / "trace.json"
    changes = [{"from_h": 0, "devices": ["a", "b"]}, {"from_h": 1, "devices": ["b"]}]
    path.write_text(json.dumps({"format": "availability-1", "until_h": 2, "changes": changes}))
    print_trace(plan, path, as_json=False)
    first, second, total, planning = capsys.readouterr().out.splitlines()
    assert first == "0 to 1 h: start on a, b: 18 s a step, 800 rows, 3 USD"
    assert second.startswith("1 to 2 h: resplit on b: 15 s a step, ")
    assert "15 s stopped" in second
    assert total.startswith("in all: ")
    assert "rows for 5 USD" in total
    assert planning.startswith("planning anew took ")
    print_trace(plan, path, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["usd"] == 5.0
    assert [each["how"] for each in found["periods"]] == ["start", "resplit"]
