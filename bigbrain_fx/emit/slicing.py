"""Copy what training needs out of the user's model file: some functions and the names they use.

The bundle must not import the model file (that would build on everything the model needs). So the
file's syntax tree is sliced; where names cannot be followed, the whole file is shipped and imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Slice:
    """Part of a model file.

    Attributes:
        text: the code. files: local modules that it imports, to be shipped beside it.
        whole: whether `text` imports the shipped model file because it could not be sliced.
    """

    text: str
    files: tuple[Path, ...]
    whole: bool = False


def slice_file(path: Path, wanted: Sequence[str]) -> Slice:
    """Return the code that defines the wanted names, in the order of the file."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    if any(_is_star(node) for node in tree.body):
        text = f"from {path.stem} import {', '.join(wanted)}\n"
        return Slice(text, (path, *_local_modules(tree.body, path.parent)), whole=True)
    chosen = _closure(tree.body, wanted)
    lines = source.splitlines()
    text = "\n".join(_text(node, lines, chosen) for node in tree.body if id(node) in chosen)
    kept = [node for node in tree.body if id(node) in chosen]
    return Slice(text + "\n", tuple(_local_modules(kept, path.parent)))


def _closure(body: Sequence[ast.stmt], wanted: Iterable[str]) -> dict[int, set[str]]:
    """Return the statements that the wanted names need, each with the names wanted from it."""
    makers: dict[str, list[ast.stmt]] = {}
    for node in body:
        for name in _defines(node):
            makers.setdefault(name, []).append(node)
    chosen: dict[int, set[str]] = {id(n): set() for n in body if _is_future(n)}
    pending = list(wanted)
    done: set[str] = set()
    while pending:
        name = pending.pop()
        if name in done:
            continue
        done.add(name)
        for node in makers.get(name, ()):
            chosen.setdefault(id(node), set()).add(name)
            if not isinstance(node, ast.Import | ast.ImportFrom):
                pending += _reads(node)
    return chosen


def _defines(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a top-level statement binds, also inside `if` and `try`, and by `x[...] = `."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
            return
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            for alias in names:
                yield alias.asname or alias.name.partition(".")[0]
            return
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            yield inner.id
        elif isinstance(inner, ast.FunctionDef | ast.ClassDef):
            yield inner.name
        elif isinstance(inner, ast.alias):
            yield inner.asname or inner.name.partition(".")[0]


def _reads(node: ast.stmt) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            yield inner.id
        elif (
            isinstance(inner, ast.Constant)
            and isinstance(inner.value, str)
            and inner.value.isidentifier()
        ):
            yield inner.value  # a quoted annotation


def _text(node: ast.stmt, lines: Sequence[str], chosen: dict[int, set[str]]) -> str:
    if isinstance(node, ast.Import | ast.ImportFrom) and not _is_future(node):
        return _import_text(node, chosen[id(node)])
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(d.lineno for d in decorators)])
    first = _with_comments(lines, first)
    text = "\n".join(lines[first - 1 : node.end_lineno])
    return f"\n\n{text}\n" if isinstance(node, ast.FunctionDef | ast.ClassDef) else text


def _with_comments(lines: Sequence[str], first: int) -> int:
    while first > 1 and lines[first - 2].startswith("#"):
        first -= 1
    return first


def _import_text(node: ast.Import | ast.ImportFrom, names: set[str]) -> str:
    kept = [a for a in node.names if (a.asname or a.name.partition(".")[0]) in names]
    if isinstance(node, ast.Import):
        return ast.unparse(ast.Import(kept))
    return ast.unparse(ast.ImportFrom(node.module, kept, node.level))


def _local_modules(body: Iterable[ast.stmt], folder: Path) -> list[Path]:
    """Return the files beside the model file that these statements import, and what those import."""
    found: dict[Path, None] = {}
    pending = list(_imported(body))
    while pending:
        file = folder / f"{pending.pop().partition('.')[0]}.py"
        if file.is_file() and file not in found:
            found[file] = None
            pending += _imported(ast.parse(file.read_text(encoding="utf-8")).body)
    return sorted(found)


def _imported(body: Iterable[ast.stmt]) -> Iterator[str]:
    for node in body:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Import):
                yield from (alias.name for alias in inner.names)
            elif isinstance(inner, ast.ImportFrom) and inner.module:
                yield inner.module


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _is_star(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
