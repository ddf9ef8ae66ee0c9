"""State of opaque modules between two steps: taken for a checkpoint, and put back.

    plain attributes of each module and of those within, random generators among them

Parameters and buffers are the stage's own tensors. No state holds values elsewhere in a module's
Python (globals, closures, files): a step with such a module is not split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .modules import owner_of
from .optimizer_state import StateError
from .own_dice import own_dice, set_states, states_of
from .plain_values import PREFIX, Values, encoded, put_back

if TYPE_CHECKING:
    from .state import State


class Stateful:
    """State of opaque modules of devices, beside their class.

    Attributes:
        stateful: path of a module -> the plain attributes that its calls go by.
    """

    stateful: Mapping[str, Sequence[str]] = {}

    def __init__(self, *args: Any) -> None:  # noqa: ANN401  # as of the device's class
        super().__init__(*args)
        device: Any = self  # a CheckedDevice
        device.objects = ModuleStates(device)


class ModuleStates:
    """The opaque modules of one device whose calls go by what they have left in attributes."""

    restored = ""  # nothing begins anew

    def __init__(self, device: Any) -> None:  # noqa: ANN401  # a CheckedDevice that is Stateful
        self.device = device

    def taken(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what JSON can hold of the modules, and the tensors of attributes by name."""
        facts, tensors = dict[str, Any](), dict[str, Tensor]()
        for path, module in self._modules():
            facts[path], more = taken_of(module, f"{PREFIX}{path}:")
            self._require_kept(path, module, facts[path]["parts"])
            tensors |= more
        return {"modules": facts}, tensors

    def restore(self, state: State) -> None:
        """Let the modules go on from a state."""
        self._put(state.facts["user"], state.tensors)

    def _put(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        for path, module in self._modules():
            own = f"{PREFIX}{path}:"
            held = {name: tensor for name, tensor in tensors.items() if name.startswith(own)}
            put_into(module, own, facts["modules"][path], held, self.device.device)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Put back at the end what the modules have now."""
        facts, tensors = self.taken()
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        yield
        self._put(facts, copies)

    def required(self, state: State) -> set[str]:
        """Return the names of a state's tensors that are in attributes.

        Raises:
            StateError: it lacks what a module keeps.
        """
        found = state.facts.get("user", {}).get("modules", {})
        for path, _ in self._modules():
            if path not in found:
                raise StateError(
                    f"the state lacks what {path} keeps in attributes between two steps: it is of "
                    "another split of the model",
                    code="BX5121",
                )
        return {name for name in state.tensors if name.startswith(PREFIX)}

    def _require_kept(self, path: str, module: nn.Module, parts: Mapping[str, Any]) -> None:
        """Refuse an attribute that calls go by, and that is no data any more."""
        for name in self.device.stateful[path]:
            inner, _, own = name.rpartition(".")
            if own in vars(module.get_submodule(inner)) and own not in parts[inner]:
                raise StateError(
                    f"{path} keeps its attribute {name!r} from call to call, and it is no data "
                    "now: expected numbers, text, containers of them, random generators, or "
                    "tensors that no gradient flows through (keep h.detach() for h)",
                    code="BX5123",
                )

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        for path in self.device.stateful:
            for stage in self.device.modules.values():
                found = _at(stage, path)
                if found is not None:
                    yield path, found
                    break


def taken_of(module: nn.Module, prefix: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what JSON can hold of a module's attributes, and their tensors by name."""
    values = Values(dict(module.named_parameters()), prefix)
    parts = {path: encoded(values, vars(part)) for path, part in module.named_modules()}
    dice = tuple(states_of(own_dice([module])))
    return {"parts": parts, "generators": values.encode_state(dice)}, values.tensors


def put_into(
    module: nn.Module,
    prefix: str,
    facts: dict[str, Any],
    tensors: dict[str, Tensor],
    home: torch.device | None = None,
) -> None:
    """Let a module have the attributes that `taken_of` gave; others that are data go."""
    values = Values(dict(module.named_parameters()), prefix, tensors, home)
    for path, part in module.named_modules():
        kept = facts["parts"].get(path, {})
        for name in encoded(Values(values.parameters, prefix), vars(part)).keys() - kept.keys():
            del vars(part)[name]
        put_back(values, vars(part), kept)
    set_states(own_dice([module]), list(values.decode(facts["generators"])))


def _at(stage: nn.Module, path: str) -> nn.Module | None:
    """Return the module of a stage at a path, if it is there."""
    try:
        owner, name = owner_of(stage, path)
    except (KeyError, AssertionError):
        return None
    return owner._modules.get(name)
