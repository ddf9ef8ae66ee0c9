"""An optimizer -> its class, options and groups of parameters by name, from which devices make it.

A device calls `optimizer(named_params)` with its own parameters. An optimizer that exists already,
or that chooses by more than names and shapes (modules, identity, places in the list), cannot be
built so. It is built once for the model, and is data then.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import types
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeAlias, TypeGuard, cast

import torch
from pydantic import TypeAdapter
from torch import nn

from bigbrain_fx.core import OptimizerData, Option, ParameterGroup
from bigbrain_fx.frontend.forked import apart
from bigbrain_fx.frontend.tracing.optimizers.trial import (
    Make,
    Shape,
    cut_short,
    dice_kept,
    shapes_of,
)
from bigbrain_fx.runtime import OptimizerGroups

Names: TypeAlias = Sequence[str]
_PLAIN = (bool, int, float, str, type(None))
_OF_GROUP = ("params", "param_names", "initial_lr")  # the last is what a scheduler notes
_APART = ("state", "param_groups", "defaults", "step")  # a scheduler wraps `step`


@dataclass(frozen=True)
class GroupedOptimizer:
    """An optimizer as data, and the function that makes it."""

    data: OptimizerData
    make: OptimizerGroups

    def __call__(self, named_params: Any) -> torch.optim.Optimizer:  # noqa: ANN401  # pairs
        """Return the optimizer of some named parameters."""
        return self.make(named_params)


def for_devices(make: Make | None, model: nn.Module) -> Make | None:
    """Return the maker of a device's optimizer: the user's function, or its result, as data.

    Args:
        make: `optimizer` of the model file, called in a fork: it may write into the model.
        model: with the trained parameters.
    """
    everything = dict(model.named_parameters())  # an optimizer may have frozen ones, too
    params = {n: p for n, p in everything.items() if p.requires_grad}
    if not isinstance(make, types.FunctionType) or not params:
        return make  # a class, which takes what it is given; or data already
    said = apart(partial(_answer, make, params, everything))
    return _from_json(said["data"], _namespace(make)) if said else make


def _answer(
    make: Make, params: Mapping[str, nn.Parameter], everything: Mapping[str, nn.Parameter]
) -> Mapping[str, str]:
    """Make an optimizer of the model's own parameters; return it as data where it must be that."""
    before = _touchable(params)
    with suppress(Exception):  # the user's own code: its trial says so
        made = make(list(params.items()))
        if _touchable(params) == before and not _goes_by_names(make, params, made):
            found = as_data(made, everything, _namespace(make))
            return {"data": json.dumps(asdict(found.data))} if found else {}
    return {}


def _touchable(params: Mapping[str, nn.Parameter]) -> list[tuple[object, ...]]:
    """Return the facts that an optimizer must not change: trained flags, hooks, numbers."""
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return [
        (p.requires_grad, p._version, *(len(getattr(p, name, None) or ()) for name in hooks))
        for p in params.values()
    ]


def _namespace(make: Make) -> Mapping[str, object]:
    return getattr(inspect.unwrap(make), "__globals__", {})


def _from_json(text: str, namespace: Mapping[str, object]) -> GroupedOptimizer:
    data = TypeAdapter(OptimizerData).validate_json(text)
    scope = vars(importlib.import_module(data.module)) if data.module else namespace
    kind = scope[data.name]
    return GroupedOptimizer(data, _maker(cast("type", kind), data))


def _maker(kind: type, data: OptimizerData) -> OptimizerGroups:
    groups = [{"params": list(each.params), **each.options} for each in data.groups]
    return OptimizerGroups(kind, groups, data.options)


def as_data(
    made: Any,  # noqa: ANN401  # whatever the user made
    params: Mapping[str, nn.Parameter],
    namespace: Mapping[str, object],
    *,
    has_state: bool = False,
) -> GroupedOptimizer | None:
    """Return an optimizer as data; None where class, groups and options do not make the same.

    Args:
        made: an optimizer of some of these parameters, which has made no step.
        has_state: it may have made some: its state goes another way.
        params: by name.
        namespace: of the model file, which may define the class.
    """
    names = {id(p): name for name, p in params.items()}
    place = _place(type(made), namespace)
    if not isinstance(made, torch.optim.Optimizer) or place is None:
        return None
    if any(id(p) not in names for group in made.param_groups for p in group["params"]):
        return None
    options = {n: v for n, v in made.defaults.items() if n in _arguments(type(made))}
    groups = [_own_options(group, made.defaults) for group in made.param_groups]
    if not all(map(_is_plain, [*options.values(), *(v for own in groups for v in own.values())])):
        return None
    members = [tuple(names[id(p)] for p in group["params"]) for group in made.param_groups]
    pairs = zip(members, groups, strict=True)
    data = OptimizerData(*place, tuple(ParameterGroup(*pair) for pair in pairs), options)
    found = GroupedOptimizer(data, _maker(type(made), data))
    return found if _is_same(made, found, params, has_state) else None


def _goes_by_names(make: Make, params: Mapping[str, nn.Parameter], made: Any) -> bool:  # noqa: ANN401
    """Whether parameters of the same names and shapes, or half of them, get the same options."""
    shapes = cut_short(shapes_of(params))
    names, want = list(shapes), _options_by_name(made, params)
    try:
        return all(
            _is_alike(make, shapes, own, want) for own in (names, names[::2], names[1::2]) if own
        )
    except Exception:  # the user's own code
        return False


def is_torchs_own(make: Make, shapes: Mapping[str, Shape], parts: Collection[Names]) -> bool:
    """Whether devices build the same optimizer of torch, which updates each parameter alone.

    Args:
        make: `optimizer` of the model file.
        shapes: of all trained parameters.
        parts: names of each device's parameters.
    """
    params = _stand_ins(shapes, list(shapes))
    try:
        made = make(list(params.items()))
        found, want = as_data(made, params, {}), _options_by_name(made, params)
        is_own = found is not None and found.data.module == "torch.optim"
        is_alone = is_own and not isinstance(made, torch.optim.LBFGS)
        return is_alone and all(_is_alike(make, shapes, own, want) for own in parts)
    except Exception:  # the user's own code: its trial says so
        return False


def _is_alike(
    make: Make,
    shapes: Mapping[str, Shape],
    names: Names,
    want: Mapping[str, Mapping[str, object]],
) -> bool:
    """Whether some parameters get the options that they have among all."""
    few = _stand_ins(shapes, names)
    found = _options_by_name(make(list(few.items())), few)
    return found == {name: want[name] for name in names if name in want}


def _stand_ins(shapes: Mapping[str, Shape], names: Names) -> dict[str, nn.Parameter]:
    return {n: nn.Parameter(torch.zeros(shapes[n].size, dtype=shapes[n].dtype)) for n in names}


def _options_by_name(
    made: Any,  # noqa: ANN401  # whatever the user made
    params: Mapping[str, nn.Parameter],
) -> dict[str, dict[str, object]]:
    names = {id(p): name for name, p in params.items()}
    return {
        names[id(p)]: {n: v for n, v in group.items() if n not in _OF_GROUP and _is_plain(v)}
        for group in made.param_groups
        for p in group["params"]
        if id(p) in names
    }


def _own_options(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Option]:
    """Return the options that a group has for itself; its rate is that before any scheduler."""
    said = {**group, "lr": group["initial_lr"]} if "initial_lr" in group else group
    return {
        name: value
        for name, value in said.items()
        if name not in _OF_GROUP and not (name in defaults and defaults[name] == value)
    }


def _is_same(
    made: Any,  # noqa: ANN401
    again: Make,
    params: Mapping[str, nn.Parameter],
    has_state: bool,
) -> bool:
    """Whether a rebuilt optimizer equals the original."""
    with dice_kept():
        try:
            fresh, count = again(params.items()), 3 if has_state else 4
            return _compared(made)[:count] == _compared(fresh)[:count]
        except Exception:  # the class takes other arguments, or has tensors among its options
            return False


def _compared(made: Any) -> tuple[object, ...]:  # noqa: ANN401
    """Return groups, hooks, other attributes and state, which is empty before a step."""
    groups = [([id(p) for p in g["params"]], _own_options(g, {})) for g in made.param_groups]
    hooks = [len(each) for n, each in vars(made).items() if n.startswith("_optimizer_")]
    beside = {n: v for n, v in vars(made).items() if not n.startswith("_") and n not in _APART}
    state = [
        [t.tolist() if isinstance(t, torch.Tensor) else t for t in made.state[p].values()]
        for group in made.param_groups
        for p in group["params"]
        if p in made.state
    ]
    return groups, hooks, beside, state


def _arguments(kind: type) -> Sequence[str]:
    code = getattr(getattr(kind, "__init__", None), "__code__", None)
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ()


def _place(kind: type, namespace: Mapping[str, object]) -> tuple[str, str] | None:
    """Return module and name of a class: of torch, of the model file, or of any other module."""
    name = kind.__name__
    if getattr(torch.optim, name, None) is kind:
        return "torch.optim", name
    for own, value in namespace.items():
        if value is kind:
            return "", own
    module = sys.modules.get(kind.__module__)
    return (kind.__module__, name) if getattr(module, name, None) is kind else None


def _is_plain(value: object) -> TypeGuard[Option]:
    if isinstance(value, tuple):
        return all(type(each) in (int, float) for each in value)
    return type(value) in _PLAIN
