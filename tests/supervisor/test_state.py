"""What a supervisor keeps in mind, without any process: votes, stops, who is behind, snapshots."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bigbrain_fx.supervisor.catch_up import CatchUp
from bigbrain_fx.supervisor.snapshots import SnapshotCost, Snapshots
from bigbrain_fx.supervisor.votes import Decision, Votes
from bigbrain_fx.supervisor.watch import LogLoss

GIB = 2**30

BOTH = frozenset({"a", "b"})


@pytest.fixture
def snapshots() -> Iterator[Snapshots]:
    found = Snapshots(("a", "b"), None)
    yield found
    found.close()


def test_a_vote_decides_when_all_have_voted_and_is_new_once() -> None:
    agreed = Votes(BOTH)
    assert agreed.vote("a", 3, True) is None
    assert agreed.vote("b", 3, False) == Decision(("b",), is_new=True)
    assert agreed.vote("b", 3, False) == Decision(("b",), is_new=False)  # it does the step again


def test_a_device_catches_up_with_the_farthest_that_it_ever_was() -> None:
    behind = CatchUp()
    behind.falls_back("a", done=5, start=2, now=1.0)
    behind.falls_back("a", done=3, start=4, now=2.0)  # its replacement died, too
    assert behind.reach("a", 5, 3.0) is None
    assert behind.reach("b", 9, 3.0) is None
    assert behind.reach("a", 6, 4.0) == {"device": "a", "step": 6, "after_s": 3.0, "steps": 2}
    assert not behind.ways


def test_a_device_with_nothing_to_do_again_has_caught_up_at_once() -> None:
    behind = CatchUp()
    behind.falls_back("a", done=1, start=2, now=1.0)
    behind.falls_back("b", done=2, start=2, now=1.0)
    behind.all_begin(2.0)
    assert [*behind.ways] == ["b"]


def test_dropped_messages_matter_until_a_later_snapshot() -> None:
    dropped = LogLoss()
    assert not dropped.take_back(0)
    assert [dropped.drop(4), dropped.drop(6)] == [True, False]
    assert not dropped.snapshot(6)
    assert not dropped.take_back(7)
    assert dropped.snapshot(7)
    assert not dropped.take_back(7)


def test_all_start_again_once_where_messages_are_missing() -> None:
    dropped = LogLoss()
    dropped.drop(4)
    assert [dropped.take_back(4), dropped.take_back(4)] == [True, False]


def test_the_newest_snapshot_is_that_of_all(snapshots: Snapshots) -> None:
    assert snapshots.start == 0
    assert not snapshots.take("a", 2, slot=0)
    assert snapshots.take("b", 2, slot=1)
    assert not snapshots.take("b", 4, slot=0)
    assert (snapshots.epoch, snapshots.start) == (2, 2)
    slots = snapshots.slots
    assert snapshots.files() == {"a": slots["a"].files[0], "b": slots["b"].files[1]}


def test_the_interval_is_chosen_once_all_know_their_costs(snapshots: Snapshots) -> None:
    cost = SnapshotCost(state=1, log=1, copy_s=0.01, step_s=0.1)
    assert not snapshots.measure("a", cost, GIB)
    assert snapshots.measure("b", cost, GIB)
    assert snapshots.every == 10
    assert not snapshots.measure("b", cost, GIB)
