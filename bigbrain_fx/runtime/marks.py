"""Attributes of the user's own on parameters, as an optimizer may choose by them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer


def marking(
    marks: Mapping[str, Mapping[str, Any]],
    make: Callable[[list[tuple[str, nn.Parameter]]], Optimizer],
) -> Callable[[list[tuple[str, nn.Parameter]]], Optimizer]:
    """Return what gives parameters their attributes before it makes an optimizer of them.

    Args:
        marks: the user's own attributes of parameters, by name: `_no_weight_decay`, say.
        make: `optimizer` of the model file.
    """

    @functools.wraps(make)
    def made(named: list[tuple[str, nn.Parameter]]) -> Optimizer:
        for name, parameter in (named := list(named)):
            vars(parameter).update(marks.get(name, {}))
        return make(named)

    return made
