"""A file is run as it is now, whenever it was written."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bigbrain_fx.frontend.users_code import run_file
from bigbrain_fx.planning.given import class_of

MINE = """class Mine:
    name = 'first'

    def partition(self, graph, cluster, costs):
        return None
"""


def _edit(path: Path, old: str, new: str) -> None:
    """Change a file as an editor may: as long as it was, within the second in which it was new."""
    time_ns = path.stat().st_mtime_ns
    path.write_text(path.read_text().replace(old, new))
    os.utime(path, ns=(time_ns, time_ns))


@pytest.fixture(autouse=True)
def _python_keeps_compiled_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)


def test_an_edit_of_a_model_file_within_a_second_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "model_edited_at_once.py"
    path.write_text("RATE = 1\n")
    assert vars(run_file(path, 0))["RATE"] == 1
    _edit(path, "1", "2")
    assert vars(run_file(path, 0))["RATE"] == 2


def test_an_edit_of_a_partitioner_within_a_second_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "mine_edited_at_once.py"
    path.write_text(MINE)
    assert vars(class_of(str(path)))["name"] == "first"
    _edit(path, "first", "other")
    assert vars(class_of(str(path)))["name"] == "other"
