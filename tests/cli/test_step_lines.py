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


@pytest.mark.parametrize(
    ("ran", "steps", "every", "expected"),
    [
        (range(20), 20, None, [*range(20)]),
        (range(25), 25, None, [0, 10, 20, 24]),
        (range(37, 45), 45, None, [37, 40, 44]),  # after a resume
        (range(25), 25, 1, [*range(25)]),
        (range(25), 25, 12, [0, 12, 24]),
    ],
)
def test_few_steps_have_a_line_each_and_many_one_in_ten(
    capsys: pytest.CaptureFixture[str],
    ran: Iterable[int],
    steps: int,
    every: int | None,
    expected: list[int],
) -> None:
    assert shown(capsys, ran, steps, every=every) == expected


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
