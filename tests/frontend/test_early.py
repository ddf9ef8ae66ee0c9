"""A fork that stays as its process was, and answers from there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from bigbrain_fx.frontend.early import Early

HELD = {"value": 1}


def _answer(question: Mapping[str, Any]) -> Mapping[str, str]:
    HELD["value"] += question["add"]
    return {"value": str(HELD["value"]), "pid": str(os.getpid())}


def test_it_answers_as_things_were_and_no_question_leaves_a_trace() -> None:
    early = Early(_answer)
    HELD["value"] = 100
    try:
        first, again = early.ask({"add": 1}), early.ask({"add": 5})
    finally:
        HELD["value"] = 1
        early.close()
    assert first is not None
    assert again is not None
    assert (first["value"], again["value"]) == ("2", "6")
    assert len({first["pid"], again["pid"], str(os.getpid())}) == 3


def test_an_answer_that_never_comes_is_none() -> None:
    def end(question: Mapping[str, Any]) -> Mapping[str, str]:
        os._exit(3)

    early = Early(end)
    assert early.ask({}) is None
    assert early.ask({}) is None
    early.close()
