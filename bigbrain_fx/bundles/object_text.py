"""Objects that exist in this process -> statements that make them anew, by Python's copy protocol.

    model.gate, a Gate that   ──▶   gate = Gate.__new__(Gate)
    counted three calls             nn.Module.__init__(gate)
                                    gate.__setstate__({"calls": 3, "_parameters": {"scale": ...}})

An object that two others hold is made once. Parameters and buffers come without their numbers,
which a bundle loads; another tensor comes with them. Nothing is pickled.
"""

from __future__ import annotations

import ast
import builtins
import copyreg
import itertools
import keyword
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from bigbrain_fx.bundles.literals import LiteralError, called, is_plain, literal

if TYPE_CHECKING:
    from torch import Tensor, nn

LARGEST_TENSOR = 10_000  # numbers of a tensor that stands in a text: a generator's state has 5,056
LARGEST_TEXT = 100_000  # values in it
_LONG = 64  # numbers; more are written as bytes
_BY_NAME = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
_CONTAINERS = (list, tuple, dict, set, frozenset)

Define = Callable[[object], str]
"""A function, class or module -> its name in the file, where it is defined first."""


@dataclass(frozen=True)
class ObjectText:
    """Text that makes an object: statements of a function's body, and the expression it returns."""

    statements: list[ast.stmt]
    value: ast.expr

    @staticmethod
    def of(
        value: object, define: Define, loaded: Iterable[Tensor] = (), hint: str = "value"
    ) -> ObjectText:
        """Return the text of an expression that builds a value.

        Args:
            value: any.
            define: returns the name of an object with a definition of its own.
            loaded: parameters and buffers whose numbers are loaded.
            hint: name of a variable for it, where it needs one.

        Raises:
            LiteralError: no text builds it, or one that is too long.
        """
        trial = _Writer(define, tuple(loaded))
        trial.expression(value, hint)
        writer = _Writer(define, tuple(loaded), trial.shared, trial.defined)
        found = writer.expression(value, hint)
        return ObjectText(writer.statements, found)


class _Writer:
    """One pass over an object; `shared` are collections that two objects hold.

    `defined` are the names of definitions in the file: a variable would hide them.
    """

    def __init__(
        self,
        define: Define,
        loaded: Sequence[Tensor],
        shared: Mapping[int, object] = MappingProxyType({}),
        defined: Iterable[str] = (),
    ) -> None:
        self.statements: list[ast.stmt] = []
        self.shared, self.defined = dict(shared), set(defined)
        self._definer, self._loaded = define, {id(tensor) for tensor in loaded}
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in loaded}
        self._made: dict[int, tuple[str, object]] = {}  # objects are kept: an id stays its own
        self._seen: dict[int, object] = {}  # collections
        self._open: set[int] = set()
        self._variables: set[str] = set()
        self._left = LARGEST_TEXT

    def expression(self, value: object, hint: str = "value") -> ast.expr:
        """Return an expression of a value, after the statements that it needs."""
        self._left -= 1
        if not self._left:
            raise LiteralError(value)
        known = self._made.get(id(value))
        if known is not None:
            return ast.Name(known[0])
        owner = getattr(value, "__self__", None)
        if isinstance(value, types.MethodType | types.BuiltinMethodType) and not isinstance(
            owner, types.ModuleType | None
        ):
            return ast.Attribute(self.expression(owner, "owner"), value.__name__)
        if isinstance(value, _BY_NAME):
            return ast.Name(self._define(value))
        if type(value) in _CONTAINERS:
            return self._container(value, hint)
        if is_plain(value):
            return literal(value)
        tensor = sys.modules["torch"].Tensor if "torch" in sys.modules else ()
        return (self._tensor if isinstance(value, tensor) else self._object)(value, hint)

    # ------------------------------------------------------------------ containers and tensors

    def _container(self, value: Any, hint: str) -> ast.expr:  # noqa: ANN401  # one of _CONTAINERS
        """Write a collection, a mutable one once: all of its holders share it."""
        if id(value) in self._open:
            raise LiteralError(value)
        self._open.add(id(value))
        found = self._items(value, hint)
        self._open.remove(id(value))
        if id(value) in self._seen and not isinstance(value, tuple | frozenset):
            self.shared[id(value)] = value
        self._seen[id(value)] = value
        return self._named(value, found, hint) if id(value) in self.shared else found

    def _items(self, value: Any, hint: str) -> ast.expr:  # noqa: ANN401  # one of _CONTAINERS
        if isinstance(value, dict):
            keys = [self.expression(key, hint) for key in value]
            items = [self.expression(item, _hint(key, hint)) for key, item in value.items()]
            return ast.Dict([*keys], items)
        items = [self.expression(item, hint) for item in value]
        if isinstance(value, set | frozenset):
            return called(type(value).__name__, ast.List(items))
        return ast.Tuple(items) if isinstance(value, tuple) else ast.List(items)

    def _tensor(self, value: Any, hint: str) -> ast.expr:  # noqa: ANN401  # a tensor
        """Write a parameter or buffer without its numbers, any other tensor with them."""
        import torch

        torch_name = self._define(torch)
        if id(value) not in self._loaded:
            return self._named(value, self._numbers(value, torch_name), hint)
        kind = _attribute(torch_name, value.dtype)
        sizes = [literal(tuple(value.shape))]
        if value.is_contiguous():
            found = called(_attribute(torch_name, "empty"), *sizes, dtype=kind)
        else:
            sizes.append(literal(value.stride()))
            found = called(_attribute(torch_name, "empty_strided"), *sizes, dtype=kind)
        if isinstance(value, torch.nn.Parameter):
            asked = {} if value.requires_grad else {"requires_grad": ast.Constant(False)}
            found = called(_attribute(torch_name, "nn.Parameter"), found, **asked)
        return self._named(value, found, hint)

    def _numbers(self, value: Tensor, torch_name: str) -> ast.expr:
        """Write a tensor with its numbers.

        Raises:
            LiteralError: it is large, a part of an autograd graph, or a view of a loaded tensor.
        """
        is_view = value.untyped_storage().data_ptr() in self._storages and value.numel()
        if value.numel() > LARGEST_TENSOR or value.requires_grad or is_view or value.is_sparse:
            raise LiteralError(value)
        kind = _attribute(torch_name, value.dtype)
        if value.numel() <= _LONG and not value.is_quantized:
            here = ast.Constant("cpu")  # also where all others are "meta"
            make = _attribute(torch_name, "tensor")
            return called(make, literal(value.tolist()), dtype=kind, device=here)
        data = (
            value.detach()
            .cpu()
            .contiguous()
            .view(-1)
            .view(sys.modules["torch"].uint8)
            .numpy()
            .tobytes()
        )
        raw = called(_attribute("bytearray", "fromhex"), ast.Constant(data.hex()))
        flat = called(_attribute(torch_name, "frombuffer"), raw, dtype=kind)
        return called(ast.Attribute(flat, "reshape"), literal(tuple(value.shape)))

    # ------------------------------------------------------------------ any other object

    def _object(self, value: Any, hint: str) -> ast.expr:  # noqa: ANN401  # whatever
        parametrized = tuple(getattr(value, "parametrizations", ())) if _is_module(value) else ()
        try:
            found = _shallow(value) if parametrized else value.__reduce_ex__(4)
        except (TypeError, RuntimeError) as error:  # a socket, a generator
            raise LiteralError(value) from error
        if isinstance(found, str):
            return _attribute(self._define(sys.modules[type(value).__module__]), found)
        make, given, state, items, pairs = (*found, None, None, None)[:5]
        name = self._named(value, self._call(make, given, hint), hint)
        if _is_seeded(value):
            self._method(name, "manual_seed", [literal(value.initial_seed())])
            return name
        if _is_module(value):
            begin = _attribute(self._define(sys.modules["torch"]), "nn.Module.__init__")
            self.statements.append(ast.Expr(called(begin, name)))
            state = _without_defaults(state)
        if items is not None and (listed := [*items]):
            self._method(name, "extend", [self.expression(listed, hint)])
        if pairs is not None and (mapped := dict(pairs)):
            self._method(name, "update", [self.expression(mapped, hint)])
        self._set_state(value, name, state)
        self._parametrize(name, parametrized)
        return name

    def _parametrize(self, name: ast.expr, tensors: Sequence[str]) -> None:
        """Let tensors of a module be computed, as torch's register_parametrization ends."""
        if not tensors:
            return
        torch_name = self._define(sys.modules["torch"])
        parametrize = _attribute(torch_name, "nn.utils.parametrize")
        self._method(parametrize, "_inject_new_class", [name])
        for tensor in tensors:
            self._method(parametrize, "_inject_property", [name, literal(tensor)])

    def _call(self, make: Any, given: tuple[Any, ...], hint: str) -> ast.expr:  # noqa: ANN401
        """Write the call that builds an object, before its state: `Gate.__new__(Gate)`."""
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]  # not in typeshed
            kind = ast.Name(self._define(given[0]))
            rest = [self.expression(each, hint) for each in given[1:]]
            return called(ast.Attribute(kind, "__new__"), kind, *rest)
        return called(self._define(make), *(self.expression(each, hint) for each in given))

    def _set_state(self, value: object, name: ast.expr, state: Any) -> None:  # noqa: ANN401
        if not state:
            return
        if hasattr(value, "__setstate__"):
            self._method(name, "__setstate__", [self.expression(state)])
            return
        own, slots = state if isinstance(state, tuple) else (state, None)
        if own:
            target = ast.Attribute(name, "__dict__")
            self._method(target, "update", [self.expression(own)])
        for key, item in (slots or {}).items():
            into = ast.Attribute(name, key, ast.Store())
            self.statements.append(ast.Assign([into], self.expression(item, key)))

    # ------------------------------------------------------------------ names

    def _define(self, value: object) -> str:
        name = self._definer(value)
        self.defined.add(name)
        return name

    def _named(self, value: object, made: ast.expr, hint: str) -> ast.Name:
        taken = self._variables | self.defined | vars(builtins).keys() | {*keyword.kwlist}
        name = next(n for n in numbered(hint) if n not in taken)
        self._variables.add(name)
        self._made[id(value)] = name, value
        self.statements.append(ast.Assign([ast.Name(name, ast.Store())], made))
        return ast.Name(name)

    def _method(self, name: ast.expr, method: str, given: list[ast.expr]) -> None:
        self.statements.append(ast.Expr(called(ast.Attribute(name, method), *given)))


def skeleton(model: nn.Module, paths: Iterable[str]) -> nn.Module:
    """Return a module that has only these modules of a model, at their places.

    Args:
        model: with all modules.
        paths: of modules in it; "" is the model itself.
    """
    from torch import nn

    wanted = sorted(set(paths))
    if "" in wanted:
        return model
    root = nn.Module()
    for path in wanted:
        if any(path.startswith(f"{other}.") for other in wanted):
            continue  # that one has it
        *way, last = path.split(".")
        at = root
        for name in way:
            if name not in at._modules:
                at.add_module(name, nn.Module())
            at = at.get_submodule(name)
        at.add_module(last, model.get_submodule(path))
    return root


def _is_module(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _shallow(module: nn.Module) -> tuple[object, ...]:
    """Return how a parametrized module is made, whose class torch has made of another."""
    return copyreg.__newobj__, type(module).__bases__, vars(module)  # type: ignore[attr-defined]


def _is_seeded(value: Any) -> bool:  # noqa: ANN401  # whatever
    """Whether a value is a generator of torch's that has drawn nothing since its seed."""
    torch = sys.modules.get("torch")
    if torch is None or type(value) is not torch.Generator:
        return False
    fresh = torch.Generator(value.device).manual_seed(value.initial_seed())
    return bool(torch.equal(fresh.get_state(), value.get_state()))


def _without_defaults(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a module's state without the entries of every new module."""
    from torch import nn

    fresh = vars(nn.Module())
    return {
        name: value
        for name, value in state.items()
        if not (name in fresh and (value is fresh[name] or not (value or fresh[name])))
    }


def numbered(hint: str) -> Iterator[str]:
    """Yield names for a variable: "gate", "gate_2"."""
    first = re.sub(r"\W", "_", hint).strip("_") or "value"
    first = first if first.isidentifier() and not first[0].isdigit() else f"part_{first}"
    yield from itertools.chain([first], (f"{first}_{count}" for count in itertools.count(2)))


def _hint(key: object, hint: str) -> str:
    """Return the name for a value of a mapping: its key where that is a name."""
    is_name = isinstance(key, str) and key.isidentifier() and not key.startswith("_")
    return str(key) if is_name or (isinstance(key, str) and key.isdigit()) else hint


def _attribute(first: str, names: object) -> ast.expr:
    found: ast.expr = ast.Name(first)
    for name in str(names).removeprefix("torch.").split("."):
        found = ast.Attribute(found, name)
    return found
