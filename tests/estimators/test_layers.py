"""The estimator `layers`: seconds of whole layers that others measured become costs of ops."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bigbrain_fx.core import Cluster, Costs, Graph, ModuleCall, ParamRef, Ref
from bigbrain_fx.planning import registry as plugins
from estimators.analytical import Analytical
from estimators.layers import Layers
from tests.support.command_line import call, write_cluster, write_model
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
