"""Forecasters beside each other: what is installed is asked, and a folder without rows says so."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tools.forecasters import beside, calculon_s, forecasters, main
from tools.published_gpus.forecasts import Said
from tools.published_gpus.graphs import Key
from tools.published_gpus.rows import Row

ROW = Row("a", "x", "t4", Key("mpt-3b", 8, "train", "float16"), 1, "", 1, 1, 2.0, recompute=False)


def test_each_forecaster_is_held_against_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert list(forecasters()) == ["ours", "one line"]
    ours, rule = beside([Said(ROW, 1.0, 3.0)])
    assert ("50.0%" in ours, "+50.0%" in rule) == (True, True)


_CALCULON = """
class Llm:
    Application = dict
    class Execution:
        from_json = dict
    def __init__(self, model, log): self.model = model
    def compile(self, system, execution): self.system, self.execution = system, execution
    def run(self, system): assert system is self.system
    def get_total_time(self):
        gpus = self.execution["batch_size"] / self.execution["microbatch_size"]
        return self.model["num_blocks"] + gpus + self.system.facts["mem1"]["GBps"]
"""


def test_a_checkout_of_calculon_is_asked_by_its_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "calculon").mkdir()
    (tmp_path / "calculon" / "__init__.py").touch()
    (tmp_path / "calculon" / "llm.py").write_text(_CALCULON)
    named = "class System:\n    def __init__(self, facts): self.facts = facts\n"
    (tmp_path / "calculon" / "system.py").write_text(named)
    (tmp_path / "systems").mkdir()
    facts = json.dumps({"mem1": {"GiB": 80, "GBps": 2000}})
    (tmp_path / "systems" / "a100_80g.json").write_text(facts)
    row = replace(ROW, card="a100-80", gpus=16, accum=2)
    assert calculon_s(tmp_path, Said(row, 1.0, 3.0), overlap=True) == 32 + 32 + 2000
    smaller = Said(replace(row, card="a100-40"), 1.0, 3.0)
    assert calculon_s(tmp_path, smaller, overlap=False) == 32 + 32 + 1555


def test_without_data_nothing_is_compared(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["--data", str(tmp_path)])
    assert (done.exit_code, "nothing is compared" in done.output) == (0, True)
