"""How fast the devices of a host are while all of them compute, or some."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigbrain_fx.core import Cluster, Device, Host, Link
from bigbrain_fx.planning.device_kinds import Crowds, crowded

LINK = Link(1e-3, 1e9)


def device(name: str, host: str = "a", memory: float = 12.0, threads: int = 1) -> Device:
    return Device(name, host, "cpu", 1 << 30, 60.0, memory, 2.0, threads, half_flops_per_s=30.0)


def cluster(*hosts: Host) -> Cluster:
    devices = (device("a0"), device("a1", memory=36.0), device("b0", "b"))
    return Cluster(devices, LINK, hosts=hosts)


def test_devices_that_share_nothing_scarce_stay_as_they_are() -> None:
    for hosts in [(), (Host("a", 1.0),), (Host("a", None, 48.0, cores=2), Host("b", None, 12.0))]:
        alone = cluster(*hosts)
        assert crowded(alone) is alone
        assert not Crowds(alone).any


def test_devices_share_their_hosts_memory_by_what_they_would_take() -> None:
    found = crowded(cluster(Host("a", 5.0, 16.0)))
    assert [d.memory_bytes_per_s for d in found.devices] == [4.0, 12.0, 12.0]
    assert [d.flops_per_s for d in found.devices] == [60.0] * 3
    assert found.hosts == (Host("a", 5.0),)  # NICs are the simulator's
    assert crowded(found) is found


def test_threads_beyond_the_cores_take_turns_at_everything() -> None:
    one, two, other = crowded(cluster(Host("a", cores=1))).devices
    assert (one.flops_per_s, one.memory_bytes_per_s, one.launch_s) == (30.0, 6.0, 4.0)
    assert (two.half_flops_per_s, two.memory_bytes_per_s) == (15.0, 18.0)
    assert other == device("b0", "b")


def test_gpus_have_cores_and_memory_of_their_own() -> None:
    alone = cluster(Host("a", None, 1.0, cores=1))
    gpus = tuple(replace(d, kind="cuda") for d in alone.devices)
    assert not Crowds(replace(alone, devices=gpus)).any
    mixed = replace(alone, devices=(gpus[0], *alone.devices[1:]))
    assert crowded(mixed).devices[0] == gpus[0]
    assert crowded(mixed).devices[1].memory_bytes_per_s == 1.0
    assert Crowds(mixed).level("a0", {"a0", "a1"}) == 1.0  # of no effect: alone and crowd are one


def test_shares_that_add_up_to_the_whole_are_not_scarce() -> None:
    devices = tuple(device(f"a{i}", memory=0.1) for i in range(3))
    assert sum(d.memory_bytes_per_s for d in devices) > 0.3
    assert not Crowds(Cluster(devices, LINK, hosts=(Host("a", None, 0.3),))).any


def test_devices_that_take_turns_ask_less_of_the_memory() -> None:
    """Two threads on one core: each moves half as much, so 24 of 24 are left to share."""
    slowed = crowded(cluster(Host("a", None, 24.0, cores=1)))
    assert [d.memory_bytes_per_s for d in slowed.devices] == [6.0, 18.0, 12.0]
    slowed = crowded(cluster(Host("a", None, 12.0, cores=1)))
    assert [d.memory_bytes_per_s for d in slowed.devices] == [3.0, 9.0, 12.0]


@pytest.mark.parametrize(
    ("host", "computing", "level"),
    [
        (Host("a", None, 16.0), {"a0"}, 0.0),
        (Host("a", None, 16.0), {"a0", "b0"}, 0.0),
        (Host("a", None, 16.0), {"a0", "a1"}, 1.0),
        (Host("a", None, 24.0), {"a1"}, 0.5),  # alone it would take 36: 1.5 of 2.0 times
        (Host("a", cores=1), {"a0"}, 0.0),
        (Host("a", cores=1), {"a0", "a1"}, 1.0),
        (Host("b", cores=1), {"a0", "a1"}, 0.0),
    ],
)
def test_contention_of_a_host(host: Host, computing: set[str], level: float) -> None:
    assert Crowds(cluster(host)).level("a0", computing) == pytest.approx(level)


def test_three_devices_make_a_fuller_crowd_than_two() -> None:
    devices = tuple(device(f"a{i}") for i in range(3))
    crowds = Crowds(Cluster(devices, LINK, hosts=(Host("a", None, 12.0),)))
    levels = [crowds.level("a0", {"a0", *names}) for names in ([], ["a1"], ["a1", "a2"])]
    assert levels == [0.0, 0.5, 1.0]
