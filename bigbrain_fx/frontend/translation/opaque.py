"""Custom `torch.autograd.Function`s: opaque in the trace instead of traced through.

Tracing through one would drop the user's backward and train on other gradients, silently. While
`recording` is active, each call becomes one node `bigbrain_fx::kept`; the graph's op calls the
user's own class again, so its gradients are the user's. This file knows nothing of the graph.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

from bigbrain_fx.core import Arg
from bigbrain_fx.errors import CaptureError, InputError
from bigbrain_fx.frontend.translation.kept import FUNCTION, KeptCall, keep
from bigbrain_fx.frontend.translation.nests import TensorSlot

PREFIX = FUNCTION


@dataclass
class Recorder:
    """The custom Functions called during one trace, by target: "opaque.model.RoundSTE"."""

    functions: dict[str, type] = field(default_factory=dict)
    paused: bool = False

    def apply(self, function: type, args: tuple[object, ...]) -> object:
        """Record one call and return its results as one traced node gives them."""
        tensors: list[Tensor] = []
        placed = tuple(_place(arg, tensors) for arg in args)
        target = f"{PREFIX}{function.__module__}.{function.__qualname__}"
        self.functions[target] = function
        name, shapes = function.__name__.lower(), partial(_learn, function)
        return keep(KeptCall(target, name, cast("Arg", placed), (), shapes), tensors)


_active: list[Recorder] = []


class Dice(TorchDispatchMode):
    """Notice whether an op draws random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it bare
        self.thrown = False

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        self.thrown |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _learn(function: type, call: KeptCall, tensors: list[Tensor]) -> list[Tensor]:
    """Run the user's forward on shapes alone; record the results in `call`."""
    given = cast("tuple[object, ...]", call.args)
    args = tuple((tensors[arg.index] if isinstance(arg, TensorSlot) else arg) for arg in given)
    ctx = torch.autograd.function.FunctionCtx()
    ctx.needs_input_grad = tuple(isinstance(arg, Tensor) for arg in args)  # type: ignore[attr-defined]
    with torch.no_grad(), Dice() as dice:
        result = _run_forward(function, ctx, args)
    if getattr(ctx, "dirty_tensors", None):
        raise CaptureError(
            f"{call.target.removeprefix(PREFIX)} writes into its argument (ctx.mark_dirty)",
            code="BX2178",
            help="return a new tensor from its forward instead",
        )
    results = result if isinstance(result, tuple | list) else (result,)
    found = [item for item in results if isinstance(item, Tensor)]
    numbers = map(TensorSlot, range(len(found)))
    slots = tuple(next(numbers) if isinstance(item, Tensor) else None for item in results)
    single = not isinstance(result, tuple | list)
    call.result = cast("Arg", slots[0] if single else ("tuple", slots))
    call.outputs, call.random = len(found), dice.thrown
    call.views = tuple(_shares(item, tensors) for item in found)
    fixed = [id(item) for item in getattr(ctx, "non_differentiable", None) or ()]
    call.fixed = frozenset(i for i, item in enumerate(found) if id(item) in fixed)
    # Fresh tensors: an op of torch.library may not return its argument.
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in found]


def _run_forward(function: type, ctx: object, args: tuple[object, ...]) -> object:
    forward: Callable[..., object] = function.forward  # type: ignore[attr-defined]
    own = getattr(function, "setup_context", None)
    if own is None or own is torch.autograd.Function.setup_context:
        return forward(ctx, *args)
    result = forward(*args)
    own(ctx, args, result)
    return result


def _shares(output: Tensor, tensors: Sequence[Tensor]) -> int | None:
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    storage = output.untyped_storage()._cdata
    return storages.index(storage) if storage in storages else None


def _place(arg: object, tensors: list[Tensor]) -> object:
    if not isinstance(arg, Tensor):
        return arg
    tensors.append(arg)
    return TensorSlot(len(tensors) - 1)


class _Shim:
    """Hold the code that stands in for `Function.apply` while a trace records."""

    @classmethod
    def apply(cls, *args, **kwargs):  # type: ignore[no-untyped-def]  # noqa: ANN002, ANN003, ANN206
        from bigbrain_fx.frontend.translation import opaque

        # `__class__` makes this code hold the same cell as the code it replaces.
        return opaque._apply(cls, __class__, args, kwargs)  # type: ignore[name-defined]


def _apply(
    function: type, base: type, args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    if function is CheckpointFunction and not _active[-1].paused:
        return _reentrant(cast("Callable[..., object]", args[0]), args[2:])
    if function.__module__.split(".")[0] == "torch" or kwargs:
        return _original[-1](function, *args, **kwargs)
    _require_no_modules(function, args)
    if _active[-1].paused:
        return _original[-1](function, *args)
    return _active[-1].apply(function, args)


def _reentrant(run: Callable[..., object], args: tuple[object, ...]) -> object:
    """Run a reentrant checkpoint as plain code, without gradients where no argument needs one."""
    needed = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
    with torch.set_grad_enabled(needed and torch.is_grad_enabled()):
        return run(*args)


def _require_no_modules(function: type, args: tuple[object, ...]) -> None:
    """Refuse a module among the arguments: a backward that calls it again finds other weights."""
    kinds = (torch.nn.Module, types.FunctionType, types.MethodType, functools.partial)
    given = next((arg for arg in args if isinstance(arg, kinds)), None)
    if given is not None:
        raise CaptureError(
            f"the autograd.Function {function.__name__} is given a {type(given).__name__}, and its "
            "backward may call that again, with other weights than forward had",
            code="BX2179",
            help="call the module in plain code, which autograd goes through: z = z + h * f(z); to "
            "save its memory: torch.utils.checkpoint.checkpoint(f, z, use_reentrant=False)",
        )


@contextmanager
def paused() -> Iterator[None]:
    """Let calls of custom Functions be plain calls, while an opaque module runs."""
    before = [recorder.paused for recorder in _active]
    for recorder in _active:
        recorder.paused = True
    try:
        yield
    finally:
        for recorder, was in zip(_active, before, strict=True):
            recorder.paused = was


_original: list[Callable[..., object]] = []


@contextmanager
def recording() -> Iterator[Recorder]:
    """Turn every call of a user's `autograd.Function` into one opaque node of the trace."""
    apply = cast("types.MethodType", torch.autograd.Function.apply).__func__
    code = apply.__code__
    original = types.FunctionType(
        code, apply.__globals__, apply.__name__, apply.__defaults__, apply.__closure__
    )
    recorder = Recorder()
    _active.append(recorder)
    _original.append(original)
    # The code is exchanged, not the attribute: users keep `f = Function.apply` at import time.
    apply.__code__ = _Shim.apply.__func__.__code__  # type: ignore[attr-defined]
    try:
        yield recorder
    finally:
        apply.__code__ = code
        _original.pop()
        _active.pop()


def function_of(target: str) -> type:
    """Import the class behind "opaque.<module>.<qualified name>".

    Raises:
        InputError: there is no such module or class.
    """
    path = target.removeprefix(PREFIX)
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module = _module(".".join(parts[:cut]))
        found: object = module
        for name in parts[cut:]:
            found = getattr(found, name, None)
        if isinstance(found, type):
            return found
    raise InputError(
        f"custom autograd.Function {path} cannot be imported",
        code="BX2180",
        help="define the class at the top level of a module that can be imported",
    )


def _module(name: str) -> types.ModuleType | None:
    if name in sys.modules:
        return sys.modules[name]
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
