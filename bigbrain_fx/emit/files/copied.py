"""Which files of the runtime a bundle takes along: those that its own files lead to.

It reads import lines, of the bundle's files and of the runtime's own; it knows no plan.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOM = "runtime"


SUPERVISED = ("control", "member")  # the ways into what only processes of a supervisor run
# what only replicas run
REPLICATED = ("buckets", "joining", "replicas", "standing", "statistics", "surviving")
COLLECTIVE = ("collectives",)  # of those, what only sums by torch's own collectives run
UNSHARDED = ("unsharded",)  # of those, what only ZeRO 3 runs
COPIED = ("copies",)  # what only devices run that hold copies of a weight
GROUPED = ("group",)  # what only groups of devices run
OFFLOADED = ("stores",)  # what only devices with stores run
LAYERED = ("stored_weights",)  # of those, what only stages run whose weights lie there
COMPILED = ("compiled",)  # what only stages under torch.compile run
OVERLAPPING = ("asynchronous",)  # what only steps that overlap run
SAVED = ("stored_activations",)  # of those, what only forwards run that save into them


def runtime_files(
    runtime: Path, texts: Iterable[str], asked: Iterable[str] = (), without: Iterable[str] = ()
) -> frozenset[str]:
    """Return the names of the files that a bundle needs of the runtime.

    Args:
        runtime: the folder.
        texts: the bundle's own Python.
        asked: files that are wanted though nothing of the bundle imports them: "pipelining".
        without: files that nothing will need, and that lead nowhere: `SUPERVISED`, `GROUPED`, ...
    """
    homes = _homes(runtime)
    names = {name for text in texts for name in _imported(text)}
    waiting = [*asked, *(homes[name] for name in sorted(names) if name in homes)]
    waiting += _neighbours(runtime / "__init__.py")  # every bundle imports the door
    found = {"__init__"}
    while waiting:
        stem = waiting.pop()
        if stem not in found and stem not in without:
            found.add(stem)
            waiting += _neighbours(runtime / f"{stem}.py")
    return frozenset(f"{stem}.py" for stem in found)


def _imported(text: str) -> Iterator[str]:
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
    """Walk what runs, inside functions too; not what stands under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _run(node)
