"""Traces of devices: what a file says, and what each mistake is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bigbrain_fx.cluster import read_availability
from bigbrain_fx.core import Period
from tests.support.messages import refused
from tests.support.synthetic import cluster_of, device

WHERE = cluster_of(device("a0"), device("a1"))


def written(folder: Path, *changes: tuple[float, list[str]], **more: object) -> Path:
    path = folder / "trace.json"
    entries = [{"from_h": hour, "devices": names} for hour, names in changes]
    whole = {"format": "availability-1", "until_h": 8, "changes": entries, **more}
    path.write_text(json.dumps(whole))
    return path


def test_each_list_holds_until_the_next(tmp_path: Path) -> None:
    path = written(tmp_path, (0, ["a0", "a1"]), (2.5, ["a0"]))
    assert read_availability(path, WHERE) == (
        Period(0.0, 2.5, ("a0", "a1")),
        Period(2.5, 8.0, ("a0",)),
    )


@pytest.mark.parametrize(
    ("changes", "more", "code"),
    [
        ([(0, ["a0"])], {"format": "2"}, "BX1060"),
        ([], {}, "BX1060"),
        ([(0, ["a0"])], {"until_h": -1}, "BX1060"),
        ([(0, ["a0"])], {"until": 3}, "BX1060"),
        ([(1, ["a0"])], {}, "BX1061"),
        ([(0, ["a0"]), (0, ["a1"])], {}, "BX1062"),
        ([(0, ["a0"])], {"until_h": 0}, "BX1062"),
        ([(0, ["a0"]), (2, [])], {}, "BX1063"),
        ([(0, ["a0", "a2"])], {}, "BX1064"),
    ],
)
def test_files_that_are_no_trace_are_refused(
    tmp_path: Path, changes: list[tuple[float, list[str]]], more: dict[str, object], code: str
) -> None:
    path = written(tmp_path, *changes, **more)
    with refused(code) as caught:
        read_availability(path, WHERE)
    assert str(caught.value.at).startswith(str(path))


def test_a_trace_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with refused("BX1059"):
        read_availability(tmp_path / "none.json", WHERE)
    (tmp_path / "half.json").write_text("{")
    with refused("BX1060"):
        read_availability(tmp_path / "half.json", WHERE)
