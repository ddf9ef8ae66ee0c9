"""Forecasters beside each other: what is installed is asked, and a folder without rows says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tools.forecasters import beside, forecasters, main
from tools.published_gpus.forecasts import Said
from tools.published_gpus.graphs import Key
from tools.published_gpus.rows import Row

ROW = Row("a", "x", "t4", Key("mpt-3b", 8, "train", "float16"), 1, "", 1, 1, 2.0, recompute=False)


def test_each_forecaster_is_held_against_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert list(forecasters()) == ["ours", "one line"]
    ours, rule = beside([Said(ROW, 1.0, 3.0)])
    assert ("50.0%" in ours, "+50.0%" in rule) == (True, True)


def test_without_data_nothing_is_compared(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["--data", str(tmp_path)])
    assert (done.exit_code, "nothing is compared" in done.output) == (0, True)
