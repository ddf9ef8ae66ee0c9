"""Copy what training needs out of the user's model file: some functions and the names they use.

The bundle must not import the model file: it would then need everything that the model needs. The
module therefore slices the file's syntax tree. Where names cannot be followed, the whole file is
shipped and imported. The module reads the file as text and never runs it.
"""

from __future__ import annotations

import ast
import keyword
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bigbrain_fx.emit.files.local_modules import imported, local_modules
from bigbrain_fx.errors import InputError

SETTINGS = (  # and whatever is in torch.backends
    "torch.set_float32_matmul_precision",
    "torch.set_flush_denormal",
    "torch.use_deterministic_algorithms",
    "torch.set_deterministic_debug_mode",
)


@dataclass(frozen=True)
class SourceSlice:
    """Part of a model file.

    Attributes:
        text: the code.
        files: local modules and packages that it imports, to be shipped beside it.
        whole: whether `text` imports the shipped model file because it could not be sliced.
        ours: lines behind it that bind names of ours: no line of the file does.
    """

    text: str
    files: tuple[Path, ...]
    whole: bool = False
    ours: str = ""


def slice_file(path: Path, wanted: Sequence[str], seed: int | None = None) -> SourceSlice:
    """Return the code that defines the wanted names, in the order of the file.

    Settings of torch at the top of the file (`torch.backends.cuda.matmul.allow_tf32 = True`) come
    along. With a `seed` the file is shipped whole, and torch is seeded before it is run.
    """
    source = _read(path)
    tree = ast.parse(source)
    if wanted and (seed is not None or any(_is_star(node) for node in tree.body)):
        text = _import_of(path, wanted, seed)
        return SourceSlice(
            text, (path, *local_modules(imported(tree.body), path.parent)), whole=True
        )
    settings = [node for node in tree.body if _is_setting(node, _imports(tree.body))]
    chosen = _closure(tree.body, [*wanted, *(n for node in settings for n in _reads(node))])
    chosen |= {id(node): set() for node in settings}
    kept = [node for node in tree.body if id(node) in chosen]
    shared = _sharing_a_line(tree.body)
    parts = zip(_gaps(kept, source), kept, strict=True)
    texts = [gap + _text(node, source, chosen, node in shared) for gap, node in parts]
    text = "\n".join(texts) + "\n"
    return SourceSlice(text, tuple(local_modules(imported(ast.parse(text).body), path.parent)))


def _import_of(path: Path, wanted: Sequence[str], seed: int | None) -> str:
    """Write how the shipped file is run, with the dice of `split`.

    Raises:
        InputError: its name cannot be imported.
    """
    if not path.stem.isidentifier() or keyword.iskeyword(path.stem):
        raise InputError(
            f"a bundle takes {path.name} whole, and Python cannot import a file of that name",
            code="BX3613",
            at=str(path),
            help="rename it: letters, digits and _, such as model.py",
        )
    line = f"from {path.stem} import {', '.join(wanted)}"
    if seed is None:
        return f"{line}\n"
    why = f"what the top of {path.name} draws is what `split` has seen"
    return f"import torch\n\n# {why}\ntorch.manual_seed({seed})\n{line}  # noqa: E402\n"


def _read(path: Path) -> str:
    """Read a Python file as Python does: in the encoding it declares."""
    with tokenize.open(path) as file:
        return file.read()


def _sharing_a_line(body: Sequence[ast.stmt]) -> set[ast.stmt]:
    """Return the statements that share a line with a neighbour: `a = 1; b = 2`."""
    pairs = [(a, b) for a, b in pairwise(body) if a.end_lineno == b.lineno]
    return {node for pair in pairs for node in pair}


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
    """Yield the names that a top-level statement binds or changes, also inside `if` and `try`.

    `TABLE[...] = x`, `Settings.rate = x` and `TABLE.update(x)` change what stands first, and
    `shuffle(ORDER)` what it is given; what else a call changes, running it tells (`frontend`).
    """
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
        elif isinstance(inner, ast.Subscript | ast.Attribute) and not isinstance(
            inner.ctx, ast.Load
        ):
            yield from _first_name(inner)
        elif isinstance(inner, ast.MatchAs | ast.MatchStar) and inner.name:
            yield inner.name
        elif isinstance(inner, ast.MatchMapping) and inner.rest:
            yield inner.rest
        elif isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Call):
            yield from _first_name(inner.value.func)
            yield from (given.id for given in inner.value.args if isinstance(given, ast.Name))
        elif isinstance(inner, ast.FunctionDef | ast.ClassDef):
            yield inner.name
        elif isinstance(inner, ast.alias):
            yield inner.asname or inner.name.partition(".")[0]


def _first_name(node: ast.expr) -> Iterator[str]:
    """Yield `x` of `x.y[0].z`; nothing for a plain name, which a call only reads."""
    inner = node
    while isinstance(inner, ast.Subscript | ast.Attribute):
        inner = inner.value
    if inner is not node and isinstance(inner, ast.Name):
        yield inner.id


def _reads(node: ast.stmt) -> Iterator[str]:
    for inner in ast.walk(node):
        match inner:
            case ast.Name(id=name):
                yield name
            case ast.Constant(value=str(text)) if text.isidentifier():
                yield text  # a quoted annotation


def _gaps(kept: Sequence[ast.stmt], source: str) -> list[str]:
    """Return an empty line for each statement that the file sets off from the one kept before."""
    lines = source.split("\n")
    found = [""] if kept else []
    for a, b in pairwise(kept):
        between = lines[a.end_lineno or a.lineno : b.lineno - 1]
        has_own = isinstance(b, ast.FunctionDef | ast.ClassDef)  # two lines, by `_text`
        found.append("" if has_own or all(map(str.strip, between)) else "\n")
    return found


def _text(node: ast.stmt, source: str, chosen: dict[int, set[str]], shared: bool) -> str:
    if _is_future(node):
        return ast.unparse(node)
    if isinstance(node, ast.Import | ast.ImportFrom):
        return _import_text(node, chosen[id(node)])
    if shared:
        return ast.get_source_segment(source, node) or ast.unparse(node)
    lines = source.split("\n")  # not splitlines: that also splits at form feeds
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


def has_settings(path: Path) -> bool:
    """Whether the top of a file says how torch computes, for all that comes after."""
    body = ast.parse(_read(path)).body
    return any(_is_setting(node, _imports(body)) for node in body)


def _is_setting(node: ast.stmt, imports: Mapping[str, str]) -> bool:
    """Whether a statement says how torch computes: its numbers are others without it."""
    match node:
        case ast.Expr(value=ast.Call(func=place)) | ast.Assign(targets=[place]):
            name, _, rest = ast.unparse(place).partition(".")
            full = f"{imports.get(name, name)}.{rest}".rstrip(".")
            return full in SETTINGS or full.startswith("torch.backends.")
        case ast.If(body=body, orelse=other):
            return all(_is_setting(inner, imports) for inner in (*body, *other))
    return False


def _imports(body: Iterable[ast.stmt]) -> dict[str, str]:
    """Return what the names that a file imports at its top stand for."""
    found: dict[str, str] = {}
    for node in body:
        match node:
            case ast.Import(names=names):
                found |= {a.asname: a.name for a in names if a.asname}
            case ast.ImportFrom(module=str(module), names=names, level=0):
                found |= {a.asname or a.name: f"{module}.{a.name}" for a in names}
    return found


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _is_star(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
