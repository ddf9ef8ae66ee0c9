"""Whether an optimizer goes by a count that no state of it holds: lost where a device is replaced.

    two of a kind, step by step; the counters of one moved on by 50, 1000 steps: the same updates?

Lookahead counts to its k in an attribute, a warm-up ends after a thousand steps: three trial steps
see neither. This file steps the user's optimizer on made-up numbers; it knows no graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.counters import Decision, look, moves, moving
from bigbrain_fx.frontend.tracing.trial import (
    Make,
    Shape,
    apart,
    numbers_of,
    place_of,
)

_KEPT = ("state", "param_groups")  # what a bundle keeps of an optimizer


def require_counts_kept(make: Make, shapes: Mapping[str, Shape]) -> None:
    """Refuse an optimizer that updates otherwise when it has made more steps than its state says.

    Args:
        make: `optimizer` of the model file.
        shapes: of its parameters, small ones.

    Raises:
        InputError: names what it counts.
    """
    try:
        found = _decision(_Trial.of(make, shapes), _Trial.of(make, shapes))
    except Exception:
        return  # it wants the shapes that it is made for; others say what is wrong with it
    if found is not None:
        raise InputError(
            f"optimizer(named_params) goes by {found.name}, which moves with each step and is in "
            f"no state of a parameter: {found.runs} steps later the same gradients give other "
            "updates, and a process that replaces a dead one begins to count anew",
            code="BX2124",
            at=place_of(make),
            help="count in a group or for each parameter: group['calls'] = group.get('calls', 0) + "
            "1, or self.state[p]['calls']; rates go by scheduler(optimizer) or lr_scale(step)",
        )


@dataclass
class _Trial:
    """An optimizer and made-up parameters; it has made so many steps."""

    made: Any
    params: Mapping[str, nn.Parameter]
    steps: int = 0

    @staticmethod
    def of(make: Make, shapes: Mapping[str, Shape]) -> _Trial:
        params = {name: nn.Parameter(numbers_of(name, shape)) for name, shape in shapes.items()}
        return _Trial(make(list(params.items())), params)

    def step(self) -> None:
        for name, parameter in self.params.items():
            shape = Shape(tuple(parameter.shape), parameter.dtype)
            parameter.grad = numbers_of(f"{self.steps} {name}", shape)
        self.steps += 1
        self.made.step()

    def is_like(self, other: _Trial) -> bool:
        pairs = ((p, other.params[name]) for name, p in self.params.items())
        return not any(bool(apart(one.detach(), two.detach()).any()) for one, two in pairs)


def _decision(one: _Trial, other: _Trial) -> Decision | None:
    kept = [getattr(other.made, name, None) for name in _KEPT]
    looks = []
    for _ in range(3):  # what begins to count is there after the first
        one.step()
        other.step()
        looks.append(look((other.made,), kept))
    counters = moving(*looks)
    for runs, change, times in moves() if counters else ():
        for counter in counters:
            change(counter)
        for _ in range(times):
            one.step()
            other.step()
            if not one.is_like(other):
                return Decision(counters[0].place.name, runs)
    return None
