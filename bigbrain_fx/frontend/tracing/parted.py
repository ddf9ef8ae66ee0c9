"""Whether the user's optimizer may be made once per device, and made again where a device died.

It is tried before a bundle is written: three steps on made-up numbers and gradients, once with all
parameters and once with those of each device; with other dice; and with a new optimizer that is
given the state of the first one, as after a death. Shapes are the model's own up to 16 million
numbers; in a larger model every dimension is cut to the same length, so that as many are left. One
that needs all parameters at a time (a global norm, a name on another device), or a closure, is
refused.
This file knows the contract for `optimizer` and names of parameters; it knows no graph.
"""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.hooks import ON_PARAMETER
from bigbrain_fx.frontend.translation.sources import where
from bigbrain_fx.runtime import (
    HostRoom,
    StateError,
    StoredState,
    optimizer_facts,
    optimizer_tensors,
    restore_optimizer,
)

MOST_NUMBERS = 16_000_000
_STEPS = 3
_FEW = 8  # the longest dimension where nothing but the state is of interest
_ALIKE = 1e-9  # of a parameter's largest update, in float64
_NOISE = 4099  # made-up numbers, which are repeated: a prime, so that rows are unlike
_OWN = "every device makes an optimizer of its own, and gives it the parameters it has"
Make: TypeAlias = Callable[..., Any]  # named parameters -> an optimizer, or what acts like one
Numbers: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Shape:
    """A parameter as the trial has it."""

    size: tuple[int, ...]
    dtype: torch.dtype


def require_parted(
    model: nn.Module,
    make: Make,
    held: Mapping[str, Sequence[str]],
    *,
    here: bool = True,
    by_pieces: bool = False,
) -> str | None:
    """Try an optimizer with all parameters of a model, and with those of each device.

    Args:
        model: whose parameters it is for; of them only names, shapes and types are looked at.
        make: `optimizer` of the model file.
        held: device -> the names of its trained parameters.
        here: whether the devices are of this host's kind; one that fails here may need the others.
        by_pieces: whether it is stepped over a few parameters at a time: see `runtime.stores`.

    Returns:
        Why it could not be tried, if so.

    Raises:
        InputError: it needs a closure, fails, or updates a parameter otherwise.
    """
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    everything = {name for names in held.values() for name in names}
    shapes = _shapes({n: p for n, p in trained.items() if n in everything})
    parts = {device: [n for n in shapes if n in set(names)] for device, names in held.items()}
    parts = {device: names for device, names in parts.items() if names}
    if not parts:
        return None
    with _dice_kept():
        try:
            whole = _tried(make, shapes, list(shapes), "")
        except InputError as error:
            if here:
                raise
            return f"the optimizer could not be tried on this host's CPU: {error.what}"
        _require_alone(make, shapes)
        if by_pieces:
            _require_pieces(make, shapes, whole)
        for device, names in parts.items() if len(parts) > 1 else ():
            share = f"device {device}, which has {len(names)} of the {len(shapes)} parameters"
            _require_alike(make, shapes, names, whole, share)
    return None


def require_all_stepped(model: nn.Module, make: Make, held: Mapping[str, Sequence[str]]) -> None:
    """Refuse a loss scale where a gradient stays scaled: torch unscales what is stepped.

    Raises:
        InputError: a trained parameter is in no group of the optimizer.
    """
    everything = {name for names in held.values() for name in names}
    trained = {n: p for n, p in model.named_parameters() if n in everything}
    few = {n: nn.Parameter(_numbers(n, shape)) for n, shape in _few(_shapes(trained)).items()}
    stepped = {id(p) for group in make(list(few.items())).param_groups for p in group["params"]}
    lacking = [name for name, p in few.items() if id(p) not in stepped]
    if lacking:
        raise InputError(
            f"grad_scaler with {lacking[0]}, which is trained and in no group of the optimizer: "
            "its gradient would stay scaled, and count so in clip_norm",
            at=_place(make),
            help="freeze it in model(), with requires_grad_(False), or give it to the optimizer "
            "in a group of its own with lr=0.0",
        )


def _require_pieces(make: Make, shapes: Mapping[str, _Shape], whole: Numbers) -> None:
    """Refuse one that does something once a step, such as to count steps for all parameters.

    Raises:
        InputError: stepped over a piece of the parameters at a time, it updates otherwise.
    """
    found = _run(make, shapes, list(shapes), by_pieces=True)
    unlike = [name for name in shapes if _apart(found[name], whole[name]).any()]
    if unlike:
        raise InputError(
            "optimizer(named_params) does something once a step for all parameters: stepped over a "
            f"few at a time, as --offload state needs it, it updates {unlike[0]} otherwise",
            at=_place(make),
            help="keep it for each parameter: self.state[p]['count'] for a counter; or leave "
            "--offload out",
        )


def _few(shapes: Mapping[str, _Shape]) -> dict[str, _Shape]:
    return {
        n: _Shape(tuple(min(size, _FEW) for size in s.size), s.dtype) for n, s in shapes.items()
    }


def _require_alone(make: Make, shapes: Mapping[str, _Shape]) -> None:
    """Refuse one whose steps need more than its state: random numbers, or what it keeps elsewhere.

    Raises:
        InputError: another seed, or a new optimizer with the state of the old, updates otherwise.
    """
    few = _few(shapes)
    try:
        first, second, thrown = (_run(make, few, list(few), seed=seed) for seed in (0, 0, 1))
        renewed = _run(make, few, list(few), renewed_at=1)
    except StateError as error:
        raise _keeps(str(error), make) from error
    except Exception:
        return  # it wants the shapes that it is made for, and has run with those
    if _unlike(first, second):
        raise _keeps("the second one that is made here updates otherwise than the first", make)
    if _unlike(first, thrown):
        raise InputError(
            "optimizer(named_params) draws random numbers in step(), and every device draws others",
            at=_place(make),
            help="let the model add the noise: torch.randn_like in forward is drawn by keys, the "
            "same in every run; or leave it out",
        )
    if _unlike(first, renewed):
        raise _keeps("a new one that is given its state goes on otherwise", make)


def _unlike(one: Numbers, other: Numbers) -> bool:
    return any(_apart(one[name], other[name]).any() for name in one)


def _keeps(what: str, make: Make) -> InputError:
    return InputError(
        f"optimizer(named_params) keeps what a process that replaces a dead one would lack: {what}",
        at=_place(make),
        notes=("what is kept: state[p], for each parameter p, and the numbers of param_groups",),
        help="keep it there: self.state[p]['count'] for a counter; of a wrapper round others, in "
        "its __init__: for part in parts: part.state = self.state, and self.param_groups = [g for "
        "part in parts for g in part.param_groups]; for a scheduler define "
        "scheduler(optimizer) in the model file, which returns it; for a GradScaler write "
        "grad_scaler = True there",
    )


def _require_alike(
    make: Make, shapes: Mapping[str, _Shape], names: Sequence[str], whole: Numbers, share: str
) -> None:
    found = _tried(make, shapes, names, share)
    unlike = [name for name in names if _apart(found[name], whole[name]).any()]
    wrong = _largest(make, shapes, names, unlike) if unlike else None
    if wrong is None:
        return
    name, error = wrong
    more = f" (and {len(unlike) - 1} more)" if len(unlike) > 1 else ""
    raise InputError(
        f"optimizer(named_params) looks at more than one parameter at a time: on {share}, it "
        f"updates {name}{more} otherwise, by {error:.1e} of its update",
        at=_place(make),
        notes=(_OWN,),
        help="update each parameter by its own gradient alone, as torch.optim.AdamW does "
        "(`clip_norm = 1.0` in the model file clips by the norm over all devices), "
        "or split over one device",
    )


def _largest(
    make: Make, shapes: Mapping[str, _Shape], names: Sequence[str], unlike: Sequence[str]
) -> tuple[str, float] | None:
    """Let float64 decide whether it was rounding; return what differs most."""
    wide = {name: _Shape(shape.size, _wide(shape.dtype)) for name, shape in shapes.items()}
    whole, part = _run(make, wide, list(wide)), _run(make, wide, names)
    errors = {name: _error(part[name], whole[name], _numbers(name, wide[name])) for name in unlike}
    name = max(errors, key=lambda each: errors[each])
    return (name, errors[name]) if errors[name] > _ALIKE else None


def _error(found: Tensor, want: Tensor, start: Tensor) -> float:
    update, error = (float(_apart(want, other).abs().max()) for other in (start, found))
    if not error:
        return 0.0
    return error / update if update and math.isfinite(error) else math.inf


def _apart(one: Tensor, other: Tensor) -> Tensor:
    """Return the difference; NaN and infinity equal themselves."""
    same = (one == other) | ((one != one) & (other != other))
    return torch.where(same, torch.zeros_like(one), one - other)


# --------------------------------------------------------------------------- one trial


def _tried(make: Make, shapes: Mapping[str, _Shape], names: Sequence[str], share: str) -> Numbers:
    """Run a trial; say what the user's code raises there.

    Raises:
        InputError: it raises, needs a closure, or holds other parameters.
    """
    try:
        return _run(make, shapes, names)
    except InputError:
        raise
    except Exception as error:  # the user's own code
        first = (str(error).splitlines() or [""])[0]
        what = f"{type(error).__name__}: {first}"
        at = where(error) or _place(make)
        if share:
            raise _fails_apart(what, share, at) from error
        raise InputError(
            f"optimizer(named_params), or a step of it, fails: {what}",
            at=at,
            notes=(
                "it was given parameters of the model's names, shapes and types, and gradients",
            ),
            help="choose by names and shapes, and give an optimizer whose step() needs nothing but "
            "gradients, such as torch.optim.AdamW(named_params)",
        ) from error


def _fails_apart(what: str, share: str, at: str) -> InputError:
    return InputError(
        f"optimizer(named_params) fails on {share}: {what}",
        at=at,
        notes=(_OWN,),
        help="choose by the names it is given, in groups that may be empty: {'params': [p for n, p "
        "in named_params if n == 'head.weight'], 'lr': 0.1}; freeze what is not to be trained in "
        "model(), with requires_grad_(False); or split over one device",
    )


def _run(
    make: Make,
    shapes: Mapping[str, _Shape],
    names: Sequence[str],
    *,
    seed: int = 0,
    renewed_at: int | None = None,
    by_pieces: bool = False,
) -> Numbers:
    """Return the named parameters after some steps; at one of them a new optimizer takes over.

    Raises:
        StateError: the state of the old one cannot be told by parameter.
    """
    torch.default_generator.manual_seed(seed)
    params = {name: nn.Parameter(_numbers(name, shapes[name])) for name in names}
    made = make(list(params.items()))
    _require_untouched(params, shapes, _place(make))
    _require_usable(made, params, _place(make))
    stepping = StoredState(made, HostRoom()) if by_pieces else None
    for step in range(_STEPS):
        made = _renewed(made, make, params) if step == renewed_at else made
        for name, parameter in params.items():
            parameter.grad = _numbers(f"{step} {name}", shapes[name])
        made.step() if stepping is None else stepping.step()
    return {name: parameter.detach() for name, parameter in params.items()}


def _renewed(made: Any, make: Make, params: Mapping[str, nn.Parameter]) -> Any:  # noqa: ANN401
    """Return a new optimizer with the state of one that is lost, as a bundle gives it."""
    rates = [group["lr"] for group in made.param_groups]
    facts = optimizer_facts(made, params, rates)
    tensors = {name: kept.clone() for name, kept in optimizer_tensors(made, params).items()}
    new = make(list(params.items()))
    restore_optimizer(new, params, list(rates), tensors, {"optimizer": facts})
    return new


def _require_untouched(
    params: Mapping[str, nn.Parameter], shapes: Mapping[str, _Shape], at: str
) -> None:
    """Refuse one that changes parameters as it is made: it is made again where a device died."""
    for name, parameter in params.items():
        does = next(_touched(parameter, _numbers(name, shapes[name])), None)
        if does is not None:
            raise InputError(
                f"optimizer(named_params) {does[0]} {name}: it is made once for each device, and "
                "again where one is replaced, and no plan knows of what else it does",
                at=at,
                help=does[1],
            )


def _touched(parameter: nn.Parameter, numbers: Tensor) -> Iterator[tuple[str, str]]:
    """Yield what was done to a parameter, and what to do instead."""
    if not parameter.requires_grad:
        yield "freezes", "freeze it in model(), with requires_grad_(False)"
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        yield "sets a gradient hook on", ON_PARAMETER
    if _apart(parameter.detach(), numbers).any():
        yield "writes into", "change weights in model(), before they are trained"


def _require_usable(made: Any, params: Mapping[str, nn.Parameter], at: str) -> None:  # noqa: ANN401
    kind = type(made).__name__
    if not hasattr(made, "param_groups") or not hasattr(made, "step"):
        raise InputError(
            f"optimizer(named_params) must return an optimizer, found {kind}",
            at=at,
            help="return one, such as torch.optim.AdamW(named_params); its scheduler is returned "
            "by scheduler(optimizer), a function of its own in the model file",
        )
    needed = [
        p.name
        for p in inspect.signature(made.step).parameters.values()
        if p.default is p.empty
        and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        and p.name != "self"  # a scheduler wraps the function and not the method
    ]
    if needed:
        raise InputError(
            f"{kind}.step({', '.join(needed)}) cannot be called: a bundle computes the loss once a "
            "step, over all devices",
            at=at,
            help="give an optimizer whose step() needs no argument, such as "
            "torch.optim.AdamW(named_params)",
        )
    own = {id(p) for p in params.values()}
    if not any(id(p) in own for group in made.param_groups for p in group["params"]):
        raise InputError(
            f"the {kind} of optimizer(named_params) holds none of the parameters it was given",
            at=at,
            notes=("a bundle has parameters of its own, by the names of the model's",),
            help="take the parameters from named_params: torch.optim.AdamW(named_params)",
        )
    if any("lr" not in group for group in made.param_groups):
        raise InputError(
            f"the groups of {kind} have no 'lr', which a bundle scales",
            at=at,
            help="give an optimizer with a learning rate, such as torch.optim.AdamW(named_params)",
        )


def _place(make: Make) -> str:
    code = getattr(make, "__code__", None)
    return f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}" if code else "optimizer"


# --------------------------------------------------------------------------- made-up numbers


def _shapes(params: Mapping[str, nn.Parameter]) -> dict[str, _Shape]:
    """Return the parameters' shapes; of a large model with every dimension cut."""
    most = max((size for p in params.values() for size in p.shape), default=1)
    while sum(_count(p.shape, most) for p in params.values()) > MOST_NUMBERS and most > 1:
        most //= 2
    return {
        name: _Shape(tuple(min(size, most) for size in p.shape), p.dtype)
        for name, p in params.items()
    }


def _count(shape: Sequence[int], most: int) -> int:
    return math.prod(min(size, most) for size in shape)


def _numbers(name: str, shape: _Shape) -> Tensor:
    """Return numbers that only the name and the shape decide."""
    dice = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(_NOISE, generator=dice, dtype=_wide(shape.dtype))
    count = math.prod(shape.size)
    return noise.repeat(-(-count // _NOISE))[:count].reshape(shape.size).to(shape.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


@contextmanager
def _dice_kept() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        yield
