"""Integer programs against brute force: the best placement, and bounds that hold."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from bigbrain_fx.core import Placement
from bigbrain_fx.errors import InputError
from bigbrain_fx.planning.unit_work import work
from partitioners.clock import TICKS_PER_S, Clock, Timing
from partitioners.cp_sat import CPSat
from partitioners.judge import Judge
from partitioners.least_step import least_busiest, least_step
from partitioners.room import Room
from tests.support.examples import examples
from tests.support.placements import case, simulated_s, unlike

quick = settings(
    max_examples=examples(15),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
seeds = st.integers(0, 10_000)
WORK = 5.0


@pytest.fixture
def ortools() -> None:
    pytest.importorskip("ortools", reason="cp-sat needs ortools: pip install -e '.[cpsat]'")


def test_without_ortools_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("ortools")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ortools", None)
    cluster = unlike(1, 2)
    graph, costs = case(1, 4, cluster)
    with pytest.raises(InputError, match="OR-tools") as caught:
        CPSat(4).partition(graph, cluster, costs)
    assert caught.value.exit_code == 2
    assert "pip install ortools" in str(caught.value)


@pytest.mark.usefixtures("ortools")
@quick
@given(seed=seeds, count=st.integers(1, 5), kib=st.sampled_from((3, 10, 100)))
def test_the_least_busiest_is_brute_force(seed: int, count: int, kib: int) -> None:
    cluster = unlike(seed, 2, kib * 1024)
    graph, costs = case(seed, count, cluster)
    timing = Timing(work(graph, costs), cluster, 4)
    room = Room(timing.known, cluster, 4)
    units = len(timing.known.groups)
    found = least_busiest(timing, room, (0,) * units, WORK, 0)
    every = list(product(range(2), repeat=units))
    fitting = [h for h in every if room.fits([f"d{home}" for home in h])]
    if found.homes is None:
        assert not fitting
        return
    if fitting:
        best = min(Clock(timing, homes).most() for homes in fitting) / TICKS_PER_S
        assert found.bound_s <= best * (1 + 1e-9)
    if kib == 100:
        least = min(Clock(timing, homes).most() for homes in every) / TICKS_PER_S
        assert Clock(timing, found.homes).most() / TICKS_PER_S == pytest.approx(least, rel=1e-5)
        assert found.bound_s == pytest.approx(least, rel=1e-4)


@pytest.mark.usefixtures("ortools")
@quick
@given(seed=seeds, count=st.integers(1, 5), kib=st.sampled_from((8, 20, 100)))
def test_the_least_serial_step_is_brute_force(seed: int, count: int, kib: int) -> None:
    cluster = unlike(seed, 2, kib * 1024)
    graph, costs = case(seed, count, cluster)
    timing = Timing(work(graph, costs), cluster, 4)
    room = Room(timing.known, cluster, 4)
    units = len(timing.known.groups)
    found = least_step(timing, room, (0,) * units, WORK, 0)
    if found.homes is None:
        return
    assert room.fits([f"d{home}" for home in found.homes])
    if kib == 100:
        every = product(range(2), repeat=units)
        least = min(serial_s(timing, homes) for homes in every)
        assert serial_s(timing, found.homes) == pytest.approx(least, rel=1e-4)


def serial_s(timing: Timing, homes: tuple[int, ...]) -> float:
    total = sum(timing.unit_ticks[home][unit] for unit, home in enumerate(homes))
    for number, value in enumerate(timing.known.values):
        for to in {homes[reader] for reader in value.readers} - {homes[value.maker]}:
            total += timing.ride(number, homes[value.maker], to).late
    more = timing.micro_batches - 1
    return (total + more * Clock(timing, homes).most()) / TICKS_PER_S


@pytest.mark.usefixtures("ortools")
@quick
@given(seed=seeds, count=st.integers(1, 5), micro=st.sampled_from((1, 4)))
def test_no_simulated_step_is_below_the_bound(seed: int, count: int, micro: int) -> None:
    cluster = unlike(seed, 2)
    graph, costs = case(seed, count, cluster)
    bound_s = CPSat(micro, work=WORK).bound_s(graph, cluster, costs)
    judge = Judge(graph, cluster, costs, micro)
    assert bound_s > 0
    for homes in product(range(2), repeat=len(judge.known.groups)):
        names = judge.names(homes)
        placement = Placement(judge.known.placed(names, names[0]))
        assert simulated_s(graph, costs, placement, micro) >= bound_s * (1 - 1e-9)


@pytest.mark.usefixtures("ortools")
def test_too_many_devices_are_said() -> None:
    cluster = unlike(1, 40)
    graph, costs = case(1, 60, cluster)
    few = replace(cluster, links=())
    placement = CPSat(2).partition(graph, few, replace(costs, cluster=few))
    assert placement.reason
    assert "below" in placement.reason


def test_micro_batches_must_be_positive() -> None:
    with pytest.raises(InputError, match="at least 1 micro-batch"):
        CPSat(0)
