"""A refused line that is an installed library's: whose it is, and how a model file changes it.

`library_remedies` completes the help of errors whose line the user cannot edit.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.translation.sources import is_own

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class LibraryLine:
    """A line of a library: the module, and the class and function around the line.

    Attributes:
        module: as it is imported, "transformers.models.gemma3n.modeling_gemma3n".
        owner: the class; None where the function stands alone.
        is_part: whether that is a class of modules.
    """

    module: str
    owner: str | None
    function: str
    is_part: bool = False

    @property
    def remedy(self) -> str:
        """Say how a model file replaces the function that has the line."""
        package = self.module.partition(".")[0]
        name = ".".join(filter(None, (self.owner, self.function)))
        whose = f"that line is in {package}, not in your file"
        if self.is_part:
            return (
                f"{whose}: to change it, write `class Own({self.owner})` with a {self.function} of "
                "its own in the model file, and set part.__class__ = Own in model() for each "
                f"{self.owner}"
            )
        return (
            f"{whose}: to change it, write a function of your own in the model file, and "
            f"`{self.module}.{name} = own` at the top"
        )


@contextmanager
def library_remedies() -> Iterator[None]:
    """Say of a refused line of a library, too, how to change what it does."""
    try:
        yield
    except CaptureError as error:
        found = library_line(error.at, (error.what, *error.notes))
        if found is not None:
            more = f"; of the line itself: {error.help}" if error.help else ""
            error.help = f"{found.remedy}{more}"
        raise


def library_line(at: str | None, texts: tuple[str, ...]) -> LibraryLine | None:
    """Return what is known of a place, "modeling.py:31"; None where it is the user's or unknown.

    Args:
        at: a file's name and a line number.
        texts: what was said of the place; one has the line's own text, which tells files of one
            name apart.
    """
    name, _, number = (at or "").rpartition(":")
    if not number.isdecimal():
        return None
    line = int(number)
    files = {file: module for module, file in _loaded(name) if _has(file, line, texts)}
    if len(files) != 1:
        return None
    [(file, module)] = files.items()
    return None if is_own(file) else _around(file, module, line)


def _loaded(name: str) -> Iterator[tuple[str, str]]:
    """Yield the modules of files of a name, with the files."""
    for module, loaded in list(sys.modules.items()):
        file = getattr(loaded, "__file__", None)
        if isinstance(file, str) and Path(file).name == name:
            yield module, file


def _has(file: str, line: int, texts: tuple[str, ...]) -> bool:
    """Whether the text of a file's line is part of what was said."""
    own = linecache.getline(file, line).strip()
    return bool(own) and any(own in text for text in texts)


def _around(file: str, module: str, line: int) -> LibraryLine | None:
    """Return the function and class around a line; None where no function is around it."""
    owner, function = None, None
    for node in _enclosing(ast.parse("".join(linecache.getlines(file))), line):
        if isinstance(node, ast.ClassDef) and function is None:
            owner = node.name
        elif isinstance(node, Function) and function is None:
            function = node.name
    if function is None:
        return None
    kind = getattr(sys.modules[module], owner or "", None)
    is_part = isinstance(kind, type) and issubclass(kind, nn.Module)
    return LibraryLine(module, owner, function, is_part)


def _enclosing(node: ast.AST, line: int) -> Iterator[ast.AST]:
    """Yield the statements around a line, outermost first."""
    for child in ast.iter_child_nodes(node):
        first, last = getattr(child, "lineno", None), getattr(child, "end_lineno", None)
        if first is not None and last is not None and first <= line <= last:
            yield child
            yield from _enclosing(child, line)
