"""A trial of the user's optimizer: a few steps on made-up numbers and gradients.

Numbers are drawn by the names of parameters. Shapes are the model's own up to 16 million numbers.
In a larger model every dimension is cut to one length, so that as many numbers are left. This file
knows the contract for `optimizer`; it compares no trials.
"""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from bigbrain_fx.frontend.tracing.executor.tolerance import distance
from bigbrain_fx.frontend.tracing.optimizers.refusals import (
    FREEZES,
    HOLDS_NONE,
    NEEDS_ARGUMENTS,
    NO_OPTIMIZER,
    SETS_HOOK,
    TOUCHES,
    WRITES,
)
from bigbrain_fx.runtime import (
    optimizer_facts,
    optimizer_tensors,
    restore_optimizer,
)

MOST_NUMBERS = 16_000_000
ALIKE = 1e-9  # of a parameter's largest update, in float64
_STEPS = 3
_STEADY = 7  # a rate that an optimizer finds itself begins to rise; odd: what turns round has moved
_FEW = 8  # the longest dimension where nothing but the state is of interest
_NOISE = 4099  # made-up numbers, which are repeated: a prime, so that rows are unlike
Make: TypeAlias = Callable[..., Any]  # named parameters -> an optimizer, or what acts like one
Numbers: TypeAlias = dict[str, Tensor]
Cut: TypeAlias = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """A parameter as the trial has it."""

    size: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Gradients:
    """Gradients for which an optimizer may skip a step, or raise its rate.

    Attributes:
        when: description of the gradients.
        ours, others: factors on one device's gradients, and on all other ones.
        steady: whether all steps have the first one's.
        turning: the gradients that change sign with each step: "ours" or "others".
    """

    when: str = ""
    ours: float = 1.0
    others: float = 1.0
    steady: bool = False
    turning: str = ""

    @property
    def steps(self) -> int:
        """How many steps show it."""
        return _STEADY if self.steady else _STEPS

    def of(self, name: str, shape: Shape, step: int, is_ours: bool) -> Tensor:
        """Return a parameter's gradient at a step."""
        drawn = numbers_of(f"{0 if self.steady else step} {name}", shape)
        turned = self.turning == ("ours" if is_ours else "others")
        factor = (self.ours if is_ours else self.others) * (-1.0 if turned and step % 2 else 1.0)
        return drawn if factor == 1.0 else drawn * factor


USUAL = Gradients()
ODD = (  # a device's are tiny beside large ones of others: whatever a limit is, it lies between
    Gradients("are huge", 1e6, 1e6),
    Gradients("are tiny", 1e-9, 1e-9),
    Gradients("of the others are huge", 1e-6, 1e6),
    Gradients("of the others are tiny", 1e6, 1e-9),
    Gradients("of the others are not finite", 1e-6, math.inf),
    Gradients("stay the same from step to step", steady=True),
    Gradients("of the others turn round at each step", others=1e3, steady=True, turning="others"),
    Gradients(
        "turn round at each step, and those of the others do not",
        others=1e3,
        steady=True,
        turning="ours",
    ),
)


class Trial:
    """An optimizer of the user's, and parameters of made-up numbers.

    Args:
        make: `optimizer` of the model file.
        shapes: of all parameters.
        names: of the parameters that the optimizer gets.
        cut: takes the optimizer's part of a parameter's numbers, and of its gradients.
    """

    def __init__(
        self,
        make: Make,
        shapes: Mapping[str, Shape],
        names: Sequence[str],
        cut: Cut | None = None,
    ) -> None:
        self.make, self.shapes, self.cut = make, shapes, cut or _whole
        self.params = {n: nn.Parameter(self._start(n)) for n in names}
        self.made = make(list(self.params.items()))
        self.count = 0
        self._require_untouched()
        _require_usable(self.made, self.params, place_of(make))

    def step(self, given: Gradients = USUAL, ours: Collection[str] = ()) -> None:
        """Give every parameter a gradient, and update."""
        for name, parameter in self.params.items():
            made_up = given.of(name, self.shapes[name], self.count, name in ours)
            parameter.grad = self.cut(name, made_up)
        self.count += 1
        self.made.step()

    def renew(self) -> None:
        """Let a new optimizer take over, with the state of the old one, as a bundle gives it.

        Raises:
            StateError: that state cannot be assigned to parameters.
        """
        rates = [group.get("lr") for group in self.made.param_groups]
        facts = optimizer_facts(self.made, self.params, rates)
        tensors = {n: t.clone() for n, t in optimizer_tensors(self.made, self.params).items()}
        self.made = self.make(list(self.params.items()))
        restore_optimizer(self.made, self.params, list(rates), tensors, {"optimizer": facts})

    @property
    def numbers(self) -> Numbers:
        """The parameters."""
        return {name: parameter.detach() for name, parameter in self.params.items()}

    def _start(self, name: str) -> Tensor:
        return self.cut(name, numbers_of(name, self.shapes[name]))

    def _require_untouched(self) -> None:
        """Refuse an optimizer that changes parameters as it is built: replacements build it anew.

        Raises:
            InputError: it does.
        """
        for name, parameter in self.params.items():
            for does, instead in _touched(parameter, self._start(name)):
                raise TOUCHES.error(place_of(self.make), does=does, name=name, instead=instead)


def _whole(_name: str, numbers: Tensor) -> Tensor:
    return numbers


def run_trial(
    make: Make,
    shapes: Mapping[str, Shape],
    names: Sequence[str],
    given: Gradients = USUAL,
    ours: Collection[str] = (),
    *,
    seed: int = 0,
    renewed_at: int | None = None,
    cut: Cut | None = None,
) -> Numbers:
    """Return the named parameters after some steps; at one of them a new optimizer takes over.

    Raises:
        StateError: the state of the old one cannot be assigned to parameters.
    """
    torch.default_generator.manual_seed(seed)
    trial = Trial(make, shapes, names, cut)
    for step in range(given.steps):
        if step == renewed_at:
            trial.renew()
        trial.step(given, ours)
    return trial.numbers


def _touched(parameter: nn.Parameter, numbers: Tensor) -> Iterator[tuple[str, str]]:
    """Yield each change of a parameter, and a remedy."""
    if not parameter.requires_grad:
        yield FREEZES
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        yield SETS_HOOK
    if distance(parameter.detach(), numbers):
        yield WRITES


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
        raise NO_OPTIMIZER.error(at, found=kind, how=_one_optimizer(made))
    needed = [name for name in needed_arguments(made.step) if name != "self"]
    if needed:  # "self": a scheduler wraps the function and not the method
        raise NEEDS_ARGUMENTS.error(at, kind=kind, needed=", ".join(needed))
    own = {id(p) for p in params.values()}
    if not any(id(p) in own for group in made.param_groups for p in group["params"]):
        raise HOLDS_NONE.error(at, kind=kind)


def needed_arguments(function: Callable[..., object]) -> list[str]:
    """Return the arguments that a function must be given by place."""
    by_place = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind in by_place]


def place_of(make: Make) -> str:
    """Return where the function is written, by file and line."""
    code = getattr(inspect.unwrap(make), "__code__", None)
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
    count = math.prod(shape.size)
    noise = torch.randn(min(count, _NOISE), generator=dice, dtype=wide_type(shape.dtype))
    return noise.repeat(-(-count // _NOISE))[:count].reshape(shape.size).to(shape.dtype)


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Return float64, or its complex counterpart."""
    return torch.complex128 if dtype.is_complex else torch.float64


def in_float64(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the same shapes, of wide numbers."""
    return {name: Shape(shape.size, wide_type(shape.dtype)) for name, shape in shapes.items()}


def cut_short(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Cut every dimension to a few numbers."""
    return {n: Shape(tuple(min(size, _FEW) for size in s.size), s.dtype) for n, s in shapes.items()}


@contextmanager
def dice_kept() -> Iterator[None]:
    """Leave the caller's random numbers and its gradient mode as they are."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        yield


def unlike(one: Numbers, other: Numbers) -> list[str]:
    """Name the parameters of one trial that another has otherwise."""
    return [name for name in one if distance(one[name], other[name])]


def relative_error(found: Tensor, want: Tensor, start: Tensor) -> float:
    """Return the largest error of an update, relative to the largest update."""
    update, error = (distance(want, other) for other in (start, found))
    if not error:
        return 0.0
    return error / update if update and math.isfinite(error) else math.inf


def worst(found: Numbers, want: Numbers, start: Numbers) -> tuple[str, float]:
    """Return the parameter with the largest error between two trials, and its `relative_error`."""
    errors = {name: relative_error(found[name], want[name], start[name]) for name in found}
    name = max(errors, key=lambda each: errors[each])
    return name, errors[name]
