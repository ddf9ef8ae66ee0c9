"""An optimizer's step over a few of its parameters at a time: the updates of one step over all.

    step of all     group: calls 7 ──▶ 8        piece of it   calls 7 ──▶ 8, the next 7 ──▶ 8, ...

The optimizer updates each parameter once in any case. A count of a group would grow once a piece:
each piece therefore finds the group's numbers as the step began. If the pieces end with different
numbers, the numbers depend on which parameters were stepped, and those of one step over all are
unknown.

Copied into bundles that offload state. The module knows no store.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .optimizer_state import NOT_HYPER, StateError

Group = dict[str, Any]


def pieces(optimizer: torch.optim.Optimizer) -> Iterator[list[nn.Parameter]]:
    """Yield parameters in groups of at most the largest one's bytes, so that one is the most."""
    params: Sequence[nn.Parameter] = [p for g in optimizer.param_groups for p in g["params"]]
    most = max((parameter.nbytes for parameter in params), default=0)
    piece: list[nn.Parameter] = []
    for parameter in params:
        if piece and sum(p.nbytes for p in piece) + parameter.nbytes > most:
            yield piece
            piece = []
        piece.append(parameter)
    if piece:
        yield piece


@contextmanager
def only(optimizer: torch.optim.Optimizer, piece: Sequence[nn.Parameter]) -> Iterator[list[Group]]:
    """Let an optimizer know some of its parameters, and their groups, for a while."""
    wanted = {id(parameter) for parameter in piece}
    groups = optimizer.param_groups
    before = [group["params"] for group in groups]
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) in wanted]
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield optimizer.param_groups
    finally:
        optimizer.param_groups = groups
        for group, params in zip(groups, before, strict=True):
            group["params"] = params


class OncePerStep:
    """The numbers of an optimizer's groups in one step, however many pieces it is made in."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._before = {id(group): _numbers(group) for group in groups}
        self._after: dict[int, Mapping[str, Any]] = {}

    @contextmanager
    def piece(self, groups: Sequence[Group]) -> Iterator[None]:
        """Let some groups be as the step began; they end as after every other piece of them.

        Raises:
            StateError: they do not.
        """
        for group in groups:
            _put(group, self._before[id(group)])
        yield
        for group in groups:
            found = _numbers(group)
            known = self._after.setdefault(id(group), found)
            unlike = [k for k in (*found, *known) if not _is_same(found.get(k), known.get(k))]
            if unlike:
                key = unlike[0]
                raise StateError(
                    f"the optimizer's step leaves {key!r} of a group as {found.get(key)} after "
                    f"some parameters and {known.get(key)} after others: it depends on all of "
                    "them, and with --offload state it is stepped over a few at a time: keep it "
                    "for each parameter (self.state[p]), or split without --offload state",
                    code="BX5174",
                )


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a group holds beside its parameters; a copy of what can be written in place."""
    return {
        key: copy.deepcopy(value) if isinstance(value, Tensor | list | dict) else value
        for key, value in group.items()
        if key not in NOT_HYPER
    }


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other) or (one != one and other != other)  # not a number is itself


def _put(group: Group, numbers: Mapping[str, Any]) -> None:
    for key in group.keys() - numbers.keys() - set(NOT_HYPER):
        del group[key]
    group.update(_numbers(numbers))
