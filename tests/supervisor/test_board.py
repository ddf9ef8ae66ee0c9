"""The board of all processes: new notes stay, and it does not grow with the run."""

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
from bigbrain_fx.supervisor.votes import KEPT, Notes


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
