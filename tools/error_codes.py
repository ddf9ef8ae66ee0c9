"""Error codes in the source of the product: where each stands, and which errors lack one.

    found = collected(Path("."))
    found.sites          code, sentence and file of each, as docs/reference/errors.md lists them
    found.uncoded        constructions of errors without a literal code
    found.repeated       codes that stand at two places
    found.unknown        codes that the source compares with, and no place has

A code stands as the keyword `code="BX1203"` where an error is constructed, or in a line that is
printed as it is: "error[BX5903]: ...". Functions that build errors take it from their callers, by a
keyword `code` without a default. Imports nothing of the product: it reads Python files only.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

PACKAGES = ("bigbrain_fx", "partitioners", "estimators")
ROOTS = ("BigBrainError", "CodedError")  # base classes whose constructions need a code
CODE = re.compile(r"BX\d{4}[a-z]?")
_FAMILY = 6  # characters of a code without its letter
_PRINTED = re.compile(r"error\[(BX\d{4}[a-z]?)\]: ")
_LONGEST = 28  # characters of an expression that a sentence shows


@dataclass(frozen=True, order=True)
class Site:
    """One place that raises or prints an error.

    Attributes:
        code: of the place.
        text: its sentence; `{...}` stands for what it names.
        path: of the file, from the root of the checkout.
        line: in the file.
    """

    code: str
    text: str
    path: str
    line: int


@dataclass(frozen=True)
class Codes:
    """All sites of a checkout, and what is wrong with them; each fault as `path:line: what`."""

    sites: tuple[Site, ...]
    uncoded: tuple[str, ...]
    repeated: tuple[str, ...]
    unknown: tuple[str, ...]


def collected(root: Path) -> Codes:
    """Return the codes of the packages below `root`."""
    files = [_File(path, root) for name in PACKAGES for path in sorted((root / name).rglob("*.py"))]
    classes = _classes(files)
    builders = [builder for file in files for builder in file.builders]
    sites = sorted(site for file in files for site in _sites(file, classes, builders))
    return Codes(
        sites=tuple(sites),
        uncoded=tuple(fault for file in files for fault in _uncoded(file, classes)),
        repeated=tuple(_repeated(sites)),
        unknown=tuple(fault for file in files for fault in _unknown(file, sites)),
    )


# --------------------------------------------------------------------------- files


@dataclass(frozen=True)
class _File:
    path: Path
    root: Path

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_bytes())

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """All nodes but the module, by levels: one walk serves every question about the file."""
        found: dict[ast.AST, ast.AST] = {}
        level: list[ast.AST] = [self.tree]
        while level:
            below = {child: node for node in level for child in ast.iter_child_nodes(node)}
            found |= below
            level = list(below)
        return found

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return self.tree, *self.parents

    @property
    def name(self) -> str:
        return self.path.relative_to(self.root).as_posix()

    @cached_property
    def calls(self) -> list[ast.Call]:
        return [node for node in self.nodes if isinstance(node, ast.Call)]

    @cached_property
    def builders(self) -> list[_Builder]:
        """Functions that take a code from their callers."""
        made = [node for node in self.nodes if isinstance(node, ast.FunctionDef)]
        return [_Builder(self, each) for each in made if _takes_code(each)]

    @cached_property
    def constants(self) -> Mapping[str, ast.expr]:
        """Names that the module sets once, to a text."""
        return _set_once(self.nodes)

    def around(self, node: ast.AST, kind: type[ast.AST]) -> ast.AST:
        """Return the innermost node of a kind around another; the module where there is none."""
        at = self.parents.get(node, self.tree)
        while not isinstance(at, kind | ast.Module):
            at = self.parents[at]
        return at

    def place(self, node: ast.expr) -> str:
        return f"{self.name}:{node.lineno}"


@dataclass(frozen=True)
class _Builder:
    """A function that takes a code and constructs an error, or an error's own __init__."""

    file: _File
    function: ast.FunctionDef

    @property
    def name(self) -> str:
        """Return the name that callers know."""
        inside = self.file.parents[self.function]
        if self.function.name == "__init__" and isinstance(inside, ast.ClassDef):
            return inside.name
        return self.function.name

    def constructions(self, classes: Mapping[str, bool]) -> list[ast.Call]:
        """Return the calls that construct the error."""
        calls = [each for each in ast.walk(self.function) if isinstance(each, ast.Call)]
        wanted = ("__init__",) if self.function.name == "__init__" else classes
        return [each for each in calls if _last(each.func) in wanted]

    @property
    def parameters(self) -> list[str]:
        args = [each.arg for each in (*self.function.args.posonlyargs, *self.function.args.args)]
        return args[1:] if args[:1] in (["self"], ["cls"]) else args

    def given(self, call: ast.Call) -> dict[str, ast.expr]:
        """Return what a call gives for each parameter."""
        by_place = dict(zip(self.parameters, call.args, strict=False))
        return {**by_place, **{k.arg: k.value for k in call.keywords if k.arg}}


def _takes_code(function: ast.FunctionDef) -> bool:
    known = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    return any(each.arg == "code" and default is None for each, default in known)


def _set_once(nodes: Iterable[ast.AST]) -> dict[str, ast.expr]:
    found: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(node.value)
    return {name: values[0] for name, values in found.items() if len(values) == 1}


# --------------------------------------------------------------------------- classes


def _classes(files: Sequence[_File]) -> dict[str, bool]:
    """Return the names of error classes: whether a construction has to give a code."""
    defined = [node for file in files for node in file.nodes]
    known = {each.name: each for each in defined if isinstance(each, ast.ClassDef)}
    found = {name: True for name in ROOTS}
    found |= {name: True for name, each in known.items() if _own(each) == "given"}
    while fresh := [each for name, each in known.items() if name not in found and _of(each, found)]:
        for each in fresh:
            inherited = all(found[base] for base in _of(each, found))
            found[each.name] = inherited if _own(each) == "" else _own(each) == "given"
    return found


def _of(each: ast.ClassDef, found: Mapping[str, bool]) -> list[str]:
    return [name for base in each.bases if (name := _last(base)) in found]


def _own(each: ast.ClassDef) -> str:
    """Return whether an error's own __init__ is given its code, or knows it; "" without one."""
    if not each.name.endswith("Error"):
        return ""
    for node in each.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return "given" if any(a.arg == "code" for a in node.args.kwonlyargs) else "known"
    return ""


def _last(node: ast.expr) -> str:
    """Return the name that a call or a base class goes by, without what it is an attribute of."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


# --------------------------------------------------------------------------- faults


def _uncoded(file: _File, classes: Mapping[str, bool]) -> Iterator[str]:
    for call in file.calls:
        if _needs_code(file, call, classes) and not _has_code(call):
            yield f"{file.place(call)}: {ast.unparse(call.func)}(...) has no literal code"


def _needs_code(file: _File, call: ast.Call, classes: Mapping[str, bool]) -> bool:
    name = _last(call.func)
    if name != "__init__":
        return classes.get(name, False)
    inside = file.around(call, ast.ClassDef)
    return isinstance(inside, ast.ClassDef) and not classes.get(inside.name, True)


def _has_code(call: ast.Call) -> bool:
    """Whether a call has a code: a literal, or that of a parameter, of an error, of a message."""
    given = next((k.value for k in call.keywords if k.arg == "code"), None)
    if isinstance(given, ast.Subscript):
        return isinstance(given.slice, ast.Constant) and given.slice.value == "code"
    return _literal(given) is not None or (given is not None and _last(given) == "code")


def _literal(node: ast.expr | None) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value if CODE.fullmatch(node.value) else None
    return None


def _repeated(sites: Sequence[Site]) -> Iterator[str]:
    count = Counter(site.code for site in sites)
    for site in sites:
        if count[site.code] > 1:
            yield f"{site.path}:{site.line}: {site.code} stands elsewhere, too"


def _unknown(file: _File, sites: Sequence[Site]) -> Iterator[str]:
    codes = {site.code for site in sites}
    known = {None} | codes | {code[:_FAMILY] for code in codes}
    for node in file.nodes:
        if isinstance(node, ast.Constant) and (code := _literal(node)) not in known:
            yield f"{file.place(node)}: no error has the code {code}"


# --------------------------------------------------------------------------- sentences


def _sites(
    file: _File, classes: Mapping[str, bool], builders: Sequence[_Builder]
) -> Iterator[Site]:
    for call in file.calls:
        code = next((_literal(k.value) for k in call.keywords if k.arg == "code"), None)
        if code is not None:
            text = _sentence(file, call, classes, builders)
            yield Site(code, " ".join(text.split()), file.name, call.lineno)
    for node in file.nodes:
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        around = file.parents[node]
        for found in () if isinstance(around, ast.Expr) else _PRINTED.finditer(node.value):
            text = _Text(file).of(around if isinstance(around, ast.JoinedStr) else node)
            text = _PRINTED.split(text)[-1].partition("\n")[0]
            yield Site(found[1], " ".join(text.split()), file.name, node.lineno)


def _sentence(
    file: _File, call: ast.Call, classes: Mapping[str, bool], builders: Sequence[_Builder]
) -> str:
    """Return the sentence of a call: its own, or that of the function which builds the error."""
    here = _Text(file, file.around(call, ast.FunctionDef))
    named = [each for each in builders if each.name == _last(call.func)]
    for builder in [each for each in named if each.file is file] or named:
        for inner in builder.constructions(classes):
            given = {name: here.of(value) for name, value in builder.given(call).items()}
            return _Text(builder.file, builder.function, given).of(_said(inner))
    return here.of(_said(call))


def _said(call: ast.Call) -> ast.expr:
    """Return the sentence among the arguments of a call: the first one that is like a text."""
    named = [k.value for k in call.keywords if k.arg not in ("code", "at", "help", "notes")]
    every = [each for each in (*call.args, *named) if _literal(each) is None]
    texts = [each for each in every if isinstance(each, ast.JoinedStr) or _is_text(each)]
    return (texts or every or [ast.Constant("")])[0]


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@dataclass(frozen=True)
class _Text:
    """Writes an expression as a sentence; names of constants and of what was given are filled in.

    Attributes:
        given: sentences that stand for a function's parameters.
    """

    file: _File
    inside: ast.AST | None = None
    given: Mapping[str, str] = field(default_factory=dict)

    def of(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(value=str(text)):
                return text
            case ast.JoinedStr(values=values):
                return "".join(map(self.of, values))
            case ast.FormattedValue(value=value):
                return self._filled(value)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self.of(left) + self.of(right)
            case ast.IfExp(body=body, orelse=orelse):
                one, other = self.of(body), self.of(orelse)
                return one if other in one else f"{one}, or: {other}"
            case ast.Call(func=ast.Attribute(value=value, attr="format")):
                return self.of(value)
            case _:
                return self._filled(node)

    def _filled(self, node: ast.expr) -> str:
        """Return the text that a name stands for, or the expression in braces."""
        if isinstance(node, ast.Constant):
            return str(node.value)
        name = node.id if isinstance(node, ast.Name) else ""
        if name in self.given:
            return self.given[name]
        body = getattr(self.inside, "body", [])
        inner = (node for statement in body for node in ast.walk(statement))
        value = _set_once(inner).get(name) or self.file.constants.get(name)
        if isinstance(value, ast.JoinedStr) or (value is not None and _is_text(value)):
            return self.of(value)
        text = ast.unparse(node)
        return f"{{{text}}}" if len(text) <= _LONGEST else "{...}"
