"""All that a device needs to go on as if nothing had happened, by the model's own names.

    parameter:NAME       trained or frozen, once, under the canonical name of tied ones
    buffer:NAME          persistent or not
    optimizer:KEY:NAME   what the optimizer keeps for a parameter
    facts                JSON: step, seed, hyperparameters and scalars by parameter name, ...

Nothing here is of a device: another split of the same model reads the same names. Random numbers
and data have no state of their own: they are functions of seed, step, micro-batch and place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .image import FORMAT, Buffer, ImageLayout, TensorEntry, layout_of, read_layout
from .optimizer_state import (
    OLDER,
    StateError,
    optimizer_facts,
    optimizer_tensors,
    require_optimizer,
    restore_optimizer,
)
from .tensor_file import CODES

if TYPE_CHECKING:
    from .checked_device import CheckedDevice

__all__ = ["State", "StateError", "restore", "state_of"]

DTYPES = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True)
class State:
    """A device between two steps.

    Attributes:
        step: how many steps are finished: the next one has this number.
        tensors: by the names above. From `state_of` they are the device's own, not copies: they are
            right until the next step starts; from `from_buffer` they are views of the buffer.
        facts: what JSON can hold.
    """

    step: int
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]

    @cached_property
    def layout(self) -> ImageLayout:
        """Return the place of each tensor in the state's image."""
        found = [TensorEntry(n, _code(n, t), tuple(t.shape)) for n, t in self.tensors.items()]
        return layout_of(found, {**self.facts, "format": FORMAT, "step": self.step})

    @property
    def nbytes(self) -> int:
        """How many bytes `copy_into` writes."""
        return self.layout.size

    def copy_into(self, buffer: Buffer) -> int:
        """Write the state's image, a whole safetensors file, into a buffer; return its size.

        The buffer may be larger than `nbytes`, and kept for the next copy: that is what makes it
        quick. On a GPU this waits for the copies.

        Raises:
            StateError: the buffer is too small.
        """
        layout = self.layout
        if len(buffer) < layout.size:
            raise StateError(
                f"the state has {layout.size} bytes, the buffer {len(buffer)}", code="BX5150"
            )
        start = len(layout.head)
        memoryview(buffer)[:start] = layout.head
        if layout.size > start:
            room = torch.frombuffer(
                buffer, dtype=torch.uint8, count=layout.size - start, offset=start
            )
            for name, place in _places(room, layout):
                place.copy_(self.tensors[name].detach())
        return layout.size

    @classmethod
    def from_buffer(cls, buffer: Buffer) -> State:
        """Read an image; its tensors are views of the buffer, which must be writable.

        Raises:
            ImageError: the bytes are no whole image.
            StateError: it is of another format.
        """
        layout = read_layout(buffer)
        facts = dict(layout.facts)
        found = facts.pop("format", None)
        if found != FORMAT or type(facts.get("step")) is not int:
            raise StateError(f"format: expected {FORMAT}, found {found!r}", code="BX5151")
        start = len(layout.head)
        tensors: dict[str, Tensor] = {}
        if layout.size > start:
            room = torch.frombuffer(
                buffer, dtype=torch.uint8, count=layout.size - start, offset=start
            )
            tensors.update(_places(room, layout))
        return cls(int(facts.pop("step")), tensors, facts)


def _places(room: Tensor, layout: ImageLayout) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor's place in the bytes after the header."""
    base = len(layout.head)
    for name, entry in layout.entries.items():
        part = room[entry.start - base : entry.end - base]
        yield name, part.view(DTYPES[entry.dtype]).view(entry.shape)


def _code(name: str, tensor: Tensor) -> str:
    if tensor.layout is not torch.strided or tensor.dtype not in CODES:
        raise StateError(
            f"{name} is {tensor.layout} of {tensor.dtype}, which cannot be saved", code="BX5153"
        )
    return CODES[tensor.dtype]


# --------------------------------------------------------------------------- of a device


def state_of(device: CheckedDevice, about: Mapping[str, Any] | None = None) -> State:
    """Return the state of a device between two steps; nothing is copied.

    Args:
        device: that has its weights and its optimizer.
        about: more facts to keep, such as the hashes of plan and graph.

    Raises:
        StateError: it is within a step; or its optimizer's state cannot be separated by parameter.
    """
    if device._saved or any(device._local.values()):
        raise StateError(
            f"{device.name} is within a step: its state is taken between two", code="BX5154"
        )
    return state_at(device, about)


def state_at(device: CheckedDevice, about: Mapping[str, Any] | None = None) -> State:
    """Return a device's state, wherever it is in a step; see `state_of`."""
    tensors: dict[str, Tensor] = {}
    began = device.statistics.began if device.statistics is not None else {}
    for name, tensor in _held(device):
        tensors.setdefault(name, began.get(id(tensor), tensor).detach())
    facts: dict[str, Any] = {
        **(about or {}),
        "seed": device.seed,
        "micro_batches": device.micro_batches,
        "inputs": {name: [d, list(shape)] for name, (d, shape) in device.stream.specs.items()},
        "torch": torch.__version__,
        "aliases": dict(device.aliases),
        "optimizer": None,
    }
    if device.loss_scale is not None:
        facts["loss_scale"] = device.loss_scale.facts()
    if device.objects is not None:
        facts["user"], more = device.objects.taken()
        tensors.update(more)
    if device.optimizer is not None and not device.is_opaque:
        facts["optimizer"] = optimizer_facts(device.optimizer, device.updated, device.rates.base)
        if device.stored is not None:
            device.stored.put_home(facts["optimizer"], device.updated)
        tensors.update(optimizer_tensors(device.optimizer, device.updated))
    if device.versions is not None:
        tensors.update(device.versions.older())
    return State(device.finished, tensors, facts)


def restore(device: CheckedDevice, state: State) -> None:
    """Put a device where a state was taken; its next step is `state.step`. All of it or nothing.

    Raises:
        StateError: the state is of another model, data or optimizer; names field, expected, found.
    """
    if device.objects is not None and device.is_opaque:
        _require_run(device, state)
        device.objects.restore(state)
        device.finished, device.step = state.step, max(0, state.step - 1)
        return
    _require(device, state)
    with torch.no_grad():
        for name, tensor in _held(device):
            tensor.copy_(state.tensors[name])
            if device.weights is not None:
                device.weights.leave(tensor)
    kept = dict(state.tensors)
    older = {name: kept.pop(name) for name in state.tensors if name.startswith(OLDER)}
    if device.versions is not None:
        device.versions.restore(state.step, older)
    device.rewind_rates(state.step)
    if device.loss_scale is not None:
        device.loss_scale.restore(state.facts.get("loss_scale"))
    if device.optimizer is not None:
        restore_optimizer(
            device.optimizer,
            device.updated,
            device.rates.base,
            kept,
            state.facts,
            keep=None if device.stored is None else device.stored.keep,
        )
    if device.objects is not None:
        device.objects.restore(state)
    device.finished, device.step = state.step, max(0, state.step - 1)
    device.stream.rewind(state.step)


def _held(device: CheckedDevice) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of all stages, each name once; the first stage's for what is replicated.

    With ZeRO 3 other replicas keep most weights: theirs are not here between two steps.
    """
    found = named_tensors(device.modules.values(), device.aliases)
    return ((name, tensor) for name, tensor in found if device.holds(tensor))


def named_tensors(
    modules: Iterable[nn.Module], aliases: Mapping[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of modules by their names in a state, each once."""
    seen = set()
    for module in modules:
        kinds = {
            "parameter": module.named_parameters(remove_duplicate=False),
            "buffer": module.named_buffers(remove_duplicate=False),
        }
        for kind, named in kinds.items():
            for own, tensor in named:
                name = f"{kind}:{aliases.get(own, own)}"
                if (name, id(tensor)) not in seen:
                    seen.add((name, id(tensor)))
                    yield name, tensor


def _require_run(device: CheckedDevice, state: State) -> None:
    """Refuse a state of a run with another seed, other micro-batches or other inputs."""
    specs = {name: [d, list(shape)] for name, (d, shape) in device.stream.specs.items()}
    wanted = {"seed": device.seed, "micro_batches": device.micro_batches, "inputs": specs}
    for field, expected in wanted.items():
        found = state.facts.get(field)
        if found != expected:
            hint = f": give --seed {found}, as the run that is resumed had" * (field == "seed")
            raise StateError(
                f"{field}: expected {expected!r}, found {found!r}{hint}", code="BX5155"
            )


def _require(device: CheckedDevice, state: State) -> None:
    """Refuse a state that does not fit, before anything is changed."""
    _require_run(device, state)
    names = set()
    for name, tensor in _held(device):
        names.add(name)
        _require_like(name, tensor, state.tensors.get(name))
    if device.objects is not None:
        names |= device.objects.required(state)
    own = {name for name in state.tensors if not name.startswith("optimizer:")}
    if own - names:
        raise StateError(
            f"the state has {sorted(own - names)[0]}, which this device does not hold",
            code="BX5156",
        )
    require_optimizer(device.optimizer, device.updated, state.tensors, state.facts)
    given = {name for name in state.tensors if name.startswith(OLDER)}
    needed = device.versions.wanted(state.step) if device.versions is not None else set[str]()
    for name in sorted(given ^ needed):
        raise StateError(
            f"the state {'lacks' if name in needed else 'has'} {name[len('optimizer:') :]}, which "
            "runs of --asynchronous have: it is of another bundle's run",
            code="BX5157",
        )


def _require_like(name: str, expected: Tensor, found: Tensor | None) -> None:
    if found is None:
        raise StateError(f"the state lacks {name}", code="BX5158")
    pairs = {"shape": (expected.shape, found.shape), "dtype": (expected.dtype, found.dtype)}
    for field, (want, have) in pairs.items():
        if want != have:
            raise StateError(f"{field} of {name}: expected {want}, found {have}", code="BX5159")
