"""A trial of the user's optimizer: a few steps on made-up numbers and gradients.

Numbers are drawn by the names of parameters; shapes are the model's own up to 16 million numbers,
and in a larger model every dimension is cut to the same length, so that as many are left.
This file knows the contract for `optimizer`; it compares no trials.
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
from bigbrain_fx.runtime import (
    HostRoom,
    StoredState,
    optimizer_facts,
    optimizer_tensors,
    restore_optimizer,
)

MOST_NUMBERS = 16_000_000
_STEPS = 3
_STEADY = 7  # a rate that an optimizer finds itself begins to rise; odd: what turns round has moved
_FEW = 8  # the longest dimension where nothing but the state is of interest
_NOISE = 4099  # made-up numbers, which are repeated: a prime, so that rows are unlike
Make: TypeAlias = Callable[..., Any]  # named parameters -> an optimizer, or what acts like one
Numbers: TypeAlias = dict[str, Tensor]
Stir: TypeAlias = Callable[[str, Tensor], Tensor]
Turn: TypeAlias = Callable[[str, int], float]  # by name and step: a factor on gradients that stay


@dataclass(frozen=True, slots=True)
class Shape:
    """A parameter as the trial has it."""

    size: tuple[int, ...]
    dtype: torch.dtype


def as_it_is(_name: str, gradient: Tensor) -> Tensor:
    """Leave a made-up gradient as it is."""
    return gradient


def run_trial(
    make: Make,
    shapes: Mapping[str, Shape],
    names: Sequence[str],
    *,
    seed: int = 0,
    renewed_at: int | None = None,
    by_pieces: bool = False,
    idle: frozenset[str] = frozenset(),
    stir: Stir = as_it_is,
    turn: Turn | None = None,
    lay: Stir = as_it_is,
) -> Numbers:
    """Return the named parameters after some steps; at one of them a new optimizer takes over.

    Those that are idle get no gradient; `stir` makes another one of what is made up for a name,
    with `turn` it is the first step's again times a factor, `lay` lets numbers and gradients lie
    otherwise in memory.

    Raises:
        StateError: the state of the old one cannot be told by parameter.
    """
    torch.default_generator.manual_seed(seed)
    params = {name: nn.Parameter(lay(name, numbers_of(name, shapes[name]))) for name in names}
    made = make(list(params.items()))
    _require_untouched(params, shapes, place_of(make))
    _require_usable(made, params, place_of(make))
    stepping = _stored(made) if by_pieces else None
    for step in range(_STEPS if turn is None else _STEADY):
        made = _renewed(made, make, params) if step == renewed_at else made
        for name, parameter in params.items():
            drawn = numbers_of(f"{step if turn is None else 0} {name}", shapes[name])
            made_up = stir(name, drawn if turn is None else drawn * turn(name, step))
            parameter.grad = None if name in idle else lay(name, made_up)
        made.step() if stepping is None else stepping.step()
    return {name: parameter.detach() for name, parameter in params.items()}


def _stored(made: Any) -> StoredState:  # noqa: ANN401  # the user's optimizer
    """Return a stepping by pieces whose state lies elsewhere, however small: views come apart."""
    found = StoredState(made, HostRoom())
    found.least_bytes = 0
    return found


def _renewed(made: Any, make: Make, params: Mapping[str, nn.Parameter]) -> Any:  # noqa: ANN401
    """Return a new optimizer with the state of one that is lost, as a bundle gives it."""
    rates = [group["lr"] for group in made.param_groups]
    facts = optimizer_facts(made, params, rates)
    tensors = {name: kept.clone() for name, kept in optimizer_tensors(made, params).items()}
    new = make(list(params.items()))
    restore_optimizer(new, params, list(rates), tensors, {"optimizer": facts})
    return new


def _require_untouched(
    params: Mapping[str, nn.Parameter], shapes: Mapping[str, Shape], at: str
) -> None:
    """Refuse one that changes parameters as it is made: it is made again where a device died."""
    for name, parameter in params.items():
        does = next(_touched(parameter, numbers_of(name, shapes[name])), None)
        if does is not None:
            raise InputError(
                f"optimizer(named_params) {does[0]} {name}: it is made once for each device, and "
                "again where one is replaced, and no plan knows of what else it does",
                code="BX2155",
                at=at,
                help=does[1],
            )


def _touched(parameter: nn.Parameter, numbers: Tensor) -> Iterator[tuple[str, str]]:
    """Yield what was done to a parameter, and what to do instead."""
    if not parameter.requires_grad:
        yield "freezes", "freeze it in model(), with requires_grad_(False)"
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        yield "sets a gradient hook on", ON_PARAMETER
    if apart(parameter.detach(), numbers).any():
        yield "writes into", "change weights in model(), before they are trained"


def _one_optimizer(made: Any) -> str:  # noqa: ANN401
    """Say how to return one optimizer, where there are several or none."""
    entries = made.values() if isinstance(made, Mapping) else made
    several = isinstance(made, Mapping | list | tuple)
    found = [one for one in entries if hasattr(one, "param_groups")] if several else []
    if len(found) < 2:
        return (
            "return one, such as torch.optim.AdamW(named_params); its scheduler is returned "
            "by scheduler(optimizer), a function of its own in the model file"
        )
    if len({type(one) for one in found}) == 1:
        name = f"{type(found[0]).__name__}"
        return f"return one with a group for each: {name}([{{'params': [...], 'lr': 0.1}}, ...])"
    return (
        "return one of a class of your own, a torch.optim.Optimizer over all parameters whose "
        "step() calls theirs, and which has for each of them one.state = self.state, and as its "
        "param_groups those of all of them (two optimizers of one class: groups of one)"
    )


def _require_usable(made: Any, params: Mapping[str, nn.Parameter], at: str) -> None:  # noqa: ANN401
    kind = type(made).__name__
    if not hasattr(made, "param_groups") or not hasattr(made, "step"):
        raise InputError(
            f"optimizer(named_params) must return an optimizer, found {kind}",
            code="BX2156",
            at=at,
            help=_one_optimizer(made),
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
            code="BX2157",
            at=at,
            help="give an optimizer whose step() needs no argument, such as "
            "torch.optim.AdamW(named_params)",
        )
    own = {id(p) for p in params.values()}
    if not any(id(p) in own for group in made.param_groups for p in group["params"]):
        raise InputError(
            f"the {kind} of optimizer(named_params) holds none of the parameters it was given",
            code="BX2158",
            at=at,
            notes=("a bundle has parameters of its own, by the names of the model's",),
            help="take the parameters from named_params: torch.optim.AdamW(named_params)",
        )
    if any("lr" not in group for group in made.param_groups):
        raise InputError(
            f"the groups of {kind} have no 'lr', which a bundle scales",
            code="BX2159",
            at=at,
            help="give an optimizer with a learning rate, such as torch.optim.AdamW(named_params)",
        )


def place_of(make: Make) -> str:
    """Return where the function is written, by file and line."""
    code = getattr(make, "__code__", None)
    return f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}" if code else "optimizer"


# --------------------------------------------------------------------------- made-up numbers


def shapes_of(params: Mapping[str, nn.Parameter]) -> dict[str, Shape]:
    """Return the parameters' shapes; of a large model with every dimension cut."""
    most = max((size for p in params.values() for size in p.shape), default=1)
    while sum(_count(p.shape, most) for p in params.values()) > MOST_NUMBERS and most > 1:
        most //= 2
    return {
        name: Shape(tuple(min(size, most) for size in p.shape), p.dtype)
        for name, p in params.items()
    }


def _count(shape: Sequence[int], most: int) -> int:
    return math.prod(min(size, most) for size in shape)


def numbers_of(name: str, shape: Shape) -> Tensor:
    """Return numbers that only the name and the shape decide."""
    dice = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(_NOISE, generator=dice, dtype=wide_type(shape.dtype))
    count = math.prod(shape.size)
    return noise.repeat(-(-count // _NOISE))[:count].reshape(shape.size).to(shape.dtype)


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Return float64, or what it is for complex numbers."""
    return torch.complex128 if dtype.is_complex else torch.float64


@contextmanager
def dice_kept() -> Iterator[None]:
    """Leave the caller's random numbers and its gradient mode as they are."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        yield


def apart(one: Tensor, other: Tensor) -> Tensor:
    """Return the difference; NaN and infinity equal themselves."""
    same = (one == other) | ((one != one) & (other != other))
    return torch.where(same, torch.zeros_like(one), one - other)


def cut_short(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Cut every dimension to a few numbers."""
    return {n: Shape(tuple(min(size, _FEW) for size in s.size), s.dtype) for n, s in shapes.items()}
