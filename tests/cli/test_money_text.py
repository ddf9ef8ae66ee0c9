"""Limits and prices as options have them, and what commands say of money."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bigbrain_fx.cli.money_text import money_json, money_lines, time_text
from bigbrain_fx.cli.option_values import goals_of, read_count
from bigbrain_fx.cli.prices import cost, hourly, offers
from bigbrain_fx.core import Input
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Goals, Offer, Plan, tokens
from tests.plan.test_explain import hand_made_costs, placed, stack, two
from tests.support.messages import refused
from tests.support.synthetic import tensor

__all__ = ["hand_made_costs"]  # a fixture, used by all tests here


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
