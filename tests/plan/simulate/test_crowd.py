"""Devices of one host slow each other in simulated time, while they compute at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigbrain_fx.core import (
    Cluster,
    Device,
    Forecast,
    Forward,
    Host,
    Link,
    OptimizerStep,
    Overheads,
    Program,
    Recv,
    Send,
    Stage,
    Stages,
)
from bigbrain_fx.errors import ScheduleError
from bigbrain_fx.plan.schedule import SCHEDULES, StageCosts, StageTimes
from bigbrain_fx.plan.simulate import simulate
from tests.support.pipelines import FREE, chain, even_costs, stepped

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
