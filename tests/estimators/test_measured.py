"""`measured`: profiles where there are any, scaled to the device; and how much that was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bigbrain_fx.core import Costs, Device, Graph, Placement, Ref
from bigbrain_fx.costs.profiles import Machine, OpProfile, ProfileStore, signatures
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Options, Source, make_plan, measured_share
from bigbrain_fx.plan.explanation import explain
from bigbrain_fx.planning import registry as plugins
from estimators.op_rules import BACKWARD_LAUNCHES, FORWARD_LAUNCHES
from tests.support.profiled import MACHINE, profile_of
from tests.support.synthetic import cluster_of, graph_of, op, random_graph

SAME = Device("same", "h", "cpu", 2**30, MACHINE.flops_per_s, MACHINE.memory_bytes_per_s, 1e-6)


def two_ops() -> Graph:
    """A product in name, then a pass; the sizes are in the profiles."""
    return graph_of(
        [
            op("a", "aten.mm.default", Ref("x"), flops=10**6, writes_bytes=4),
            op("b", "aten.relu.default", Ref("a"), flops=4, writes_bytes=10**6),
        ]
    )


def stored(path: Path, graph: Graph, *names: str, machine: Machine = MACHINE) -> Path:
    """Keep a profile of 1 ms forward for some ops of a graph."""
    found: list[OpProfile] = []
    for entry, signature in signatures(graph):
        if not names or entry.name in names:
            sizes = {"flops": int(entry.flops), "writes_bytes": int(entry.writes_bytes)}
            found.append(profile_of(signature, **sizes))
    ProfileStore(path).put(machine, *found)
    return path


def estimated(path: Path, graph: Graph, *devices: Device) -> Costs:
    return plugins.estimator("measured", profiles=str(path)).estimate(graph, cluster_of(*devices))


def test_on_the_machine_itself_a_profile_holds_as_it_is(tmp_path: Path) -> None:
    graph = two_ops()
    costs = estimated(stored(tmp_path / "p.sqlite", graph), graph, SAME)
    cost = costs.op_cost("b", "same")
    assert cost.forward_s == pytest.approx(1e-3, rel=1e-12)
    assert cost.backward_s == pytest.approx(2e-3, rel=1e-12)
    assert costs.measured == {"same": ("a", "b")}
    assert costs.optimizer_s_per_byte == {"same": MACHINE.optimizer_s_per_byte}
    assert costs.optimizer_s_per_tensor == {"same": MACHINE.optimizer_s_per_tensor}


def test_an_op_scales_with_its_bound(tmp_path: Path) -> None:
    graph = two_ops()
    path = stored(tmp_path / "p.sqlite", graph)
    counting = replace(SAME, name="counting", flops_per_s=MACHINE.flops_per_s / 3)
    moving = replace(SAME, name="moving", memory_bytes_per_s=MACHINE.memory_bytes_per_s / 5)
    costs = estimated(path, graph, counting, moving)
    starting_s = FORWARD_LAUNCHES * MACHINE.launch_s
    for name, device, factor in [("a", "counting", 3.0), ("b", "moving", 5.0)]:
        expected_s = starting_s + (1e-3 - starting_s) * factor
        assert costs.op_cost(name, device).forward_s == pytest.approx(expected_s)
    assert costs.op_cost("a", "moving").forward_s == pytest.approx(1e-3)
    assert costs.op_cost("b", "counting").forward_s == pytest.approx(1e-3)


def test_start_costs_scale_with_launches(tmp_path: Path) -> None:
    graph = two_ops()
    path = stored(tmp_path / "p.sqlite", graph)
    slow = replace(SAME, launch_s=11 * MACHINE.launch_s)
    cost = estimated(path, graph, slow).op_cost("b", "same")
    assert cost.forward_s == pytest.approx(1e-3 + 10 * FORWARD_LAUNCHES * MACHINE.launch_s)
    assert cost.backward_s == pytest.approx(2e-3 + 10 * BACKWARD_LAUNCHES * MACHINE.launch_s)


def test_missing_ops_and_optimizers_are_analytical(tmp_path: Path) -> None:
    graph = two_ops()
    path = stored(tmp_path / "p.sqlite", graph, "a", machine=with_optimizer(0.0, 0.0))
    costs = estimated(path, graph, SAME)
    known = plugins.estimator("analytical").estimate(graph, cluster_of(SAME))
    assert costs.measured == {"same": ("a",)}
    assert costs.op_cost("b", "same") == known.op_cost("b", "same")
    assert costs.op_cost("a", "same").saved_bytes == known.op_cost("a", "same").saved_bytes
    assert costs.optimizer_s_per_tensor == known.optimizer_s_per_tensor
    assert costs.optimizer_s_per_byte == known.optimizer_s_per_byte


def test_another_kind_of_device_is_analytical(tmp_path: Path) -> None:
    graph = two_ops()
    gpu = replace(SAME, kind="cuda")
    costs = estimated(stored(tmp_path / "p.sqlite", graph), graph, gpu)
    assert costs.measured == {"same": ()}
    assert costs.ops == plugins.estimator("analytical").estimate(graph, cluster_of(gpu)).ops


def test_the_nearest_machine_is_taken(tmp_path: Path) -> None:
    graph, path = two_ops(), tmp_path / "p.sqlite"
    stored(path, graph, machine=replace(MACHINE, processor="far", flops_per_s=1.0))
    stored(path, graph, machine=replace(MACHINE, processor="threads", threads=2))
    stored(path, graph, "a")
    assert estimated(path, graph, SAME).measured == {"same": ("a",)}
    assert estimated(path, graph, replace(SAME, threads=2)).measured == {"same": ("a", "b")}


def test_a_gpus_profile_holds_whatever_its_hosts_threads(tmp_path: Path) -> None:
    graph, path = two_ops(), tmp_path / "p.sqlite"
    gpu = replace(MACHINE, kind="cuda", processor="a GPU", threads=8)
    stored(path, graph)  # on the host's CPU, with one thread
    stored(path, graph, machine=replace(gpu, processor="far", flops_per_s=1.0, threads=1))
    stored(path, graph, "a", machine=gpu)
    device = replace(SAME, kind="cuda", threads=1)
    costs = estimated(path, graph, device)
    assert costs.measured == {"same": ("a",)}
    assert costs.op_cost("a", "same").forward_s == pytest.approx(1e-3, rel=1e-12)


def test_a_gpu_of_nearly_the_rates_is_the_same_card(tmp_path: Path) -> None:
    """Its rates are noise, and nothing is scaled; a CPU's are taken as they are."""
    graph, path = two_ops(), tmp_path / "p.sqlite"
    for kind in ("cpu", "cuda"):
        stored(path, graph, machine=replace(MACHINE, kind=kind))
    near = Device(
        *("near", "h", "cuda", 2**30, 0.9 * SAME.flops_per_s, 1.1 * SAME.memory_bytes_per_s),
        launch_s=1.14e-6,
    )
    others = replace(near, name="other", launch_s=1.2e-6), replace(near, name="cpu", kind="cpu")
    costs = estimated(path, graph, near, *others)
    for name in ("a", "b"):
        assert costs.op_cost(name, "near").forward_s == pytest.approx(1e-3, rel=1e-12)
        for other in others:
            assert costs.op_cost(name, other.name).forward_s != pytest.approx(1e-3, rel=1e-3)
    assert costs.optimizer_s_per_tensor["near"] == MACHINE.optimizer_s_per_tensor
    assert costs.optimizer_s_per_byte["near"] == MACHINE.optimizer_s_per_byte
    assert costs.optimizer_s_per_tensor["other"] > MACHINE.optimizer_s_per_tensor


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_machine_that_was_profiled_is_not_scaled(tmp_path: Path, kind: str) -> None:
    """Its name says so, whatever its rates were this time; but neighbours slow it still."""
    graph, path = two_ops(), tmp_path / "p.sqlite"
    for name in ("another", "a processor"):
        stored(path, graph, machine=replace(MACHINE, kind=kind, processor=name))
    rates = 2.5 * SAME.flops_per_s, 0.4 * SAME.memory_bytes_per_s
    own = Device("own", "h", "cpu", 2**30, *rates, 3e-6, processor="a processor")
    own = replace(own, kind=kind)  # type: ignore[arg-type]
    half = replace(own, name="half", core_share=0.5, memory_share=0.5)
    costs = estimated(path, graph, own, half, replace(own, name="more", threads=2))
    for name in ("a", "b"):
        assert costs.op_cost(name, "own").forward_s == pytest.approx(1e-3, rel=1e-12)
        assert costs.op_cost(name, "half").forward_s == pytest.approx(2e-3, rel=1e-12)
    more_s = costs.op_cost("a", "more").forward_s
    assert (more_s == pytest.approx(1e-3, rel=1e-12)) == (kind == "cuda")
    assert costs.optimizer_s_per_byte["own"] == MACHINE.optimizer_s_per_byte


def test_a_database_must_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("BIGBRAIN_PROFILES", raising=False)
    with pytest.raises(InputError, match="needs a profile database") as caught:
        plugins.estimator("measured")
    assert "BIGBRAIN_PROFILES=profiles.sqlite" in str(caught.value.help)
    monkeypatch.setenv("BIGBRAIN_PROFILES", str(tmp_path / "absent.sqlite"))
    with pytest.raises(InputError, match="no such file"):
        plugins.estimator("measured")


def test_a_file_that_grows_is_read_again(tmp_path: Path) -> None:
    graph, path = two_ops(), tmp_path / "p.sqlite"
    stored(path, graph, "a")
    estimator = plugins.estimator("measured", profiles=str(path))
    assert estimator.estimate(graph, cluster_of(SAME)).measured == {"same": ("a",)}
    ProfileStore(path).put(MACHINE, *(profile_of(s) for _, s in signatures(random_graph(3, 60))))
    stored(path, graph, "b")
    assert estimator.estimate(graph, cluster_of(SAME)).measured == {"same": ("a", "b")}


def with_optimizer(per_tensor_s: float, per_byte_s: float) -> Machine:
    pair = {"optimizer_s_per_tensor": per_tensor_s, "optimizer_s_per_byte": per_byte_s}
    return replace(MACHINE, **pair)  # type: ignore[arg-type]  # both are numbers


def test_the_optimizer_is_that_of_the_model_with_most_of_the_ops(tmp_path: Path) -> None:
    graph, path = two_ops(), tmp_path / "p.sqlite"
    a, b = (signature.key for _, signature in signatures(graph))
    store = ProfileStore(path)
    stored(path, graph)  # a session without a model: its optimizer is the middle one below
    for model, pair, keys in [
        ("whole", (1e-6, 1e-10), (a, b)),
        ("half", (9e-5, 9e-9), (a,)),  # the last one that was profiled
    ]:
        store.put(with_optimizer(*pair), model=model)
        store.credit(model, *keys)
    slow = replace(SAME, name="slow", launch_s=3e-6, memory_bytes_per_s=SAME.memory_bytes_per_s / 2)
    costs = estimated(path, graph, SAME, slow)
    assert costs.optimizer_s_per_tensor == pytest.approx({"same": 1e-6, "slow": 3e-6})
    assert costs.optimizer_s_per_byte == pytest.approx({"same": 1e-10, "slow": 2e-10})
    store.put(with_optimizer(0.0, 0.0), model="whole")  # begun again, and not yet at its end
    assert estimated(path, graph, SAME).optimizer_s_per_tensor == pytest.approx({"same": 9e-5})
    strange = graph_of([op("z", "aten.tanh.default", Ref("x"))])
    middle = estimated(path, strange, SAME)
    assert middle.optimizer_s_per_byte == {"same": MACHINE.optimizer_s_per_byte}


def test_a_plan_says_how_much_of_its_time_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = two_ops()
    monkeypatch.setenv("BIGBRAIN_PROFILES", str(stored(tmp_path / "p.sqlite", graph, "a")))
    options = Options("naive", "measured", micro_batches=1)
    plan = make_plan(graph, cluster_of(SAME), Source("m.py"), options)
    costs = estimated(tmp_path / "p.sqlite", graph, SAME)
    each_s = [
        costs.op_cost(n, "same").forward_s + costs.op_cost(n, "same").backward_s for n in "ab"
    ]
    assert measured_share(plan) == pytest.approx(each_s[0] / sum(each_s))
    assert f"{100 * each_s[0] / sum(each_s):.0f} % of the ops' time measured" in str(explain(plan))
    usual = make_plan(graph, cluster_of(SAME), Source("m.py"), Options("naive", micro_batches=1))
    assert measured_share(usual) is None
    assert "measured" not in str(explain(usual))
    assert usual.placement == Placement(plan.placement.device_of, usual.placement.reason)


def test_a_plan_says_whose_times_it_has_where_they_were_measured_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = two_ops()
    monkeypatch.setenv("BIGBRAIN_PROFILES", str(stored(tmp_path / "p.sqlite", graph)))
    options = Options("naive", "measured", micro_batches=1)
    own = replace(SAME, processor=MACHINE.processor, threads=MACHINE.threads)
    more = replace(own, threads=MACHINE.threads + 6, flops_per_s=5 * own.flops_per_s)
    for device, told in ((SAME, False), (own, False), (more, True)):  # the first does not say
        plan = make_plan(graph, cluster_of(device), Source("m.py"), options)
        said = (
            f"scaled for same by rates from {MACHINE.key}: "
            f"`bigbrain-fx profile --threads {device.threads}`"
        )
        assert (said in str(explain(plan))) is told
