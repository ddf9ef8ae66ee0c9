"""What is printed of a plan: limits, money, exact text in a pipe, traces, JSON, notebooks."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import bigbrain_fx as bb
from bigbrain_fx.bundles.verifying import Check, Verification
from bigbrain_fx.cli.console import (
    MOST_CUTS,
    plan_json,
    show_explanation,
    show_forecast,
    show_plan,
    show_verification,
)
from bigbrain_fx.cli.money_text import money_json, money_lines, time_text
from bigbrain_fx.cli.option_values import goals_of, read_count
from bigbrain_fx.cli.output import json_line
from bigbrain_fx.cli.prices import cost, hourly, offers
from bigbrain_fx.cli.tracing import print_trace
from bigbrain_fx.cli.verdict import verdict
from bigbrain_fx.core import Cluster, Device, Input, Link, Shown
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Goals, Offer, Plan, explain, tokens
from bigbrain_fx.plan.explanation import Cut, DevicePart, Explanation
from tests.plan.test_explain import hand_made_costs, placed, stack, two
from tests.support.messages import refused
from tests.support.synthetic import tensor

__all__ = ["hand_made_costs"]  # a fixture, used by all tests here

Capture = pytest.CaptureFixture[str]

# busy s: 2 ops x 3 s and 3 ops x 3 s. weights: 1 KiB an op; gradients and Adam's two moments
PLAN = """\
toy: 1,280 parameters, 5 ops, 2 stages; 1f1b, 1 micro-batch of 4 rows
fits 2 devices: 18 s a step, 0.222 rows/s (90 % interval 14.04 to 23.04 s)
limits: b is busy 50 % of a step (all devices 42 %); b is fullest, {b} of 64.0 MiB (0 %)
better: --partitioner auto also tries replicas, tensor parallelism and other schedules
device  stages  modules            ops  busy s   idle s    memory       of
a       0       embed to layers.0    2  6.0000  12.0000  {a} 64.0 MiB
b       1       layers.1 to head     3  9.0000   9.0000  {b} 64.0 MiB
naive: by hand
cut 0 -> 1 after layers.0: 4.0 KiB a micro-batch in 1500.00 ms, gradients back 4.0 KiB in 1500.00 ms
  with layers.0 on b: 18.0000 s (+0.0 %)
  with layers.1 on a: 18.0000 s (+0.0 %)
forecast 18.0000 s a step
"""


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_a_plan(capsys: Capture) -> None:
    plan = placed(stack(), "aabbb", two())
    a, b = (f"{entry.peak_bytes / 1024:.1f} KiB" for entry in plan.forecast.devices)
    show_plan(plan, 5 * 256, verbose=True)
    assert words(capsys.readouterr().out) == words(PLAN.format(a=a, b=b))
    show_plan(plan, 5 * 256)
    assert words(capsys.readouterr().out) == words(PLAN.format(a=a, b=b))[:7]


def test_a_forecast(capsys: Capture) -> None:
    plan = placed(stack(), "aabbb", two())
    show_forecast(plan)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "toy: naive with analytical, 1f1b, 1 micro-batch of 4 rows"
    assert [line.partition(" ")[0] for line in lines[1:4]] == ["fits", "limits:", "better:"]
    assert lines[4].split()[-3:] == ["messages", "peak", "of"]
    assert lines[5].split()[:5] == ["a", "6.0000", "12.0000", "2.0", "KiB"]  # two weights
    assert lines[6].split()[:5] == ["b", "9.0000", "9.0000", "3.0", "KiB"]
    assert len(lines) == 7
    assert len({len(line) for line in lines[4:]}) == 1  # columns stand under their heads


def test_a_plan_as_json() -> None:
    plan = placed(stack(), "aabbb", two())
    found = json.loads(json_line(plan_json(plan)))
    assert found["step_s"] == 18.0
    assert found["stages"] == 2
    assert [entry["memory_bytes"] for entry in found["devices"]] == [2**26, 2**26]
    assert [entry["weights_bytes"] for entry in found["devices"]] == [2048, 3072]


def explanation(cuts: int = 0, moved: tuple[str, ...] = (), modules: str = "all") -> Explanation:
    part = DevicePart("d0", (0,), modules, 1, 0.5, 0.5, 1024, 2048)
    found = tuple(Cut(i, i + 1, f"after b{i}", ("v",), i, 0.0, 0, 0.0, ()) for i in range(cuts))
    return Explanation(1.0, "", (part,), found, moved)


def test_only_the_largest_of_many_cuts(capsys: Capture) -> None:
    show_explanation(explanation(cuts=MOST_CUTS + 3))
    out = capsys.readouterr().out
    assert "cut 2 -> 3" not in out  # 0, 1 and 2 bytes
    assert "cut 3 -> 4 after b3: 3 B a micro-batch in 0.00 ms\n" in out
    assert "and 3 smaller cuts, see --json\n" in out


def test_moved_ops(capsys: Capture) -> None:
    show_explanation(explanation(moved=("add", "relu")))
    assert "2 ops moved to stay with others: add, relu\n" in capsys.readouterr().out
    show_explanation(explanation(moved=tuple("abcdefg")))
    assert "7 ops moved to stay with others: a, b, c, d, e, ...\n" in capsys.readouterr().out


def test_names_are_no_markup(capsys: Capture) -> None:
    show_explanation(explanation(modules="[red]x[/] to y[0]"))
    assert "[red]x[/] to y[0]" in capsys.readouterr().out
    plan = placed(stack(), "aaaaa", two())
    show_forecast(replace(plan, graph=replace(plan.graph, name="[bold]N[/x]")))
    assert capsys.readouterr().out.startswith("[bold]N[/x]: ")


def test_a_verification(capsys: Capture) -> None:
    long = "gradient of [a] " * 20
    show_verification(Verification((Check("losses", True, "5 steps"), Check("w", False, long))))
    checks = f"equal  losses: 5 steps\nDIFFERENT  w: {long}\n"
    assert capsys.readouterr().out == f"FAILED: 1 of 2 checks\n{checks}"


def test_speed_comes_first_and_limits_name_their_device() -> None:
    speed, limits, better = verdict(placed(stack(), "aabbb", two()))
    assert speed == "fits 2 devices: 18 s a step, 0.222 rows/s (90 % interval 14.04 to 23.04 s)"
    assert limits.startswith("limits: b is busy 50 % of a step (all devices 42 %); b is fullest, ")
    assert better.startswith("better: --partitioner auto ")


def test_a_plan_that_leaves_devices_idle_says_how_many_and_how_to_use_all() -> None:
    speed, _, better = verdict(placed(stack(), "aaaaa", two()))
    assert speed.startswith("fits 1 of 2 devices: ")
    assert "--partitioner naive" in better


def test_a_faster_neighbour_of_a_cut_is_named_with_its_pin() -> None:
    plan = placed(stack(), "aaaab", two())
    found = explain(plan)
    slower = replace(plan, forecast=replace(plan.forecast, step_s=plan.forecast.step_s * 2))
    *_, better = verdict(slower, replace(found, step_s=found.step_s * 2))
    assert better.startswith("better: --pin ")
    assert "=" in better


def test_the_pin_of_a_block_that_a_cut_divides_is_its_name() -> None:
    graph = stack(("embed", "layers.0", "layers.0", "layers.0", "head"))
    plan = placed(graph, "aaabb", two())
    slow = replace(plan, forecast=replace(plan.forecast, step_s=2 * plan.forecast.step_s))
    *_, better = verdict(slow, explain(plan))
    assert re.match(r"better: --pin layers\.0=[ab];", better)


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


# --------------------------------------------------------------------------- money


@pytest.fixture
def plan() -> Plan:
    """Plan 4 rows in 18 s, for 3 dollars an hour."""
    where = replace(two(), prices=(("a", 1.0), ("b", 2.0)))
    return replace(placed(stack(), "aabbb", two()), cluster=where)


@pytest.mark.parametrize(
    ("text", "count"),
    [("300e9", 3e11), ("300B", 3e11), ("1.5T", 1.5e12), ("5000", 5e3), ("2k", 2e3), ("7M", 7e6)],
)
def test_counts_as_people_write_them(text: str, count: float) -> None:
    assert read_count(text, "--tokens") == count


@pytest.mark.parametrize("text", ["0", "-1", "many", "1e99", "3 apples", "", "5/h"])
def test_values_that_are_no_count_are_refused(text: str) -> None:
    with refused("BX3536") as caught:
        read_count(text, "--tokens")
    assert caught.value.at == "--tokens"


def test_limits_are_read_from_options() -> None:
    assert goals_of({}) is None
    found = goals_of({"tokens": "1B", "max_cost": "20", "deadline": "2d", "min_throughput": "1k"})
    assert found == Goals(1e9, 20.0, None, 1e3, 172_800.0)
    assert goals_of({"max_cost": "5/h"}) == Goals(max_hour_usd=5.0)
    with refused("BX1030"):
        goals_of({"deadline": "soon"})


def test_money_is_price_times_time(plan: Plan) -> None:
    goals = Goals(tokens=4000.0)
    first, second = money_lines(plan, goals)
    assert first == "money: 3 USD/h for 2 devices; 3750 USD a million rows"
    assert second == "4,000 rows: 5 hours and 15 USD, in 1,000 steps"
    found = money_json(plan, goals)
    assert found["training"] == {"tokens": 4000.0, "steps": 1000, "s": 18_000.0, "usd": 15.0}
    assert found["money"] == {
        "hour_usd": 3.0,
        "devices_hour_usd": 3.0,
        "step_usd": 0.015,
        "million_usd": 3750.0,
    }


def test_nothing_is_said_of_money_without_prices(plan: Plan) -> None:
    bare = replace(plan, cluster=two())
    assert list(money_lines(bare, None)) == []
    assert money_json(bare, None) == {}
    one = replace(plan, cluster=replace(two(), prices=(("a", 1.0),)))
    assert list(money_lines(one, None)) == ["money: not known, as price_per_hour_usd is missing: b"]


def test_the_gain_of_other_devices_is_printed(plan: Plan) -> None:
    rented = (
        Offer(("a",), 18.0, 0.01),
        Offer(("a", "b"), 9.0, 0.02, "too dear"),
        Offer(("b",), why="no"),
    )
    lines = list(money_lines(replace(plan, rented=rented), None))[1:]
    assert lines == [
        "devices left out: b",
        "compared: a, b: 2 times the throughput at 2 times the cost; too dear",
        "compared: b: no",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.5, "1.5 s"), (150, "2.5 minutes"), (9000, "2.5 hours"), (3e5, "3.47 days")],
)
def test_times_in_the_unit_that_people_use(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


CPU = '"kind": "cpu", "memory": "4GiB", "flops": "60GFLOP/s", "memory_bandwidth": "12GB/s"'


@pytest.mark.parametrize("text", ["2.1", "h", "0/h", "-1/h x", "2/day"])
def test_values_that_are_no_price_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="price by the hour"):
        hourly(text)


def test_rows_and_tokens_cost_what_their_time_does(plan: Plan) -> None:
    found = cost(plan, 3.6)  # 4 rows in 18 s
    assert found.unit == "rows"
    assert found.a_million == pytest.approx(0.001 * 18 / 4 * 1e6)
    entry = Input("t", ("t",), tensor(4, 128, grad=False, dtype="int64"))
    graph = replace(plan.graph, inputs=(*plan.graph.inputs, entry))
    assert tokens(graph) == 128
    paid = cost(replace(plan, graph=graph), 3.6)
    assert paid.unit == "tokens"
    assert paid.a_million == pytest.approx(found.a_million / 128)


def test_clusters_in_the_order_of_what_they_cost(plan: Plan, tmp_path: Path) -> None:
    def written(name: str, count: int, flops: str) -> Path:
        rates = CPU.replace("60GFLOP/s", flops)
        devices = ", ".join(f'{{"name": "{n}", {rates}}}' for n in "ab"[:count])
        path = tmp_path / name
        path.write_text(f'{{"devices": [{devices}]}}')
        return path

    files = [written("slow", 2, "1MFLOP/s"), written("fast", 2, "1TFLOP/s")]
    few = written("few", 1, "1TFLOP/s")
    found = offers(plan, [*files, few], ["1/h", "2/h", "1/h"], again=False)
    assert [Path(each.devices).name for each in found][-1] == "few"
    assert found[-1].code == "BX3023"
    first, second = found[:2]
    assert first.cost is not None
    assert second.cost is not None
    assert first.cost.a_million <= second.cost.a_million
    assert first.spread is not None
    assert all(each.cost is None for each in offers(plan, files, [], again=False))
    priced = tmp_path / "priced"
    text = files[0].read_text().replace('"name"', '"price_per_hour_usd": 0.5, "name"')
    priced.write_text(text)
    (own,) = offers(plan, [priced], [], again=False)
    (given,) = offers(plan, [files[0]], ["1/h"], again=False)
    assert own.cost == given.cost
    with pytest.raises(InputError, match="a price for each of 2 clusters, found 3"):
        offers(plan, files, ["1/h", "2/h", "3/h"], again=False)


# --------------------------------------------------------------------------- notebooks


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
