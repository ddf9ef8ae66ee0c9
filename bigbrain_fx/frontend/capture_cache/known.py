"""Cached facts of one model from earlier commands: its capture, and answers about it.

The module looks answers up by request; it computes none and traces nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bigbrain_fx.frontend.capture_cache.fingerprint import content, fingerprint, options_text
from bigbrain_fx.frontend.capture_cache.table import Table

if TYPE_CHECKING:
    from bigbrain_fx.frontend.modelfile import ModelFile

Answer = Mapping[str, Any]
REPEATED = frozenset({"report", "optimizer", "micro-batches", "rules", "prove", "rehearse"})
"""Questions that have the same answer for the same model; others read data, or write files."""


class Known:
    """Cached answers about one model; always empty without a table.

    Args:
        table: the store of answers.
        of_model: its fingerprint.
    """

    def __init__(self, table: Table | None = None, of_model: str = "") -> None:
        self._table, self._of_model = table, of_model

    @property
    def keeps(self) -> bool:
        """Whether there is a table."""
        return self._table is not None

    def answer(self, request: Mapping[str, object], find: Callable[[], Answer]) -> Answer:
        """Return a cached answer, else find it and cache it.

        Args:
            request: the question; where it names a file or a folder, the contents count.
            find: computes the answer as JSON data; an exception is not cached.
        """
        if self._table is None or request["do"] not in REPEATED:
            return find()
        key = f"{self._of_model} {_text(request)}"
        found = self._table.get(key)
        if isinstance(found, dict):
            return cast("Answer", found)
        answer = find()
        if _is_final(answer):
            self._table.put(key, answer)
        return answer

    def capture(self) -> Answer | None:
        """Return the cached capture."""
        found = self._table and self._table.get(f"{self._of_model} capture")
        return cast("Answer", found) if isinstance(found, dict) else None

    def keep_capture(self, record: Answer | None) -> None:
        """Keep a capture, where there is something to keep."""
        if self._table is not None and record is not None:
            self._table.put(f"{self._of_model} capture", record)


def known_of(file: ModelFile, wanted: Mapping[str, object]) -> Known:
    """Return the cached answers about a loaded model file; none where no table was named.

    Models with weights from elsewhere, and opaque steps, are not cached.
    """
    if not wanted.get("known") or wanted["blank"] or "refusal" in wanted:
        return Known()
    return Known(_table(wanted), fingerprint(file, wanted))


def is_known_text(wanted: Mapping[str, object]) -> bool:
    """Whether a command captured the same text before: then its answers may well be known.

    This runs before the model file does; the fingerprint decides later.
    """
    table = _table(wanted)
    return table is not None and table.get(_beforehand(wanted)) is not None


def note_text(wanted: Mapping[str, object]) -> None:
    """Note that all was answered for this text."""
    table = _table(wanted)
    if table is not None:
        table.put(_beforehand(wanted), True)


def _table(wanted: Mapping[str, object]) -> Table | None:
    return Table(Path(str(wanted["known"]))) if wanted.get("known") else None


def _beforehand(wanted: Mapping[str, object]) -> str:
    location = str(wanted["location"])
    path = Path(location if Path(location).exists() else location.rpartition(":")[0])
    text = content(path) if path.exists() else ""
    return f"text {text} {options_text(wanted)}"


def _is_final(answer: Answer) -> bool:
    """Whether an answer would be the same again: all was compared in time, and held."""
    checks, effect = answer.get("checks", ()), answer.get("effect") or {}
    compared = not (answer.get("why") or answer.get("refused")) and not effect.get("not_compared")
    return compared and all(check["passed"] is True for check in checks)


def _text(request: Mapping[str, object]) -> str:
    places = {name: content(Path(str(request[name]))) for name in _PLACES if name in request}
    asked = json.dumps({**request, **places}, sort_keys=True)
    return hashlib.blake2b(asked.encode(), digest_size=20).hexdigest()


_PLACES = ("path", "bundle")
