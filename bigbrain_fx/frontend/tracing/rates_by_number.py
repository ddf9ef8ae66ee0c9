"""Whether `lr_scale(step)` goes by the step alone: a device that is replaced asks anew."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable

import torch

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.dice import random_state_kept

_STEPS = 4

LrScale = Callable[[int], float]


def require_rates_by_number(lr_scale: LrScale) -> None:
    """Refuse an `lr_scale` that gives other rates when it is asked again.

    Raises:
        InputError: it counts its calls, or draws.
    """
    first, again = _rates(lr_scale), _rates(lr_scale)
    for step, (one, other) in enumerate(zip(first, again, strict=False)):
        if one != other:
            raise InputError(
                f"lr_scale({step}) is {one:.6g} first and {other:.6g} when it is asked again: "
                "every device asks for itself, and one that replaces a dead one begins anew",
                code="BX2151",
                at=_place(lr_scale),
                help="let it go by its argument alone: def lr_scale(step): return min(1.0, (step + "
                "1) / 100)",
            )


def _rates(lr_scale: LrScale) -> list[float]:
    """Return the first rates; nothing where it raises, which whoever runs the bundle is told."""
    with random_state_kept(), torch.random.fork_rng(devices=[]), contextlib.suppress(Exception):
        return [float(lr_scale(step)) for step in range(_STEPS)]
    return []


def _place(function: Callable[..., object]) -> str | None:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}" if code else None
