"""Options that change no placement: compile, quantize, freeze, and where cuts may be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bigbrain_fx.core import Graph, ModuleCall, Param, ParamRef, Ref, TensorSpec
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.frontend import capture, load_model_file
from bigbrain_fx.plan import (
    Options,
    Plan,
    Source,
    explain,
    from_json,
    make_plan,
    replan,
    to_json,
    with_frozen,
)
from bigbrain_fx.plan.features import plain_params, require_float
from bigbrain_fx.plan.memory_check import COMPILER_BYTES, needed_bytes
from bigbrain_fx.planning import Given
from tests.plan.test_asynchronous import GRAPH
from tests.support import samples
from tests.support.bundles import MODEL
from tests.support.synthetic import chain_graph, cluster_of, device, graph_of, op, weight

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


# --------------------------------------------------------------------------- --quantize


QUANTISED = Source("model.py", quantize="int8", quantize_error=0.01)


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
    plan = make_plan(quantised_graph(), CLUSTER, QUANTISED, Options("naive", micro_batches=2))
    assert [stage.again for stage in plan.stages.stages] == [("w0", "w1"), ("w2", "w3")]
    moved = replan(plan, CLUSTER)
    assert [stage.again for stage in moved.stages.stages] == [("w0", "w1"), ("w2", "w3")]
    said = "4 frozen weights are int8 with a scale for each output, 0.0 MiB instead of 0.1 MiB"
    assert f"{said}; a weight is at most 0.01 off" in str(explain(plan))
    unknown = replace(plan, source=replace(QUANTISED, quantize_error=None))  # as `estimate` has it
    assert unknown.said["quantised"].endswith(said)
    assert [p.name for p in plain_params(plan.graph)] == ["b0", "b1", "b2", "b3"]


def test_a_plan_without_it_is_written_as_ever_and_takes_float_weights() -> None:
    graph, options = quantised_graph(), Options("naive", micro_batches=2)
    plan = make_plan(graph, CLUSTER, QUANTISED, options)
    plain = make_plan(graph, CLUSTER, Source("model.py"), options)
    assert json.loads(to_json(plan))["source"]["quantize"] == "int8"
    assert "quantize" not in json.loads(to_json(plain))["source"]
    require_float(plain, "load")
    with pytest.raises(InputError, match="load: frozen weights of this bundle are int8"):
        require_float(plan, "load")


# --------------------------------------------------------------------------- --freeze


APART = MODEL.replace("        self.head.weight = self.embed.weight\n", "")
FROZEN = """
def model():
    made = Net()
    for name in {names}:
        made.get_submodule(name).requires_grad_(False)
    return made
"""


def captured(folder: Path, text: str) -> Graph:
    path = folder / "letters.py"
    path.write_text(text)
    file = load_model_file(str(path))
    return capture(file.model, file.example_batch, file.loss).graph


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("text", "asked", "names"),
    [
        (APART, ["embed"], ["embed"]),
        (APART, ["embed", "blocks.0-2"], ["embed", "blocks.0", "blocks.1", "blocks.2"]),
        (APART, ["blocks.1-2", "head"], ["blocks.1", "blocks.2", "head"]),
        (MODEL, ["embed", "blocks.0"], ["embed", "blocks.0"]),
    ],
    ids=["first", "prefix", "between", "tied"],
)
def test_a_frozen_graph_is_that_of_a_model_frozen_in_its_file(
    tmp_path: Path, text: str, asked: list[str], names: list[str]
) -> None:
    made = with_frozen(captured(tmp_path, text), asked)
    (tmp_path / "frozen").mkdir()
    wanted = captured(tmp_path / "frozen", text + FROZEN.format(names=names))
    assert [(p.name, p.spec) for p in made.params] == [(p.name, p.spec) for p in wanted.params]
    assert [(op.name, op.outputs) for op in made.ops] == [
        (op.name, op.outputs) for op in wanted.ops
    ]
    assert made.graded == wanted.graded


def test_an_unknown_name_is_refused_with_the_nearest(tmp_path: Path) -> None:
    graph = captured(tmp_path, APART)
    with pytest.raises(InputError, match=r"there is no module 'block\.1'") as no:
        with_frozen(graph, ["block.1"])
    assert "blocks.1" in str(no.value.help)
    with pytest.raises(InputError, match=r"there is no module 'blocks\.4'"):
        with_frozen(graph, ["blocks.2-4"])
    frozen = with_frozen(graph, ["embed"])
    with pytest.raises(InputError, match="nothing of 'embed' is trained"):
        with_frozen(frozen, ["embed"])
    with pytest.raises(InputError, match="nothing is left to train"):
        with_frozen(frozen, ["blocks", "norm", "head"])


# --------------------------------------------------------------------------- --cut-at


def of_layers(count: int, each: int) -> Graph:
    """Draw layers in a row, of a few ops each."""
    graph = chain_graph(3, count * each, skips=False)
    ops = (
        replace(op, modules=(ModuleCall(f"blocks.{i // each}", "Block"),))
        for i, op in enumerate(graph.ops)
    )
    return replace(graph, ops=tuple(ops))


CUT = of_layers(3, 4)  # two devices would have a layer and a half each


def plan_of(partitioner: Given, **choices: object) -> Plan:
    options = replace(Options(partitioner, micro_batches=4), **choices)  # type: ignore[arg-type]  # by name
    return make_plan(CUT, samples.cluster(2), Source("model.py"), options)


def cut_layers(plan: Plan) -> list[int]:
    home = plan.placement.device_of
    names = [op.name for op in plan.graph.ops]
    return [i for i in range(3) if len({home[name] for name in names[4 * i : 4 * i + 4]}) > 1]


@pytest.mark.gate("chain-dp")
@pytest.mark.parametrize("partitioner", ["chain-dp", "auto"])
def test_blocks_stay_whole_whatever_that_costs(partitioner: str) -> None:
    whole = plan_of(partitioner, cut_at="blocks")
    anywhere = plan_of(partitioner, cut_at="anywhere")
    assert cut_layers(whole) == []
    assert cut_layers(anywhere) != []  # or the cases say nothing
    assert anywhere.forecast.step_s < whole.forecast.step_s


def test_the_default_cuts_inside_a_layer_where_that_gains_more_than_forecasts_are_off() -> None:
    whole, anywhere = (
        plan_of("chain-dp", cut_at=at).forecast.step_s for at in ("blocks", "anywhere")
    )
    found = plan_of("chain-dp")
    assert bool(cut_layers(found)) == (whole > 1.04 * anywhere)


def test_bounds_say_that_no_layer_was_cut() -> None:
    search = plan_of("auto", cut_at="blocks").search
    assert search is not None
    assert "that cuts no layer" in search.bounds[0].covers
