"""An optimizer whose groups are given by names: each device makes it of the parameters it has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class OptimizerGroups:
    """Makes an optimizer of those parameters of each group that it is given.

    Attributes:
        kind: the optimizer's class.
        groups: as `kind` takes them, with names in place of parameters; one may end up empty.
        options: keyword arguments of `kind`.
    """

    kind: Callable[..., Optimizer]
    groups: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]

    def __call__(self, named_params: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        """Return the optimizer of some parameters."""
        own = dict(named_params)
        groups = [
            {**group, "params": [own[name] for name in group["params"] if name in own]}
            for group in self.groups
        ]
        return self.kind(groups, **self.options)
