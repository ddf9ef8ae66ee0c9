"""What a few ops are worth: which are chosen, and that what is left out is seen by nobody."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bigbrain_fx.costs.profiles import ProfileStore
from tests.support.fitted import CPU, rows
from tools import few_ops
from tools.few_ops import Curve, Judged, curves, line, telling


def test_the_ops_that_are_chosen_are_unlike_and_not_the_clocks() -> None:
    some = rows(machines=[CPU])
    found = telling(some, 3)
    assert len({profile.signature.key for _, profile in found}) == 3
    assert len({profile.signature.target for _, profile in found}) >= 2
    assert found == telling(some, 5)[:3]  # one after the other
    quick = [row for row in some if few_ops._expected_s(row) < few_ops.LEAST_S]
    assert telling(quick, 3) == []


@pytest.mark.nightly
def test_a_slower_device_is_forecast_by_its_own_ops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_ops, "COUNTS", (0, 20))
    monkeypatch.setattr(few_ops, "DEFAULT", "linear")
    slow = replace(CPU, processor="Slow CPU")
    for name, machine, times in (("base", CPU, 1.0), ("new", slow, 4.0)):
        store = ProfileStore(tmp_path / f"{name}.sqlite")
        for i, (_, p) in enumerate(rows(machines=[CPU])):
            phases = ("forward_s", "backward_input_s", "backward_weight_s")
            store.put(machine, replace(p, **{key: times * getattr(p, key) for key in phases}))
            store.credit("even" if i % 2 else "odd", p.signature.key)
    found = {c.method: c for c in curves(tmp_path / "base.sqlite", tmp_path / "new.sqlite")}
    assert {each.held for each in found["analytical"].judged[0]} == {"even", "odd"}
    by_count = found["base, ops chosen"].judged
    assert list(by_count) == [0, 20]
    off = [_mean_off(by_count[count]) for count in (0, 20)]
    assert off[1] < 0.5 * off[0]


def _mean_off(some: object) -> float:
    assert isinstance(some, list)
    return sum(abs(each.forecast_s / each.measured_s - 1.0) for each in some) / len(some)


def test_a_line_has_the_errors_of_ops_and_of_sums() -> None:
    some = [Judged("a", 2.0, 1.0), Judged("a", 1.0, 2.0), Judged("b", 3.0, 3.0)]
    found = line(Curve("d", "m", {5: some}), 5)
    assert found == "| d | m | 5 | 50% | 50% | 1.59 | 0% | 0.500 |"
