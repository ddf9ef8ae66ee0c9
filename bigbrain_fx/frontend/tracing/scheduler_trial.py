"""A trial of the user's scheduler: one that steps without a number of the training.

Whether it gives each device the rates of the whole, a rehearsal shows. This file knows the contract
for `scheduler`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.refusal import Refusal
from bigbrain_fx.frontend.tracing.optimizer_trial import (
    cut_short,
    needed_arguments,
    place_of,
    shapes_of,
)
from bigbrain_fx.frontend.translation.sources import where

_STEPS = 3
Make: TypeAlias = Callable[..., Any]
_BY_STEPS = "such as torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)"

FAILS = Refusal(
    "scheduler(optimizer), or a step of it, fails: {error}",
    code="BX2146",
    help=f"give a scheduler that sets rates by the number of steps, {_BY_STEPS}",
)
NO_SCHEDULER = Refusal(
    "scheduler(optimizer) must return a scheduler, found {kind}",
    code="BX2147",
    help="return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)",
)
NEEDS_NUMBER = Refusal(
    "{kind}.step({needed}) cannot be called: it needs a number of the training, such as the loss, "
    "which one device alone has",
    code="BX2148",
    help=f"give a scheduler that sets rates by the number of steps, {_BY_STEPS}",
)


def require_scheduler(trained: Mapping[str, nn.Parameter], make: Make | None, own: Make) -> None:
    """Step a scheduler on the optimizer of all trained parameters.

    Args:
        trained: of them only names, shapes and types are looked at.
        make: `optimizer` of the model file; None: AdamW as it comes.
        own: `scheduler` of the model file.

    Raises:
        InputError: it fails, wants a metric, or is none.
    """
    shapes = cut_short(shapes_of(trained))
    few = [(n, nn.Parameter(torch.zeros(s.size, dtype=s.dtype))) for n, s in shapes.items()]
    try:
        made = own((make or torch.optim.AdamW)(few))
        _require_steps(made, place_of(own))
        with warnings.catch_warnings():  # nothing is updated here
            warnings.simplefilter("ignore")
            for _ in range(_STEPS):
                made.step()
    except InputError:
        raise
    except Exception as error:  # the user's own code
        said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise FAILS.error(where(error) or place_of(own), error=said) from error


def _require_steps(made: Any, at: str) -> None:  # noqa: ANN401  # of any kind
    kind = type(made).__name__
    if not callable(getattr(made, "step", None)):
        raise NO_SCHEDULER.error(at, kind=kind)
    needed = needed_arguments(made.step)
    if needed:
        raise NEEDS_NUMBER.error(at, kind=kind, needed=", ".join(needed))
