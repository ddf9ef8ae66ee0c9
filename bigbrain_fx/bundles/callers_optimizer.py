"""Options of the caller's own optimizer, which a loop changes as training goes on.

    scheduler.step(validation_loss)  ──▶  group["lr"]  ──▶  an entry of the next batch  ──▶  devices

A scheduler of the caller's sets them, or a plain assignment; the optimizer itself makes no step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from bigbrain_fx.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

OF_OPTIMIZER = "optimizer."  # as in runtime/feeding.py
_NO_OPTIONS = ("params", "param_names", "initial_lr")
_Options: TypeAlias = list[dict[str, Any]]


class CallersOptimizer:
    """Changes that the caller's loop makes in an optimizer's groups.

    Args:
        optimizer: the caller's; the devices have an identical one.
        is_set_there: functions on the devices set its rates.
    """

    def __init__(self, optimizer: Optimizer, *, is_set_there: bool) -> None:
        self.optimizer, self.is_set_there = optimizer, is_set_there
        vars(optimizer)["_opt_called"] = True  # the devices' own step: a scheduler asks for one
        rates = [
            {"lr": g["initial_lr"]} if "initial_lr" in g else {} for g in optimizer.param_groups
        ]
        pairs = zip(self._now(), rates, strict=True)
        self._first = [{**options, **rate} for options, rate in pairs]  # as the devices have them
        self._moved: set[str] = set()  # options that were others at some time

    def entries(self) -> dict[str, Tensor]:
        """Return the options that devices set for the next step, by the name of an entry.

        Raises:
            InputError: an option has changed that cannot be sent, or that is set there.
        """
        import torch

        now = self._now()
        if now != self._first:
            self._note(now)
        return {
            f"{OF_OPTIMIZER}{name}": torch.tensor([g[name] for g in now], dtype=torch.float64)
            for name in sorted(self._moved)
        }

    def _note(self, now: _Options) -> None:
        if len(now) != len(self._first) or any(
            one.keys() != other.keys() for one, other in zip(now, self._first, strict=True)
        ):
            raise InputError(
                "the optimizer has other groups than when the devices made theirs",
                code="BX3190",
                help="give it all its groups before, those that train later with lr=0.0",
            )
        pairs = zip(now, self._first, strict=True)
        moved = {name for one, other in pairs for name in one if one[name] != other[name]}
        for name in sorted(moved - self._moved):
            self._require_sendable(name, now)
        self._moved |= moved

    def _require_sendable(self, name: str, now: _Options) -> None:
        if self.is_set_there:
            raise InputError(
                f"the loop has set the optimizer's {name}, and lr_scale or scheduler, given to "
                "machine(...), sets it on the devices",
                code="BX3191",
                help="leave one of them out",
            )
        if not all(name in group and _is_numbers(group[name]) for group in now):
            raise InputError(
                f"the loop has set the optimizer's {name} to {now[0].get(name)!r}, which is no "
                "number: devices hear of numbers alone",
                code="BX3192",
                help="set it before the session begins",
            )

    def _now(self) -> _Options:
        return [_options(group) for group in self.optimizer.param_groups]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in group.items() if name not in _NO_OPTIONS}
    return {name: _plain(value) for name, value in found.items()}


def _plain(value: Any) -> Any:  # noqa: ANN401  # of any optimizer
    """Return a value that a later change does not touch: the number of a rate that is a tensor."""
    return value.item() if hasattr(value, "item") else value


def _is_numbers(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_numbers, value))
    return isinstance(value, int | float) and not isinstance(value, bool)
