"""Whether the user's optimizer chooses parameters by names and shapes, or by the objects they are.

A bundle gives it parameters of its own, of the same names: a list of the model's that the file has
kept holds none of them, and each would be in the group for the rest. So it is made twice, of the
model's own and of others, and what it says of each is compared. Nothing is stepped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.blank import is_blank
from bigbrain_fx.frontend.tracing.optimizer_trial import Make, place_of

Said: TypeAlias = dict[str, dict[str, object]]  # of a parameter: lr, weight_decay, ...
_PLAIN = (bool, int, float, str, tuple, type(None))


def require_named(make: Make, trained: Mapping[str, nn.Parameter]) -> None:
    """Try it with the model's own parameters, and with others of their names, shapes and types.

    Where the weights have no numbers here, an optimizer that copies them would fill the memory with
    their zeros: it is not tried.

    Raises:
        InputError: a parameter is in another group, or in none.
    """
    if any(map(is_blank, trained.values())):
        return
    try:
        own = _said(make, trained)
        other = _said(make, {name: _like(p) for name, p in trained.items()})
    except Exception:  # it looks at numbers: the trials beside this one have some
        return
    unlike = [name for name in trained if own.get(name) != other.get(name)]
    if unlike:
        raise _by_object(make, unlike, own, other)


def _by_object(make: Make, unlike: Sequence[str], own: Said, other: Said) -> InputError:
    name = unlike[0]
    more = f" (and {len(unlike) - 1} more)" if len(unlike) > 1 else ""
    return InputError(
        "optimizer(named_params) chooses parameters by the objects that they are: of the model's "
        f"own, {name}{more} has {_differing(own.get(name), other.get(name))}; of others with their "
        f"names and shapes, {_differing(other.get(name), own.get(name))}",
        code="BX2126",
        at=place_of(make),
        notes=("a bundle's devices have parameters of their own, of the same names",),
        help="choose by the names that it is given: [p for name, p in named_params if "
        f"name == {name!r}]",
    )


def _differing(one: Mapping[str, object] | None, other: Mapping[str, object] | None) -> str:
    """Say what a parameter has that it has otherwise there."""
    if one is None:
        return "no group"
    if other is None:
        return "a group"
    return ", ".join(f"{key} {one[key]!r}" for key in one if one[key] != other.get(key))


def _like(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"))


def _said(make: Make, named: Mapping[str, nn.Parameter]) -> Said:
    """Return what groups say of each parameter that is in one."""
    name_of = {id(p): name for name, p in named.items()}
    return {
        name_of[id(p)]: {
            key: value
            for key, value in group.items()
            if key != "params" and isinstance(value, _PLAIN)
        }
        for group in make(list(named.items())).param_groups
        for p in group["params"]
    }
