"""The user's step: the way of a batch into the model, and its loss."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from bigbrain_fx.frontend.tracing.export import uncompiled
from bigbrain_fx.frontend.tracing.step import Loss, Route, parameters_of
from bigbrain_fx.runtime import loss_in

Call: TypeAlias = tuple[str | int, ...]
"""How a batch reaches `forward`: whole; all entries of a dict, or those so named; the first ones.

("whole",), ("all",), ("named", "x", "mask"), ("first", 2)
"""
Way = Literal["whole", "all", "named", "first"]


def call_of(model: nn.Module, batch: object, how: Route) -> Call:
    """Return how batches reach a model; of a dict by all names that its forward knows.

    Args:
        model: the user's.
        batch: the example.
        how: how the example reaches it.
    """
    if how.whole:
        return ("whole",)
    if not isinstance(batch, Mapping):
        return "first", how.positions
    parameters = parameters_of(model)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return ("all",)
    return "named", *(parameter.name for parameter in parameters)


@dataclass(frozen=True)
class UserStep:
    """Model and loss, called as the user's own loop calls them."""

    model: nn.Module
    loss: Loss | None
    call: Call
    autocast: str | None = None

    def loss_of(self, batch: object) -> Tensor:
        """Run forward and loss on a batch.

        Raises:
            ValueError: there is no loss to call `backward()` on.
        """
        with uncompiled(), self._cast():
            output = self._output(batch)
            given: object = self.loss(output, batch) if self.loss else output
            found = loss_in(given)
        if not isinstance(found, Tensor) or found.numel() != 1 or not found.requires_grad:
            found_there = _shown(given if found is None else found)
            raise ValueError(f"expected one number with a gradient as loss, found {found_there}")
        return found

    def _output(self, batch: Any) -> object:  # noqa: ANN401  # a nest of any kind
        way, *more = self.call
        if way == "whole":
            return self.model(batch)
        if way == "first":
            return self.model(*batch[: cast("int", more[0])])
        names = batch if way == "all" else [name for name in more if name in batch]
        return self.model(**{str(name): batch[name] for name in names})

    def _cast(self) -> contextlib.AbstractContextManager[object]:
        if self.autocast is None:
            return contextlib.nullcontext()
        device = next((p.device.type for p in self.model.parameters()), "cpu")
        return torch.autocast(device, dtype=getattr(torch, self.autocast))


def _shown(found: object) -> str:
    if not isinstance(found, Tensor):
        return type(found).__name__
    return f"shape {tuple(found.shape)}" + " without a gradient" * (not found.requires_grad)
