"""The order in which replicas add gradients: what ZeRO needs is chosen where none is asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigbrain_fx.core import SumOrder, ZeroStage
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Options, Plan, make_plan
from tests.plan.test_layer_by_layer import SOURCE, layers
from tests.support.synthetic import cluster_of, device

TWO = Options("naive", replicas=2, micro_batches=4)
STAGES: tuple[ZeroStage, ...] = (0, 1, 2, 3)


def planned(options: Options) -> Plan:
    return make_plan(layers(4), cluster_of(device("d0"), device("d1")), SOURCE, options)


@pytest.mark.parametrize("zero", STAGES)
def test_the_order_that_zero_needs_is_chosen(zero: ZeroStage) -> None:
    plan = planned(replace(TWO, zero_stage=zero))
    expected: SumOrder = "micro" if zero >= 2 else "replica"
    assert plan.stages.sum_order == expected
    assert ("--all-reduce-order micro" in plan.placement.reason) == (zero >= 2)


@pytest.mark.parametrize("zero", [2, 3])
def test_a_choice_plans_what_asking_for_it_does(zero: ZeroStage) -> None:
    chosen = planned(replace(TWO, zero_stage=zero))
    asked = planned(replace(TWO, zero_stage=zero, sum_order="micro"))
    assert (chosen.stages, chosen.programs) == (asked.stages, asked.programs)
    assert "--all-reduce-order" not in asked.placement.reason


@pytest.mark.parametrize("zero", [2, 3])
def test_an_order_that_zero_cannot_have_is_refused(zero: ZeroStage) -> None:
    with pytest.raises(InputError) as caught:
        planned(replace(TWO, zero_stage=zero, sum_order="replica"))
    assert "--all-reduce-order tree" in (caught.value.help or "")


@pytest.mark.parametrize("order", ["micro", "tree", "backend"])
def test_an_order_that_was_asked_for_stays(order: SumOrder) -> None:
    assert planned(replace(TWO, zero_stage=2, sum_order=order)).stages.sum_order == order
