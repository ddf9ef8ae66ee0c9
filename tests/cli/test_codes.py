"""Codes of errors travel from child processes, into JSON, and onto the terminal."""

from __future__ import annotations

import pytest

from bigbrain_fx.cli import group
from bigbrain_fx.errors import (
    BigBrainError,
    CaptureError,
    InputError,
    NoPlanError,
    ScheduleError,
    VerificationError,
    from_fields,
    os_error_as,
)
from tests.support.command_line import call

KINDS = BigBrainError, InputError, NoPlanError, CaptureError, VerificationError, ScheduleError


@pytest.mark.parametrize("kind", KINDS)
def test_error_of_a_child_process_is_the_same_here(kind: type[BigBrainError]) -> None:
    error = kind("it is so", code="BX0160c", at="a:1", notes=("one", "two"), help="do it")
    found = from_fields(error.fields)
    assert type(found) is kind
    assert found.fields == error.fields
    assert (found.code, found.family) == ("BX0160c", "BX0160")


def test_code_of_a_refusal_that_is_left_for_later_is_that_of_the_refusal() -> None:
    made: list[str] = []

    def make() -> NoPlanError:
        made.append("once")
        return NoPlanError("none fits", code="BX1406")

    error = NoPlanError.later(make)
    assert made == []
    assert (error.code, error.what) == ("BX1406", "none fits")
    assert made == ["once"]


def test_error_of_a_plug_in_needs_no_code() -> None:
    error = InputError("mine", help="mend it")
    assert (error.code, error.family) == (None, None)
    assert error.headline == "error: mine\n  help: mend it"
    assert from_fields(error.fields).code is None


def test_os_error_has_the_code_of_the_place(tmp_path: object) -> None:
    with (
        pytest.raises(InputError) as caught,
        os_error_as("cannot read it", code="BX1001", help="look at it"),
    ):
        open(f"{tmp_path}/none", encoding="utf-8").close()
    assert (caught.value.code, caught.value.at) == ("BX1001", f"{tmp_path}/none")


def test_command_line_shows_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise CaptureError("it cannot be", code="BX0199d", at="a.py:3")

    monkeypatch.setattr(group.cli, "main", fail)
    done = call("split")
    assert (done.code, done.err) == (4, "error[BX0199d]: it cannot be\n  at: a.py:3\n")
