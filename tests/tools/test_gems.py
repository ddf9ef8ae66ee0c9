"""GEMS beside 1F1B and zb-v: what the page makes of rows, and how the largest model is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigbrain_fx.plan import Plan
from tools import gems
from tools.gems import CONTENDERS, DEPTHS, Contender, Row, Timed, largest, page, planned

DOC = Path(gems.ROOT, "docs", "gems.md")


def test_every_schedule_is_tried_with_what_it_may_keep_away() -> None:
    names = [each.name for each in CONTENDERS]
    assert names[0] == "1f1b"
    assert {"gems", "gems --offload activations,state", "zb-v --offload state"} <= {*names}
    assert not [name for name in names if "zb-v --offload act" in name]  # those stay in memory


@pytest.mark.parametrize("most", [0, 4, 20, DEPTHS[-1]])
def test_the_largest_is_the_deepest_that_fits(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    def fits(model: str, blocks: int, contender: Contender, memory_mib: int) -> str | None:
        return f"{blocks}" if blocks <= most else None

    monkeypatch.setattr(gems, "planned", fits)
    found, plan = largest("text", CONTENDERS[0], 1, DEPTHS)
    assert (found, plan) == (most, str(most) if most else None)


@pytest.mark.nightly
def test_gems_holds_one_micro_batch_where_1f1b_holds_four() -> None:
    """Of images activations are most of what is held; its step is that of no pipeline at all."""
    by_name = {each.name: each for each in CONTENDERS}
    plans = [planned("images", 4, by_name[name], 4096) for name in ("1f1b", "gems")]
    ours, mirrored = (plan for plan in plans if isinstance(plan, Plan))
    assert ours.forecast.devices[0].peak_bytes > mirrored.forecast.devices[0].peak_bytes
    assert 1 < mirrored.forecast.step_s / ours.forecast.step_s < gems.DEVICES
    assert planned("images", 4, by_name["gems"], 48) is None


def test_the_page_says_what_came_out() -> None:
    rows = [
        Row("text", "1f1b", 12, 3.0, 3.0, 50 << 20),
        Row("text", "1f1b --offload state", 20, 2.5, 2.9, 30 << 20),
        Row("text", "gems", 4, 5.0, None, None),
        Row("text", "gems --offload state", DEPTHS[-1], 0.5, 1.5, 40 << 20),
        Row("text", "gems --recompute all", 0, 0.0, None, None),
    ]
    found = page(rows, [Timed("1f1b", 2.0, 1.0, 1 << 20, 1 << 20)], 128)
    assert "| 1f1b | 12 | 3.00 | 3.00 | 50 |" in found
    assert f"| gems --offload state | {DEPTHS[-1]}+ | 0.50 | 1.50 | 40 |" in found
    assert "| gems --recompute all | none | - | - | - |" in found
    assert "GEMS holds 16.0 times as many blocks as without" in found
    assert "`1f1b --offload state`: 20, 2.50 rows/s" in found
    assert "| 1f1b | 1.00 | 1.00 | 1.00 | 1.00 |" in found


def test_the_page_that_stands_has_all_rows() -> None:
    text = DOC.read_text()
    assert all(text.count(f"| {each.name} |") >= len(gems.SHAPES) for each in CONTENDERS)
