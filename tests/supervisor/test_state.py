"""What a supervisor keeps in mind, without any process: votes, stops, snapshots, the board."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from bigbrain_fx.runtime.board import Board, make_up_for
from bigbrain_fx.runtime.checkpoint_format import CommitError, Part, Record
from bigbrain_fx.runtime.checkpoint_options import Start, read_as, text_of
from bigbrain_fx.runtime.checkpoint_store import CheckpointStore
from bigbrain_fx.runtime.checkpoints import Checkpoints
from bigbrain_fx.runtime.control import Control
from bigbrain_fx.runtime.device import Device
from bigbrain_fx.runtime.mesh import MeshTransport
from bigbrain_fx.runtime.replay import ReplayTransport
from bigbrain_fx.supervisor.catch_up import CatchUp
from bigbrain_fx.supervisor.snapshots import SnapshotCost, Snapshots
from bigbrain_fx.supervisor.votes import KEPT, Decision, Notes, Votes
from bigbrain_fx.supervisor.watch import LogLoss
from tests.support.puppets import Stage

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


# --------------------------------------------------------------------------- snapshots


def test_a_snapshot_of_a_dead_process_is_not_one_of_its_replacement(tmp_path: Path) -> None:
    """The others would drop messages that the replacement, which begins before it, wants again."""
    on = Stage(tmp_path, every=1, restarts=1)
    on.begin()
    d0, d1 = on.puppets
    epoch = on.supervisor.snapshots
    for puppet in (d0, d1):
        puppet.say("snapshot", step=1, slot=0, bytes=1)
    on.turn_until(lambda: epoch.epoch == 1)
    d1.say("snapshot", step=2, slot=1, bytes=1)
    d1.end(-9)
    on.turn_until(lambda: len(on.puppets) == 3)
    assert on.puppets[2].order("be")["slots"] == [1, -1]
    d0.say("snapshot", step=2, slot=1, bytes=1)
    on.connect()
    assert epoch.epoch == 1
    on.puppets[2].say("snapshot", step=2, slot=1, bytes=1)
    on.turn_until(lambda: epoch.epoch == 2)
    for puppet in on.puppets:
        puppet.end(-9)
    on.supervisor.crew.close()
    epoch.close()
    for puppet in on.puppets:
        puppet.process.dispose()


# --------------------------------------------------------------------------- the board


def test_a_note_replaces_the_one_of_its_key() -> None:
    board = Notes()
    assert board.post("begin", "one") == []
    assert board.post("begin", "two") == []
    assert board.notes == {"begin": "two"}


def test_of_numbered_notes_the_newest_numbers_stay() -> None:
    board = Notes()
    board.post("begin", "kept")
    dropped = [
        key
        for step in range(0, 1000, 10)
        for name in ("d0", "d1")
        for key in board.post(f"shard/{step}/{name}", "written")
    ]
    newest = range(1000 - 10 * KEPT, 1000, 10)
    assert set(board.notes) == {"begin", *(f"shard/{s}/{n}" for s in newest for n in ("d0", "d1"))}
    assert len(dropped) == 2 * (100 - KEPT)
    assert not set(dropped) & set(board.notes)


def test_a_numbered_note_that_is_said_again_drops_nothing() -> None:
    board = Notes()
    for step in range(KEPT):
        board.post(f"shard/{step}/d0", "missed")
    assert board.post("shard/0/d0", "written") == []
    assert board.notes["shard/0/d0"] == "written"


@pytest.fixture
def board() -> Iterator[Board]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield Board(ReplayTransport("d1", (), 1, Control(ours, 1.0), unconnected), 1.0)


def unconnected(generation: int) -> MeshTransport:
    raise AssertionError(generation)


ABOUT = {"plan": "p", "graph": "g"}


def checkpoints(board: Board, folder: Path) -> Checkpoints:
    return Checkpoints(CheckpointStore(folder), 2, "d1", ("d0", "d1"), board, ABOUT)


def test_a_commit_whose_note_is_gone_is_not_written_again(board: Board) -> None:
    """A replacement that starts far behind would wait for notes that nobody posts again."""
    board.control.board = {"shard/8/d0": text_of(Part(8, "sum")), "shard/9/d1": "", "begin": ""}
    assert [board.has_part("d0", step) for step in (2, 7)] == [True, True]
    board.control.board = {"shard/8/d1": text_of(Part(8, "sum"))}
    assert not board.has_part("d0", 7)


def test_a_device_that_comes_later_makes_the_folder_of_its_own_host(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first device may have begun on another host: else this host has no commit, ever."""
    folder, written = tmp_path / "commits", list[bool]()
    made = checkpoints(board, folder)
    board.control.board = {"begin": text_of(Start(1))}
    monkeypatch.setattr(made, "commit", lambda _: written.append(folder.is_dir()))
    assert made.begin(object.__new__(Device), resume=False) == 0
    assert written == [True]


def test_a_replacement_does_not_wait_for_words_on_another_commit(
    board: Board, tmp_path: Path
) -> None:
    """What the run began with is gone: the others, who have begun, say nothing of an older one."""
    made, record = checkpoints(board, tmp_path), Record(3, 1, "commit-3-g1", {}, {})
    fine = text_of(Part())
    board.control.board = {f"load/commit-3-g1/{name}": fine for name in made.names}
    with pytest.raises(CommitError, match="d1: gone: the run has begun with this checkpoint"):
        made._gathered(record, Part(why="d1: gone"))
    assert made._gathered(record, Part()) == [Part()] * 2


def test_a_replacement_gives_up_what_the_dead_one_owed(board: Board, tmp_path: Path) -> None:
    """The others wait for a word on each commit that was under way."""
    told = dict[str, str]()
    board.post = told.__setitem__  # type: ignore[method-assign, assignment]
    device = object.__new__(Device)
    device.finished = 5
    make_up_for(checkpoints(board, tmp_path), device, ["d1"])
    assert {key: not read_as(Part, text).why for key, text in told.items()} == {
        "shard/4/d1": False,
        "shard/2/d1": False,
    }
