"""Opaque modules by the user's choice, neither traced nor cut.

An opaque module may run any Python (loops over experts, decisions that depend on data). Its call is
one op that takes its tensors beside its arguments; the graph calls the user's own module again.
This file knows modules; `leaf_trace` knows traces.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from bigbrain_fx.core import Graph
from bigbrain_fx.errors import CaptureError, InputError
from bigbrain_fx.frontend.translation.kept import LEAF, place
from bigbrain_fx.frontend.translation.nests import TensorSlot
from bigbrain_fx.runtime import ForwardLines

MARK = "bigbrain_fx_leaf"
_Module = TypeVar("_Module")


def leaf(module: _Module) -> _Module:
    """Mark a module, or a class of modules, as opaque; return it.

    Use it as a decorator of the class, or on an instance while the model is built.
    """
    setattr(module, MARK, True)
    return module


def find_leaves(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules that are marked or named, outermost ones only, by path.

    Args:
        model: the user's.
        names: paths ("blocks.0.experts") or class names ("Experts").

    Raises:
        InputError: a name fits no module, or the whole model.
    """
    found: dict[str, nn.Module] = {}
    fitting: set[str] = set()
    for path, part in model.named_modules():
        fits = {name for name in names if name in (path, type(part).__name__) and path}
        fitting |= fits
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if path and not inside and (fits or getattr(part, MARK, False)):
            found[path] = part
    missing = [name for name in names if name not in fitting]
    if missing:
        raise _no_such_leaf(model, missing[0])
    return found


def _no_such_leaf(model: nn.Module, name: str) -> InputError:
    known = {key for path, part in model.named_modules() for key in (path, type(part).__name__)}
    close = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    return InputError(
        f"no module inside the model has the path or class name {name!r}",
        code="BX0140l",
        help=f"did you mean {' or '.join(close)}?" if close else "see model.named_modules()",
    )


def leaf_paths(graph: Graph) -> tuple[str, ...]:
    """Return the paths of the opaque modules of a graph."""
    targets = dict.fromkeys(op.target for op in graph.ops if op.target.startswith(LEAF))
    return tuple(target.removeprefix(LEAF) for target in targets)


# --------------------------------------------------------------------------- calls of a leaf


def call_leaf(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> object:
    """Call a user's module with other tensors in the place of its own, hooks and all.

    Raises:
        CaptureError: it assigns a tensor of its own instead of writing into it: that would be lost.
    """
    assigned: list[str] = []

    def look(*_: object) -> None:
        now = own_tensors(module).items()
        assigned.extend(name for name, tensor in now if _differs(tensor, tensors.get(name)))

    handle = module.register_forward_hook(look)
    try:
        result: object = _with_tensors(module, tensors, args, kwargs)
    finally:
        handle.remove()
    if assigned:
        raise _assigns(module, assigned[0])
    return result


class _Owner(nn.Module):
    """The module whose forward has some opaque lines: its tensors are exchanged."""

    def __init__(self, lines: ForwardLines) -> None:
        super().__init__()
        self.owner, self.lines = lines.of, (lines,)  # in a tuple: no module of this one

    def forward(self, *args: object, **kwargs: object) -> object:
        """Call the lines."""
        return self.lines[0](*args, **kwargs)


def _with_tensors(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> object:
    call = torch.func.functional_call
    if isinstance(module, ForwardLines):
        own = {f"owner.{name}": tensor for name, tensor in tensors.items()}
        try:
            return call(_Owner(module), own, args, dict(kwargs))
        except (AttributeError, TypeError, KeyError) as error:  # of what stands for a weight
            raise CaptureError(
                f"the opaque module {type(module).__name__} cannot run apart from the model: "
                f"{error}",
                code="BX0141d",
                help="keep numbers in attributes of modules or in buffers, not in those of weights",
            ) from error
    return call(module, dict(tensors), args, dict(kwargs))


def _differs(now: Tensor, before: Tensor | None) -> bool:
    """Whether another tensor has taken its place, and its numbers are others."""
    if before is None or now is before or not (_has_numbers(now) and _has_numbers(before)):
        return False
    return now.shape != before.shape or not torch.equal(now, before)


def _has_numbers(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta  # no trace's own kind


def _assigns(module: nn.Module, name: str) -> CaptureError:
    return CaptureError(
        f"the opaque module {type(module).__name__} puts another tensor in the place of {name!r}",
        code="BX0140m",
        help=f"write into it: with torch.no_grad(): self.{name}.copy_(...), where it says "
        f"self.{name} = ...",
    )


def run_leaf(module: nn.Module, args: Sequence[object], nest: object) -> object:
    """Run an opaque module's op: return its tensor, or the tensors of its result in order."""
    tensors = dict(zip(own_tensors(module), cast("Sequence[Tensor]", args), strict=True))
    positional, named, *names = cast("_Given", nest)
    left, found = names[0] if names else (), list[Tensor]()
    result = call_leaf(module, tensors, positional, dict(named))
    values = [attribute_of(module, name) for name in left]
    encoded: object = place((result, values) if left else result, found)
    return found[0] if isinstance(encoded, TensorSlot) else found


def apart_from_here(functions: Mapping[str, object]) -> dict[str, object]:
    """Return a graph's functions, with copies of opaque modules: their state is the run's own.

    The copies share all tensors; a call exchanges them for its own.
    """
    return {target: _copied(own) for target, own in functions.items()}


def _copied(own: object) -> object:
    if not isinstance(own, nn.Module):
        return own
    held = (*own.parameters(), *own.buffers())
    with suppress(Exception):  # the user's own objects: a lock, say, which no device has twice
        return copy.deepcopy(own, {id(tensor): tensor for tensor in held})
    return own


_Given = tuple[tuple[object, ...], Mapping[str, object], *tuple[tuple[str, ...], ...]]
"""Positional, keyword; then names of attributes: those that the op gives, those that are state."""


def attribute_of(module: nn.Module, name: str) -> object:
    """Return a plain attribute of a module, or of a module within: "gate.loss"."""
    owner, _, own = name.rpartition(".")
    return vars(module.get_submodule(owner))[own]


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, each once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
