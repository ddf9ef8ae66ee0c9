"""--compile: what it does not go with, and that a plan without it is written as ever."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan import Options, Source, explain, from_json, make_plan, replan, to_json
from bigbrain_fx.plan.compiling import require_compilable, require_compilable_options
from bigbrain_fx.plan.memory_check import COMPILER_BYTES, needed_bytes
from tests.plan.test_asynchronous import GRAPH
from tests.support.synthetic import cluster_of, device

SOURCE = Source("model.py")
CLUSTER = cluster_of(device("d0"), device("d1"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"partitioner": "auto"}, "--partitioner auto"),
        ({"schedule": "zb-h1"}, "--schedule zb-h1: it may have a backward in two halves"),
        ({"schedule": "zb-v"}, "--schedule zb-v"),
        ({"defer": "all"}, "--defer"),
        ({"recompute": "ops"}, "--recompute ops"),
        ({"recompute": "auto"}, "--recompute auto"),
        ({"offload": ("weights",)}, "--offload of weights"),
        ({"offload": ("activations", "state")}, "--offload of weights and activations"),
        ({"asynchronous": "2bw"}, "--asynchronous"),
        ({"tensor": 2}, "--tensor"),
        ({"tensor": 0}, "--tensor"),
        ({"zero_stage": 3}, "--zero 3"),
    ],
)
def test_what_it_does_not_go_with_is_said(more: dict[str, object], message: str) -> None:
    options = Options(**{"partitioner": "naive", "compiled": True, **more})  # type: ignore[arg-type]
    with pytest.raises(InputError, match=f"--compile does not go with {message}"):
        require_compilable_options(options)
    require_compilable_options(replace(options, compiled=False))


def test_smaller_last_batches_have_other_shapes() -> None:
    with pytest.raises(InputError, match="drop_last = False"):
        require_compilable(GRAPH, replace(SOURCE, drop_last=False), Options(compiled=True))


def test_compiled_code_draws_other_numbers() -> None:
    drawing = replace(GRAPH, ops=(*GRAPH.ops[:3], replace(GRAPH.ops[3], random=True)))
    with pytest.raises(InputError, match=r"(?s)random numbers \(v3.*set dropout to 0"):
        require_compilable(drawing, SOURCE, Options(compiled=True))


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
