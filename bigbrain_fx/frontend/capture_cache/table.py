"""Answers by key in one file of SQLite, shared by all commands of a user.

A file that SQLite cannot read, or of another format, is replaced; an answer with a wrong checksum
is dropped. A folder that cannot be written, a full disk, a table that another command holds:
nothing is cached, and nothing is reported. The module knows keys and JSON, not models.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

FOLDER = "BIGBRAIN_CACHE"  # a variable of the environment: another folder
NO_CACHE = "BIGBRAIN_NO_CACHE"  # another one: any text switches it off
LIMIT_BYTES = 256 * 2**20
_FORMAT = 1
_OF_A_TERMINAL = ("PWD", "OLDPWD", "SHLVL", "_", "COLUMNS", "LINES", "WINDOWID", "PS1")
_OF_SESSIONS = ("TERM", "SSH_", "TMUX", "XDG_", "DBUS_", "DISPLAY", "BIGBRAIN_")
_WAIT_S = 2.0  # for another command
_MAKE = """
create table if not exists answers (
    key text primary key, used_s real not null, checksum blob not null, answer blob not null
)
"""
_TRIM = """
delete from answers where key in (
    select key from (
        select key, sum(length(answer)) over (order by used_s desc, key) as total from answers
    ) where total > ?
)
"""


def folder() -> Path:
    """Return the folder of the cache: of the environment, else ~/.cache/bigbrain-fx."""
    own = os.environ.get(FOLDER)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(own or f"{base}/bigbrain-fx").expanduser()


def environment() -> str:
    """Return a text of the variables that may affect a model, without a terminal's and a login's.

    They are the variables of the requesting process: torch sets some of its own on import.
    """
    own = (
        each
        for each in os.environ.items()
        if each[0] not in _OF_A_TERMINAL and not each[0].startswith(_OF_SESSIONS)
    )
    return hashlib.blake2b(repr(sorted(own)).encode(), digest_size=20).hexdigest()


def is_off() -> bool:
    """Whether the environment switches the cache off."""
    return bool(os.environ.get(NO_CACHE))


class Table:
    """Answers by key.

    Args:
        path: of the file; its folder is made.
        limit_bytes: of all answers together; the least recently used ones are dropped.
    """

    def __init__(self, path: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.path, self.limit_bytes = path, limit_bytes

    def get(self, key: str) -> object | None:
        """Return an answer; None where there is none."""
        with contextlib.suppress(sqlite3.Error, OSError, ValueError), self._open() as table:
            row = table.execute("select checksum, answer from answers where key = ?", (key,))
            checksum, answer = row.fetchone() or (b"", b"")
            if isinstance(answer, bytes) and checksum == _checksum(key, answer):
                table.execute("update answers set used_s = ? where key = ?", (time.time(), key))
                return cast("object", json.loads(answer))
            table.execute("delete from answers where key = ?", (key,))
        return None

    def put(self, key: str, answer: object) -> None:
        """Store an answer of JSON data, unless it is too large."""
        text = json.dumps(answer).encode()
        if len(text) > self.limit_bytes:
            return
        row = key, time.time(), _checksum(key, text), text
        with contextlib.suppress(sqlite3.Error, OSError), self._open() as table:
            table.execute("insert or replace into answers values (?, ?, ?, ?)", row)
            table.execute(_TRIM, (self.limit_bytes,))

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open the file; replace one that is no such table."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            table = self._connected()
        except sqlite3.OperationalError:
            raise  # locked, full, read-only: not the file's fault
        except sqlite3.DatabaseError:
            self.path.unlink(missing_ok=True)
            table = self._connected()
        with contextlib.closing(table):
            yield table

    def _connected(self) -> sqlite3.Connection:
        table = sqlite3.connect(self.path, timeout=_WAIT_S, isolation_level=None)
        try:
            table.execute("pragma auto_vacuum = full")
            (found,) = table.execute("pragma user_version").fetchone()
            if found not in (0, _FORMAT):
                raise sqlite3.DatabaseError(f"format {found}")
            table.execute(_MAKE)
            table.execute(f"pragma user_version = {_FORMAT}")
        except BaseException:
            table.close()
            raise
        return table


def _checksum(key: str, answer: bytes) -> bytes:
    return hashlib.blake2b(answer, key=key.encode()[:64], digest_size=16).digest()
