"""The files of the runtime that a bundle copies: those that its own files import, directly or not.

The module reads import lines of the bundle's files and of the runtime's; it does not read the plan.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOM = "runtime"
SMALLER = {  # name -> file of any plan; file, and its name there, of one that adds nothing
    "Device": ("device", "checked_device", "CheckedDevice"),
    "InferenceDevice": ("planned_infer", "infer", "EvalDevice"),
}
DOOR = '"""What this bundle runs on; it imports nothing of bigbrain-fx."""'
CALLED = frozenset({"run_in_process", "infer_in_process"})  # by scripts beside a bundle


def runtime_files(
    runtime: Path, texts: Iterable[str], asked: Iterable[str] = (), without: Iterable[str] = ()
) -> frozenset[str]:
    """Return the names of the files that a bundle needs of the runtime.

    Args:
        runtime: the folder.
        texts: the bundle's own Python.
        asked: files that are wanted though nothing of the bundle imports them: "pipelining".
        without: files that nothing will need, and that lead nowhere.
    """
    smaller = {name: own for name, (of_any, own, _) in SMALLER.items() if of_any in without}
    homes = {**_homes(runtime), **smaller}
    names = {name for text in texts for name in imported_names(text)}
    first = [*asked, *(homes[name] for name in sorted(names) if name in homes)]
    return room_files(runtime, first, without)


def room_files(
    room: Path, first: Iterable[str] = (), without: Iterable[str] = (), *, door: bool = True
) -> frozenset[str]:
    """Return the names of the files of a package that its `__init__` and some files lead to.

    Args:
        room: the folder of the package.
        first: files that a bundle imports beside the `__init__`.
        without: files that nothing will need, and that lead nowhere.
        door: the bundle has the package's own `__init__`; False: one of its own.
    """
    waiting = [*first, *_neighbours(room / "__init__.py")] if door else [*first]
    found = {"__init__"} if door else set()
    while waiting:
        stem = waiting.pop()
        if stem not in found and stem not in without:
            found.add(stem)
            waiting += _neighbours(room / f"{stem}.py")
    return frozenset(f"{stem}.py" for stem in found)


def door(runtime: Path, texts: Iterable[str], files: Collection[str]) -> str:
    """Return `runtime/__init__.py` of a bundle: of the public names those that its files import.

    Args:
        runtime: the folder.
        texts: the bundle's own Python.
        files: of the runtime that the bundle has.
    """
    text = (runtime / "__init__.py").read_text(encoding="utf-8")
    called = {name for name in CALLED if f"{_homes(runtime)[name]}.py" in files}
    called |= {name for name, (_, own, _) in SMALLER.items() if f"{own}.py" in files}
    names = {name for own in texts for name in imported_names(own)} | called
    homes = {name: (file, name) for name, file in _homes(runtime).items()}
    for name, (of_any, *smaller) in SMALLER.items():
        if f"{of_any}.py" not in files:
            homes[name] = smaller[0], smaller[1]
    return "\n".join([*_doors_head(text), *imports_of(names & homes.keys(), homes)]) + "\n"


def _doors_head(text: str) -> list[str]:
    """Return the first lines of a door: what it says of old Pythons, and what is imported first."""
    lines, body = text.splitlines(), ast.parse(text).body
    old = next(node for node in body if isinstance(node, ast.If))
    first = next(n for n in body if isinstance(n, ast.ImportFrom) and n.level and not n.module)
    return [
        DOOR,
        "",
        "import sys",
        "",
        *lines[old.lineno - 1 : old.end_lineno],
        "",
        *(lines[first.lineno - 1 : first.end_lineno]),
    ]


def supervisors_door(supervisor: Path) -> str:
    """Return `supervisor/__init__.py` of a bundle, of which launch.py runs `main` alone."""
    text = (supervisor / "__init__.py").read_text(encoding="utf-8")
    first = next(n for n in ast.parse(text).body if isinstance(n, ast.ImportFrom) and n.level)
    head = "".join(text.splitlines(keepends=True)[: first.lineno - 1])
    unused = "from typing import TYPE_CHECKING, Any\n"
    return head.replace(unused, "") + "from .command import main as main\n"


def imports_of(names: Iterable[str], homes: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return an `__init__`'s import of each file, with its names, as `homes` has them."""
    by_file: dict[str, list[str]] = {}
    for name in sorted(names):
        file, there = homes[name]
        by_file.setdefault(file, []).append(name if there == name else f"{there} as {name}")
    return [f"from .{file} import {', '.join(found)}" for file, found in sorted(by_file.items())]


def imported_names(text: str) -> Iterator[str]:
    """Yield the names that a file of the bundle takes from the runtime."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module == ROOM:
            yield from (alias.name for alias in node.names)


@cache
def _homes(runtime: Path) -> Mapping[str, str]:
    """Return name -> file, as the door of the runtime says it."""
    tree = ast.parse((runtime / "__init__.py").read_text())
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            found |= {alias.name: node.module for alias in node.names}
    return found


@cache
def _neighbours(file: Path) -> tuple[str, ...]:
    """Return the files that one imports, those that only a type checker reads left out."""
    nodes = _run(ast.parse(file.read_text(encoding="utf-8")))
    near = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 1]
    return tuple(
        stem
        for node in near
        for stem in ((node.module,) if node.module else (alias.name for alias in node.names))
        if (file.parent / f"{stem}.py").exists()
    )


def _run(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk statements that run, inside functions too; not those under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr) or (isinstance(node, ast.If) and _is_for_checkers(node)):
            continue
        yield node
        yield from _run(node)


def _is_for_checkers(node: ast.If) -> bool:
    return ast.unparse(node.test) == "TYPE_CHECKING"
