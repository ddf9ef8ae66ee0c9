"""The lines of a module's own forward, without the modules inside it: what they gave is given.

    forward_of(user_model, "", True, {"encoder": [hidden], "head": [logits]}, {}, sound, labels)

runs every line that the user wrote in that forward, and nothing of `encoder` and `head`;
`lines_until(..., "head", ...)` runs those before `head` and returns its arguments. This file
knows modules; it knows nothing of devices, messages or schedules.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import Lock

import torch
from torch import Tensor, nn

from .kept import AssumptionError, built, flat

Answers = Mapping[str, Sequence[object]]
"""Path of a module inside -> what its calls gave, in order."""
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)


_EVERY_TIME = (
    "let it call the same modules for every batch (choose with torch.where, or multiply by 0), or "
    "put the lines and what they call into a module of their own, which `split --opaque CLASS` "
    "keeps "
    "whole; split again"
)


class _CalledError(BaseException):
    """Leave a forward where it calls a module: `given` are the arguments of that call."""

    def __init__(self, given: tuple[tuple[object, ...], dict[str, object]]) -> None:
        super().__init__()
        self.given = given


class Shell:
    """A module without numbers, whose forward is given what the modules inside it gave.

    Args:
        module: the user's; it is not changed.
        device: of the tensors that stand where its parameters were.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        held = (*module.parameters(), *module.buffers())
        self.module = copy.deepcopy(module, {id(tensor): _blank(tensor, device) for tensor in held})
        self._left: dict[str, list[object]] = {}
        self._until: str | None = None
        self._lock = Lock()  # devices may be threads of one process
        for path, part in self.module.named_modules():
            part.__dict__.update({name: OrderedDict() for name in _HOOKS})
            part.__dict__["_compiled_call_impl"] = None
            if path:
                part.__dict__["forward"] = partial(self._answer, path)

    def run(
        self,
        training: bool,
        answers: Answers,
        own: Mapping[str, Tensor],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        watch: Callable[[], AbstractContextManager[object]] = nullcontext,
        until: str | None = None,
    ) -> object:
        """Run the forward; `own` are tensors of the module that its lines read, by name.

        `watch` is entered around the lines alone. If `until` names a module, the lines end with its
        call after those whose answers are given: its arguments are returned.

        Raises:
            AssumptionError: it calls other modules than those whose answers are given.
        """
        with self._lock:
            self.module.train(training)
            self._left = {path: list(given) for path, given in answers.items()}
            self._until = until
            forward = self.module.forward
            self.module.__dict__["forward"] = partial(_watched, watch, forward)
            try:
                found: object = torch.func.functional_call(
                    self.module, dict(own), tuple(args), dict(kwargs or {})
                )
            except _CalledError as called:
                return called.given
            finally:
                del self.module.__dict__["forward"]
            left = [path for path, rest in self._left.items() if rest]
        left += [] if until is None else [until]
        if left:
            raise AssumptionError(
                f"forward did not call {left[0]}, as it did for the example batch: {_EVERY_TIME}",
                code="BX5106",
            )
        return found

    def _answer(self, path: str, *args: object, **kwargs: object) -> object:
        left = self._left.get(path)
        if path == self._until and not any(self._left.values()):
            raise _CalledError((args, kwargs))
        if not left:
            raise AssumptionError(
                f"forward calls {path}, as it did not for the example: {_EVERY_TIME}", code="BX5107"
            )
        return left.pop(0)

    def plain_tensors(self) -> list[Tensor]:
        """Return the tensors that are attributes of the modules, and neither theirs nor buffers."""
        values = [value for part in self.module.modules() for value in vars(part).values()]
        return [tensor for value in values for tensor in flat(value)]


def _watched(
    watch: Callable[[], AbstractContextManager[object]],
    forward: Callable[..., object],
    *args: object,
    **kwargs: object,
) -> object:
    with watch():
        return forward(*args, **kwargs)


def _blank(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of that shape and type in the memory of one number."""
    made = torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


_shells: dict[tuple[object, str, torch.device], Shell] = {}


def forward_of(
    model: Callable[[], nn.Module] | nn.Module,
    path: str,
    training: bool,
    answers: Answers,
    own: Mapping[str, Tensor],
    *args: object,
    **kwargs: object,
) -> object:
    """Run the lines of the forward of one module of the user's model; see `Shell.run`."""
    shell = _shell_of(model, path, (tuple(answers.values()), *own.values(), args, kwargs))
    return shell.run(training, answers, own, args, kwargs)


def lines_until(
    model: Callable[[], nn.Module] | nn.Module,
    path: str,
    training: bool,
    answers: Answers,
    own: Mapping[str, Tensor],
    until: str,
    *args: object,
    **kwargs: object,
) -> object:
    """Run those lines to the next call of a module; return its arguments. See `Shell.run`."""
    shell = _shell_of(model, path, (tuple(answers.values()), *own.values(), args, kwargs))
    return shell.run(training, answers, own, args, kwargs, until=until)


def _shell_of(
    model: Callable[[], nn.Module] | nn.Module, path: str, given: tuple[object, ...]
) -> Shell:
    """Return the shell of a module, on the device of what it is given."""
    tensors = flat(given)
    device = tensors[0].device if tensors else torch.device("cpu")
    key = model, path, device
    if key not in _shells:
        _shells[key] = Shell(built(model).get_submodule(path), device)
    return _shells[key]
