"""What a notebook shows: short reprs, and a noun's own text as the cell's output."""

from __future__ import annotations

from pathlib import Path

import bigbrain_fx as bb
from bigbrain_fx.bundles.verifying import Check
from bigbrain_fx.core import Cluster, Device, Link, Shown


def test_every_noun_has_one_line_and_a_text(bundle: Path) -> None:
    plan = bb.read_plan(bundle)
    run = bb.Run(
        (bb.StepLine(0, 2.5, 1.0), bb.StepLine(1, 2.0, 0.5)), {"d0": 3 << 20}, Path("logs")
    )
    contender = bb.Contender("naive", "naive", "analytical", 0.25, plan)
    nouns: dict[str, Shown] = {
        "<Plan Net: 2 stages": plan,
        "<Forecast ": plan.forecast,
        "<Explanation forecast ": bb.explain(plan),
        "<Cluster 2 devices on localhost>": plan.cluster,
        "<Run 2 steps, loss 2.5000 -> 2.0000, median 0.5000 s>": run,
        "<Comparison Tiny: captured in 1.5 s>": bb.Comparison("Tiny", (contender,), 1.5),
        "<Verification equal  a link: 3 < 4>": bb.Verification((Check("a link", True, "3 < 4"),)),
    }
    for start, noun in nouns.items():
        assert repr(noun).startswith(start)
        assert len(repr(noun)) < 200
        assert "\n" not in repr(noun)
    assert nouns["<Verification equal  a link: 3 < 4>"]._repr_html_() == (
        "<pre>equal  a link: 3 &lt; 4</pre>"
    )
    assert "d1: busy" in str(plan.forecast)
    assert "d0: 3 MiB resident" in str(run)


def test_names_of_devices_are_no_markup() -> None:
    device = Device("<b>", "<i>", "cpu", 2**30, 1e9, 1e9)
    shown = Cluster((device,), Link(1e-5, 1e9))._repr_html_()
    assert "&lt;b&gt;: cpu on &lt;i&gt;, 1.0 GiB, 1 GFLOP/s" in shown
