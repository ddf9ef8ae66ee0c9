"""The report shows the step with its times, devices with their figures; plans tell progress."""

from __future__ import annotations

import re

import pytest

from bigbrain_fx.core import Link, Slice
from bigbrain_fx.plan import Options, Source, make_plan, telling
from bigbrain_fx.plan.plan_report import MOST_BARS, Curve, curves, gantt, report, ticks
from tests.support import samples
from tests.support.synthetic import chain_graph, cluster_of, device


def test_a_step_has_an_axis_numbers_and_links() -> None:
    page = report(samples.plan("gpt", "naive", 3, "1f1b", 4))
    assert "<script" not in page
    assert re.search(r">\d+ ms</text>", page)
    assert page.count(' text-anchor="middle" fill="#fff">3</text>') == 6  # forth and back, thrice
    assert all(f">{lane}</text>" in page for lane in ("d0", "d0-&gt;d1", "d2-&gt;d1"))
    assert page.count("60 GFLOP/s") == page.count("12 GB/s") == 3
    assert page.count(" of 4.0 GiB</td>") == 3
    assert re.search(r"<td>d0-&gt;d1</td><td>\d+</td><td>[\d.]+ ms</td><td>[\d.]+%</td>", page)
    assert "What auto compared" not in page


@pytest.mark.nightly
def test_compared_plans_stand_beside_the_chosen_one() -> None:
    page = report(samples.plan("gpt", "auto", 2, None, 4))
    assert "<h2>What auto compared</h2>" in page
    assert ">taken</td>" in page


def test_ticks_are_round_and_few() -> None:
    assert ticks(0.1)[1] == (0.02, "20 ms")
    assert ticks(2.4)[-1] == (2.0, "2 s")
    assert all(3 <= len(ticks(0.9**n)) <= 9 for n in range(100))
    assert ticks(0.0) == []


def test_memory_is_drawn_over_a_step_against_what_a_device_has() -> None:
    forecast, measured = [(0.0, 2.0), (1.0, 8.0), (3.0, 4.0)], [(0.0, 3.0), (2.0, 9.0)]
    drawn = curves([Curve("d0", 10, "8 of 10", forecast, measured)], 4.0)
    (filled,) = re.findall(r'polygon points="([^"]*)"', drawn)
    (line,) = re.findall(r'polyline points="([^"]*)"', drawn)
    dashed = float(re.findall(r'<line [^>]*y1="([\d.]+)"[^>]*stroke-dasharray', drawn)[0])
    floor, tops = heights(filled)[0], sorted(set(heights(filled)))
    assert [round(10 * (floor - y) / (floor - dashed)) for y in tops] == [8, 4, 2, 0]
    assert [round(10 * (floor - y) / (floor - dashed)) for y in sorted(set(heights(line)))] == [
        9,
        3,
    ]
    assert all(words in drawn for words in (">8 of 10<", "forecast", "measured", ">4 s<"))


def test_little_of_a_large_memory_is_drawn_without_its_limit() -> None:
    drawn = curves([Curve("d0", 1000, "", [(0.0, 10.0)])], 1.0)
    assert "stroke-dasharray" not in drawn
    assert "polyline" not in drawn
    assert len(set(heights(re.findall(r'polygon points="([^"]*)"', drawn)[0]))) == 2


def heights(points: str) -> list[float]:
    return [float(point.partition(",")[2]) for point in points.split()]


def test_300_stages_stay_a_small_page() -> None:
    devices = [f"d{i}" for i in range(300)]
    bars = [
        Slice(d, f"forward {i} #{m}", m, m + 1) for i, d in enumerate(devices) for m in range(64)
    ]
    drawn = gantt(bars, devices, 64.0)
    assert drawn.count("<rect") <= MOST_BARS
    assert "of 300 devices and links; timeline.json has all" in drawn
    assert len(drawn) < 500_000


# --------------------------------------------------------------------------- progress


CLUSTER = cluster_of(device("d0"), device("d1"), link=Link(1e-4, 1e9))


@pytest.mark.nightly
def test_a_search_tells_how_many_plans_it_has_simulated() -> None:
    graph, said = chain_graph(0, 8), list[str]()
    options = Options("auto", "analytical", effort="fast")
    with telling(said.append):
        found = make_plan(graph, CLUSTER, Source("model.py"), options)
    assert found.search is not None
    assert said[0] == "one pipeline"
    assert said[-1].startswith(f"{found.search.simulated} plans simulated, the fastest ")
    assert make_plan(graph, CLUSTER, Source("model.py"), options).placement == found.placement
    assert len(said) == found.search.simulated + 1, "it listens no longer"


def test_each_number_of_micro_batches_is_told() -> None:
    graph, said = chain_graph(0, 4), list[str]()
    with telling(said.append):
        make_plan(graph, CLUSTER, Source("model.py"), Options("naive", "analytical"))
    assert said == ["naive, 1 micro-batch", "naive, 2 micro-batches", "naive, 4 micro-batches"]
