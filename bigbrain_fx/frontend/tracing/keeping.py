"""Whether the user's lines may keep anything from call to call, by what they are made of.

    self.seen = (n + 1, x)   next(SCHEDULE)   LOG.info("...")   ─▶ they may

Where they store nothing and ask no iterator, logger or file, no number of calls changes what they
compute. This file reads code; it runs nothing.
"""

from __future__ import annotations

import contextlib
import dis
import io
import types
from collections.abc import Iterator

from torch import nn

from bigbrain_fx.frontend.tracing.reached import codes
from bigbrain_fx.frontend.tracing.side_effects import reached

_STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR", "DELETE_ATTR", "DELETE_SUBSCR")
_OF_ITERATORS = {"next", "send", "__next__"}
_OF_CONTAINERS = {
    *("append", "appendleft", "extend", "insert", "update", "setdefault", "add", "discard"),
    *("pop", "popleft", "popitem", "remove", "clear", "rotate", "sort", "put", "get_nowait"),
}
_OF_TELLING = {
    *("debug", "info", "warning", "warn", "error", "exception", "critical", "log"),
    *("write", "writelines", "read", "readline", "seek", "tell", "execute"),
}
_BY_NAME = {"setattr", "globals", "vars", "set", "getrefcount", "get_count", "cache_info"}
_KEEP = _OF_ITERATORS | _OF_CONTAINERS | _OF_TELLING | _BY_NAME


def may_keep(model: nn.Module, loss: object) -> bool:
    """Whether forward, loss or what they reach may keep something for a later call."""
    roots = (*{type(part): part for part in model.modules()}.values(), loss)
    seen: set[int] = set()
    found = (function for root in roots for function in reached(root, seen))
    return any(_keeps(function) for function in found if function.__name__ != "__init__")


def _keeps(function: types.FunctionType) -> bool:
    for code in codes(function.__code__):
        if _KEEP.intersection(code.co_names):
            return True
        for each in dis.Bytecode(code):
            freed = each.opname == "STORE_DEREF" and each.argval in code.co_freevars
            if freed or each.opname in _STORES:
                return True
    return False


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Keep what many calls print from the user."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
