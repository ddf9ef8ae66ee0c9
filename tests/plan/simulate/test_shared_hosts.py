"""Devices of one host in simulated time: shared cores and NICs, and GPUs that wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigbrain_fx.core import (
    Cluster,
    Device,
    Edge,
    Forecast,
    Forward,
    Host,
    Link,
    OptimizerStep,
    Overheads,
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
from bigbrain_fx.plan.schedule import SCHEDULES, StageCosts, StageTimes
from bigbrain_fx.plan.simulate import simulate
from tests.support.pipelines import FREE, chain, even_costs, stepped
from tests.support.synthetic import graph_of, op, weight

FOLDED = ("forward", "auto", "interleaved", "zb-v", "dualpipe-v", "gems")  # no chain
TRAINING = [name for name in SCHEDULES if name not in FOLDED]


def slowed(
    costs: StageCosts, times: float, host: Host, overheads: Overheads | None = None
) -> StageCosts:
    """Let `costs` be those of devices alone, and everything take `times` as long in a crowd."""
    own = overheads or Overheads()
    devices = tuple(replace(d, host="h", overheads=own) for d in costs.cluster.devices)
    cluster = replace(costs.cluster, devices=devices)
    shared = replace(cluster, hosts=(host,))
    return replace(
        costs,
        forward_s=tuple(times * s for s in costs.forward_s),
        backward_s=tuple(times * s for s in costs.backward_s),
        optimizer_s={name: times * s for name, s in costs.optimizer_s.items()},
        cluster=cluster,
        alone=StageTimes(costs.forward_s, costs.backward_s, costs.optimizer_s, shared),
    )


def apart(costs: StageCosts, *programs: Program) -> Forecast:
    """Run stages that have nothing to do with each other, one a device."""
    return simulate(programs, Stages(tuple(Stage(i, f"d{i}", ()) for i in range(2)), ()), costs)


def ends(done: Forecast) -> dict[str, float]:
    return {bar.what: bar.end_s for bar in done.timeline}


ONE_CORE = Host("h", cores=1)


def test_work_goes_on_at_full_speed_once_the_neighbour_is_done() -> None:
    """Alone 2 and 6 s, on one core: both at half speed until 4 s, then the rest alone."""
    costs = slowed(replace(even_costs(2), forward_s=(2.0, 6.0)), 2.0, ONE_CORE)
    found = ends(apart(costs, *(Program(f"d{i}", (Forward(i, 0),)) for i in range(2))))
    assert found == {"forward 0 #0": 4.0, "forward 1 #0": 8.0}


def test_a_core_gives_no_more_than_it_has() -> None:
    """Whatever the order, one core that never idles ends when all its work is done."""
    for times in [(3.0, 5.0), (4.0, 4.0), (1.0, 9.0)]:
        costs = slowed(replace(even_costs(2), forward_s=times), 2.0, ONE_CORE)
        done = apart(costs, *(Program(f"d{i}", (Forward(i, 0),)) for i in range(2)))
        assert done.step_s == pytest.approx(sum(times))


def test_waiting_processes_slow_no_other() -> None:
    """d0 handles a message for 1 s and d1 waits for it: their computations never meet."""
    stages = chain(2, nbytes=8)
    costs = slowed(even_costs(2), 2.0, ONE_CORE, Overheads(message_s=1.0))
    edge = stages.edges[0]
    programs = (
        Program("d1", (Recv(edge, 0), Forward(1, 0))),
        Program("d0", (Forward(0, 0), Send(edge, 0))),
    )
    assert ends(simulate(programs, stages, costs))["forward 1 #0"] == 1.0 + 1.0 + 1.0 + 1.0


def test_a_message_waits_for_its_link_as_ever() -> None:
    """Each of the three forwards takes 1 s alone; two go on at once, at half speed, until 2 s."""
    stages = chain(2, nbytes=8)
    costs = slowed(even_costs(2, Link(0.0, 4.0)), 2.0, ONE_CORE)
    edge = stages.edges[0]
    sends = (Forward(0, 0), Send(edge, 0), Forward(0, 1), Send(edge, 1))
    programs = (
        Program("d0", sends),
        Program("d1", (Forward(1, 7), Recv(edge, 0), Recv(edge, 1), OptimizerStep())),
    )
    flights = [b for b in simulate(programs, stages, costs).timeline if b.device == "d0->d1"]
    assert [(b.start_s, b.end_s) for b in flights] == [(2.0, 4.0), (4.0, 6.0)]


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("p", range(1, 5))
@pytest.mark.parametrize("blocking", [False, True])
def test_nothing_changes_where_a_crowd_costs_nothing(name: str, p: int, *, blocking: bool) -> None:
    own = Overheads(0.125, 64.0, 0.25, 0.5, blocking)
    for m in (1, 3, 6):
        stages, costs = chain(p, nbytes=8), even_costs(p, Link(0.25, 16.0), b=1.5)
        devices = tuple(replace(d, overheads=own) for d in costs.cluster.devices)
        costs = replace(costs, cluster=replace(costs.cluster, devices=devices))
        same = slowed(costs, 1.0, ONE_CORE, own)
        plain, crowd = stepped(stages, costs, name, m), stepped(stages, same, name, m)
        assert crowd.step_s == pytest.approx(plain.step_s)
        bars = [sorted((b.device, b.what) for b in done.timeline) for done in (plain, crowd)]
        assert bars[0] == bars[1]


@pytest.mark.parametrize("name", TRAINING)
def test_a_step_is_between_that_of_all_alone_and_that_of_all_in_a_crowd(name: str) -> None:
    stages, alone = chain(3, nbytes=8), even_costs(3, Link(0.25, 16.0))
    both = slowed(alone, 1.75, Host("h", None, 2.0))
    worst = replace(both, alone=None)
    for m in (1, 2, 5, 8):
        found = [stepped(stages, costs, name, m).step_s for costs in (alone, both, worst)]
        assert found == sorted(found)
        if m == 8:
            assert found[0] < found[1] < found[2]


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("p", range(1, 4))
def test_work_of_no_length_beside_other_work(name: str, p: int) -> None:
    """Devices without parameters take an optimizer step that takes no time, at any moment.

    The core is busy all the time, so a step takes as long as all work together.
    """
    for m in (1, 2, 4):
        costs = slowed(even_costs(p), float(p), ONE_CORE)
        assert stepped(chain(p), costs, name, m).step_s == pytest.approx(3.0 * m * p)
        nothing = slowed(even_costs(p, f=0.0, b=0.0), float(p), ONE_CORE)
        assert stepped(chain(p), nothing, name, m).step_s == 0.0


def test_a_program_that_is_stuck_is_still_named() -> None:
    stages, costs = chain(2), slowed(even_costs(2), 2.0, ONE_CORE)
    waiting = Program("d1", (Recv(stages.edges[0], 0), Forward(1, 0)))
    with pytest.raises(ScheduleError):
        simulate((waiting,), stages, costs)


def test_devices_of_other_hosts_are_not_slowed() -> None:
    devices = tuple(Device(f"d{i}", f"h{i}", "cpu", 1 << 30, 1.0, 1.0) for i in range(2))
    costs = even_costs(2)
    shared = Cluster(devices, FREE, hosts=(Host("h0", None, 0.5),))
    two = slowed(costs, 3.0, ONE_CORE)
    assert two.alone is not None
    two = replace(two, alone=replace(two.alone, cluster=shared))
    done = apart(two, *(Program(f"d{i}", (Forward(i, 0),)) for i in range(2)))
    assert ends(done) == {"forward 0 #0": 3.0, "forward 1 #0": 1.0}


# --------------------------------------------------------------------------- NICs


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


# ------------------------------------------------------------ GPUs and their processes


def step_s(
    host_f: float, host_b: float, *, count: int = 1, m: int = 4, latency: float = 0
) -> float:
    costs = even_costs(count, Link(latency, float("inf")), f=1.0, b=2.0)
    own = replace(costs, host_forward_s=(host_f,) * count, host_backward_s=(host_b,) * count)
    return stepped(chain(count), own, m=m).step_s


def test_a_process_that_is_faster_costs_nothing() -> None:
    assert step_s(0.5, 1.0) == step_s(0.0, 0.0) == pytest.approx(12.0)


def test_a_process_that_is_slower_holds_its_gpu_up() -> None:
    assert step_s(3.0, 3.0) == pytest.approx(24.0)


def test_a_process_that_is_ahead_helps_later() -> None:
    """Forwards that it starts slowly are made up for while long backwards run.

    process  |f0  |f1  |f2  |f3  |b0|b1|b2|b3|
    GPU         f0|  f1|  f2|  f3|  b0   |  b1   | ...
    """
    assert step_s(1.5, 0.5) == pytest.approx(4 * 1.5 + 4 * 2.0)


def test_a_process_goes_on_while_its_gpu_waits_for_a_message() -> None:
    slow = step_s(1.0, 2.0, count=2, latency=10.0)
    assert slow == pytest.approx(step_s(0.0, 0.0, count=2, latency=10.0))
