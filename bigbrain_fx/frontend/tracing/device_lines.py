"""The lines of the user's own files that ask for the device, by their words: nothing is run.

A rehearsal on CPUs sees nothing of them. Public code that has it: attention of Stable Diffusion,
which takes `torch.autocast(enabled=False, device_type='cuda')` round its scores.
"""

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
_ASKS = re.compile(
    r"\.is_(cuda|cpu)\b|\.device\.type\s*(==|!=|in\b|not\b)|\.device\s*[!=]=|str\([\w.]*device\)"
    r"|\bcuda\.(is_available|device_count)\(|\bcuda\.amp\b|\bis_autocast_\w*enabled\("
    r"|\bautocast\(.*(?<!\w)['\"](cuda|cpu)\b"
)


def device_lines(model: nn.Module, loss: object) -> tuple[str, ...]:
    """Return the lines that query the device, or whether there is a GPU: "model.py:3"."""
    names = {kind.__module__ for part in model.modules() for kind in type(part).__mro__}
    files = _own_files([*names, str(getattr(loss, "__module__", ""))])
    return tuple(line for file in files for line in _asking(file))


def _asking(file: str) -> Iterator[str]:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        lines = Path(file).read_text(encoding="utf-8").splitlines()
        found = (n for n, line in enumerate(lines, 1) if _ASKS.search(line.partition("#")[0]))
        yield from (f"{Path(file).name}:{number}" for number in found)


def _own_files(names: list[str]) -> Iterator[str]:
    """Yield the user's files: of these modules, and of modules that these refer to."""
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
