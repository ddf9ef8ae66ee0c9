"""What the user's objects keep between two steps: taken for a checkpoint, and put back.

    modules       plain attributes, which parameters are trained, attributes of parameters
    optimizer     state and groups, its own plain attributes; optimizers and schedulers inside it
    scheduler     its plain attributes
    generators    that the model file has made

Numbers, text, lists, tuples, dicts, sets, deques, tensors, parameters and random generators are
kept by value, as JSON and tensors. Anything else (a function, a file, an iterator) is not:
`UnkeptError`. What else the user's Python keeps (globals, closures, files) no state holds.
"""

from __future__ import annotations

import math
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .limits import tell
from .modules import owner_of
from .own_dice import own_dice, set_states, states_of

if TYPE_CHECKING:
    from .opaque_device import OpaqueDevice
    from .state import State

PREFIX = "user:"
"""Of the names of tensors that are in plain attributes or an optimizer's state."""
_OF_TORCH = vars(nn.Module()).keys() - {"training"}
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
        values = Values(dict(self.device.model.named_parameters()), PREFIX)
        found = {label: _encoded(values, held) for label, held in self._objects()}
        optimizer = self.device.optimizer
        trained = [n for n, p in values.parameters.items() if p.requires_grad]
        facts = {
            "objects": {label: entry for label, entry in found.items() if entry},
            "trained": trained,
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
        parameters = dict(device.model.named_parameters())
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in trained)
        kept = {n: t for n, t in state.tensors.items() if n.startswith(PREFIX)}
        values = Values(parameters, PREFIX, kept)
        device.rates.base[:] = values.decode(facts["base_lr"])
        for label, held in self._objects():
            _decode(values, held, facts["objects"].get(label, {}))
        device.stream.rewind(state.step)
        device.stream.read_up_to(state.step)
        set_states(self._generators(), list(values.decode(facts["generators"])))
        self.restored = _BEGINS_ANEW.format(name=device.name, step=state.step)
        if state.step:
            tell(self.restored)

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


def _is_own(name: str) -> bool:
    """Whether an attribute is the user's, or a number of torch's: no table of modules or hooks."""
    return name not in _OF_TORCH and not name.endswith("hooks")


def _encoded(values: Values, held: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is data of an object's attributes."""
    found = {}
    for name, value in held.items():
        plain = dict(value) if name == "state" and isinstance(value, dict) else value
        with suppress(UnkeptError):
            if _is_own(name):
                found[name] = values.encode(plain)
    return found


def _decode(values: Values, held: dict[str, Any], found: Mapping[str, Any]) -> None:
    """Write attributes back; groups and state of an optimizer stay the objects that they are."""
    for name, entry in found.items():
        before = held.get(name)
        value = values.decode(entry, before)
        if name == "param_groups" and isinstance(before, list):
            for group, new in zip(before, value, strict=True):
                group.update(new)
        elif name == "state" and isinstance(before, dict):
            before.clear()
            before.update(value)
        else:
            held[name] = value


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


_SEQUENCES: Mapping[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_DICTS: Mapping[str, Any] = {"dict": dict, "ordered": OrderedDict}


class UnkeptError(TypeError):
    """Report a value that is no data."""


@dataclass
class Values:
    """What encodes and decodes; the tensors of all values are in one table.

    Attributes:
        names: parameters by their identity -> their names in the model.
        prefix: of the names of tensors.
        tensors: by name.
    """

    parameters: Mapping[str, nn.Parameter]
    prefix: str
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._names = {id(p): name for name, p in self.parameters.items()}

    def encode(self, value: Any) -> Any:  # noqa: ANN401  # of any kind
        """Return JSON for a value.

        Raises:
            UnkeptError: it, or something in it, is no data.
        """
        if type(value) in _PLAIN:
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"is": "float", "of": str(value)}
        if type(value) is list:
            return [self.encode(item) for item in value]
        if isinstance(value, Tensor):
            return self._encode_tensor(value)
        for kind, make in _SEQUENCES.items():
            if type(value) is make:
                return {"is": kind, "of": [self.encode(item) for item in value]}
        for kind, make in _DICTS.items():
            if type(value) is make:
                pairs = [[self.encode(k), self.encode(v)] for k, v in value.items()]
                return {"is": kind, "of": pairs}
        if type(value) is deque:
            items = [self.encode(item) for item in value]
            return {"is": "deque", "of": items, "most": value.maxlen}
        if _is_generator(value):
            return {"is": "generator", "of": self.encode_state(states_of([value])[0])}
        raise UnkeptError(f"a value of type {type(value).__name__} is no data")

    def _encode_tensor(self, value: Tensor) -> Any:  # noqa: ANN401  # JSON
        if id(value) in self._names:
            return {"is": "parameter", "of": self._names[id(value)]}
        if value.layout is not torch.strided or (value.requires_grad and value.grad_fn is not None):
            raise UnkeptError("a tensor that is sparse, or part of a computation, is no data")
        name = f"{self.prefix}{len(self.tensors)}"
        self.tensors[name] = value.detach()
        place = {"strides": [*value.stride()], "on": value.device.type}
        return {"is": "tensor", "of": name, **place}

    def encode_state(self, state: Any) -> Any:  # noqa: ANN401  # of a generator
        """Return JSON for where a generator is."""
        if isinstance(state, Tensor):
            return {"is": "bytes", "of": bytes(state.tolist()).hex()}
        if hasattr(state, "tolist") and hasattr(state, "dtype"):
            return {"is": "array", "of": state.tolist(), "dtype": str(state.dtype)}
        if isinstance(state, Mapping):
            pairs = [[k, self.encode_state(v)] for k, v in state.items()]
            return {"is": "dict", "of": pairs}
        if isinstance(state, tuple):
            return {"is": "tuple", "of": [self.encode_state(item) for item in state]}
        return self.encode(state)

    def decode(self, found: Any, before: Any = None) -> Any:  # noqa: ANN401  # of any kind
        """Return the value again; a generator that is there already goes on from its state.

        Args:
            found: what `encode` gave.
            before: what stands in its place now.
        """
        if isinstance(found, list):
            return [self.decode(item) for item in found]
        if not isinstance(found, dict):
            return found
        kind, value = found["is"], found["of"]
        if kind == "parameter":
            return self.parameters[value]
        if kind == "tensor":
            return self._decode_tensor(found)
        if kind == "generator":
            if before is not None:
                set_states([before], [self.decode(value)])
            return before
        return self._decode_container(kind, value, found)

    def _decode_container(self, kind: str, value: Any, found: Mapping[str, Any]) -> Any:  # noqa: ANN401
        if kind == "float":
            return float(value)
        if kind == "bytes":
            return torch.tensor([*bytes.fromhex(value)], dtype=torch.uint8)
        if kind == "array":
            return sys.modules["numpy"].array(value, dtype=found["dtype"])
        if kind == "deque":
            return deque((self.decode(item) for item in value), found["most"])
        if kind in _DICTS:
            return _DICTS[kind]((self.decode(k), self.decode(v)) for k, v in value)
        return _SEQUENCES[kind](self.decode(item) for item in value)

    def _decode_tensor(self, found: Mapping[str, Any]) -> Tensor:
        kept = self.tensors[found["of"]]
        like = next(iter(self.parameters.values()), kept)
        where = like.device if found["on"] != "cpu" else torch.device("cpu")
        room = 1 + sum((n - 1) * s for n, s in zip(kept.shape, found["strides"], strict=True))
        if room != kept.numel():  # a view with gaps
            return kept.to(where, copy=True)
        made = torch.empty_strided(
            tuple(kept.shape), found["strides"], dtype=kept.dtype, device=where
        )
        return made.copy_(kept)


_PLAIN = (bool, int, str, type(None))


def _is_generator(value: object) -> bool:
    numpy_random = sys.modules.get("numpy.random")
    kinds = (numpy_random.Generator, numpy_random.RandomState) if numpy_random else ()
    return isinstance(value, (torch.Generator, random.Random, *kinds))
