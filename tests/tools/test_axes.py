"""The table of axes of one model, and its proof."""

from __future__ import annotations

import pytest

from tools.axes import main


def test_a_model_is_shown_and_proved(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models/digits.py", "--shares", "2:1", "--most", "3"]) == 0
    said = capsys.readouterr().out
    assert "without a rule, kept whole: none" in said
    assert "channels.2                                32" in said
    assert said.count("16 gradients") == 2
