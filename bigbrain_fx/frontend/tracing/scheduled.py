"""Whether the user's scheduler may be made once per device, and made again where a device died.

It is tried before a bundle is written, on the user's optimizer: with all parameters, with those of
each device, and made anew after some steps. The hyperparameters that each parameter is updated
with must be the same. This file knows optimizers and names of parameters; it knows no graph.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.parted import require_all_stepped, require_parted
from bigbrain_fx.frontend.translation.sources import where
from bigbrain_fx.runtime import RewindableRates

_STEPS = 3
_FEW = 8  # the longest dimension: only the optimizer's groups are of interest
Make: TypeAlias = Callable[..., Any]
Hyper: TypeAlias = dict[str, dict[str, Any]]  # parameter -> what its group says


def require_made_per_device(
    model: nn.Module,
    make: Make | None,
    scheduler: Make | None,
    held: Mapping[str, Sequence[str]],
    *,
    is_scaled: bool,
    here: bool,
    by_pieces: bool = False,
) -> str | None:
    """Require that an optimizer and its scheduler can be made once per device; see `parted`.

    Args:
        model: whose parameters they are for.
        make: None: AdamW as it comes.
        scheduler: None: there is none.
        held: device -> the names of its trained parameters.
        is_scaled: whether there is a loss scale.
        here: whether the devices are of this host's kind.
        by_pieces: whether the optimizer is stepped over a few parameters at a time.

    Returns:
        Why it could not be tried, if so.

    Raises:
        InputError: they cannot.
    """
    how = {"here": here, "by_pieces": by_pieces}
    note = None if make is None else require_parted(model, make, held, **how)
    if make is not None and is_scaled and not note:
        require_all_stepped(model, make, held)
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
    made = make or torch.optim.AdamW
    everything = {name for names in held.values() for name in names}
    few = {
        name: nn.Parameter(torch.zeros([min(size, _FEW) for size in p.shape], dtype=p.dtype))
        for name, p in model.named_parameters()
        if name in everything
    }
    whole = _run(made, scheduler, few, "")
    for device, names in held.items():
        part = {name: p for name, p in few.items() if name in set(names)}
        if not part:
            continue
        for anew in (False, True):
            found = _run(made, scheduler, part, f" of device {device}", anew=anew)
            _require_alike(scheduler, found, whole, device)


def _run(
    make: Make,
    scheduler: Make,
    params: Mapping[str, nn.Parameter],
    whose: str,
    *,
    anew: bool = False,
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
        first = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"scheduler(optimizer), or a step of it, fails on the optimizer{whose}: "
            f"{type(error).__name__}: {first}",
            code="BX2146",
            at=where(error) or _place(scheduler),
            notes=("every device makes an optimizer of its own parameters, and a scheduler of it",),
            help="give a scheduler that sets rates by the number of steps, for any number of "
            "groups, such as torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)",
        ) from error


def _checked(scheduler: Make) -> Make:
    def make(optimizer: torch.optim.Optimizer) -> Any:  # noqa: ANN401  # of any kind
        made = scheduler(optimizer)
        if not callable(getattr(made, "step", None)):
            raise InputError(
                f"scheduler(optimizer) must return a scheduler, found {type(made).__name__}",
                code="BX2147",
                at=_place(scheduler),
                help="return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)",
            )
        needed = [
            p.name
            for p in inspect.signature(made.step).parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        if needed:
            raise InputError(
                f"{type(made).__name__}.step({', '.join(needed)}) cannot be called: it needs a "
                "number of the training, such as the loss, which one device alone has",
                code="BX2148",
                at=_place(scheduler),
                help="give a scheduler that sets rates by the number of steps, such as "
                "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)",
            )
        return made

    return make


def _hyper(optimizer: Any, params: Mapping[str, nn.Parameter]) -> Hyper:  # noqa: ANN401
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
            unlike = [key for key in hyper if hyper[key] != all_[name].get(key)]
            if unlike:
                key = unlike[0]
                raise InputError(
                    f"scheduler(optimizer) gives {name} at step {step} the {key} {hyper[key]!r} on "
                    f"device {device}, and {all_[name].get(key)!r} where one optimizer has all "
                    "parameters",
                    code="BX2149",
                    at=_place(scheduler),
                    help="let it depend on the number of steps alone; groups may be empty on a "
                    "device, and are in the same order on all of them",
                )


def _place(make: Make) -> str:
    code = getattr(make, "__code__", None)
    return f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}" if code else "scheduler"
