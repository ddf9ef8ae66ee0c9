"""What processes and supervisors tell each other: read as it was meant, also from older bundles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bigbrain_fx.runtime import protocol as of_process
from bigbrain_fx.runtime.compared_stream import Subject
from bigbrain_fx.supervisor.protocol import (
    BATCH,
    DISK,
    LastWord,
    Wait,
    wait_of,
)
from bigbrain_fx.supervisor.suspicion import take_back
from bigbrain_fx.supervisor.votes import Votes


@pytest.mark.parametrize("file", ["protocol.py", "coded.py"])
def test_both_rooms_have_one_file(file: str) -> None:
    runtime = Path(of_process.__file__).parent
    ours = runtime.parent / "supervisor" / file
    assert ours.is_symlink()
    assert ours.resolve() == (runtime / file).resolve()


def test_older_bundles_name_waits_in_words() -> None:
    assert wait_of(("", "the disk")).kind == DISK
    assert wait_of(("", "the caller's next batch")).kind == BATCH
    assert wait_of(("d1", "x")) == Wait("d1", "x")


@pytest.mark.parametrize("word", [lambda subject: subject.key, str], ids=["keys", "older"])
def test_votes_forget_subjects_by_their_step(word: Callable[[Subject], str]) -> None:
    votes = Votes(frozenset({"d0"}))
    keys = [word(Subject(step, of)) for of in ("", "head/weight") for step in (3, 4)]
    for key in (*keys, "of no step"):
        votes.first(key, "d0 aa")
    take_back(votes, 4)
    assert set(votes.firsts) == {*keys[:3], "of no step"}
    votes.forget_steps(before=4)
    assert set(votes.firsts) == {keys[1], "of no step"}


def test_a_last_word_is_told_to_programs_and_shown_to_people() -> None:
    word = LastWord("there is no checkpoint", 2, "CommitError", "BX5054")
    assert word.said == "CommitError[BX5054]: there is no checkpoint"
    assert word.shown == "error[BX5054]: there is no checkpoint"
    older = LastWord("CommitError[BX5054]: there is no checkpoint", 2)
    assert older.said == older.shown == older.text
    assert LastWord("no", 1, "ValueError").said == "ValueError: no"
