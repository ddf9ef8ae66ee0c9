"""Statements of a module's forward as a module of their own, on the one device that runs them.

    class NetForward2To4(ForwardLines):          the text is the user's, in functions.py
        owner, uses = "", ("rnn",)               of the module whose forward it is
        def forward(self, embedded, length): ...

`self` in the statements is this module. The owner's modules and tensors are the stage's; other
attributes come from the owner itself: numbers, text, methods. Attributes that the statements assign
stay in this module, and are in checkpoints.
"""

from __future__ import annotations

import copy
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from .kept import built

_MISSING = object()


class ForwardLines(nn.Module):
    """Some statements of a module's forward; see the top of this file.

    Args:
        home: has the owner's modules and tensors: a stage, or the owner itself.
        path: of the owner there.
        model: the user's `model()`, or the module itself, around the owner.

    Attributes:
        owner: path of the module whose forward it is.
        uses: paths of the owner's modules and tensors that the statements read.
        keeps: attributes that they assign.
    """

    owner = ""
    uses: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()

    def __init__(
        self, home: nn.Module, path: str, model: Callable[[], nn.Module] | nn.Module
    ) -> None:
        super().__init__()
        owner = built(model).get_submodule(self.owner)
        self.__dict__["_place"] = (home, path, owner)  # in a tuple, so that it is no module of this
        own = vars(owner)
        self.__dict__.update({n: copy.deepcopy(own[n]) for n in self.keeps if n in own})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # as of the statements
        """Run the statements; no gradient of a later call flows into attributes of this one.

        A loop that goes on from a hidden state detaches it, and a replacement process has its
        numbers alone.
        """
        found = super().__call__(*args, **kwargs)
        own = self.__dict__
        own.update({name: _detached(own[name]) for name in self.keeps if name in own})
        return found

    def __setattr__(self, name: str, value: Any) -> None:  # noqa: ANN401  # of any kind
        """Keep an attribute here, unless it is a tensor of the owner: `self.count += 1`."""
        if isinstance(value, Tensor) and getattr(self, name, None) is value:
            return
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # whatever the owner has
        """Return an attribute of the owner, a method or property bound to this module."""
        own = self.__dict__.get("_modules", {}).get(name, _MISSING)
        place = self.__dict__.get("_place")
        if own is not _MISSING or place is None:
            return own if place else super().__getattr__(name)
        home, path, owner = place
        found = _at(home, path, name)
        if isinstance(found, nn.Module | Tensor):
            return found
        of_class = getattr(type(owner), name, None)
        if isinstance(of_class, property) and of_class.fget is not None:
            return of_class.fget(self)  # `self.device`: of these tensors, not the owner's
        value = getattr(owner, name)
        if isinstance(value, types.MethodType) and value.__self__ is owner:
            return types.MethodType(value.__func__, self)
        if isinstance(value, nn.Module):  # without tensors, or the stage would have it
            self._modules[name] = copy.deepcopy(value).train(self.training)
            return self._modules[name]
        return value

    @property
    def of(self) -> nn.Module:
        """The owner."""
        owner: nn.Module = self.__dict__["_place"][2]
        return owner

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield this module and, without an outer caller, the modules that it calls."""
        memo = set() if memo is None else memo
        yield from super().named_modules(memo, prefix, remove_duplicate)
        for name, held in () if prefix else self._used(""):
            if isinstance(held, nn.Module):
                yield from held.named_modules(memo, name, remove_duplicate)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the owner's parameters that the statements read; no module around it does."""
        for name, held in self._used(prefix):
            if isinstance(held, nn.Module):
                yield from held.named_parameters(name, recurse, remove_duplicate)
            elif isinstance(held, nn.Parameter):
                yield name, held

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the owner's buffers that the statements read."""
        for name, held in self._used(prefix):
            if isinstance(held, nn.Module):
                yield from held.named_buffers(name, recurse, remove_duplicate)
            elif not isinstance(held, nn.Parameter):
                yield name, held

    def _used(self, prefix: str) -> Iterator[tuple[str, nn.Module | Tensor]]:
        for name in self.uses:
            held = operator.attrgetter(name)(self)
            if isinstance(held, nn.Module | Tensor):
                yield f"{prefix}.{name}".removeprefix("."), held


def _detached(value: Any) -> Any:  # noqa: ANN401  # of any kind
    if isinstance(value, Tensor):
        return value.detach() if value.grad_fn is not None else value
    if type(value) in (tuple, list):
        return type(value)(map(_detached, value))
    if type(value) is dict:
        return {key: _detached(item) for key, item in value.items()}
    return value


def _at(home: nn.Module, path: str, name: str) -> object:
    """Return an attribute of a module inside another, None where there is none."""
    found: object = home
    for part in [*filter(None, path.split(".")), name]:
        found = getattr(found, part, None)
    return found
