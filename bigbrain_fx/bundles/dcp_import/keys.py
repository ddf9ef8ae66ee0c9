"""The keys of a distributed checkpoint -> a model's tensors, and its optimizer's by parameter name.

    model.NAME, or NAME                         a state dict of the model, where it is found whole
    optimizer.state.NAME.exp_avg                as get_optimizer_state_dict names them
    optimizer.param_groups.0.lr, ... .params    groups by number, each with its names; or
    optimizer.param_groups.NAME.lr              flattened: by name

What comes before these is the user's own. This file knows keys; it reads no tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bigbrain_fx.bundles.dcp_import.reading import DistributedCheckpoint, SpreadTensor
from bigbrain_fx.errors import InputError
from bigbrain_fx.weights import names_in

_HELP = (
    'save {"model": m, "optimizer": o, "step": N} with m, o = '
    "torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer)"
)


@dataclass(frozen=True)
class OptimizerKeys:
    """Keys of an optimizer in a checkpoint.

    Attributes:
        tensors: (kind, parameter) -> the tensor, those with dimensions.
        facts: hyperparameters, and numbers by parameter, in the form of a commit's.
    """

    tensors: Mapping[tuple[str, str], SpreadTensor]
    facts: Mapping[str, Any]


def model_tensors(
    found: DistributedCheckpoint, names: Collection[str]
) -> Mapping[str, SpreadTensor]:
    """Return the state dict of the model: where most of its names are, by the names there."""
    of_optimizer = {key for key, *_ in _after("state", found, names)}
    groups: dict[tuple[str | int, ...], dict[str, SpreadTensor]] = {}
    for key, tensor in found.tensors.items():
        if key not in of_optimizer:
            *place, name = found.paths[key]
            groups.setdefault(tuple(place), {})[str(name)] = tensor
    wanted = list(names)
    best = max(groups, key=lambda at: (len(names_in(wanted, groups[at])), len(at)), default=None)
    return {} if best is None else groups[best]


def optimizer_keys(found: DistributedCheckpoint, names: Mapping[str, str]) -> OptimizerKeys:
    """Return the state of an optimizer.

    Raises:
        InputError: there is none, or not by parameter name.
    """
    tensors: dict[tuple[str, str], SpreadTensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for key, name, kind in _after("state", found, names):
        own = scalars.setdefault(names[name], {})
        if key in found.tensors and found.tensors[key].shape:
            tensors[kind, names[name]] = found.tensors[key]
        else:
            own[kind] = _value(found, key)
    hyper, of = _groups(found, names)
    if not of:
        raise InputError(
            "the checkpoint has no optimizer's state by parameter name",
            code="BX3733",
            at=str(found.path),
            help=f"{_HELP}; weights alone: `bigbrain-fx load BUNDLE --from {found.path}`",
        )
    facts = {"class": None, "hyper": hyper, "of": of, "scalars": scalars}
    return OptimizerKeys(tensors, {**facts, "strides": {}, "on_cpu": []})


def finished_steps(
    found: DistributedCheckpoint, optimizer: OptimizerKeys, names: Collection[str]
) -> int:
    """Return after how many steps it was written: what it calls "step", or what the optimizer does.

    Raises:
        InputError: nothing says it, or two places differ.
    """
    keys = [key for key, path in found.paths.items() if path[-1] == "step" and len(path) < 3]
    said = {_number(_value(found, key)) for key in keys if "step" not in names}
    counted = {_number(own["step"]) for own in optimizer.facts["scalars"].values() if "step" in own}
    steps = said or counted
    (step,) = steps if len(steps) == 1 else (None,)
    if step is None or step < max((n for n in counted if n is not None), default=0):
        raise InputError(
            f"how many steps are done: the checkpoint's step is {_listed(said)}, "
            f"the optimizer's {_listed(counted)}",
            code="BX3734",
            at=str(found.path),
            help='save {"model": ..., "optimizer": ..., "step": N}',
        )
    return int(step)


def _listed(found: Collection[object]) -> str:
    return " and ".join(sorted(map(str, found))) or "not there"


def _after(
    word: str, found: DistributedCheckpoint, names: Collection[str]
) -> Iterator[tuple[str, str, str]]:
    """Yield (key, NAME, KIND) of keys ...WORD.NAME.KIND: one of the names, or a group's number."""
    for key in (*found.tensors, *found.values):
        parts = key.split(".")
        for number in [i for i, part in enumerate(parts) if part == word and key not in names]:
            name = ".".join(parts[number + 1 : -1])
            if name in names or (word == "param_groups" and name.isdigit()):
                yield key, name, parts[-1]
                break


def _groups(
    found: DistributedCheckpoint, names: Mapping[str, str]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return hyperparameters, equal ones once, and which of them each parameter has."""
    groups: dict[str, dict[str, Any]] = {}
    for key, group, kind in _after("param_groups", found, names):
        groups.setdefault(group, {})[kind] = _value(found, key)
    table: dict[str, int] = {}
    of = {}
    for group, own in groups.items():
        held = own.pop("params", [group])
        own.pop("param_names", None)
        entry = {"base_lr": own.get("initial_lr", own.get("lr")), "group": own}
        number = table.setdefault(json.dumps(entry, sort_keys=True), len(table))
        of.update({names[name]: number for name in held if name in names})
    return [json.loads(entry) for entry in table], of


def _number(value: object) -> int | float | None:
    found = value["tensor"] if isinstance(value, dict) and "tensor" in value else value
    return found if isinstance(found, int | float) else None


def _value(found: DistributedCheckpoint, key: str) -> Any:  # noqa: ANN401  # JSON
    tensor = found.tensors.get(key)
    if tensor is None:
        return _encoded(found.value(key), key, found)
    if tensor.shape:
        raise _no_data(key, f"a {tensor.dtype} of shape {tensor.shape}", found)
    number = tensor.whole().item()
    return {"tensor": _encoded(number, key, found), "dtype": tensor.dtype_name}


def _encoded(value: object, key: str, found: DistributedCheckpoint) -> Any:  # noqa: ANN401  # JSON
    """Return a value as a commit's facts have it."""
    if isinstance(value, tuple | list):
        parts = [_encoded(part, key, found) for part in value]
        return {"tuple": parts} if isinstance(value, tuple) else parts
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise _no_data(key, type(value).__name__, found)


def _no_data(key: str, what: str, found: DistributedCheckpoint) -> InputError:
    return InputError(
        f"{key}: expected a number, a word or a list of them, found {what}",
        code="BX3735",
        at=str(found.path),
        help="leave it out of what is saved",
    )
