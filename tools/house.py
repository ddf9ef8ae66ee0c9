"""Count the house: names, lines, functions, classes defined twice, layers, circles, side entrances.

    python -m tools.house                     this checkout
    python -m tools.house --base OTHER        beside another one, as it was before
    python -m tools.house --json
    python -m tools.house --picture docs/explanation/architecture.md    draws rooms and arrows there

It reads files as text and runs nothing of them.
"""

from __future__ import annotations

import ast
import json
import re
import statistics
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import click
import networkx as nx

PRODUCT = ("bigbrain_fx", "partitioners", "estimators")
COPIED = ("runtime", "supervisor")
# The last two stand for folders at the top of the checkout, which PRODUCT has.
NO_ROOMS = {"__init__.py", "__main__.py", "py.typed", "__pycache__"}
NO_ROOMS |= {"partitioners.py", "estimators.py"}
MANY_BRANCHES = 20
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class House:
    """Counts of one checkout.

    Attributes:
        names: at the top of bigbrain_fx, folders and files, besides `NO_ROOMS`.
        lines: of Python in the three packages; `copied_lines` of them may stand in a bundle.
        median_lines, p90_lines, most_lines: of functions, from `def` to their last line.
        branching: functions with more than 20 branches.
        defined_twice: names of public classes that stand in more than one file.
        layers: rows of the road's import contract.
        circles: groups of files that import each other, TYPE_CHECKING left out.
        side_entrances: imports of a room's inside from outside, as "file -> module".
    """

    names: tuple[str, ...]
    files: int
    lines: int
    copied_lines: int
    functions: int
    median_lines: int
    p90_lines: int
    most_lines: int
    branching: tuple[str, ...]
    defined_twice: tuple[str, ...]
    layers: int
    circles: tuple[tuple[str, ...], ...]
    side_entrances: tuple[str, ...]


@dataclass(frozen=True)
class Module:
    """One file of Python: its dotted name, whether it is a package's `__init__`, its tree."""

    name: str
    is_package: bool
    lines: int
    tree: ast.Module

    @property
    def package(self) -> str:
        """The package that its relative imports start from."""
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All of its tree, walked once."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def imports(self) -> tuple[ast.Import | ast.ImportFrom, ...]:
        """Its imports, wherever they stand."""
        return tuple(n for n in self.nodes if isinstance(n, ast.Import | ast.ImportFrom))

    @cached_property
    def promised(self) -> frozenset[str]:
        """The names that a package's `__init__` binds itself: they are no modules of it."""
        named = (node for node in self.imports if isinstance(node, ast.ImportFrom))
        return frozenset(alias.asname or alias.name for node in named for alias in node.names)

    @cached_property
    def for_checkers(self) -> frozenset[ast.AST]:
        """Nodes that only a type checker reads."""
        blocks = (n for n in self.nodes if isinstance(n, ast.If) and _is_checking(n.test))
        lines = (line for block in blocks for line in block.body)
        return frozenset(inner for line in lines for inner in ast.walk(line))


def counted(root: Path) -> House:
    """Count a checkout.

    Args:
        root: the folder that holds `bigbrain_fx/` and pyproject.toml.
    """
    modules = _modules(root)
    functions = [found for module in modules.values() for found in _functions(module)]
    sizes = sorted(end - start + 1 for _, start, end, _ in functions)
    return House(
        names=_top_names(root),
        files=len(modules),
        lines=sum(module.lines for module in modules.values()),
        copied_lines=sum(m.lines for m in modules.values() if _room(m.name) in COPIED),
        functions=len(sizes),
        median_lines=int(statistics.median(sizes)),
        p90_lines=sizes[len(sizes) * 9 // 10],
        most_lines=sizes[-1],
        branching=tuple(name for name, *_, branches in functions if branches > MANY_BRANCHES),
        defined_twice=_defined_twice(modules),
        layers=_layers(root),
        circles=_circles(modules),
        side_entrances=tuple(side_entrances(modules)),
    )


def side_entrances(modules: dict[str, Module]) -> list[str]:
    """Return imports of what is inside a room of bigbrain_fx by a file outside of it."""
    found = []
    for module in modules.values():
        for target in sorted(_imported(module, modules)):
            own = _room(module.name) if module.name.startswith("bigbrain_fx.") else ""
            inside = target.startswith("bigbrain_fx.") and target.count(".") > 1
            if inside and _room(target) != own:
                found.append(f"{module.name} -> {target}")
    return sorted(found)


def _top_names(root: Path) -> tuple[str, ...]:
    return tuple(sorted({p.name for p in (root / "bigbrain_fx").iterdir()} - NO_ROOMS))


@lru_cache(maxsize=2)
def _modules(root: Path) -> dict[str, Module]:
    return {module.name: module for module in _parsed(root)}


def _parsed(root: Path) -> Iterator[Module]:
    for top in PRODUCT:
        for path in sorted((root / top).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            text = path.read_text(encoding="utf-8")
            name = ".".join(parts[:-1] if is_package else parts)
            yield Module(name, is_package, len(text.splitlines()), ast.parse(text))


def _room(name: str) -> str:
    parts = name.split(".")
    return parts[1] if parts[0] == "bigbrain_fx" and len(parts) > 1 else parts[0]


def _functions(module: Module) -> Iterator[tuple[str, int, int, int]]:
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            end = node.end_lineno or node.lineno
            yield f"{module.name}:{node.name}", node.lineno, end, _branches(node)


def _branches(function: ast.AST) -> int:
    """Count the places where a function may go on in more than one way."""
    one = (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.match_case)
    count = 0
    for node in ast.walk(function):
        count += isinstance(node, one)
        count += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        count += 1 + len(node.ifs) if isinstance(node, ast.comprehension) else 0
    return count


def _defined_twice(modules: dict[str, Module]) -> tuple[str, ...]:
    places = Counter(
        node.name
        for module in modules.values()
        for node in module.tree.body
        if isinstance(node, ast.ClassDef)
    )
    return tuple(sorted(name for name, count in places.items() if count > 1))


def _layers(root: Path) -> int:
    told = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = told["tool"]["importlinter"]["contracts"]
    return next(len(each["layers"]) for each in contracts if each["id"] == "road")


def _circles(modules: dict[str, Module]) -> tuple[tuple[str, ...], ...]:
    graph: nx.DiGraph[str] = nx.DiGraph()
    for module in modules.values():
        graph.add_edges_from((module.name, target) for target in _imported(module, modules, True))
    groups = (tuple(sorted(group)) for group in nx.strongly_connected_components(graph))
    return tuple(sorted(group for group in groups if len(group) > 1))


def _imported(module: Module, modules: dict[str, Module], at_run: bool = False) -> set[str]:
    """Return what of ours a file imports: the module that a name comes from, or the module named.

    Args:
        module: whose imports.
        modules: all of ours by name.
        at_run: leave out what only a type checker reads.
    """
    skipped = module.for_checkers if at_run else frozenset[ast.AST]()
    found = set[str]()
    for node in module.imports:
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        else:
            found.update(_sources(module, node, modules))
    return {name for name in found if name in modules and name != module.name}


def _is_checking(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def _sources(module: Module, node: ast.ImportFrom, modules: dict[str, Module]) -> Iterator[str]:
    base = node.module or ""
    if node.level:
        start = module.package.split(".")
        base = ".".join([*start[: len(start) - node.level + 1], *([base] if base else [])])
    promised = modules[base].promised if base in modules else frozenset[str]()
    for alias in node.names:
        inner = f"{base}.{alias.name}"
        yield inner if inner in modules and alias.name not in promised else base


def table(now: House, base: House | None = None) -> str:
    """Return the counts as lines, beside those of another checkout where one is given."""
    rows = [("", "now", "before" if base else "")]
    for field, value in asdict(now).items():
        before = getattr(base, field) if base else None
        rows.append((field.replace("_", " "), _short(value), _short(before)))
    return "\n".join(f"{name:16} {new:>10} {old:>10}".rstrip() for name, new, old in rows)


def _short(value: object) -> str:
    if value is None:
        return ""
    return f"{len(value) if isinstance(value, tuple) else value:,}"


ROOMS = re.compile(r"(<!-- rooms -->\n).*?(<!-- end -->)", re.DOTALL)


def picture(root: Path) -> str:
    """Draw the rooms in mermaid: an arrow where one imports another and no path says so already."""
    modules = _modules(root)
    graph: nx.DiGraph[str] = nx.DiGraph()
    for module in modules.values():
        here = _drawn(module.name)
        there = {_drawn(target) for target in _imported(module, modules, at_run=True)} - {here}
        graph.add_edges_from((here, target) for target in there)
    graph.remove_nodes_from(_FACES & set(graph))
    least = nx.transitive_reduction(graph)
    arrows = sorted(f"    {a} --> {b}" for a, b in least.edges)
    return "\n".join(["```mermaid", "flowchart TD", *arrows, "```", ""])


_FACES = {"bigbrain_fx", "__init__", "__main__", "api"}  # they hand on what the rooms have


def _drawn(name: str) -> str:
    parts = name.split(".")
    return parts[1] if parts[0] == "bigbrain_fx" and len(parts) > 1 else parts[0]


def with_picture(text: str, root: Path) -> str:
    """Return a page with its picture of the rooms drawn anew."""
    return ROOMS.sub(lambda found: f"{found[1]}{picture(root)}{found[2]}", text)


@click.command()
@click.option("--base", type=click.Path(path_type=Path, exists=True), help="Another checkout.")
@click.option("--names", "named", is_flag=True, help="Say what was counted, too.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--picture", "page", type=click.Path(path_type=Path, exists=True), help="Draw there.")
def main(base: Path | None, named: bool, as_json: bool, page: Path | None) -> None:
    """Count the house, and print it; or draw its rooms into a page, where `<!-- rooms -->` is."""
    if page is not None:
        page.write_text(with_picture(page.read_text(encoding="utf-8"), ROOT), encoding="utf-8")
        return
    now = counted(ROOT)
    if as_json:
        click.echo(json.dumps(asdict(now), indent=2))
        return
    click.echo(table(now, counted(base) if base else None))
    for field, value in asdict(now).items() if named else ():
        if isinstance(value, tuple):
            click.echo(f"\n{field.replace('_', ' ')}:")
            click.echo("\n".join(f"  {item}" for item in value))


if __name__ == "__main__":
    main()
