"""The caller's own module while devices train copies of it; each read gets their weights first.

    model.head.weight   average.update(parameters)   model(x)  ──▶  weights of now
    clip_grad_norm_(model.parameters(), 1.0)                   ──▶  refused: the devices have them

Its tensors get a class of their own until the end, whose `__torch_function__` sees every use of
them. The caller may have held one since before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bigbrain_fx.errors import InputError

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

_Function = Callable[..., Any]
_GRADIENT = vars(torch._C.TensorBase)["grad"].__get__
_PROPERTY = ("__get__", "__set__", "__delete__")
_ZEROING = ("zero_", "_foreach_zero_", "detach_")  # zero_grad(set_to_none=False)


class CallersModule:
    """Calls `refresh` before the module computes, and before its tensors are read.

    Attributes:
        is_read: a tensor was read since this was set to False; the caller may write into it.

    Args:
        module: the caller's.
        refresh: gives it the weights of now.
    """

    def __init__(self, module: nn.Module, refresh: Callable[[], None]) -> None:
        self._module, self._refresh, self._read = module, refresh, _Read(self)
        self._place: int | None = None  # of the hook: the same when it comes again
        self.is_read = self._is_within = False

    def enter(self, others: Mapping[str, Tensor] = MappingProxyType({})) -> CallersModule:
        """Hear of the module, and of its tensors as they are now; return itself.

        Args:
            others: parameters of no module of the session that its loss gives gradients, by name.
        """
        self.is_read = False
        self._steps = _refusing_steps(others)
        self._handle = self._hooked()
        watched = {kind: _watched(kind, self) for kind in (Tensor, nn.Parameter)}
        found = (*self._module.parameters(), *self._module.buffers())
        tensors = {id(tensor): tensor for tensor in found}
        self._kinds = [(t, type(t)) for t in tensors.values() if type(t) in watched]
        for tensor, kind in self._kinds:
            tensor.__class__ = watched[kind]
        return self

    def _hooked(self) -> RemovableHandle:
        handle = self._module.register_forward_pre_hook(self._read)  # layers may hold theirs, too
        hooks = self._module._forward_pre_hooks
        self._place = handle.id if self._place is None else self._place
        hooks[self._place] = hooks.pop(handle.id)
        handle.id = self._place
        return handle

    def read(self) -> None:
        """Give the module the weights of now, if that is not under way."""
        if not self._is_within:
            self.is_read = True
            with self.unread():
                self._refresh()

    @contextmanager
    def unread(self) -> Iterator[None]:
        """Let reads in the block find the tensors as they are."""
        before, self._is_within = self._is_within, True
        try:
            yield
        finally:
            self._is_within = before

    def compute(self, function: _Function, args: Sequence[Any], named: Mapping[str, Any]) -> Any:  # noqa: ANN401  # as of torch
        """Compute a function of tensors of the module, for their class."""
        is_property = function.__name__ in _PROPERTY
        if not is_property:
            self.read()
        with torch._C.DisableTorchFunctionSubclass():
            found = function(*args, **named)
        if self._is_within or not is_property:
            return found
        if function == _GRADIENT:
            is_asked = found is None and args[0].requires_grad
            return NoGradient.of(args[0]) if is_asked else found
        if isinstance(
            found, Tensor
        ):  # a view, such as `data`: its numbers change with the weight's
            self.read()
        return found

    def leave(self) -> None:
        """Let the module be as the caller made it."""
        self._handle.remove()
        self._steps.remove()
        for tensor, kind in self._kinds:
            tensor.__class__ = kind


def _refusing_steps(others: Mapping[str, Tensor]) -> RemovableHandle:
    """Refuse steps of any optimizer by gradients that only the devices could have computed.

    The centres of a loss, say, with an optimizer of their own: without a gradient it skips them.
    """
    named = {id(tensor): name for name, tensor in others.items()}

    def before(optimizer: Optimizer, *_: object) -> None:
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        names = [named[id(p)] for p in stepped if id(p) in named and p.grad is None]
        if names:
            raise InputError(
                f"an optimizer of the loop steps {names[0]}, which the loss reads and the model "
                "does not have: devices train the model's parameters alone",
                code="BX3193a",
                help="make it a part of the model before the session begins (net.criterion = "
                "criterion), and give machine(...) one optimizer, with a group for it",
            )

    return register_optimizer_step_pre_hook(before)


class _Read:
    """The hook of a module's calls; in a copy of the module, such as an average, it is idle."""

    def __init__(self, module: CallersModule | None = None) -> None:
        self._module = module

    def __call__(self, *_: object) -> None:
        if self._module is not None:
            self._module.read()

    def __reduce__(self) -> tuple[type[_Read], tuple[()]]:
        return _Read, ()


def _watched(kind: type[Tensor], module: CallersModule) -> type[Tensor]:
    """Return a class of tensors like `kind`, whose uses a module hears of; a copy is plain."""

    def plain(tensor: Tensor) -> Tensor:
        copied = tensor.detach().clone()
        return nn.Parameter(copied, tensor.requires_grad) if kind is nn.Parameter else copied

    class Watched(kind):  # type: ignore[misc, valid-type]
        @classmethod
        def __torch_function__(
            cls,
            function: _Function,
            _kinds: object,
            args: Sequence[Any] = (),
            named: Mapping[str, Any] | None = None,
        ) -> Any:  # noqa: ANN401  # as of torch
            return module.compute(function, args, named or {})

        def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
            return cast("Tensor", memo.setdefault(id(self), plain(self)))

        def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401  # as of pickle
            return plain(self).__reduce_ex__(protocol)

    return Watched


class NoGradient(Tensor):
    """The gradient of a weight that devices train: it has a form, no numbers, and may be zeroed."""

    @staticmethod
    def of(parameter: Tensor) -> Tensor:
        """Return that of a parameter."""
        return Tensor._make_wrapper_subclass(
            NoGradient, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch gives no names
        cls,
        function: Any,  # noqa: ANN401  # as of torch
        _kinds: object,
        args: Sequence[Any] = (),
        _named: object = None,
    ) -> Any:  # noqa: ANN401  # as of torch
        if function.__name__.partition(".")[0] in _ZEROING:
            return args[0] if isinstance(args[0], Tensor) else None
        raise InputError(
            "gradients are on the devices, and this process has none",
            code="BX3193",
            help="give machine(...) clip_norm=1.0 to clip them there, and leave this call out",
        )
