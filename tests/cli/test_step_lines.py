"""Which steps of a run have a line on stdout: all of a few, one in ten of many, all of JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

import pytest

from bigbrain_fx.bundles import BatchLine, StepLine
from bigbrain_fx.cli.progress import stepping


def shown(
    capsys: pytest.CaptureFixture[str], ran: Iterable[int], steps: int | None, **choices: int | None
) -> list[int]:
    """Return the numbers of the steps that have a line."""
    with stepping(steps, as_json=False, **choices) as show:
        for number in ran:
            show(StepLine(number, 1.0, 0.1))
    return [int(line.split()[1]) for line in capsys.readouterr().out.splitlines()]


def test_few_steps_have_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, range(20), 20) == [*range(20)]


def test_many_steps_have_one_in_ten_and_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, range(25), 25) == [0, 10, 20, 24]
    assert len(shown(capsys, range(100), 100)) == 11


def test_the_first_step_after_a_resume_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, range(37, 45), 45) == [37, 40, 44]


@pytest.mark.parametrize(("every", "expected"), [(1, [*range(25)]), (12, [0, 12, 24])])
def test_a_choice_stands(
    capsys: pytest.CaptureFixture[str], every: int, expected: list[int]
) -> None:
    assert shown(capsys, range(25), 25, every=every) == expected


def test_json_has_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    with stepping(100, as_json=True) as show:
        for number in range(100):
            show(StepLine(number, 1.0, 0.1))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["step"] for line in lines] == [*range(100)]


def test_batches_of_unknown_number_have_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    with stepping(None, as_json=False) as show:
        for number in range(30):
            show(BatchLine(number, 4, 0.1))
    assert len(capsys.readouterr().out.splitlines()) == 30


def test_lines_go_to_stdout_beside_the_progress_bar_of_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert shown(capsys, range(25), 25) == [0, 10, 20, 24]
