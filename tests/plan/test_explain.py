"""An explanation of a plan whose every figure can be worked out, and how sure it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from bigbrain_fx.cluster import parse_cluster
from bigbrain_fx.core import (
    Cluster,
    Costs,
    Graph,
    Link,
    ModuleCall,
    Op,
    OpCost,
    ParamRef,
    Placement,
    Ref,
    TensorSpec,
)
from bigbrain_fx.plan import (
    Options,
    Plan,
    Source,
    make_plan,
    one as planning,
    spread,
    with_placement,
)
from bigbrain_fx.plan.explanation import Alternative, Explanation, explain, size_text
from bigbrain_fx.plan.memory_check import needed_bytes
from tests.support.synthetic import cluster_of, device, graph_of, weight

KIB = 1024
VALUE = TensorSpec((4, 256), "float32", (256, 1), True)  # 4 KiB a value
PATHS = ("embed", "layers.0", "layers.1", "layers.2", "head")


class OneSecond:
    """Every op takes 1 s forward and 2 s backward, on every device."""

    name = "analytical"

    def estimate(self, graph: Graph, cluster: Cluster) -> Costs:
        cost = {op.name: OpCost(1.0, 2.0, 1.0) for op in graph.ops}
        names = [entry.name for entry in cluster.devices]
        return Costs(dict.fromkeys(names, cost), cluster, dict.fromkeys(names, 0.0))


@pytest.fixture(autouse=True)
def hand_made_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "estimator", lambda name: OneSecond())


def layer(index: int, path: str, source: str) -> Op:
    arguments = (Ref(source), ParamRef(f"{path}.weight"))
    calls = (ModuleCall(path, "torch.nn.Linear"),)
    name = f"v{index}"
    return Op(name, "aten.linear.default", arguments, outputs=(VALUE,), modules=calls)


def stack(paths: tuple[str, ...] = PATHS) -> Graph:
    """Put one layer after another: one op each, 1 KiB of weights each."""
    ops = [layer(i, path, f"v{i - 1}" if i else "x") for i, path in enumerate(paths)]
    weights = [weight(f"{path}.weight", 256) for path in dict.fromkeys(paths)]
    return graph_of(ops, weights)


def two(memory_bytes: int = 2**26, bytes_per_s: float = 4 * KIB) -> Cluster:
    """Two devices; a value takes 1 s + 0.5 s from one to the other."""
    a, b = device("a", memory_bytes=memory_bytes), device("b", memory_bytes=memory_bytes)
    return cluster_of(a, b, link=Link(0.5, bytes_per_s))


def placed(graph: Graph, devices: str, cluster: Cluster) -> Plan:
    """Plan with op i on the device named by the i-th letter."""
    options = Options("naive", schedule=None, micro_batches=1)
    placement = Placement(
        {op.name: name for op, name in zip(graph.ops, devices, strict=True)}, "by hand"
    )
    made = make_plan(graph, cluster, Source(""), options)
    return with_placement(made, placement)


def test_a_chain_of_two() -> None:
    # forward 2 s, over 1.5 s, forward 3 s, backward 6 s, back 1.5 s, backward 4 s
    found = explain(placed(stack(), "aabbb", two()))
    assert found.step_s == 2 + 1.5 + 3 + 6 + 1.5 + 4
    assert [(p.device, p.stages, p.modules, p.ops, p.busy_s) for p in found.devices] == [
        ("a", (0,), "embed to layers.0", 2, 2 + 4),
        ("b", (1,), "layers.1 to head", 3, 3 + 6),
    ]
    assert [part.idle_s for part in found.devices] == [12, 9]
    (cut,) = found.cuts
    assert (cut.source, cut.target, cut.after, cut.values) == (0, 1, "after layers.0", ("v1",))
    assert (cut.nbytes, cut.transfer_s) == (4 * KIB, 1.5)
    assert (cut.back_nbytes, cut.back_transfer_s) == (4 * KIB, 1.5)
    # one micro-batch: the work is 15 s and the way 3 s, wherever the cut is
    assert cut.alternatives == (
        Alternative("layers.0", "b", 18.0),
        Alternative("layers.1", "a", 18.0),
    )


def test_the_text() -> None:
    found = explain(placed(stack(), "aabbb", two()))
    lines = str(found).splitlines()
    assert lines[0:2] == ["forecast 18.0000 s a step", "naive: by hand"]
    assert lines[2].startswith(
        "  a: embed to layers.0 (2 ops); busy 6.0000 s, idle 12.0000 s; memory "
    )
    assert lines[2].endswith(" of 64.0 MiB")
    assert lines[4:7] == [
        "  cut 0 -> 1 after layers.0: 4.0 KiB a micro-batch in 1500.00 ms, "
        "gradients back 4.0 KiB in 1500.00 ms",
        "    with layers.0 on b: 18.0000 s (+0.0 %)",
        "    with layers.1 on a: 18.0000 s (+0.0 %)",
    ]


def moved(plan: Plan, homes: Mapping[str, str]) -> float:
    placement = Placement({**plan.placement.device_of, **homes})
    return with_placement(plan, placement).forecast.step_s


def test_alternatives_are_simulated_plans() -> None:
    graph = stack(("embed", "layers.0", "layers.1", "layers.2", "layers.3", "head"))
    plan = replace(placed(graph, "aabbbb", two()), micro_batches=4, rows=1)
    plan = with_placement(plan, plan.placement)  # four micro-batches: now the cut matters
    back, forth = explain(plan).cuts[0].alternatives
    assert back.step_s == moved(plan, {"v1": "b"})
    assert forth.step_s == moved(plan, {"v2": "a"})
    assert forth.step_s < plan.forecast.step_s < back.step_s  # 3 | 3 < 2 | 4 < 1 | 5
    assert explain(plan).compare(forth).endswith(" %)")


def test_an_alternative_that_does_not_fit_says_so() -> None:
    plan = placed(stack(), "aabbb", two())
    most = max(needed_bytes(e, plan.cluster.device[e.device]) for e in plan.forecast.devices)
    tight = with_placement(replace(plan, cluster=two(memory_bytes=most)), plan.placement)
    back, forth = explain(tight).cuts[0].alternatives
    assert back.step_s is None
    assert "does not fit" in back.reason
    assert forth.step_s == 18.0
    assert explain(tight).compare(back).startswith("not layers.0 on b: the plan does not fit: b ")


def test_a_cut_within_a_block() -> None:
    graph = stack(("embed", "layers.0", "layers.0", "layers.0", "head"))
    (cut,) = explain(placed(graph, "aabbb", two())).cuts
    assert cut.after == "within layers.0"
    assert [other.block for other in cut.alternatives] == ["layers.0", "layers.0"]
    assert [str(other) for other in cut.alternatives] == [
        "all of layers.0 on b",
        "all of layers.0 on a",
    ]
    assert [other.to_device for other in cut.alternatives] == ["b", "a"]


def test_ops_between_blocks_go_along() -> None:
    graph = stack(("embed", "layers.0", "", "", "layers.1", "head"))  # "": the model's own forward
    plan = placed(graph, "aaaabb", two())
    (cut,) = explain(plan).cuts
    assert cut.after == "after layers.0"
    back, forth = cut.alternatives
    assert back.step_s == moved(plan, {"v1": "b", "v2": "b", "v3": "b"})
    assert forth.step_s == moved(plan, {"v4": "a"})


def test_names_of_blocks_under_a_wrapper() -> None:
    paths = ("model.embed", "model.layers.0.up", "model.layers.1.up", "model.norm", "head.out")
    found = explain(placed(stack(paths), "aabbb", two()))
    assert [part.modules for part in found.devices] == [
        "model.embed to model.layers.0",
        "model.layers.1 to head",
    ]


def test_scattered_stages_have_cuts_and_no_neighbours() -> None:
    found = explain(placed(stack(), "ababa", two()))
    assert [(cut.source, cut.target) for cut in found.cuts] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert not any(cut.alternatives for cut in found.cuts)
    assert [part.stages for part in found.devices] == [(0, 2, 4), (1, 3)]


def test_one_device_has_no_cuts() -> None:
    found = explain(placed(stack(), "aaaaa", two()))
    assert found.cuts == ()
    assert found.devices[0].modules == "embed to head"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (3 * 2**40, "3.0 TiB")],
)
def test_sizes(count: int, text: str) -> None:
    assert size_text(count) == text


def test_an_explanation_is_a_value() -> None:
    first, second = (explain(placed(stack(), "aabbb", two())) for _ in range(2))
    assert first == second
    assert isinstance(first, Explanation)


# --------------------------------------------------------------------------- spread


__all__ = ["hand_made_costs"]  # a fixture, used by all tests here


def on(plan: Plan, preset: str) -> Plan:
    """Return a plan of two CPUs as if they were cards."""
    names = ", ".join(f'{{"name": "{n}", "preset": "{preset}"}}' for n in "ab")
    return replace(plan, cluster=parse_cluster(f'{{"devices": [{names}]}}', "x"))


@pytest.fixture
def plan() -> Plan:
    return placed(stack(), "aabbb", two())


def test_an_interval_holds_the_forecast(plan: Plan) -> None:
    found = spread(plan)
    assert found.low_s < plan.forecast.step_s < found.high_s
    assert found.note == ""
    assert str(found).endswith(" s (90 %)")


def test_a_profiled_forecast_has_a_smaller_interval(plan: Plan) -> None:
    wide, narrow = spread(plan), spread(replace(plan, estimator="measured"))
    assert wide.low_s < narrow.low_s
    assert narrow.high_s < wide.high_s


def test_a_card_that_nobody_measured_is_less_sure_and_says_so(plan: Plan) -> None:
    known, unknown = spread(on(plan, "t4")), spread(on(plan, "l40s"))
    assert (known.note, unknown.low_s < known.low_s, unknown.high_s > known.high_s) == (
        *("", True),
        True,
    )
    assert "l40s" in unknown.note


def test_a_rate_of_a_card_that_nobody_measured_is_less_sure_too(plan: Plan) -> None:
    half = replace(plan, graph=replace(plan.graph, autocast="float16"))
    found = spread(on(half, "l4"))
    assert found.note == "no published row of l4 in half precision was forecast before"
    assert spread(on(half, "t4")).note == ""
    assert found.high_s / found.low_s > spread(on(plan, "l4")).high_s / spread(on(plan, "l4")).low_s


def test_replicas_were_measured_on_cpus_with_profiled_ops(plan: Plan) -> None:
    both = replace(plan, stages=replace(plan.stages, micros=((0,), (1,))))
    guessed, profiled = spread(both), spread(replace(both, estimator="measured"))
    assert guessed.note.endswith("were held against measured steps on CPUs with profiled ops only")
    assert guessed.high_s > spread(plan).high_s
    assert profiled.note == ""
    assert profiled.high_s == pytest.approx(1.15 * plan.forecast.step_s)
    assert profiled.low_s == spread(replace(plan, estimator="measured")).low_s
