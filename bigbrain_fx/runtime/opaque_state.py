"""State of the user's objects between two steps: taken for a checkpoint, and put back.

    modules       plain attributes, which parameters are trained, attributes of parameters
    optimizer     state and groups, its own plain attributes; optimizers and schedulers inside it;
                  parameters that it steps and the model does not have: a criterion's
    scheduler     its plain attributes
    generators    that the model file has made

No state holds other values of the user's Python (globals, closures, files).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .limits import tell
from .modules import owner_of
from .own_dice import own_dice, set_states, states_of
from .plain_values import PREFIX, Values, encoded, put_back

if TYPE_CHECKING:
    from .opaque_device import OpaqueDevice
    from .state import State

_BEGINS_ANEW = (
    "device {name} goes on at step {step}: the model's tensors and plain attributes, optimizer, "
    "scheduler and generators are as they were; what the model file keeps elsewhere (globals, "
    "closures, iterators, files) begins anew"
)


class ObjectStates:
    """The objects of one device that runs the user's own step.

    Attributes:
        restored: what to say of a state that was put back, and of what no state holds.
    """

    def __init__(self, device: OpaqueDevice) -> None:
        self.device = device
        self.restored = ""

    def taken(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what JSON can hold of the objects, and their tensors by name."""
        others = others_of(self.device.model, self.device.optimizer)
        values = Values(dict(self.device.model.named_parameters()) | others, PREFIX)
        found = {label: encoded(values, held) for label, held in self._objects()}
        optimizer = self.device.optimizer
        trained = [n for n, p in values.parameters.items() if p.requires_grad]
        facts = {
            "objects": {label: entry for label, entry in found.items() if entry},
            "trained": trained,
            "others": {name: values.encode(p.detach()) for name, p in others.items()},
            "generators": values.encode_state(tuple(states_of(self._generators()))),
            "base_lr": values.encode(list(self.device.rates.base)),
            "class": type(optimizer).__qualname__,
        }
        return facts, values.tensors

    def restore(self, state: State) -> None:
        """Put all of it back, the model's own tensors, too; the next batch is that of the step.

        Raises:
            StateError: as `put`.
        """
        device, facts = self.device, state.facts["user"]
        _put_tensors(device.model, state.tensors)
        trained = set(facts["trained"])
        others = others_of(device.model, device.optimizer)
        parameters = dict(device.model.named_parameters()) | others
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in trained)
        kept = {n: t for n, t in state.tensors.items() if n.startswith(PREFIX)}
        values = Values(parameters, PREFIX, kept)
        _put(others, {n: values.decode(t) for n, t in facts.get("others", {}).items()})
        device.rates.base[:] = values.decode(facts["base_lr"])
        for label, held in self._objects():
            put_back(values, held, facts["objects"].get(label, {}))
        device.stream.rewind(state.step)
        device.stream.read_up_to(state.step)
        set_states(self._generators(), list(values.decode(facts["generators"])))
        self.restored = _BEGINS_ANEW.format(name=device.name, step=state.step)
        if state.step:
            tell(self.restored)

    def required(self, state: State) -> set[str]:
        """Return the names of a state's tensors that are in attributes or the optimizer's."""
        return {name for name in state.tensors if name.startswith(PREFIX)}

    def _generators(self) -> list[Any]:
        """Return the generators that the user's objects and functions lead to, in one order."""
        device = self.device
        made = (*device.stages.values(), device.training.optimizer, type(device).step_loss)
        return own_dice([device.stream.batches, device.model, *made])

    def _objects(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the attributes of each object under a label that another process finds, too."""
        device = self.device
        for path, module in device.model.named_modules():
            yield f"module:{path}", vars(module)
        for name, parameter in device.model.named_parameters():
            yield f"parameter:{name}", vars(parameter)
        yield from _inside("optimizer", device.optimizer)
        yield from _inside("scheduler", device.rates.scheduler)


def others_of(model: nn.Module, optimizer: object) -> dict[str, nn.Parameter]:
    """Return the parameters that an optimizer steps and the model does not have, by their place.

    A criterion's own weights are such: the loss of the model file reads them as a global.
    """
    own = {id(parameter) for parameter in model.parameters()}
    inside = (held for _, held in _inside("optimizer", optimizer))
    groups = (group for held in inside for group in held.get("param_groups", ()))
    found = {id(p): p for group in groups for p in group["params"] if id(p) not in own}
    return {f"optimizer:{place}": p for place, p in enumerate(found.values())}


def _inside(label: str, held: object) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the attributes of an optimizer or scheduler, then of those inside it."""
    if held is None:
        return
    yield label, vars(held)
    for name, value in vars(held).items():
        for place, each in enumerate(value if isinstance(value, list | tuple) else (value,)):
            is_inner = isinstance(
                each, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler
            )
            if is_inner and name != "optimizer":  # a scheduler's own is the one above
                yield from _inside(f"{label}.{name}.{place}", each)


@torch.no_grad()
def _put(parameters: Mapping[str, nn.Parameter], numbers: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(numbers[name])


@torch.no_grad()
def _put_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy parameters and buffers; a buffer that has another shape by then becomes a new one."""
    for name, parameter in model.named_parameters():
        parameter.copy_(tensors[f"parameter:{name}"])
    for name, buffer in model.named_buffers():
        kept = tensors[f"buffer:{name}"]
        if kept.shape == buffer.shape:
            buffer.copy_(kept)
        else:
            owner, attribute = owner_of(model, name)
            owner._buffers[attribute] = kept.clone().to(buffer.device)
