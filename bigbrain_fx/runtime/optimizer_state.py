"""An optimizer's state and hyperparameters, by parameter name instead of by group and position.

Groups may then be cut in another way when the model is: the values that a parameter's update
depends on are under its name. An optimizer without such values by name is refused. Optimizers
inside another (a wrapper that clips, looks ahead, or steps two) have keys of their own.
`inner0.exp_avg` is that of the first one that has the parameter.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .coded import InputError
from .recipe import Optimizer

Parameters = Mapping[str, nn.Parameter]
Keep = Callable[[nn.Parameter, str, Tensor], Tensor]

_OF_INNER = re.compile(r"inner(\d+)\.(.+)")
NOT_HYPER = ("params", "param_names")
OLDER = "optimizer:older_"  # "optimizer:older_1:NAME" are the weights of one update ago


class StateError(InputError, ValueError):
    """Report a state that cannot be taken, or that does not fit; names what."""


def optimizer_facts(
    optimizer: Optimizer, parameters: Parameters, base_lr: list[Any]
) -> dict[str, Any]:
    """Return what JSON can hold of an optimizer: class, hyperparameters and scalars by parameter.

    A parameter without state has no entry in "scalars": it is absent again when restored.

    Raises:
        StateError: the optimizer couples parameters, steps others than the model's, or keeps what
            is no number.
    """
    _require_separable(optimizer, parameters)
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    hyper: list[dict[str, Any]] = []
    of: dict[str, int] = {}
    for group, base in zip(optimizer.param_groups, base_lr, strict=True):
        of.update({name_of[id(p)]: len(hyper) for p in group["params"]})
        values = {k: _encoded(k, v) for k, v in group.items() if k not in NOT_HYPER}
        hyper.append({"base_lr": _encoded("lr", base), "group": values})
    scalars: dict[str, dict[str, Any]] = {}
    strides: dict[str, list[int]] = {}
    on_cpu = []
    for name, key, value in _state(optimizer, parameters):
        if key is None:
            scalars.setdefault(name, {})
            continue
        if not _is_tensor(value):
            scalars.setdefault(name, {})[key] = _encoded(f"{key} of {name}", value)
            continue
        if not value.is_contiguous():
            strides[f"optimizer:{key}:{name}"] = _dense_strides(key, name, value)
        if value.device != parameters[name].device:
            on_cpu.append(f"optimizer:{key}:{name}")
    return {
        "class": _class_of(optimizer),
        "hyper": hyper,
        "of": of,
        "scalars": scalars,
        "strides": strides,
        "on_cpu": on_cpu,
    }


def optimizer_tensors(optimizer: Optimizer, parameters: Parameters) -> dict[str, Tensor]:
    """Return the tensors that an optimizer keeps, as they are, by `optimizer:KEY:NAME`."""
    return {
        f"optimizer:{key}:{name}": value.detach()
        for name, key, value in _state(optimizer, parameters)
        if key is not None and _is_tensor(value)
    }


def require_optimizer(
    optimizer: Optimizer | None,
    parameters: Parameters,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
) -> None:
    """Refuse a state that is not of this optimizer and these parameters.

    Raises:
        StateError: names the field, what was expected and what was found.
    """
    found = facts.get("optimizer")
    if optimizer is None or found is None:
        if (optimizer is None) != (found is None):
            has = "none" if found is None else found["class"]
            own = "none" if optimizer is None else _class_of(optimizer)
            raise StateError(f"optimizer: expected {own}, found {has}", code="BX5093")
        return
    _require_separable(optimizer, parameters)
    if found["class"] not in (None, _class_of(optimizer)):  # None: nothing says whose it is
        raise StateError(
            f"optimizer: expected {_class_of(optimizer)}, found {found['class']}", code="BX5094"
        )
    for name in sorted(set(parameters) ^ set(found["of"])):
        where = "lacks" if name in parameters else "has another parameter,"
        raise StateError(f"the optimizer's state {where} {name}", code="BX5095")
    known = {name.partition(":")[2].partition(":")[2] for name in tensors if _is_ours(name)}
    for name in sorted(known - set(parameters)):
        raise StateError(
            f"the state has tensors for {name}, which is no parameter here", code="BX5096"
        )
    for group, names in _groups(optimizer, parameters):
        _require_group(group, names, found)


def restore_optimizer(
    optimizer: Optimizer,
    parameters: Parameters,
    base_lr: list[Any],
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    keep: Keep | None = None,
) -> None:
    """Give an optimizer what `optimizer_facts` and `optimizer_tensors` returned; see `require_`.

    `keep` says of a tensor what is kept of it, where that is not itself: see `stores`.
    """
    found = facts["optimizer"]
    for number, (group, names) in enumerate(_groups(optimizer, parameters)):
        if not names:
            continue
        entry = found["hyper"][found["of"][names[0]]]
        base_lr[number] = decoded(entry["base_lr"], base_lr[number])
        for key, value in entry["group"].items():
            group[key] = decoded(value, group.get(key))
    inner = _inner(optimizer)
    for each in (optimizer, *(one for own in inner.values() for one in own)):
        each.state.clear()
    for name, entry in found["scalars"].items():
        parameter = parameters[name]
        if not entry:
            optimizer.state[parameter] = {}
        for key, value in entry.items():
            made = _placed(key, decoded(value, None), name, parameters, optimizer)
            _put(optimizer, inner, parameter, key, made)
    for full, tensor in tensors.items():
        if _is_ours(full):
            _, key, name = full.split(":", 2)
            where = torch.device("cpu") if full in found["on_cpu"] else parameters[name].device
            strides = found["strides"].get(full)
            copied = _copied(tensor, where, strides)
            parameter = parameters[name]
            of_inner = _OF_INNER.match(key) is not None
            kept = keep(parameter, key, copied) if keep and not of_inner else copied
            _put(optimizer, inner, parameter, key, kept)


def _require_group(group: Mapping[str, Any], names: list[str], found: Mapping[str, Any]) -> None:
    if not names:
        return
    entries = [found["hyper"][found["of"][name]] for name in names]
    for name, entry in zip(names, entries, strict=True):
        if entry != entries[0]:
            raise StateError(
                f"{names[0]} and {name} are in one group of the optimizer here, "
                "but were trained with other hyperparameters",
                code="BX5097",
            )
    expected, has = set(group) - set(NOT_HYPER), set(entries[0]["group"])
    more = has - expected - {"initial_lr"} if found["class"] is None else set()
    if expected - has or more:  # of the same class, more is what its steps have put there
        raise StateError(
            f"hyperparameters of {names[0]}: expected {sorted(expected)}, found {sorted(has)}",
            code="BX5098",
        )


def _require_separable(optimizer: Optimizer, parameters: Parameters) -> None:
    """Refuse an optimizer whose state cannot be told apart by parameter name."""
    kind = type(optimizer).__name__
    if needs_closure(optimizer):
        raise StateError(
            f"optimizer {kind} couples parameters: its step asks for a closure that computes the "
            "loss again; its state cannot be kept by parameter name",
            code="BX5099",
        )
    known = {id(parameter) for parameter in parameters.values()}
    every = (optimizer, *{id(o): o for own in _inner(optimizer).values() for o in own}.values())
    stepped = [p for each in every for group in each.param_groups for p in group["params"]]
    foreign = [p for p in stepped if id(p) not in known]
    if foreign:
        raise StateError(
            f"optimizer {kind} steps a tensor of shape {tuple(foreign[0].shape)} that is no "
            "parameter of the model: parameters fused or flattened into one have no names, and "
            "nothing says which slice of it is whose; give the optimizer the parameters themselves",
            code="BX5100",
        )
    if any(id(key) not in known for each in every for key in each.state):
        raise StateError(
            f"optimizer {kind} couples parameters: it keeps state that belongs to none of them",
            code="BX5101",
        )


def _groups(
    optimizer: Optimizer, parameters: Parameters
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    for group in optimizer.param_groups:
        yield group, [name_of[id(p)] for p in group["params"]]


def _state(optimizer: Optimizer, parameters: Parameters) -> Iterator[tuple[str, str | None, Any]]:
    """Yield (parameter, key, value); one with the key None for each parameter that has state."""
    inner = _inner(optimizer)
    for name, parameter in parameters.items():
        if parameter in optimizer.state:
            yield name, None, None
            yield from _entries(optimizer, parameter, name)
        for number, each in enumerate(inner.get(id(parameter), ())):
            if parameter in each.state:
                for _, key, value in _entries(each, parameter, name):
                    yield name, f"inner{number}.{key}", value


def _entries(
    optimizer: Optimizer, parameter: nn.Parameter, name: str
) -> Iterator[tuple[str, str, Any]]:
    for key, value in optimizer.state[parameter].items():
        if not isinstance(key, str) or ":" in key:
            raise StateError(
                f"the optimizer keeps {key!r} for {name}: no plain name", code="BX5102"
            )
        yield name, key, value


def _inner(optimizer: Optimizer) -> dict[int, list[Optimizer]]:
    """Return the optimizers inside another by the identity of the parameters that they have."""
    found: dict[int, list[Optimizer]] = {}
    seen = {id(optimizer.state)}
    for each in _held(optimizer):
        if id(each.state) in seen:
            continue  # it shares the state of one before
        seen.add(id(each.state))
        for parameter in (p for group in each.param_groups for p in group["params"]):
            found.setdefault(id(parameter), []).append(each)
    return found


def _held(optimizer: Optimizer, known: tuple[int, ...] = ()) -> Iterator[Optimizer]:
    """Yield the optimizers in the attributes of another, and those in theirs."""
    for value in vars(optimizer).values():
        held = value.values() if isinstance(value, dict) else value
        for each in held if isinstance(value, list | tuple | dict) else (value,):
            if isinstance(each, torch.optim.Optimizer) and id(each) not in known:
                yield each
                yield from _held(each, (*known, id(optimizer)))


def _put(
    optimizer: Optimizer,
    inner: Mapping[int, list[Optimizer]],
    parameter: nn.Parameter,
    key: str,
    value: object,
) -> None:
    """Write a value where its key says: into this optimizer's state, or that of one inside it."""
    said = _OF_INNER.match(key)
    if said is None:
        optimizer.state.setdefault(parameter, {})[key] = value
    else:
        state = inner[id(parameter)][int(said[1])].state
        state.setdefault(parameter, {})[said[2]] = value


def _is_ours(name: str) -> bool:
    return name.startswith("optimizer:")


def _is_tensor(value: object) -> bool:
    """Whether a value is kept as a tensor: all but a number on the CPU, which is a fact."""
    return isinstance(value, Tensor) and not (value.dim() == 0 and value.device.type == "cpu")


def _dense_strides(key: str, name: str, value: Tensor) -> list[int]:
    """Return strides under which kernels walk as before; views with holes cannot be made again."""
    pairs = zip(value.shape, value.stride(), strict=True)
    if value.numel() != 1 + sum((size - 1) * stride for size, stride in pairs):
        raise StateError(
            f"{key} of {name} is a view with holes, which cannot be restored as it is",
            code="BX5103",
        )
    return list(value.stride())


def _class_of(optimizer: Optimizer) -> str:
    """Return the class by name; that of a bundle's own training.py has the same name in another."""
    kind = type(optimizer)
    return f"{kind.__module__}.{kind.__qualname__}"


# --------------------------------------------------------------------------- values as JSON


def _encoded(what: str, value: object) -> Any:  # noqa: ANN401  # JSON
    if isinstance(value, Tensor):
        if value.dim():
            raise StateError(
                f"the optimizer's {what} is a tensor of shape {tuple(value.shape)}", code="BX5104"
            )
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": _encoded(what, value.item()), "dtype": dtype}
    if isinstance(value, tuple):
        return {"tuple": [_encoded(what, part) for part in value]}
    if isinstance(value, list):
        return [_encoded(what, part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise StateError(
        f"the optimizer's {what} is of type {type(value).__name__}, which is no data", code="BX5105"
    )


def decoded(value: Any, before: object = None) -> Any:  # noqa: ANN401  # JSON
    """Return a value of facts; a number in a tensor goes where the tensor was before it."""
    if isinstance(value, list):
        return [decoded(part, None) for part in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(decoded(part, None) for part in value["tuple"])
    if "float" in value:
        return float(value["float"])
    where = before.device if isinstance(before, Tensor) else torch.device("cpu")
    dtype = getattr(torch, value["dtype"])
    return torch.tensor(decoded(value["tensor"], None), dtype=dtype, device=where)


def _placed(
    key: str, value: object, name: str, parameters: Parameters, optimizer: Optimizer
) -> object:
    """Put `step` where the optimizer wants it, as torch's own `load_state_dict` does."""
    if key != "step" or not isinstance(value, Tensor):
        return value
    groups = [g for g, names in _groups(optimizer, parameters) if name in names]
    on_device = any(group.get("capturable") or group.get("fused") for group in groups)
    return value.to(parameters[name].device) if on_device else value


def _copied(tensor: Tensor, where: torch.device, strides: list[int] | None) -> Tensor:
    if strides is None:
        return tensor.to(where, copy=True)
    made = torch.empty_strided(tuple(tensor.shape), strides, dtype=tensor.dtype, device=where)
    return made.copy_(tensor)


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether `step` asks for a closure that computes the loss again, as LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
