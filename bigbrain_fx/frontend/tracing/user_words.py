"""The lines of the user's own files that have a word: what a model may ask, without running it."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from torch import nn

from bigbrain_fx.frontend.translation.sources import is_own

_HERE = f"{Path(__file__).parents[2]}/"


def mentions(model: nn.Module, loss: object, words: re.Pattern[str]) -> bool:
    """Whether one of the user's files that these come from has such a word at all."""
    names = {kind.__module__ for part in model.modules() for kind in type(part).__mro__}
    files = _own_files([*names, str(getattr(loss, "__module__", ""))])
    return any(_has(words, file) for file in files)


def lines_with(model: nn.Module, loss: object, words: re.Pattern[str]) -> Iterator[str]:
    """Yield the lines of those files that have such a word, "model.py:3"."""
    names = {kind.__module__ for part in model.modules() for kind in type(part).__mro__}
    for file in _own_files([*names, str(getattr(loss, "__module__", ""))]):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            lines = Path(file).read_text(encoding="utf-8").splitlines()
            found = (n for n, line in enumerate(lines, 1) if words.search(line.partition("#")[0]))
            yield from (f"{Path(file).name}:{number}" for number in found)


def _own_files(names: list[str]) -> Iterator[str]:
    """Yield the user's files: of these modules, and of those whose names they know."""
    seen: set[str] = set()
    while names:
        module = sys.modules.get(names.pop())
        file = str(getattr(module, "__file__", None) or "")
        if module is None or file in seen or not is_own(file) or file.startswith(_HERE):
            continue
        seen.add(file)
        yield file
        names += map(_origin, vars(module).values())


def _origin(value: object) -> str:
    name = "__name__" if isinstance(value, ModuleType) else "__module__"
    with contextlib.suppress(Exception):  # the user's own objects
        return str(getattr(value, name, ""))
    return ""


def _has(words: re.Pattern[str], file: str) -> bool:
    try:
        return bool(words.search(Path(file).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError):
        return True
