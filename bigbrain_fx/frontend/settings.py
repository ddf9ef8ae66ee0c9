"""What a model file may set for all of torch: how it computes, its functions, the environment.

What is set at the top is set in a bundle, too, where a copy of its lines, or the whole file, is
run; `model()` no bundle calls. This file knows torch and the process; it knows no text.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch

from bigbrain_fx.errors import InputError


@dataclass(frozen=True)
class Settings:
    """All at one moment.

    Attributes:
        numbers: how it is set -> what it is; what decides numbers without any call's saying so.
        functions: of torch, by name: (where it stands, its name there, itself).
        environ: the environment.
    """

    numbers: Mapping[str, object] = field(default_factory=dict)
    functions: Mapping[str, tuple[object, str, object]] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def now(cls) -> Settings:
        """Return what they are."""
        return cls(_numbers(), {key: (o, n, f) for key, o, n, f in _functions()}, dict(os.environ))

    def put_back(self) -> None:
        """Let all be as they were; in a fork, whose parent goes on as it is."""
        if not self.numbers:
            return  # nobody has looked
        for what, value in self.numbers.items():
            _SETTERS[what](value)
        for key, owner, name, function in _functions():
            if key in self.functions and self.functions[key][2] is not function:
                _put(owner, name, self.functions[key][2])
        os.environ.clear()
        os.environ.update(self.environ)

    def changed(self, later: Settings) -> dict[str, object]:
        """Return what is another thing later -> what it is then."""
        numbers = {k: v for k, v in later.numbers.items() if v != self.numbers.get(k, v)}
        steps = {
            f"{key} = ...": found
            for key, (_, _, found) in later.functions.items()
            if key in self.functions and _own(found) is not _own(self.functions[key][2])
        }
        words = {
            f"os.environ[{key!r}] = ...": text
            for key, text in later.environ.items()
            if self.environ.get(key) != text and not key.startswith("TORCH")  # of torch's own
        }
        return {**numbers, **steps, **words}


def _numbers() -> dict[str, object]:
    small = torch.tensor(1.2e-38, dtype=torch.float32, device="cpu")
    return {
        "torch.set_default_dtype(...)": torch.get_default_dtype(),
        "torch.set_float32_matmul_precision(...)": torch.get_float32_matmul_precision(),
        "torch.set_flush_denormal(...)": not bool(small * 0.1),
        "torch.backends.mkldnn.enabled = ...": torch.backends.mkldnn.enabled,
        "torch.set_grad_enabled(...)": torch.is_grad_enabled(),
        "torch.set_autocast_enabled(...)": torch.is_autocast_enabled("cpu"),
    }


_SETTERS: Mapping[str, Callable[[Any], object]] = {
    "torch.set_default_dtype(...)": torch.set_default_dtype,
    "torch.set_float32_matmul_precision(...)": torch.set_float32_matmul_precision,
    "torch.set_flush_denormal(...)": torch.set_flush_denormal,
    "torch.backends.mkldnn.enabled = ...": lambda on: setattr(torch.backends.mkldnn, "enabled", on),
    "torch.set_grad_enabled(...)": torch.set_grad_enabled,
    "torch.set_autocast_enabled(...)": lambda on: torch.set_autocast_enabled("cpu", on),
}
_AT_THE_TOP = "set it at the top of the file, which a bundle runs, too: {what}"
_INSTEAD = {
    "torch.set_grad_enabled(...)": "let it end within {name}(): with torch.no_grad(): ...",
    "torch.set_autocast_enabled(...)": "let it end within {name}(): with torch.autocast(...): ...; "
    'for training, say it at the top of the file: autocast = "bfloat16"',
}


def _functions() -> Iterator[tuple[str, object, str, object]]:
    """Yield functions of torch that files replace: those of its optimizers, and of tensors."""
    held = *vars(torch.optim).values(), *vars(torch.optim.lr_scheduler).values()
    kinds = [k for k in held if isinstance(k, type) and k.__module__.startswith("torch.optim")]
    for kind in dict.fromkeys((*kinds, torch.Tensor, torch.nn.Module)):
        where = f"torch.optim.{kind.__name__}" if kind in kinds else _OWNERS[kind]
        for name in dir(kind):
            value = inspect.getattr_static(kind, name)
            if callable(value) and not isinstance(value, type):
                yield f"{where}.{name}", kind, name, value
    for module in (torch, torch.nn.functional):
        for name, value in list(vars(module).items()):
            if callable(value) and not isinstance(value, type):
                yield f"{module.__name__}.{name}", module, name, value


def _put(owner: object, name: str, function: object) -> None:
    """Let a function stand where it stood: in a class, or in one that it is made of."""
    if isinstance(owner, type) and any(vars(k).get(name) is function for k in owner.__mro__[1:]):
        delattr(owner, name)
    else:
        setattr(owner, name, function)


_OWNERS: Mapping[type, str] = {torch.Tensor: "torch.Tensor", torch.nn.Module: "torch.nn.Module"}
_TORCH = f"{os.path.dirname(torch.__file__)}{os.sep}"


def _own(function: object) -> object:
    """Return what torch itself wraps, as the first optimizer of a class is made, say."""
    while isinstance(function, FunctionType) and function.__code__.co_filename.startswith(_TORCH):
        inner = getattr(function, "__wrapped__", None)
        if inner is None:
            break
        function = inner
    return function


def require_unset(before: Settings, after: Settings, at: str, name: str) -> None:
    """Refuse a `model()` that sets how later lines compute, or update: no bundle calls it.

    Args:
        before: what is set before it is called.
        after: what is set after that.
        at: where it is defined.
        name: what it is called.

    Raises:
        InputError: names the setting, and where it belongs.
    """
    for what, now in before.changed(after).items():
        if what in _SETTERS or what.startswith("torch.optim."):
            setting = what.partition("(")[0].partition(" ")[0]
            was = before.numbers.get(what) if what in _SETTERS else "its own"
            raise InputError(
                f"{name}() changes a setting of torch, {setting}, from {was} to {said(now)}, "
                "and a bundle does not call it before it reads batches or computes",
                code="BX2103",
                at=at,
                help=_INSTEAD.get(what, _AT_THE_TOP).format(name=name, what=what),
            )


def said(setting: object) -> str:
    """Name what something is set to."""
    return str(getattr(setting, "__qualname__", setting))
