"""Estimators of measured layers and of a fitted model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bigbrain_fx.core import Cluster, Costs, Device, Graph, ModuleCall, Op, ParamRef, Ref
from bigbrain_fx.costs import model as cost_model
from bigbrain_fx.costs.fit import fit
from bigbrain_fx.costs.model import SHIPPED, OpWork, read_model
from bigbrain_fx.costs.profiles import signatures
from bigbrain_fx.errors import InputError
from bigbrain_fx.planning import registry as plugins
from estimators.analytical import Analytical
from estimators.layers import Layers
from estimators.learned import VARIABLE, Learned
from tests.support.command_line import call, write_cluster, write_model
from tests.support.fitted import CPU, costs_file, rows
from tests.support.messages import refused
from tests.support.synthetic import cluster_of, device, graph_of, op, tensor, weight

Write = Callable[..., Path]


def blocks(rows: int = 4) -> Graph:
    """x -> blocks.0 -> blocks.1 -> loss; a block is a product and a relu."""
    ops = []
    for number, value in enumerate(("x", "r0")):
        stack = (ModuleCall("", "m.Net"), ModuleCall(f"blocks.{number}", "m.Block"))
        w = ParamRef(f"w{number}")
        ops += [
            op(f"p{number}", "aten.linear.default", Ref(value), w, modules=stack, out=tensor(4, 4)),
            op(f"r{number}", "aten.relu.default", Ref(f"p{number}"), modules=stack),
        ]
    ops.append(op("loss", "aten.sum.default", Ref("r1")))
    return graph_of(ops, [weight("w0", 4, 4), weight("w1", 4, 4)], rows)


def cards() -> Cluster:
    return cluster_of(replace(device("d0"), processor="fast"), device("d1"))


def timed(rows: int, forward: float, **more: object) -> dict[str, Any]:
    return {"card": "fast", "rows": rows, "forward": forward, "backward": 2 * forward, **more}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(*times: dict[str, Any], modules: tuple[str, ...] = ("blocks.*",)) -> Path:
        layer = {"modules": modules, "times": times or (timed(4, 1.0),)}
        path = tmp_path / "times.json"
        path.write_text(json.dumps({"format": "layer-times-1", "layers": [layer]}))
        return path

    return written


def estimated(path: Path, graph: Graph | None = None, members: int = 1) -> Costs:
    return Layers(str(path)).of_group(members).estimate(graph or blocks(), cards())


def seconds(costs: Costs, *ops: str) -> tuple[float, float]:
    found = [costs.op_cost(name, "d0") for name in ops]
    return sum(c.forward_s for c in found), sum(c.backward_s for c in found)


@pytest.mark.parametrize("modules", [("blocks.*",), ("Block",)])
def test_each_module_takes_what_was_measured(write: Write, modules: tuple[str, ...]) -> None:
    costs = estimated(write(timed(4, 1.0, update=0.5), modules=modules))
    for number in (0, 1):
        assert seconds(costs, f"p{number}", f"r{number}") == pytest.approx((1.0, 2.0))
    assert costs.measured["d0"] == ("p0", "r0", "p1", "r1")
    assert costs.optimizer_s("d0", 2, 2 * 64) == pytest.approx(2 * 0.5)


def test_several_modules_are_one_layer(write: Write) -> None:
    costs = estimated(write(modules=("blocks.0", "blocks.1")))
    assert seconds(costs, "p0", "r0", "p1", "r1") == pytest.approx((1.0, 2.0))


def test_layers_without_a_profile_take_the_cards_factor(write: Write) -> None:
    """The loss is slower than `analytical` as the blocks are; another card is as it says."""
    plain, costs = Analytical().estimate(blocks(), cards()), estimated(write())
    low, high = sorted(3.0 / sum(seconds(plain, f"p{n}", f"r{n}")) for n in (0, 1))
    assert low < seconds(costs, "loss")[0] / seconds(plain, "loss")[0] < high
    assert costs.measured["d1"] == ()
    assert costs.op_cost("p0", "d1") == plain.op_cost("p0", "d1")


def test_between_two_sizes_time_is_a_line(write: Write) -> None:
    path = write(timed(2, 1.0), timed(6, 2.0))
    assert seconds(estimated(path), "p0", "r0")[0] == pytest.approx(1.5)
    assert estimated(path).measured["d0"]
    beyond = estimated(path, blocks(rows=10))
    assert seconds(beyond, "p0", "r0")[0] == pytest.approx(3.0)
    assert beyond.measured["d0"] == ()


def test_a_degree_that_nobody_measured_is_the_nearest_ones_share(write: Write) -> None:
    costs = estimated(write(timed(4, 1.0), timed(4, 0.7, tensor=2)), members=4)
    assert seconds(costs, "p0", "r0")[0] == pytest.approx(0.35)
    assert costs.measured["d0"] == ()


@pytest.mark.parametrize(
    ("code", "content"),
    [
        ("BX1473", {"format": "layer-times-1", "layers": [{"modules": ["blocks.0"]}]}),
        ("BX1473", {"format": "layer-times-2", "layers": []}),
        ("BX1473", {"layers": [{"modules": ["loss"], "times": [timed(4, -1.0)]}]}),
        ("BX1473", {"layers": [{"modules": ["loss"], "times": [timed(0, 1.0)]}]}),
        ("BX1473", {"layers": [{"modules": ["loss"], "times": [timed(4, 1.0)]}], "zones": 1}),
        ("BX1432", {"layers": [{"modules": ["block.*"], "times": [timed(4, 1.0)]}]}),
        ("BX1435", {"layers": [{"modules": ["loss"], "times": [{**timed(4, 1), "card": "fats"}]}]}),
        (
            "BX1433",
            {"layers": [{"modules": ["Block"], "parameters": 9, "times": [timed(4, 1.0)]}]},
        ),
        (
            "BX1434",
            {"inputs": {"x": [5]}, "layers": [{"modules": ["Block"], "times": [timed(4, 1.0)]}]},
        ),
        (
            "BX1431",
            {"layers": [{"modules": [m], "times": [timed(4, 1.0)]} for m in ("Block", "blocks.0")]},
        ),
    ],
)
def test_profiles_of_another_model(tmp_path: Path, code: str, content: Any) -> None:
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"format": "layer-times-1", **content}))
    with refused(code):
        estimated(path)


def test_profiles_that_are_no_json(tmp_path: Path) -> None:
    with refused("BX1470"):
        Layers(str(tmp_path / "none.json"))
    (tmp_path / "times.json").write_text("{")
    with refused("BX1472"):
        plugins.estimator(f"layers:{tmp_path / 'times.json'}")
    with refused("BX1436"):
        Layers()


def test_estimate_says_what_share_was_measured(tmp_path: Path) -> None:
    model, cluster = write_model(tmp_path), write_cluster(tmp_path)
    name = json.loads(cluster.read_text())["devices"][0]["name"]
    layer = {"modules": ["loss"], "times": [{**timed(1, 1e-3), "card": name}]}
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"format": "layer-times-1", "layers": [layer]}))
    words = ("estimate", model, "--devices", cluster, "--profile", path)
    assert "of the ops' time measured" in call(*words).out
    assert call(*words, "--estimator", "analytical").code == 2


# --------------------------------------------------------------------------- a fitted model


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return costs_file(tmp_path_factory.mktemp("learned") / "costs.json")


def host(name: str = "d0") -> Device:
    """A device with the rates of the machine that was profiled."""
    return replace(device(name), flops_per_s=CPU.flops_per_s, launch_s=CPU.launch_s)


def layers() -> Graph:
    """x -> linear -> relu, read twice -> mul -> sum."""
    out = tensor(4, 64)
    linear = op("v0", "aten.linear.default", Ref("x"), ParamRef("w"), out=out)
    linear = replace(linear, flops=2 * 4 * 4 * 64, reads_bytes=16 * 4 + 256 * 4)
    relu = op("v1", "aten.relu.default", Ref("v0"), out=out, reads_bytes=1024)
    mul = op("v2", "aten.mul.Tensor", Ref("v1"), Ref("v0"), out=out, reads_bytes=2048)
    return graph_of([linear, relu, mul], [weight("w", 64, 4)])


def test_each_op_costs_what_the_model_says(costs: Path) -> None:
    graph, at = layers(), host()
    found = Learned(str(costs)).estimate(graph, cluster_of(at)).ops["d0"]
    model = read_model(costs)
    for entry, signed in signatures(graph):
        work = OpWork(signed, entry.flops, entry.reads_bytes, entry.writes_bytes)  # type: ignore[arg-type]
        (forward_s,) = model.seconds("forward", [work], at)
        assert found[entry.name].forward_s == pytest.approx(forward_s)
    (relu,) = [OpWork(s, 256, 1024, 1024) for o, s in signatures(graph) if o.name == "v1"]
    (back_s,) = model.seconds("backward_input", [relu], at)
    assert found["v1"].backward_s == found["v1"].backward_input_s == pytest.approx(back_s)
    assert found["v0"].backward_input_s == 0.0 < found["v0"].backward_s  # x is data


def test_memory_is_the_analytical_estimators(costs: Path) -> None:
    graph, cluster = layers(), cluster_of(host(), device("d1", 3))
    ours, theirs = (
        Learned(str(costs)).estimate(graph, cluster),
        plugins.estimator("analytical").estimate(graph, cluster),
    )
    for name in ("d0", "d1"):
        for entry in graph.ops:
            mine, other = ours.op_cost(entry.name, name), theirs.op_cost(entry.name, name)
            assert mine.saved_bytes == other.saved_bytes
            assert mine.workspace_bytes == other.workspace_bytes
    assert ours.optimizer_s_per_byte == theirs.optimizer_s_per_byte
    assert ours.optimizer_s_per_tensor == theirs.optimizer_s_per_tensor


def test_the_optimizer_is_as_it_was_profiled(tmp_path: Path) -> None:
    machine = replace(
        CPU,
        optimizer_s_per_byte=20.0 / CPU.memory_bytes_per_s,
        optimizer_s_per_tensor=9.0 * CPU.launch_s,
    )
    cost_model.write_model(fit(rows(machines=[machine]), "linear"), tmp_path / "costs.json")
    slow = replace(host("d1"), launch_s=5 * CPU.launch_s)
    found = Learned(str(tmp_path / "costs.json")).estimate(layers(), cluster_of(host(), slow))
    assert found.optimizer_s_per_byte["d0"] == pytest.approx(20.0 / host().memory_bytes_per_s)
    assert found.optimizer_s_per_tensor == pytest.approx(
        {"d0": 9.0 * CPU.launch_s, "d1": 45.0 * CPU.launch_s}
    )


def test_a_region_costs_the_sum_of_its_ops(costs: Path) -> None:
    plain, at = layers(), cluster_of(host())
    body = replace(plain, loss=None)
    region = Op("r", "region.enable_grad", (Ref("x"),), outputs=plain.ops[-1].outputs, body=body)
    whole = graph_of([region], plain.params)
    inside = Learned(str(costs)).estimate(plain, at).ops["d0"]
    outside = Learned(str(costs)).estimate(whole, at).ops["d0"]
    assert outside["r"].forward_s == pytest.approx(sum(c.forward_s for c in inside.values()))
    assert outside["r"].backward_s == pytest.approx(sum(c.backward_s for c in inside.values()))


# --------------------------------------------------------------------------- where the model is


def test_without_a_file_it_is_the_shipped_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    learned = plugins.estimator("learned")
    found = learned.estimate(layers(), cluster_of(host()))
    again = Learned(str(SHIPPED)).estimate(layers(), cluster_of(host()))
    assert found.ops == again.ops
    gpu = replace(host(), kind="cuda")
    with pytest.raises(InputError, match="of cpu devices, not of cuda") as caught:
        learned.estimate(layers(), cluster_of(gpu))
    assert "profile a cuda device" in str(caught.value.help)


def test_a_file_is_named_by_option_or_environment(
    costs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nothing.json"))
    with pytest.raises(InputError, match="no readable file"):
        plugins.estimator("learned")
    assert plugins.estimator("learned", costs=str(costs)) == Learned(str(costs))
    monkeypatch.setenv(VARIABLE, str(costs))
    assert plugins.estimator("learned").name == "learned"


def test_a_file_that_is_written_again_is_read_again(tmp_path: Path) -> None:
    path = costs_file(tmp_path / "costs.json", "linear")
    assert Learned(str(path)).model().kind == "linear"
    costs_file(path, "boosting")
    assert Learned(str(path)).model().kind == "boosting"


@pytest.mark.nightly
def test_the_preset_plans_with_it(
    costs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(VARIABLE, str(costs))
    model, cluster = write_model(tmp_path), write_cluster(tmp_path)
    words = ("estimate", model, "--devices", cluster, "--micro-batches", "4", "--json")
    (found,) = call(*words, "--partitioner", "learned").objects
    assert (found["partitioner"], found["estimator"]) == ("chain-dp", "learned")
    assert found["step_s"] > 0.0
