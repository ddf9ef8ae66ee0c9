"""Parts of devices' states: a device that is lost is put together from what its replicas have.

Copied into bundles with replicas.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .named_facts import joined_facts, parameter_of, part_of_facts
from .state import State, StateError, named_tensors, state_at

if TYPE_CHECKING:
    from .device import Device

SAME = ("seed", "micro_batches", "inputs", "torch", "loss_scale")  # facts that all devices share


def part_of_state(state: State, names: Collection[str]) -> State:
    """Return what a state has of some parameters and buffers, by their names in it, uncopied."""
    trained = {name.partition(":")[2] for name in names if name.startswith("parameter:")}
    tensors = {
        name: tensor
        for name, tensor in state.tensors.items()
        if name in names or parameter_of(name) in trained
    }
    optimizer = part_of_facts(state.facts["optimizer"], trained)
    return State(state.step, tensors, {**state.facts, "optimizer": optimizer})


def joined_state(parts: Sequence[State]) -> State:
    """Join the parts of a device's state that several devices had.

    Raises:
        StateError: they are not of one step of one model; names what differs.
    """
    first = parts[0]
    for part in parts[1:]:
        pairs: dict[str, tuple[Any, Any]] = {"step": (first.step, part.step)}
        pairs |= {name: (first.facts.get(name), part.facts.get(name)) for name in SAME}
        for field, (expected, found) in pairs.items():
            if expected != found:
                raise StateError(
                    f"{field}: one peer has {expected!r}, another {found!r}", code="BX5152"
                )
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    optimizer = joined_facts(part.facts["optimizer"] for part in parts)
    return State(first.step, tensors, {**first.facts, "optimizer": optimizer})


def state_before_update(device: Device) -> State:
    """Return the state that a device's newest step began with, until that step's update is made.

    Up to there a step writes into running statistics only, which are kept as they were.
    """
    return state_at(device)


def held_names(device: type[Device]) -> frozenset[str]:
    """Return the names that a device's state has of parameters and buffers."""
    empty = (stage.empty(torch.device("meta")) for stage in device.stages.values())
    return frozenset(name for name, _ in named_tensors(empty, device.aliases))
