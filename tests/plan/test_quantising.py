"""--quantize: what it does not go with, and what a plan says and keeps of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bigbrain_fx.core import Graph, Param, ParamRef, Ref, TensorSpec
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Options, Source, explain, make_plan, replan, to_json
from bigbrain_fx.plan.features import plain_params, require_float
from tests.support.synthetic import cluster_of, device, graph_of, op, weight

CLUSTER = cluster_of(device("d0"), device("d1"))
SOURCE = Source("model.py", quantize="int8", quantize_error=0.01)


def buffer(name: str, dtype: str, *shape: int) -> Param:
    spec = TensorSpec(shape, dtype, (shape[1], 1))
    return Param(name=name, canonical=name, kind="buffer", spec=spec)


def quantised_graph(layers: int = 4) -> Graph:
    """Return products in a row: each has an int8 weight with its scale, and a part that trains."""
    ops, params = [], []
    for i in range(layers):
        own = ParamRef(f"{i}.weight"), ParamRef(f"{i}.weight_scale")
        x = Ref(f"v{i - 1}" if i else "x")
        ops.append(op(f"w{i}", "aten.mul.Tensor", *own))
        ops.append(op(f"v{i}", "aten.linear.default", x, Ref(f"w{i}"), ParamRef(f"b{i}")))
        params.append(buffer(own[0].param, "int8", 64, 64))
        params.append(buffer(own[1].param, "float32", 64, 1))
        params.append(weight(f"b{i}", 64))
    return graph_of(ops, params, rows=16)


def test_backwards_make_float_weights_again_unasked() -> None:
    plan = make_plan(quantised_graph(), CLUSTER, SOURCE, Options("naive", micro_batches=2))
    assert [stage.again for stage in plan.stages.stages] == [("w0", "w1"), ("w2", "w3")]
    moved = replan(plan, CLUSTER)
    assert [stage.again for stage in moved.stages.stages] == [("w0", "w1"), ("w2", "w3")]
    said = "4 frozen weights are int8 with a scale for each output, 0.0 MiB instead of 0.1 MiB"
    assert f"{said}; a weight is at most 0.01 off" in str(explain(plan))
    unknown = replace(plan, source=replace(SOURCE, quantize_error=None))  # as `estimate` has it
    assert unknown.said["quantised"].endswith(said)
    assert [p.name for p in plain_params(plan.graph)] == ["b0", "b1", "b2", "b3"]


def test_a_plan_without_it_is_written_as_ever_and_takes_float_weights() -> None:
    graph, options = quantised_graph(), Options("naive", micro_batches=2)
    plan = make_plan(graph, CLUSTER, SOURCE, options)
    plain = make_plan(graph, CLUSTER, Source("model.py"), options)
    assert json.loads(to_json(plan))["source"]["quantize"] == "int8"
    assert "quantize" not in json.loads(to_json(plain))["source"]
    require_float(plain, "load")
    with pytest.raises(InputError, match="load: frozen weights of this bundle are int8"):
        require_float(plan, "load")
