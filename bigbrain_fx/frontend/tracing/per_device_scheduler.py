"""Whether the user's scheduler may be made once a device, and made again where a device died.

It is tried before a bundle is written, on the user's optimizer: with all parameters, with those of
each device, and made anew after some steps. The hyperparameters that each parameter is updated
with must be the same. This file knows optimizers and names of parameters; it knows no graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
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
from bigbrain_fx.frontend.tracing.per_device_optimizer import require_per_device
from bigbrain_fx.frontend.translation.sources import where
from bigbrain_fx.runtime import RewindableRates

_STEPS = 3
Make: TypeAlias = Callable[..., Any]
Params: TypeAlias = Mapping[str, nn.Parameter]
Hyper: TypeAlias = dict[str, dict[str, Any]]  # parameter -> what its group says
_BY_STEPS = "such as torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)"

FAILS = Refusal(
    "scheduler(optimizer), or a step of it, fails on the optimizer{whose}: {error}",
    code="BX2146",
    notes=("every device makes an optimizer of its own parameters, and a scheduler of it",),
    help=f"give a scheduler that sets rates by the number of steps, for any number of groups, "
    f"{_BY_STEPS}",
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
OTHER_RATES = Refusal(
    "scheduler(optimizer) gives {name} at step {step} the {key} {found!r} on device {device}, and "
    "{want!r} where one optimizer has all parameters",
    code="BX2149",
    help="let it depend on the number of steps alone; groups may be empty on a device, and are in "
    "the same order on all of them",
)


def require_made_per_device(
    model: nn.Module,
    make: Make | None,
    scheduler: Make | None,
    held: Mapping[str, Sequence[str]],
    *,
    here: bool,
    by_pieces: bool = False,
) -> str | None:
    """Require that an optimizer and its scheduler can be made once a device.

    Args:
        model: whose parameters they are for.
        make: None: AdamW as it comes.
        scheduler: None: there is none.
        held: device -> the names of its trained parameters.
        here: whether the devices are of this host's kind.
        by_pieces: whether the optimizer is stepped over a few parameters at a time.

    Returns:
        Why it could not be tried, if so.

    Raises:
        InputError: they cannot.
    """
    how = {"here": here, "by_pieces": by_pieces}
    note = None if make is None else require_per_device(model, make, held, **how)
    if scheduler is not None and not note:
        require_scheduled(model, make, scheduler, held)
    return note


def require_scheduled(
    model: nn.Module, make: Make | None, scheduler: Make, held: Mapping[str, Sequence[str]]
) -> None:
    """Try a scheduler on the optimizer of all parameters, and on those of each device.

    Raises:
        InputError: it fails, wants a metric, or gives a device other rates than all of them.
    """
    everything = {name for names in held.values() for name in names}
    shapes = cut_short(shapes_of({n: p for n, p in model.named_parameters() if n in everything}))
    few = {n: nn.Parameter(torch.zeros(s.size, dtype=s.dtype)) for n, s in shapes.items()}
    made = make or torch.optim.AdamW
    whole = _run(made, scheduler, few, "")
    for device, names in held.items():
        part = {name: p for name, p in few.items() if name in set(names)}
        for anew in (False, True) if part else ():
            found = _run(made, scheduler, part, f" of device {device}", anew=anew)
            _require_alike(scheduler, found, whole, device)


def _run(
    make: Make, scheduler: Make, params: Params, whose: str, *, anew: bool = False
) -> list[Hyper]:
    """Return the hyperparameters of each parameter at some steps.

    Raises:
        InputError: the user's code fails there.
    """
    try:
        optimizer = make(list(params.items()))
        rates = RewindableRates(optimizer, scheduler=_checked(scheduler))
        seen = []
        with warnings.catch_warnings():  # nothing is updated here
            warnings.simplefilter("ignore")
            for step in range(_STEPS):
                if anew:
                    rates.rewind(step)
                seen.append(_hyper(optimizer, params))
                rates.advance()
        return seen
    except InputError:
        raise
    except Exception as error:  # the user's own code
        said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise FAILS.error(where(error) or place_of(scheduler), whose=whose, error=said) from error


def _checked(scheduler: Make) -> Make:
    def make(optimizer: torch.optim.Optimizer) -> Any:  # noqa: ANN401  # of any kind
        made = scheduler(optimizer)
        kind = type(made).__name__
        if not callable(getattr(made, "step", None)):
            raise NO_SCHEDULER.error(place_of(scheduler), kind=kind)
        needed = needed_arguments(made.step)
        if needed:
            raise NEEDS_NUMBER.error(place_of(scheduler), kind=kind, needed=", ".join(needed))
        return made

    return make


def _hyper(optimizer: Any, params: Params) -> Hyper:  # noqa: ANN401
    name_of = {id(p): name for name, p in params.items()}
    return {
        name_of[id(p)]: {
            k: _number(v) for k, v in group.items() if k not in ("params", "param_names")
        }
        for group in optimizer.param_groups
        for p in group["params"]
        if id(p) in name_of
    }


def _number(value: Any) -> Any:  # noqa: ANN401  # of any optimizer
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _require_alike(
    scheduler: Make, found: Sequence[Hyper], whole: Sequence[Hyper], device: str
) -> None:
    for step, (mine, all_) in enumerate(zip(found, whole, strict=True)):
        for name, hyper in mine.items():
            for key in (key for key in hyper if hyper[key] != all_[name].get(key)):
                two = {"found": hyper[key], "want": all_[name].get(key)}
                about = {"name": name, "step": step, "key": key, "device": device}
                raise OTHER_RATES.error(place_of(scheduler), **about, **two)
