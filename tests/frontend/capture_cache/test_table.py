"""Answers on disk: found again, dropped when damaged, and never in a command's way."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bigbrain_fx.frontend.capture_cache.table import FOLDER, NO_CACHE, Table, folder, is_off


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path / "cache" / "answers.sqlite")


def test_answers_are_found_by_their_key(table: Table) -> None:
    table.put("a", {"x": [1, 2.5, None]})
    assert Table(table.path).get("a") == {"x": [1, 2.5, None]}
    assert table.get("b") is None


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def _overwrite(path: Path) -> None:
    path.write_bytes(b"another program's file " * 1000)


def _other_format(path: Path) -> None:
    with sqlite3.connect(path) as own:
        own.execute("pragma user_version = 99")


@pytest.mark.parametrize("damage", [_cut, _overwrite, _other_format])
def test_a_file_that_is_no_table_of_ours_is_made_again(
    table: Table, damage: Callable[[Path], None]
) -> None:
    table.put("a", 1)
    damage(table.path)
    assert table.get("a") is None
    table.put("a", 2)
    assert table.get("a") == 2


def test_an_answer_with_another_checksum_is_dropped(table: Table) -> None:
    table.put("a", 1)
    with sqlite3.connect(table.path) as own:
        own.execute("update answers set answer = '2'")
    assert table.get("a") is None


def test_the_least_recently_used_entry_goes_first(tmp_path: Path) -> None:
    table = Table(tmp_path / "answers.sqlite", limit_bytes=250)
    for key in "abc":
        table.put(key, "x" * 80)
    assert [table.get(key) is not None for key in "abc"] == [True, True, True]
    table.get("a")
    table.put("d", "x" * 80)
    assert [table.get(key) is not None for key in "abcd"] == [True, False, True, True]
    table.put("large", "x" * 300)
    assert table.get("large") is None
    assert table.get("a") is not None


def test_a_folder_that_cannot_be_made_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    table = Table(tmp_path / "file" / "answers.sqlite")
    table.put("a", 1)
    assert table.get("a") is None


def test_commands_share_a_table(table: Table) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: Table(table.path).put(str(n % 4), n % 4), range(24)))
    assert [table.get(str(n)) for n in range(4)] == [0, 1, 2, 3]


def test_the_environment_says_where_and_whether(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, "/somewhere/else")
    assert folder() == Path("/somewhere/else")
    monkeypatch.delenv(FOLDER)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert folder() == Path("/caches/bigbrain-fx")
    monkeypatch.setenv(NO_CACHE, "")
    assert not is_off()
