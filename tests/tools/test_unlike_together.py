"""The page of everything planned together: what it says of a row, and a small model by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigbrain_fx.plan import Source
from tests.support.synthetic import chain_graph
from tools.emulation.models import Site
from tools.unlike_together import Row, page, row_of

ROW = Row("gpt", (2, 1), 1000.0, 0.66, 0.75, 0.6, "2 devices, zb-v, 4", 0.57, 0.575, 0.63, 0.1, 2.0)


def test_a_row_that_reaches_the_limit_says_no_more() -> None:
    assert ROW.of_fluid == pytest.approx(0.95)
    assert ROW.worse == pytest.approx(0.6 / 0.66 - 1)
    last = page([ROW]).splitlines()[-3]
    assert last.endswith("| -9.1 % | 95% |  |")
    assert "1 of 1 reach 90% of fluid" in page([ROW])


def test_a_row_that_falls_short_says_what_stands_in_the_way() -> None:
    short = replace(ROW, everything_s=0.7, replicas_s=None)
    said = page([short])
    assert "| 0.66 | - | 0.7 |" in said
    assert "pipelines 99% of fluid at most, lines of whole backwards 90%; gradients 0.1 s" in said
    assert "at most +6.06 %. 0 of 1" in said


@pytest.mark.nightly
def test_a_model_is_planned_in_every_way() -> None:
    graph = chain_graph(1, 6, skips=False)
    row = row_of("chain", graph, Source("model.py"), Site("", (2, 1), 1000.0))
    assert row.bound_s <= row.everything_s * (1 + 1e-9)
    assert row.fluid_s <= row.everything_s * (1 + 1e-9)
    assert row.worse <= 1e-9
