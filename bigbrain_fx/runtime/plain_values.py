"""Values of the user's objects, kept by value: as JSON and tensors, and back.

Numbers, text, lists, tuples, dicts, sets, deques, tensors, parameters and random generators.
Anything else (a function, a file, an iterator) is not: `UnkeptError`.
"""

from __future__ import annotations

import math
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .own_dice import set_states, states_of

PREFIX = "user:"
"""Of the names of tensors that are in plain attributes or an optimizer's state."""
_OF_TORCH = vars(nn.Module()).keys() - {"training"}


def _is_own(name: str) -> bool:
    """Whether an attribute is the user's, or a number of torch's: no table of modules or hooks."""
    return name not in _OF_TORCH and not name.endswith("hooks")


def encoded(values: Values, held: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is data of an object's attributes."""
    found = {}
    for name, value in held.items():
        plain = dict(value) if name == "state" and isinstance(value, dict) else value
        with suppress(UnkeptError):
            if _is_own(name):
                found[name] = values.encode(plain)
    return found


def put_back(values: Values, held: dict[str, Any], found: Mapping[str, Any]) -> None:
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


_SEQUENCES: Mapping[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_DICTS: Mapping[str, Any] = {"dict": dict, "ordered": OrderedDict}


class UnkeptError(TypeError):
    """Report a value that is no data."""


@dataclass
class Values:
    """Encoder and decoder of values; the tensors of all values are in one table.

    Attributes:
        names: parameters by their identity -> their names in the model.
        prefix: of the names of tensors.
        tensors: by name.
        home: device of tensors that were not on the CPU; the parameters' device when left out.
    """

    parameters: Mapping[str, nn.Parameter]
    prefix: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    home: torch.device | None = None

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
            return self._encode_items(value)
        if isinstance(value, Tensor):
            return self._encode_tensor(value)
        for kind, make in _SEQUENCES.items():
            if type(value) is make:
                return {"is": kind, "of": self._encode_items(value)}
        for kind, make in _DICTS.items():
            if type(value) is make:
                return {"is": kind, "of": [self._encode_items(pair) for pair in value.items()]}
        if type(value) is deque:
            return {"is": "deque", "of": self._encode_items(value), "most": value.maxlen}
        if _is_generator(value):
            return {"is": "generator", "of": self.encode_state(states_of([value])[0])}
        raise UnkeptError(f"a value of type {type(value).__name__} is no data")

    def _encode_items(self, items: Iterable[Any]) -> list[Any]:
        """Return JSON for what a container holds; a generator there is none that goes on."""
        found = [*items]
        if any(map(_is_generator, found)):
            raise UnkeptError("a container of random generators is no data")
        return [self.encode(item) for item in found]

    def _encode_tensor(self, value: Tensor) -> Any:  # noqa: ANN401  # JSON
        if id(value) in self._names:
            return {"is": "parameter", "of": self._names[id(value)]}
        if value.layout is not torch.strided or (value.requires_grad and value.grad_fn is not None):
            raise UnkeptError("a tensor that is sparse, or part of a computation, is no data")
        name = f"{self.prefix}{len(self.tensors)}"
        self.tensors[name] = value.detach()
        place: dict[str, Any] = {"strides": [*value.stride()], "on": value.device.type}
        if value.requires_grad:
            place["needs"] = True
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
            return self._decode_tensor(found).requires_grad_("needs" in found)
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
        where = self.home or like.device
        where = where if found["on"] != "cpu" else torch.device("cpu")
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
