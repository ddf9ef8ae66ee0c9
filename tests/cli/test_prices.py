from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bigbrain_fx.cli.prices import cost, hourly, offers
from bigbrain_fx.core import Input
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Plan, tokens
from tests.plan.test_explain import hand_made_costs, placed, stack, two
from tests.support.synthetic import tensor

__all__ = ["hand_made_costs"]  # a fixture, used by all tests here

CPU = '"kind": "cpu", "memory": "4GiB", "flops": "60GFLOP/s", "memory_bandwidth": "12GB/s"'


@pytest.fixture
def plan() -> Plan:
    return placed(stack(), "aabbb", two())


@pytest.mark.parametrize("text", ["2.1/h", "$2.1/h", " 2.1 / h"])
def test_a_price_by_the_hour(text: str) -> None:
    assert hourly(text) == 2.1


@pytest.mark.parametrize("text", ["2.1", "h", "0/h", "-1/h x", "2/day"])
def test_what_is_no_price_is_refused(text: str) -> None:
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
