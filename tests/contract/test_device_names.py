"""No plan depends on what devices are called or where they are listed, whatever field differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from bigbrain_fx.core import Cluster, Costs, Device, Graph, Link, OpCost, Overheads, Placement
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.plan import Options, Source, make_plan
from bigbrain_fx.planning import registry as plugins
from bigbrain_fx.planning.device_kinds import nameless, seen_devices
from tests.support.placements import simulated_s
from tests.support.synthetic import chain_graph, device, random_graph

MICRO = 4
QUICK = {"proposals": 60}
OTHERS: Mapping[str, st.SearchStrategy[object]] = {
    "kind": st.just("cuda"),
    "memory_bytes": st.sampled_from((1 << 29, 1 << 31)),
    "flops_per_s": st.sampled_from((5e8, 2e9)),
    "memory_bytes_per_s": st.sampled_from((5e8, 2e9)),
    "launch_s": st.sampled_from((0.0, 1e-5)),
    "threads": st.sampled_from((2, 4)),
    "overheads": st.sampled_from(
        (Overheads(1e-4), Overheads(message_bytes_per_s=1e8), Overheads(step_s=1e-3))
    ),
    "half_flops_per_s": st.sampled_from((5e8, 2e9)),
    "blas_bytes": st.just(1 << 20),
    "tf32_flops_per_s": st.sampled_from((5e8, 2e9)),
    "matmul_precision": st.sampled_from(("high", "medium")),
    "lacks": st.just(("bfloat16",)),
    "preset": st.just("a100"),
    "units": st.sampled_from((40, 108)),
    "processor": st.just("another"),
    "core_share": st.just(0.5),
    "memory_share": st.just(0.5),
    "kernels": st.just((("copy", 1e-5),)),
    "process_bytes": st.just(2**31),
}
"""For each field of a device, values other than the first device's."""
PARTITIONERS = tuple(name for name in plugins.names("partitioner") if name != "naive")
every_field = pytest.mark.parametrize("field", OTHERS)
drawn = settings(
    max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def test_every_field_of_a_device_has_another_value() -> None:
    assert set(OTHERS) | {"name", "host"} == {field.name for field in fields(Device)}
    assert nameless(device("a", host="x")) == nameless(device("b", host="y"))


@dataclass(frozen=True)
class ByKind:
    """Estimates by what a device is, and never by its name: `slow` ones take `times` as long."""

    slow: Device
    times: float

    name = "by-kind"

    def estimate(self, graph: Graph, cluster: Cluster) -> Costs:
        def cost(times: float) -> Mapping[str, OpCost]:
            each = OpCost(times * 1e-3, times * 2e-3, times * 1e-3, saved_bytes=100)
            return {op.name: each for op in graph.ops}

        tables = {False: cost(1.0), True: cost(self.times)}
        ops = {d.name: tables[nameless(d) == self.slow] for d in cluster.devices}
        return Costs(ops, cluster, {d.name: 0.0 for d in cluster.devices})


@dataclass(frozen=True)
class Named:
    """One cluster under two sets of names, each listed in an order of its own."""

    first: Cluster
    second: Cluster
    estimator: ByKind


@st.composite
def named(draw: st.DrawFn, field: str) -> Named:
    """Draw devices of two kinds that differ in one field, and how often the slow ones stop."""
    plain = nameless(device("x"))
    changed = {field: draw(OTHERS[field])}
    kinds = [plain, replace(plain, **changed)]  # type: ignore[arg-type]  # a field by its name
    slow, times = draw(st.sampled_from(kinds)), draw(st.sampled_from((1.0, 3.0)))
    which = draw(st.sampled_from(([0, 1], [0, 1, 1], [0, 0, 1])))
    own = [kinds[i] for i in which]
    one = _called(own, draw(st.permutations(range(len(own)))))
    two = _called(own, draw(st.permutations(range(len(own)))))
    return Named(one, two, ByKind(slow, times))


def _called(devices: Sequence[Device], order: Sequence[int]) -> Cluster:
    """Name and list devices in an order."""
    found = [replace(devices[i], name=f"d{at}", host=f"h{at}") for at, i in enumerate(order)]
    return Cluster(tuple(found), Link(1e-3, 1e6))


def homes(cluster: Cluster, placement: Placement) -> Mapping[str, Device]:
    """Return which kind of device has which op."""
    return {op: nameless(cluster.device[name]) for op, name in placement.device_of.items()}


def require_same_placement(name: str, case: Named, graph: Graph) -> None:
    """Require that each op is on the same kind of device under both sets of names."""
    taken = plugins.options_of("partitioner", name)
    given = {"micro_batches": MICRO, **QUICK}
    method = plugins.partitioner(name, **{key: given[key] for key in given if key in taken})
    found = []
    for cluster in (case.first, case.second):
        costs = case.estimator.estimate(graph, cluster)
        placement = method.partition(graph, cluster, costs)
        found.append((homes(cluster, placement), simulated_s(graph, costs, placement, MICRO)))
    assert found[0] == found[1]


@pytest.mark.gate("chain-dp", "m-etf", "m-sct", "m-topo", "scattered")
@pytest.mark.parametrize("name", PARTITIONERS)
@settings(drawn, max_examples=8)
@given(data=st.data(), field=st.sampled_from(sorted(OTHERS)), seed=st.integers(0, 1000))
def test_a_placement_is_the_same_for_any_names(
    name: str, data: st.DataObject, field: str, seed: int
) -> None:
    require_same_placement(name, data.draw(named(field)), random_graph(seed, 8))


@pytest.mark.nightly
@every_field
@pytest.mark.parametrize("name", PARTITIONERS)
@drawn
@given(data=st.data(), seed=st.integers(0, 1000))
def test_whichever_field_differs_a_placement_is_the_same_for_any_names(
    name: str, field: str, data: st.DataObject, seed: int
) -> None:
    require_same_placement(name, data.draw(named(field)), random_graph(seed, 8))


def same_by_auto(case: Named, graph: Graph, options: Options) -> bool:
    """Say whether `auto` plans as fast a step of the same devices, whatever these are called."""
    found: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bigbrain_fx.plan.one.estimator", lambda _name: case.estimator)
        for cluster in (case.first, case.second):
            try:
                plan = make_plan(graph, cluster, Source("m.py"), options)
            except NoPlanError as error:
                found.append(error.what)
                continue
            used = sorted(repr(nameless(cluster.device[d])) for d in plan.stages.devices)
            found.append((plan.forecast.step_s, plan.schedule, used))
    return found[0] == found[1]


@pytest.mark.nightly
@settings(drawn, max_examples=5)
@given(data=st.data(), field=st.sampled_from(sorted(OTHERS)), seed=st.integers(0, 1000))
def test_auto_plans_the_same_for_any_names(data: st.DataObject, field: str, seed: int) -> None:
    options = Options("auto", micro_batches=MICRO, effort="fast", tensor=1)
    assert same_by_auto(data.draw(named(field)), chain_graph(seed, 6), options)


@pytest.mark.nightly
@every_field
@settings(drawn, max_examples=2)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_auto_plans_the_same_replicas_and_groups_for_any_names(
    field: str, data: st.DataObject, seed: int
) -> None:
    options = Options("auto", micro_batches=MICRO, effort="fast", replicas=0)
    assert same_by_auto(data.draw(named(field)), chain_graph(seed, 5), options)


@pytest.mark.gate("auto-names0", "chain-dp-names0", "chain-dp-names1")
@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
@pytest.mark.parametrize("partitioner", ["chain-dp", "auto"])
def test_the_fast_device_is_found_though_another_field_alone_tells_it(
    partitioner: str, names: tuple[str, str]
) -> None:
    """Eight ops that take three times as long on a device of equal rates, over a slow link.

    Taken for alike, the slow device came first where its name did: 0.126 s a step.
    """
    graph = chain_graph(1, 8, skips=False)
    slow, fast = (device(name, host=name) for name in names)
    slow = replace(slow, processor="slow")
    cluster = Cluster(tuple(sorted((slow, fast), key=lambda d: d.name)), Link(1e-2, 1e5))
    options = Options(partitioner, micro_batches=MICRO, tensor=1)
    with pytest.MonkeyPatch.context() as patch:
        by_kind = ByKind(nameless(slow), 3.0)
        patch.setattr("bigbrain_fx.plan.one.estimator", lambda _name: by_kind)
        plan = make_plan(graph, cluster, Source("m.py"), options)
    assert plan.forecast.step_s <= 0.096 + 1e-9
    if partitioner == "chain-dp":
        assert plan.stages.devices == (fast.name,)


def test_devices_that_costs_tell_apart_are_no_twins() -> None:
    """A third party's estimator may know devices by name."""
    twins = Cluster((device("a"), device("b")), Link(1e-4, 1e6))
    assert seen_devices(twins).kinds == [0, 0]
    assert seen_devices(twins, (1, 0)).kinds == [0, 1]
    assert [d.name for d in seen_devices(twins, (1, 0)).devices] == ["b", "a"]


def test_neighbours_follow_each_other_whatever_they_are_called() -> None:
    """Two pairs of devices with fast links, listed in turns: all four are of one colour."""
    names = ("d0", "d1", "d2", "d3")
    fast = Link(1e-5, 1e8)
    for a, b, c, d in (names, ("d2", "d0", "d1", "d3"), ("d0", "d3", "d2", "d1")):
        cluster = Cluster(tuple(map(device, names)), Link(1e-3, 1e6), ((a, c, fast), (b, d, fast)))
        seen = seen_devices(cluster)
        pairs = {frozenset(each.name for each in seen.devices[i : i + 2]) for i in (0, 2)}
        assert pairs == {frozenset((a, c)), frozenset((b, d))}
        assert len(set(seen.colours)) == 1
