"""Messages of one host share its NIC."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigbrain_fx.core import (
    Cluster,
    Device,
    Edge,
    Forward,
    Host,
    Link,
    OptimizerStep,
    ParamRef,
    Program,
    Recv,
    Ref,
    Send,
    Stage,
    Stages,
)
from bigbrain_fx.errors import ScheduleError
from bigbrain_fx.plan import Options, Source, make_plan
from bigbrain_fx.plan.schedule import SCHEDULES, StageCosts
from bigbrain_fx.plan.simulate import simulate
from tests.support.pipelines import FREE, chain, even_costs, stepped
from tests.support.synthetic import graph_of, op, weight

FOLDED = ("forward", "auto", "interleaved", "zb-v", "dualpipe-v", "gems")  # no chain
TRAINING = [name for name in SCHEDULES if name not in FOLDED]


def shared(nic_bytes_per_s: float | None, link: Link) -> StageCosts:
    """d0 and d1 on one host, d2 and d3 on another."""
    devices = tuple(
        Device(f"d{i}", "left" if i < 2 else "right", "cpu", 1 << 30, 1.0, 1.0) for i in range(4)
    )
    hosts = (Host("left", nic_bytes_per_s),) if nic_bytes_per_s else ()
    return StageCosts((1.0,) * 4, (1.0,) * 4, (1,) * 4, Cluster(devices, link, hosts=hosts))


def crossing(nbytes: int) -> Stages:
    """d0 sends to d2, d1 to d3, at the same time."""
    edges = tuple(Edge(f"x{i}", i, i + 2, "activation", nbytes) for i in range(2))
    return Stages(tuple(Stage(i, f"d{i}", ()) for i in range(4)), edges)


def arrivals(costs: StageCosts, nbytes: int = 8) -> list[float]:
    stages = crossing(nbytes)
    sent = [
        Program(f"d{i}", (Forward(i, 0), Send(stages.edges[i], 0), OptimizerStep()))
        for i in range(2)
    ]
    got = [
        Program(f"d{i + 2}", (Recv(stages.edges[i], 0), Forward(i + 2, 0), OptimizerStep()))
        for i in range(2)
    ]
    done = simulate((*got, *sent), stages, costs)
    return [bar.start_s for bar in done.timeline if bar.what.startswith(("forward 2", "forward 3"))]


def test_messages_of_one_host_share_its_nic() -> None:
    """8 bytes at 4 a second take 2 s on either link; a NIC of 4 lets them go one by one."""
    link = Link(0.0, 4.0)
    assert arrivals(shared(None, link)) == [3.0, 3.0]
    assert arrivals(shared(4.0, link)) == [3.0, 5.0]


def test_a_nic_that_is_faster_than_its_links_takes_several_messages() -> None:
    """Each takes 2 s of its link and 1 s of the NIC, which is done with both by then."""
    assert arrivals(shared(8.0, Link(0.0, 4.0))) == [3.0, 3.0]


def test_a_message_that_waits_at_the_other_end_holds_up_nothing_behind_it() -> None:
    """d0 sends to d1, whose NIC is busy with what d2 sent, then to d3, whose NIC is idle."""
    devices = tuple(Device(f"d{i}", f"h{i}", "cpu", 1 << 30, 1.0, 1.0) for i in range(4))
    cluster = Cluster(devices, Link(0.0, 1e9), hosts=tuple(Host(d.host, 1.0) for d in devices))
    pairs = ((2, 1), (0, 1), (0, 3))
    edges = tuple(
        Edge(f"x{i}", *ends, "activation", 10 if i == 0 else 2) for i, ends in enumerate(pairs)
    )
    stages = Stages(tuple(Stage(i, f"d{i}", ()) for i in range(4)), edges)
    costs = StageCosts((0.0,) * 4, (0.0,) * 4, (1,) * 4, cluster)
    programs = (
        Program("d2", (Send(edges[0], 0),)),
        Program("d0", (Send(edges[1], 0), Send(edges[2], 0))),
        Program("d1", (Recv(edges[0], 0), Recv(edges[1], 0), Forward(1, 0))),
        Program("d3", (Recv(edges[2], 0), Forward(3, 0))),
    )
    begun = {bar.what: bar.start_s for bar in simulate(programs, stages, costs).timeline}
    assert begun["forward 1 #0"] == 12.0
    assert begun["forward 3 #0"] == 4.0


@pytest.mark.parametrize("count", [2, 4, 8])
def test_replicas_sum_at_the_speed_of_a_ring(count: int) -> None:
    """1.6 GB of gradients, one device a host of 0.115 GB/s: 21 s for four of them in a ring."""
    rate, elements = 0.115e9, 400_000_000
    devices = tuple(Device(f"d{i}", f"h{i}", "cpu", 1 << 40, 1e12, 1e12) for i in range(count))
    cluster = Cluster(devices, Link(1e-4, rate), hosts=tuple(Host(d.host, rate) for d in devices))
    params = [weight(f"w{i}", elements // 8) for i in range(8)]
    read = ["x", *(f"v{i}" for i in range(7))]
    ops = [
        op(f"v{i}", "aten.mul.Tensor", Ref(value), ParamRef(f"w{i}"))
        for i, value in enumerate(read)
    ]
    graph = graph_of(ops, params, rows=count)
    options = Options("naive", micro_batches=count, replicas=count)
    plan = make_plan(graph, cluster, Source("m.py"), options)
    ring_s = 2 * (count - 1) / count * 4 * elements / rate
    assert ring_s <= plan.forecast.step_s <= 1.15 * ring_s


def test_a_nic_that_is_slower_than_a_link_holds_a_message_up() -> None:
    assert arrivals(shared(2.0, Link(0.0, 4.0))) == [5.0, 9.0]


def test_a_message_alone_goes_at_the_slowest_rate_on_its_way() -> None:
    link = Link(1.0, 4.0)
    cluster = shared(2.0, link).cluster
    assert cluster.wire("d0", "d2") == Link(1.0, 2.0)
    assert cluster.wire("d0", "d1") == link
    assert shared(8.0, link).cluster.wire("d0", "d2") == link


def test_within_a_host_there_is_no_nic() -> None:
    devices = tuple(Device(f"d{i}", "h", "cpu", 1 << 30, 1.0, 1.0) for i in range(3))
    cluster = Cluster(devices, Link(0.5, 4.0), hosts=(Host("h", 1e-9),))
    stages, costs = chain(3, nbytes=8), even_costs(3)
    slow = replace(costs, cluster=cluster)
    free = replace(costs, cluster=replace(cluster, hosts=()))
    for m in (1, 2, 5):
        assert stepped(stages, slow, "1f1b", m) == stepped(stages, free, "1f1b", m)


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("p", range(1, 5))
def test_taking_turns_changes_nothing_where_nothing_is_shared(name: str, p: int) -> None:
    """A NIC that is never scarce: the same times, though devices are followed in another order."""
    link = Link(0.25, 16.0)
    for m in (1, 3, 6):
        stages, costs = chain(p, nbytes=8), even_costs(p, link, b=1.5)
        apart = tuple(replace(d, host=d.name) for d in costs.cluster.devices)
        wide = tuple(Host(device.name, 1e30) for device in apart)
        one = replace(costs, cluster=Cluster(apart, link))
        two = replace(costs, cluster=Cluster(apart, link, hosts=wide))
        assert stepped(stages, one, name, m).step_s == stepped(stages, two, name, m).step_s


def test_a_program_that_is_stuck_is_still_named_where_nics_are_shared() -> None:
    stages, costs = crossing(8), shared(4.0, FREE)
    waiting = Program("d2", (Recv(stages.edges[0], 0), Forward(2, 0)))
    with pytest.raises(ScheduleError):
        simulate((waiting,), stages, costs)


def sums_s(sum_order: str) -> float:
    """Four replicas on two hosts, whose NICs are all that takes time."""
    product = op("p", "aten.linear.default", Ref("x"), ParamRef("w"))
    graph = graph_of([product], [weight("w", 1 << 10, 1 << 10)])
    devices = tuple(
        Device(f"d{i}", f"h{i // 2}", "cpu", 1 << 30, 1e15, 1e15, 0.0) for i in range(4)
    )
    hosts = (Host("h0", 1e8), Host("h1", 1e8))
    cluster = Cluster(devices, FREE, hosts=hosts)
    options = Options("naive", micro_batches=4, replicas=4, sum_order=sum_order)  # type: ignore[arg-type]
    return make_plan(graph, cluster, Source(""), options).forecast.step_s


def test_a_collective_takes_a_sum_into_a_host_once() -> None:
    """One by one, two devices of a host each send half of 4 MiB to the other host, and back."""
    nic_s = (4 << 20) / 1e8
    assert sums_s("replica") == pytest.approx(2 * nic_s, rel=0.05)
    assert sums_s("backend") == pytest.approx(nic_s, rel=0.05)
