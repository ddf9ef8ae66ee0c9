"""Gradient hooks of the user: a bundle's backward pass would run without them.

A hook is code that sees, and may change, a gradient on its way. A module that has one, or whose
forward sets one, is opaque; a hook on a parameter is refused. This file knows hooks, and no graphs.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.translation.sources import is_users
from bigbrain_fx.frontend.translation.trace_refusals import AUTOGRAD, PAST_TRACE

_ON_TENSORS = ("register_hook", "register_post_accumulate_grad_hook")
_ON_MODULES = ("_backward_hooks", "_backward_pre_hooks")
_OF_ALL = ("_global_backward_hooks", "_global_backward_pre_hooks")
FUNCTION = (
    "write it as a torch.autograd.Function whose backward changes the gradient, and call that in "
    "forward: such a class is kept (forward: return x.view_as(x); backward: return g.clamp(-1, 1))"
)
ON_PARAMETER = (
    "change p.grad in the optimizer: a class whose step() does it for each parameter and then "
    "calls super().step(), returned by optimizer(named_params); clip_norm = 1.0 in the model file "
    "clips the norm of all; or write it as a torch.autograd.Function, called on the parameter in "
    "forward"
)


def check_hooks(model: nn.Module, leaves: Collection[nn.Module] = ()) -> None:
    """Refuse gradient hooks that were set before forward.

    Args:
        model: the user's.
        leaves: opaque modules: their own hooks run with them, hooks of their parameters do not.

    Raises:
        CaptureError: names the parameter or module, and the line of the hook.
    """
    for name, parameter in model.named_parameters():
        for hook in _hooks(parameter, ("_backward_hooks", "_post_accumulate_grad_hooks")):
            raise _refused(f"parameter {name}", hook, ON_PARAMETER)
    for path in hooked_modules(model, leaves):
        raise _on_module(model.get_submodule(path), path)
    for hook in _hooks(torch_modules, _OF_ALL):
        raise _refused("every module of torch", hook, f"take that hook out, or {FUNCTION}")


def hooked_modules(model: nn.Module, leaves: Collection[nn.Module] = ()) -> list[str]:
    """Return the paths of modules with backward hooks, except within opaque modules."""
    inside = {id(part) for leaf in leaves for part in leaf.modules()}
    named = ((path, part) for path, part in model.named_modules() if id(part) not in inside)
    return [path for path, part in named if any(_hooks(part, _ON_MODULES))]


def check_saved_tensors_hooks() -> None:
    """Refuse hooks on all saved tensors: a rehearsal has them, too, and a bundle's own run has not.

    Raises:
        CaptureError: names the line of the hook.
    """
    for hook in torch._C._autograd._top_saved_tensors_default_hooks(False) or ():
        raise CaptureError(
            f"all tensors that a backward needs go through a hook{_named(hook)}, which a "
            "bundle's do not",
            code="BX0170b",
            at=_line(hook),
            help="take it out of the model file; what is kept for a backward can be made again "
            "instead: --activation-checkpointing all",
        )


def _on_module(part: nn.Module, path: str) -> CaptureError:
    hook = next(_hooks(part, _ON_MODULES))
    error = CaptureError(
        f"module {path or 'model'} ({type(part).__name__}) has a gradient hook{_named(hook)}, and "
        "a bundle's backward pass would run without it",
        code="BX0172a",
        at=_line(hook),
        help=f"make the module and its hook opaque: --opaque {path}, or {FUNCTION}"
        if path
        else FUNCTION,
    )
    error.inside = path
    return error


def _hooks(owner: object, names: Collection[str]) -> Iterator[object]:
    for name in names:
        yield from (getattr(owner, name, None) or {}).values()


@contextlib.contextmanager
def refusing_autograd() -> Iterator[None]:
    """Refuse lines of the user's that ask autograd meanwhile for gradients that a trace has not.

    Of some the export knows how they are computed, as of an inner step on a weight.

    Raises:
        CaptureError: from such a line; the module that it is in can be opaque.
    """
    own, asked = torch.autograd.grad, list[CaptureError]()

    def grad(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # as torch's own
        frame = _user_of_autograd(sys._getframe(1))
        if frame is not None:
            asked.append(_asking(frame))
        return own(*args, **kwargs)

    torch.autograd.grad = grad
    try:
        yield
    except RuntimeError as error:
        if asked and PAST_TRACE in str(error):
            raise asked[0] from error
        raise
    finally:
        torch.autograd.grad = own


def _asking(frame: FrameType) -> CaptureError:
    at = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    owner = frame.f_locals.get("self")
    return AUTOGRAD.error(at, inside=[owner] if isinstance(owner, nn.Module) else None)


@contextlib.contextmanager
def refusing_hooks() -> Iterator[None]:
    """Refuse hooks that forward itself sets meanwhile, on any tensor.

    Raises:
        CaptureError: from the user's line that sets one.
    """
    own = {name: getattr(Tensor, name) for name in _ON_TENSORS}
    for name, function in own.items():
        setattr(Tensor, name, _refusing(function))
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(Tensor, name, function)


def _refusing(own: Callable[..., object]) -> Callable[..., object]:
    def register(self: Tensor, hook: object) -> object:
        cause = _user_of_autograd(sys._getframe(1))
        return own(self, hook) if cause is None else _refuse_here(hook, cause)

    return register


def _refuse_here(hook: object, frame: FrameType) -> NoReturn:
    error = CaptureError(
        f"a tensor in forward has a gradient hook{_named(hook)}, and a bundle's backward pass "
        "would run without it",
        code="BX0172b",
        at=f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}",
        help=f"{FUNCTION}; or make the module whose forward sets the hook opaque: --opaque with "
        "its class",
    )
    owner = frame.f_locals.get("self")
    error.inside = [owner] if isinstance(owner, nn.Module) else None
    raise error


def _user_of_autograd(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the user's line that sets a hook; None where torch itself needs one."""
    while frame is not None and frame.f_code.co_filename == torch.autograd.graph.__file__:
        frame = frame.f_back
    return frame if frame is not None and is_users(frame.f_code.co_filename) else None


def _refused(owner: str, hook: object, remedy: str) -> CaptureError:
    return CaptureError(
        f"{owner} has a gradient hook{_named(hook)}, and a bundle's backward pass would "
        "run without it",
        code="BX0170d",
        at=_line(hook),
        help=remedy,
    )


def _code(hook: object) -> Any:  # noqa: ANN401  # a code object, or None
    plain = inspect.unwrap(hook) if callable(hook) else hook
    return getattr(getattr(plain, "func", plain), "__code__", None)


def _named(hook: object) -> str:
    code = _code(hook)
    return f" ({code.co_name})" if code is not None and code.co_name.isidentifier() else ""


def _line(hook: object) -> str | None:
    code = _code(hook)
    if code is None or not is_users(code.co_filename):
        return None
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}"
