"""Which devices form which replica: the same mix where that divides, else as fast as each other."""

from __future__ import annotations

import pytest

from bigbrain_fx.cluster import parse_cluster, to_json
from bigbrain_fx.core import Cluster, Device, Link
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Options
from bigbrain_fx.plan.replicas.divide import divide, likeness, numbers, only


def cluster(*speeds: float, replicas: tuple[tuple[str, ...], ...] = ()) -> Cluster:
    made = (Device(f"d{i}", f"h{i}", "cpu", 2**33, s, 12e9, 1e-6) for i, s in enumerate(speeds))
    return Cluster(tuple(made), Link(50e-6, 1e9), replicas=replicas)


def test_the_same_mix_where_it_divides() -> None:
    assert divide(cluster(2, 2, 1, 1), 2) == (("d0", "d2"), ("d1", "d3"))
    assert divide(cluster(1, 1, 1, 1), 2) == (("d0", "d1"), ("d2", "d3"))


def test_else_each_is_as_fast() -> None:
    assert divide(cluster(2, 1, 1), 2) == (("d0",), ("d1", "d2"))


def test_each_has_whole_groups_of_members_where_it_can() -> None:
    unlike = cluster(100, 25, 25, 25, 25, 20, 20, 20)
    assert sorted(map(len, divide(unlike, 2))) == [3, 5]
    assert divide(unlike, 2, 2) == (("d0", "d5", "d6", "d7"), ("d1", "d2", "d3", "d4"))
    assert divide(cluster(100, 20, 20, 20), 2, 2) == (("d0", "d3"), ("d1", "d2"))
    assert sorted(map(len, divide(cluster(100, 20, 20), 2, 2))) == [1, 2]  # it cannot


def test_as_the_cluster_file_says() -> None:
    named = cluster(1, 1, 1, replicas=(("d2",), ("d0", "d1")))
    assert divide(named, 2) == (("d2",), ("d0", "d1"))
    with pytest.raises(InputError, match="names 2 replicas, not 3"):
        divide(named, 3)


def test_more_replicas_than_devices_are_refused() -> None:
    with pytest.raises(InputError, match="3 replicas need as many devices at least"):
        divide(cluster(1, 1), 3)
    assert numbers(cluster(1, 1, 1, 1, 1, 1)) == (1, 2, 3, 6)
    assert numbers(cluster(2, 1, 1)) == (1, 2, 3)  # of few unlike ones every number
    assert numbers(cluster(2, 1, 1, 1, 1, 1, 1)) == (1, 7)


def test_a_file_with_replicas_infers_with_all_devices() -> None:
    named = cluster(1, 1, replicas=(("d0",), ("d1",)))
    assert not Options().wants_replicas(named, trains=False)
    assert Options().wants_replicas(named, trains=True)


def test_devices_identical_but_for_names() -> None:
    whole = cluster(2, 1, 2, 1)
    a, b, c = (only(whole, group) for group in (("d0", "d1"), ("d2", "d3"), ("d0", "d2")))
    assert likeness(a) == likeness(b) != likeness(c)


TEXT = """{"devices": [
 {"name": "d0", "kind": "cpu", "memory": "1GiB", "flops": "1GFLOP/s", "memory_bandwidth": "1GB/s"},
 {"name": "d1", "kind": "cpu", "memory": "1GiB", "flops": "1GFLOP/s", "memory_bandwidth": "1GB/s"}
], "replicas": %s}"""


def test_a_cluster_file_names_replicas() -> None:
    found = parse_cluster(TEXT % '[["d1"], ["d0"]]', "c.json")
    assert found.replicas == (("d1",), ("d0",))
    assert parse_cluster(to_json(found), "again") == found


@pytest.mark.parametrize(
    ("replicas", "said"),
    [
        ('[["d0"], ["d0"]]', 'device "d0" is already in replicas[0]'),
        ('[["d0"], ["d9"]]', 'no device "d9" in this cluster'),
        ('[["d0"], []]', "a replica without a device"),
    ],
)
def test_wrong_replicas_of_a_cluster_file(replicas: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_cluster(TEXT % replicas, "c.json")
    assert said in str(caught.value)
    assert "replicas[" in (caught.value.at or "")
