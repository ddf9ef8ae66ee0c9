"""--compile: what it does not go with, and that a plan without it is written as ever."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.plan import Options, Source, explain, from_json, make_plan, replan, to_json
from bigbrain_fx.plan.memory_check import COMPILER_BYTES, needed_bytes
from tests.plan.test_asynchronous import GRAPH
from tests.support.synthetic import cluster_of, device

SOURCE = Source("model.py")
CLUSTER = cluster_of(device("d0"), device("d1"))


def test_the_compiler_takes_memory_besides() -> None:
    plan = make_plan(GRAPH, CLUSTER, SOURCE, Options("naive", micro_batches=2))
    most = max(needed_bytes(e, CLUSTER.device[e.device]) for e in plan.forecast.devices)
    small = replace(
        CLUSTER, devices=tuple(replace(d, memory_bytes=2 * most) for d in CLUSTER.devices)
    )
    options = Options("naive", micro_batches=2)
    make_plan(GRAPH, small, SOURCE, options)
    assert most < COMPILER_BYTES
    with pytest.raises(NoPlanError, match=r"--compile takes 200\.0 MiB of each besides"):
        make_plan(GRAPH, small, SOURCE, replace(options, compiled=True))


def test_a_plan_says_it_keeps_it_and_one_without_is_written_as_ever() -> None:
    plain = make_plan(GRAPH, CLUSTER, SOURCE, Options("naive", micro_batches=2))
    plan = make_plan(GRAPH, CLUSTER, SOURCE, Options("naive", micro_batches=2, compiled=True))
    assert "compiled" not in json.loads(to_json(plain))["stages"]
    assert from_json(to_json(plan), "plan.json").stages.compiled
    assert replan(plan, CLUSTER).stages.compiled
    assert "under torch.compile" in str(plan)
    assert "equal to rounding" in str(explain(plan))
    assert "torch.compile" not in f"{plain} {explain(plain)}"
