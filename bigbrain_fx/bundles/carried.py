"""Functions and classes that exist in this process -> a file of source that defines them anew.

    optimizer = partial(AdamW, lr=RATE)  ──▶  from torch.optim.adamw import AdamW
                                              def optimizer(named_params): ...

Names that they use come along. A name of an installed module comes as an import, a name of the
running program or notebook as its source. A number, a text, or a collection of such comes as its
value. Anything else is refused by name. Nothing is pickled, and the module knows no torch.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import functools
import inspect
import linecache
import symtable
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bigbrain_fx.bundles.literals import LiteralError, called, is_plain
from bigbrain_fx.bundles.object_text import ObjectText, numbered, skeleton
from bigbrain_fx.bundles.own_sources import copy_source, own_source
from bigbrain_fx.emit import imports_of_module
from bigbrain_fx.errors import InputError

_FUTURE = 0
for _name in __future__.all_feature_names:
    _FUTURE |= getattr(__future__, _name).compiler_flag
Make = Callable[..., object]
_HELP = (
    "write it as text: in a file or a notebook cell, not by exec(); or put it into a module beside "
    "your program and import it"
)


def carry(named: Mapping[str, object], folder: Path) -> Path:
    """Write `code.py` into a folder, and beside it the modules of the user's that it imports.

    Args:
        named: name in that file -> function or class.
        folder: must exist.

    Raises:
        InputError: something has no source, or uses what cannot be carried; names it.
    """
    text = _Text(folder)
    for name, value in named.items():
        text.define(name, value, f"`{name}`")
    head = ['"""What a module in memory is trained with."""', "from __future__ import annotations"]
    path = folder / "code.py"
    path.write_text("\n\n".join([*head, *text.parts]) + "\n", encoding="utf-8")
    return path


def as_optimizer(made: object) -> Any:  # noqa: ANN401  # a function, or what it makes
    """Return a function of named parameters for a torch class, or a `functools.partial` of one."""
    kind, _ = _class_and_options(made)
    return _ClassOptimizer(made) if isinstance(kind, type) else made


class _ClassOptimizer:
    """A class with options that acts like `optimizer` of a model file."""

    def __init__(self, made: object) -> None:
        self.kind, self.options = _class_and_options(made)

    def __call__(self, named_params: object) -> object:
        return self.kind(list(named_params), **self.options)  # type: ignore[call-overload,operator]


def _class_and_options(made: object) -> tuple[object, dict[str, object]]:
    if isinstance(made, functools.partial) and not made.args:
        return made.func, made.keywords
    return made, {}


@dataclass(frozen=True)
class Parts:
    """Modules of a model in memory, by their paths, which devices make for themselves."""

    module: Any
    paths: tuple[str, ...]


@dataclass
class _Text:
    """The file as it grows: `known` has what each of its names stands for."""

    folder: Path
    parts: list[str] = field(default_factory=list)
    known: dict[str, object] = field(default_factory=dict)
    shipped: set[str] = field(default_factory=set)  # modules whose imports were followed

    def define(self, name: str, value: object, whose: str) -> None:
        """Let a name mean a value.

        Raises:
            InputError: it cannot be carried, or the name means something else already.
        """
        if name in self.known:
            self._require_same(name, value, whose)
            return
        self.known[name] = value
        if isinstance(value, types.ModuleType):
            self._import_module(name, value, whose)
        elif isinstance(value, _ClassOptimizer):
            self._class_optimizer(name, value, whose)
        elif isinstance(value, functools.partial):
            self._partial(name, value, whose)
        elif isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
            self._callable(name, value, whose)
        elif isinstance(value, Parts):
            self._model(name, value, whose)
        else:
            self.parts.append(_assigned(name, self._value(value, whose, name)))

    def _require_same(self, name: str, value: object, whose: str) -> None:
        known = self.known[name]
        if known is not value and not (
            is_plain(value) and type(known) is type(value) and known == value
        ):
            raise InputError(
                f"{whose}: two things are called `{name}`, {_said(known)} and {_said(value)}",
                code="BX3000",
                help="rename one of them",
            )

    # ------------------------------------------------------------------ each kind

    def _import_module(self, name: str, module: types.ModuleType, whose: str) -> None:
        if module.__name__ == "__main__" or module.__spec__ is None:
            raise InputError(
                f"{whose} uses the module {module.__name__}, which no device can import",
                code="BX3001",
                help=_HELP,
            )
        self._ship(module.__name__)
        self.parts.append(ast.unparse(ast.Import([ast.alias(module.__name__, name)])))

    def _class_optimizer(self, name: str, made: _ClassOptimizer, whose: str) -> None:
        kind = getattr(made.kind, "__name__", "kind")
        kind = f"{kind}_" if kind == name else kind
        self.define(kind, made.kind, whose)
        options = self._keywords(made.options, whose)
        call = ast.Call(ast.Name(kind), [called("list", ast.Name("named_params"))], options)
        self.parts.append(_def(name, [ast.Return(call)], "named_params"))

    def _partial(self, name: str, made: functools.partial[object], whose: str) -> None:
        function = f"{name}_whole"
        self.define(function, made.func, whose)
        self.define("functools", functools, whose)
        given = [self._value(value, whose) for value in made.args]
        call = ast.Call(
            ast.Attribute(ast.Name("functools"), "partial"),
            [ast.Name(function), *given],
            self._keywords(made.keywords, whose),
        )
        self.parts.append(_assigned(name, call))

    def _callable(self, name: str, value: object, whose: str) -> None:
        module, own = str(getattr(value, "__module__", "")), str(getattr(value, "__qualname__", ""))
        if _is_importable(module, own, value):
            self._ship(module)
            self.parts.append(ast.unparse(ast.ImportFrom(module, [ast.alias(own, name)], 0)))
            return
        self._source(name, value, whose)

    def _ship(self, module: str) -> None:
        """Copy what a module needs of the user's own, in whole packages, to where the file is."""
        pending = [module]
        while pending:
            name = pending.pop()
            source = None if name in self.shipped else own_source(name)
            self.shipped.add(name)
            if source is not None:
                copy_source(source, self.folder)
                pending += imports_of_module(name, source.parent)

    # ------------------------------------------------------------------ objects

    def _model(self, name: str, parts: Parts, whose: str) -> None:
        """Write a function that makes modules as they are, without their numbers."""
        model = parts.module
        loaded = (*model.parameters(), *model.buffers())
        made = self._text(skeleton(model, parts.paths), whose, "model", loaded)
        title = "Make the modules that devices call as they were in memory; numbers are loaded."
        body = [ast.Expr(ast.Constant(title)), *made.statements, ast.Return(made.value)]
        self.parts.append(_def(name, body))

    def _value(self, value: object, whose: str, hint: str = "value") -> ast.expr:
        """Return an expression of a value; of an object by a function that makes it."""
        made = self._text(value, whose, hint)
        if not made.statements:
            return made.value
        name = self._free(f"make_{hint}")
        self.known[name] = made
        self.parts.append(_def(name, [*made.statements, ast.Return(made.value)]))
        return called(name)

    def _text(self, value: object, whose: str, hint: str, loaded: Iterable[Any] = ()) -> ObjectText:
        """Write what makes a value.

        Raises:
            InputError: no text does.
        """
        try:
            return ObjectText.of(value, lambda part: self._name_of(part, whose), loaded, hint)
        except LiteralError as error:
            raise InputError(
                f"{whose} uses {_said(error.value)}, which cannot be carried to the devices as "
                "text",
                code="BX3006",
                help="use numbers, texts, functions, classes, modules, and objects that Python can "
                "copy; what has weights belongs into the model",
            ) from error

    def _name_of(self, value: object, whose: str) -> str:
        """Return the name of a function, class or module in the file, where it is defined."""
        known = (name for name, other in self.known.items() if other is value)
        if (name := next(known, None)) is not None:
            return name
        own = str(getattr(value, "__name__", "value")).rpartition(".")[2]
        name = self._free(own if own.isidentifier() else "function")
        self.define(name, value, f"{whose}, by `{name}`,")
        return name

    def _free(self, name: str) -> str:
        """Return a name that stands for nothing yet."""
        return next(n for n in numbered(name) if n not in self.known and n not in vars(builtins))

    def _keywords(self, options: Mapping[str, object], whose: str) -> list[ast.keyword]:
        return [
            ast.keyword(name, self._value(value, f"{whose}, by {name}=,", name))
            for name, value in options.items()
        ]

    # ------------------------------------------------------------------ by source

    def _source(self, name: str, value: object, whose: str) -> None:
        node = _node_of(value, whose)
        scope = _scope(value)
        own = name if isinstance(node, ast.Lambda) else node.name
        if own != name and own not in self.known:
            self.known[own] = value
        for used in _globals_of(node):
            if used in scope:
                self.define(used, scope[used], f"{whose}, by `{used}`,")
            elif used not in vars(builtins) and used != own:
                raise InputError(
                    f"{whose} uses `{used}`, which is not defined",
                    code="BX3002",
                    help="define it before",
                )
        if isinstance(node, ast.Lambda):
            self.parts.append(_assigned(name, node))
            return
        self.parts.append(ast.unparse(node))
        if own != name:
            self.parts.append(_assigned(name, ast.Name(own)))


def _node_of(value: object, whose: str) -> ast.FunctionDef | ast.ClassDef | ast.Lambda:
    """Return the definition of a function or class, from its file or its cell."""
    codes = _codes_of(value)
    file = codes[0].co_filename if codes else _file_of(value)
    text = "".join(linecache.getlines(file))
    tree = ast.parse(text)
    found = [node for node in ast.walk(tree) if _is_definition(node, value, codes)]
    if not text.strip() or not (found or codes):
        raise InputError(
            f"{whose} has no source: {_said(value)} was defined where Python keeps no text of it",
            code="BX3003",
            help=_HELP,
        )
    flags = codes[0].co_flags & _FUTURE if codes else 0  # a cell may have an earlier one's
    if not set(codes) <= set(_all_codes(compile(text, "code", "exec", flags, True))):
        raise InputError(
            f"{whose} is not what its file says now: {_said(value)}",
            code="BX3004",
            at=f"{codes[0].co_filename}:{codes[0].co_firstlineno}",
            help="import the file again, or start Python anew",
        )
    if len(found) != 1:
        raise InputError(
            f"{whose} cannot be told from others on its line: {_said(value)}",
            code="BX3005",
            help="define it with `def`, on a line of its own",
        )
    return found[0]  # type: ignore[return-value]


def _file_of(value: object) -> str:
    """Return the file of a class that has no method, or ""."""
    module = sys.modules.get(str(getattr(value, "__module__", "")))
    return str(getattr(module, "__file__", None) or "")


def _codes_of(value: object) -> list[types.CodeType]:
    """Return the code of a function, or of the methods that a class body defines."""
    if not isinstance(value, type):
        function: Any = value
        code = getattr(inspect.unwrap(function), "__code__", None)
        return [code] if code else []
    return [
        code
        for function in _methods(value)
        for code in [inspect.unwrap(function).__code__]
        if code.co_qualname == f"{value.__qualname__}.{code.co_name}"
    ]


def _methods(kind: type) -> Iterator[types.FunctionType]:
    for member in vars(kind).values():
        inner = getattr(member, "__func__", getattr(member, "fget", member))
        if isinstance(inner, types.FunctionType):
            yield inner


def _all_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _all_codes(inner)


def _is_definition(node: ast.AST, value: object, codes: list[types.CodeType]) -> bool:
    """Whether a node is what made a function or class."""
    if isinstance(value, type):
        lines = {code.co_firstlineno for code in codes}
        is_around = isinstance(node, ast.ClassDef) and node.name == value.__name__
        return is_around and lines <= {_first_line(inner) for inner in node.body}  # type: ignore[attr-defined]
    code = codes[0]
    if isinstance(node, ast.Lambda):
        return code.co_name == "<lambda>" and _is_lambda(node, code)
    is_named = isinstance(node, ast.FunctionDef) and node.name == code.co_name
    return is_named and _first_line(node) == code.co_firstlineno


def _first_line(node: ast.AST) -> int:
    """Return where a definition begins, decorators included; 0 for what has no line."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([int(getattr(node, "lineno", 0)), *(d.lineno for d in decorators)])


def _is_lambda(node: ast.Lambda, code: types.CodeType) -> bool:
    """Whether a lambda has this code; two of them may stand in one line."""
    places = {(line, column) for line, _, column, _ in code.co_positions() if column is not None}
    inner = {(n.lineno, n.col_offset) for n in ast.walk(node.body) if isinstance(n, ast.expr)}
    return node.lineno == code.co_firstlineno and bool(places & inner)


def _scope(value: object) -> dict[str, object]:
    """Return what the names of a function or class mean: in enclosing functions, in its module."""
    if isinstance(value, type):
        module = sys.modules.get(value.__module__)
        found = dict(vars(module)) if module is not None else {}
        for method in _methods(value):
            found |= _scope(method)
        return found
    function = inspect.unwrap(value)  # type: ignore[arg-type]
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {**function.__globals__, **{n: c.cell_contents for n, c in cells if n != "__class__"}}


def _globals_of(node: ast.FunctionDef | ast.ClassDef | ast.Lambda) -> list[str]:
    """Return the names that a definition takes from around it, annotations left out."""
    bare = _Bare().visit(ast.parse(ast.unparse(node)))
    top = symtable.symtable(ast.unparse(bare), "code", "exec")
    own = {node.name} if isinstance(node, ast.FunctionDef | ast.ClassDef) else set()
    found = dict.fromkeys(
        symbol.get_name()
        for table in _tables(top)
        for symbol in table.get_symbols()
        if symbol.is_referenced() and (symbol.is_global() or table is top)
    )
    return [name for name in found if name not in own]


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)


class _Bare(ast.NodeTransformer):
    """Take annotations away: they are text in the file that is written."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:  # ast's name
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:  # ast's name
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)


# --------------------------------------------------------------------------- where from


def _is_importable(module: str, name: str, value: object) -> bool:
    """Whether `from module import name` gives this very thing, in another process, too."""
    found = sys.modules.get(module)
    if found is None or module == "__main__" or not name.isidentifier():
        return False
    is_a_file = getattr(found, "__file__", None) is not None or module in sys.builtin_module_names
    is_there = is_a_file and getattr(found, "__spec__", None) is not None
    is_compiled = isinstance(value, types.BuiltinFunctionType)  # torch._C._nn is a part of a file
    return getattr(found, name, None) is value and (is_there or is_compiled)


# --------------------------------------------------------------------------- words


def _said(value: object) -> str:
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    kind = type(value)
    of = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return f"{of} `{name}`" if name else f"an object of {of}"


def _assigned(name: str, value: ast.expr) -> str:
    return ast.unparse(ast.fix_missing_locations(ast.Assign([ast.Name(name, ast.Store())], value)))


def _def(name: str, body: Sequence[ast.stmt], *arguments: str) -> str:
    given = ast.arguments([], [ast.arg(each) for each in arguments], None, [], [], None, [])
    made = ast.FunctionDef(name, given, [*body], [], None)
    return ast.unparse(ast.fix_missing_locations(made))
