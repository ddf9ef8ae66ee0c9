"""The user's own modules that a file needs, through any imports; found by reading, not running.

    import recipes.adam ─▶ recipes/__init__.py, recipes/adam.py ─▶ from . import rates ─▶ ...

A package is taken whole, since it may read files of its own; only what is reached in it is read.
"""

from __future__ import annotations

import ast
import tokenize
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

_BY_NAME = ("import_module", "__import__", "iter_modules", "walk_packages")
"""What a package calls that imports by a text, as those do that register all their files."""


def local_modules(names: Iterable[str], folder: Path) -> list[Path]:
    """Return the modules and packages in a folder that these, or what they import, belong to."""
    pending, seen = list(names), set[str]()
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            pending += imports_of_module(name, folder)
    tops = {name.partition(".")[0] for name in seen}
    return sorted(path for top in tops for path in _of_top(top, folder))


def imports_of_module(name: str, folder: Path) -> list[str]:
    """Return the full names of what a module in a folder imports; none where it is elsewhere."""
    return [
        each
        for package, file in _files(name, folder)
        for each in _imports_of_file(file, package, file.stat().st_mtime_ns)
    ]


def imported(body: Iterable[ast.stmt], package: str = "") -> Iterator[str]:
    """Yield the full names that statements import: of `from a import b` both a and a.b.

    Args:
        body: of a file.
        package: which it is in, for its relative imports.
    """
    for node in body:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Import):
                yield from (alias.name for alias in inner.names)
            elif isinstance(inner, ast.ImportFrom):
                base = _absolute(inner, package)
                yield from (base, *(f"{base}.{a.name}" for a in inner.names)) if base else ()


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*filter(None, parts), *filter(None, [node.module])])


def _of_top(top: str, folder: Path) -> Iterator[Path]:
    file, package = folder / f"{top}.py", folder / top
    if _is_file(file, package):
        yield file
    elif package.is_dir() and any(package.rglob("*.py")):
        yield package


def _is_file(file: Path, package: Path) -> bool:
    """As Python chooses: a package before a file, a file before a folder without `__init__.py`."""
    return file.is_file() and not (package / "__init__.py").is_file()


def _files(name: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files that run where a module is imported, each with the package it is in."""
    place, package = folder, ""
    for part in name.split("."):
        file, inner = place / f"{part}.py", place / part
        if _is_file(file, inner):
            yield package, file
            return
        place, package = inner, f"{package}.{part}".lstrip(".")
        if (inner / "__init__.py").is_file():
            yield package, inner / "__init__.py"


@lru_cache(maxsize=4096)  # a bundle's texts ask several times
def _imports_of_file(file: Path, package: str, _changed_ns: int) -> tuple[str, ...]:
    with tokenize.open(file) as source:
        text = source.read()
    names = dict.fromkeys(imported(ast.parse(text).body, package))
    if file.name == "__init__.py" and any(call in text for call in _BY_NAME):
        inner = (
            each.relative_to(file.parent).with_suffix("") for each in file.parent.rglob("*.py")
        )
        names |= dict.fromkeys(".".join([package, *each.parts]) for each in inner)
    return tuple(names)
