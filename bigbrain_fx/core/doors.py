"""Public names of packages: what an `__init__` lists, loaded when it is first used."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path


@cache
def promised(room: str) -> Mapping[str, str]:
    """Return name -> module for the imports `X as X` of a package under `if TYPE_CHECKING`."""
    tree = ast.parse(Path(str(sys.modules[room].__file__)).read_text(encoding="utf-8"))
    blocks = (node.body for node in tree.body if isinstance(node, ast.If))
    imports = [node for block in blocks for node in block if isinstance(node, ast.ImportFrom)]
    return {a.name: f"{node.module}" for node in imports for a in node.names if a.asname == a.name}


def door(room: str, asked: str = "") -> Callable[[str], object]:
    """Return a `__getattr__` for a package that loads each public name when it is first used.

    The imports that a type checker reads are the only list of these names.

    Args:
        room: the package, `__name__` of its `__init__`.
        asked: what an error calls it, where its names are those of another package, too.
    """

    def load(name: str) -> object:
        if name not in promised(room):
            raise AttributeError(f"module {asked or room!r} has no attribute {name!r}")
        return getattr(importlib.import_module(promised(room)[name]), name)

    return load
