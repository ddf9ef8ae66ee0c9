"""Go on in plain PyTorch: give an optimizer the state that `bigbrain-fx export --optimizer` wrote.

    model.load_state_dict(safetensors.torch.load_file("model.safetensors"))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=2e-3)     # as it was trained
    steps = load_optimizer(model, optimizer, "optimizer.safetensors")    # so many are done

This file stands alone: it needs torch and safetensors, and may be copied.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn


class ResumeError(ValueError):
    """Report a state that an optimizer cannot take; `code` names the place that raises it."""

    def __init__(self, what: str, *, code: str) -> None:
        super().__init__(what)
        self.code = code


def load_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    path: str | Path,
    scaler: torch.amp.GradScaler | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> int:
    """Give an optimizer its state and hyperparameters; return how many steps are done.

    Args:
        model: with the parameters that the optimizer steps.
        optimizer: made as it was for training.
        path: of the optimizer's file.
        scaler: of the loss, where training had one: it gets its scale.
        scheduler: of this optimizer, made as it was for training: it is stepped as often.

    Raises:
        ResumeError: it is of another class, its parameters are not the model's, a loss scale has no
            scaler, or the scheduler is not new or another's.
    """
    about, tensors = _read(path)
    _require_scaler(scaler, about.get("loss_scale"))
    found, names = about["optimizer"], _names(model, optimizer)
    kind = type(optimizer).__qualname__
    if found["class"].rpartition(".")[2] != kind.rpartition(".")[2]:
        raise ResumeError(
            f"the state is of {found['class']}, the optimizer is {kind}", code="BX5002"
        )
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    if set(names.values()) & trained != set(found["of"]) & trained:
        other = min(set(names.values()) & trained ^ set(found["of"]) & trained)
        raise ResumeError(
            f"the optimizer's parameters are not those of the state: {other}", code="BX5184"
        )
    _require_own_state((*tensors, *(key for own in found["scalars"].values() for key in own)))
    _step(scheduler, optimizer, int(about["step"]))
    for group in optimizer.param_groups:  # what the scheduler has set among it, bit by bit
        _set_group(group, [names[id(p)] for p in group["params"]], found)
    optimizer.state.clear()
    parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    for name, own in _states(found, tensors, parameters).items():
        optimizer.state[parameters[name]] = own
    _set_scale(scaler, about.get("loss_scale"))
    return int(about["step"])


def optimizer_states(
    path: str | Path, parameters: Mapping[str, Tensor]
) -> dict[str, dict[str, Any]]:
    """Return the state of some parameters by their names; the others' are left out.

    Args:
        path: of the optimizer's file.
        parameters: by name; their devices are where the state goes.

    Raises:
        ResumeError: it is the state of an optimizer inside another.
    """
    about, tensors = _read(path)
    return _states(about["optimizer"], tensors, parameters)


def _read(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    with safe_open(str(path), framework="pt") as file:
        about = json.loads(file.metadata()["facts"])
        for name in file.keys():  # noqa: SIM118  # it is no mapping
            tensors[name] = file.get_tensor(name)
    return about, tensors


def _states(
    found: Mapping[str, Any], tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> dict[str, dict[str, Any]]:
    _require_own_state((*tensors, *(key for own in found["scalars"].values() for key in own)))
    states: dict[str, dict[str, Any]] = {}
    for name, entry in found["scalars"].items():
        if name in parameters:
            states[name] = {key: _decoded(value) for key, value in entry.items()}
    for full, tensor in tensors.items():
        _, key, name = full.split(":", 2)
        if name in parameters:
            where = torch.device("cpu") if full in found["on_cpu"] else parameters[name].device
            laid = _laid(tensor, where, found["strides"].get(full))
            states.setdefault(name, {})[key] = laid
    return states


def _require_own_state(keys: Iterable[str]) -> None:
    """Refuse the state of optimizers inside another, which this file does not look for."""
    inner = next((key for key in keys if "inner0." in key), None)
    if inner is not None:
        raise ResumeError(
            f"{inner} is the state of an optimizer inside the one given: resume with the bundle",
            code="BX5148",
        )


def _require_scaler(scaler: torch.amp.GradScaler | None, kept: list[float] | None) -> None:
    if kept is not None and (scaler is None or not scaler.is_enabled()):
        raise ResumeError(
            f"training had a loss scale, {kept[0]:g} by now: give "
            "scaler=torch.amp.GradScaler(DEVICE), made as in training",
            code="BX5185",
        )


def _step(
    scheduler: torch.optim.lr_scheduler.LRScheduler | None,
    optimizer: torch.optim.Optimizer,
    steps: int,
) -> None:
    """Bring a scheduler to where it was; with `last_epoch` some classes would begin anew."""
    if scheduler is None:
        return
    if scheduler.optimizer is not optimizer:
        raise ResumeError("the scheduler is of another optimizer than the one given", code="BX5186")
    if getattr(scheduler, "last_epoch", 0) != 0:
        raise ResumeError(
            f"the scheduler is at {scheduler.last_epoch}: make it anew, not stepped", code="BX5187"
        )
    with warnings.catch_warnings():  # torch misses the optimizer's own steps
        warnings.simplefilter("ignore")
        for _ in range(steps):
            scheduler.step()


def _set_scale(scaler: torch.amp.GradScaler | None, kept: list[float] | None) -> None:
    """Give a scaler the scale and its healthy steps; how it grows and falls stays its own."""
    if scaler is not None and kept is not None:
        scale, healthy = kept
        own = scaler.state_dict()
        scaler.load_state_dict({**own, "scale": float(scale), "_growth_tracker": int(healthy)})


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    if any(id(p) not in known for p in stepped):
        raise ResumeError(
            "the optimizer steps a tensor that is no parameter of the model", code="BX5188"
        )
    return {id(p): known[id(p)] for p in stepped}


def _set_group(group: dict[str, Any], names: list[str], found: dict[str, Any]) -> None:
    entries = [found["hyper"][found["of"][name]] for name in names if name in found["of"]]
    if any(entry != entries[0] for entry in entries):
        raise ResumeError(
            f"{names[0]} and others of its group had other hyperparameters", code="BX5189"
        )
    for entry in entries[:1]:
        group.update({key: _decoded(value) for key, value in entry["group"].items()})
        if "initial_lr" not in entry["group"]:  # a scheduler's own is not always the first rate
            group["initial_lr"] = _decoded(entry["base_lr"])


def _decoded(value: Any) -> Any:  # noqa: ANN401  # JSON
    if isinstance(value, list):
        return [_decoded(part) for part in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(_decoded(part) for part in value["tuple"])
    if "float" in value:
        return float(value["float"])
    return torch.tensor(_decoded(value["tensor"]), dtype=getattr(torch, value["dtype"]))


def _laid(tensor: Tensor, where: torch.device, strides: list[int] | None) -> Tensor:
    if strides is None:
        return tensor.to(where, copy=True)
    made = torch.empty_strided(tuple(tensor.shape), strides, dtype=tensor.dtype, device=where)
    return made.copy_(tensor)
