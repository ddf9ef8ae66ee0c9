"""The board of all processes: new notes stay, and it does not grow with the run."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from bigbrain_fx.runtime import supervised_commits
from bigbrain_fx.runtime.commits import CommitError
from bigbrain_fx.runtime.control import Control
from bigbrain_fx.runtime.device import Device
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


def test_a_commit_whose_note_is_gone_is_not_written_again() -> None:
    """A replacement that starts far behind would wait for notes that nobody posts again."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        control = Control(ours, 1.0)
        committer = object.__new__(supervised_commits.SupervisedCommitter)
        committer.name, committer.control = "d0", control
        committer.ledger = supervised_commits.Board(control, 1.0)
        control.board = {"shard/8/d0": '{"sha256": ""}', "shard/9/d1": "", "begin": ""}
        assert [committer._was_written(step) for step in (2, 7)] == [True, True]
        control.board = {"shard/8/d1": '{"sha256": ""}'}
        assert not committer._was_written(7)


def test_a_device_that_comes_later_makes_the_folder_of_its_own_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first device may have begun on another host: else this host has no commit, ever."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        control = Control(ours, 1.0)
        committer = object.__new__(supervised_commits.SupervisedCommitter)
        committer.name, committer.names, committer.folder = "d1", ("d0", "d1"), tmp_path / "commits"
        committer.ledger = supervised_commits.Board(control, 1.0)
        begun = {"generation": 1, "rescue": 0, "keep": 2, "records": []}
        control.board = {"begin": json.dumps(begun)}
        written: list[bool] = []
        monkeypatch.setattr(
            committer, "_commit", lambda _: written.append(committer.folder.is_dir())
        )
        device = object.__new__(Device)
        assert committer.join(device, resume=False, epoch=-1) == 0
    assert written == [True]


def test_a_replacement_does_not_wait_for_words_on_another_commit() -> None:
    """What the run began with is gone: the others, who have begun, say nothing of an older one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        control = Control(ours, 1.0)
        committer = object.__new__(supervised_commits.SupervisedCommitter)
        committer.name, committer.names = "d1", ("d0", "d1")
        committer.ledger = supervised_commits.Board(control, 1.0)
        fine = json.dumps({"broken": "", "refused": ""})
        control.board = {f"load/commit-3-g1/{name}": fine for name in committer.names}
        with pytest.raises(CommitError, match="d1: gone: the run has begun with this commit"):
            committer._gathered("load/commit-3-g1", {"broken": "d1: gone", "refused": ""})
        whole = committer._gathered("load/commit-3-g1", {"broken": "", "refused": ""})
        assert whole == [json.loads(fine)] * 2
