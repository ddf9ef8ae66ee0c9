"""Parts of stage modules: named tensors, and random numbers that no placement changes.

`HeldWeights` has the trained parameters of one device, by their names in the model and by stage.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .coded import InputError, MisuseError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Empty:
    """A tensor to be: its shape, element type, and whether it is a parameter or a buffer."""

    shape: Shape
    dtype: torch.dtype = torch.float32
    requires_grad: bool = True
    is_buffer: bool = False


Held: TypeAlias = Shape | Empty | nn.Module


def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> Empty:
    """Declare a buffer (running statistics, a constant table)."""
    return Empty(shape, dtype, requires_grad=False, is_buffer=True)


def parameter(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> Empty:
    """Declare a parameter that is not plain float32, or is frozen."""
    return Empty(shape, dtype, requires_grad)


class Tensors(nn.Module):
    """Hold parameters, buffers and further holders under the names they have in the original model.

    A value is a shape (a float32 parameter), `buffer(...)`, `parameter(...)`, or a module. Names
    that no attribute can have ("0", "class", "seeded") are reached by `holder["0"]`.
    """

    def __init__(self, named: Mapping[Any, Held] | None = None, /, **more: Held) -> None:
        super().__init__()
        self.hold({**(named or {}), **more})

    def hold(self, named: Mapping[Any, Held]) -> None:
        """Register more tensors and modules under these names."""
        for name, value in named.items():
            entry = Empty(value) if isinstance(value, tuple) else value
            if not isinstance(entry, Empty):
                self._modules[str(name)] = entry
                continue
            empty = torch.empty(entry.shape, dtype=entry.dtype)
            if entry.is_buffer:
                self._buffers[str(name)] = empty
            else:
                self._parameters[str(name)] = nn.Parameter(empty, entry.requires_grad)

    def tie(self, name: str, twin: str) -> None:
        """Make the parameter `name` the same one as `twin`; both are dotted names below here."""
        owner, attribute = owner_of(self, twin)
        set_parameter(self, name, owner._parameters[attribute])

    def __iter__(self) -> Iterator[nn.Module]:
        """Run over the children, as over those of an nn.ModuleList."""
        return self.children()

    def __getitem__(self, name: str | int) -> Any:  # noqa: ANN401  # as nn.Module's own attributes
        for held in (self._modules, self._parameters, self._buffers):
            if str(name) in held:
                return held[str(name)]
        raise KeyError(name)


def _twins(module: nn.Module) -> list[tuple[str, str]]:
    """Return (name, first name) for each further name of a parameter."""
    first: dict[int, str] = {}
    named = list(module.named_parameters(remove_duplicate=False))
    found = [(name, first.setdefault(id(parameter), name)) for name, parameter in named]
    return [(name, twin) for name, twin in found if name != twin]


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that holds the tensor of a dotted name, and the name it has there."""
    *path, attribute = name.split(".")
    for part in path:  # `get_submodule` finds no child that is called like a method ("seeded")
        child = module._modules[part]
        assert child is not None, name
        module = child
    return module, attribute


def set_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Put a parameter at a dotted name below a module."""
    owner, attribute = owner_of(module, name)
    owner._parameters[attribute] = parameter


class Region(Tensors):
    """A part of the model with a forward of its own: a stage, or a block that repeats.

    Inside `with self.seeded("drop"):` the default generator is seeded by (seed, step, micro-batch,
    place in the model). A dropout mask is then the same wherever the op runs. With no active key
    (in a foreign training loop) the default generator goes on as it is.
    """

    path = ""
    call = 0

    @property
    def device(self) -> torch.device:
        """Return the device of its tensors."""
        found = [tensor.device for tensor in (*self.parameters(), *self.buffers())]
        return found[0] if found else active.device

    @property
    def group(self) -> Any:  # noqa: ANN401  # a `group.Group`, of bundles with tensor groups
        """The devices that run this stage together, each with a part of its tensors."""
        if active.group is None:
            said = "this stage has one TP rank's part of its tensors: run it by train.py"
            raise MisuseError(said, code="BX5070")
        return active.group

    def nth(self, call: int) -> Region:
        """Say which call of a shared block the next one is; return the block."""
        for module in self.modules():
            if isinstance(module, Region):  # a child of the model may be called `call`
                object.__setattr__(module, "call", call)
        return self

    def seeded(
        self, name: str = "", index: int = 0, of: int = 1
    ) -> contextlib.AbstractContextManager[None]:
        """Seed the draws in the `with` block; `index` of `of` draws under this name in one call."""
        if active.key is not None:
            place = ".".join(part for part in (self.path, name) if part)
            ordinal = self.call * of + index
            reseed(active.key, f"{place}#{ordinal}" if ordinal else place, active.device)
        return _NOTHING


default_types: list[torch.dtype] = []  # the model file's, of each stage that is being built


class _OfFloat32(type):
    """Builds stages of float32 where they say no type, whatever the model file's default is."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # as `type` has it
        default_types.append(torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        try:
            return super().__call__(*args, **kwargs)
        finally:
            torch.set_default_dtype(default_types.pop())


class Stage(Region, metaclass=_OfFloat32):
    """One stage of the split model; `returns` names what its forward returns, in order."""

    returns: tuple[str, ...] = ()

    @classmethod
    def empty(cls, device: torch.device) -> Stage:
        """Make the stage without giving its tensors numbers: they are loaded."""
        with torch.device("meta"):
            stage = cls()
        twins = _twins(stage)
        stage.to_empty(device=device)
        for name, twin in twins:
            stage.tie(name, twin)
        return stage.place()

    def place(self) -> Stage:
        """Tell every region its path in the model, part of its random key; return the stage."""
        for path, module in self.named_modules():
            if isinstance(module, Region):
                object.__setattr__(module, "path", path)  # a child may be called `path`
        return self


@dataclass
class Active:
    """Context of a running stage: the key of its draws, (seed, step, micro-batch), and a group."""

    key: tuple[int, int, int] | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: Any = None  # a `group.Group`: the ranks with which this device runs a stage


active = Active()
_NOTHING = contextlib.nullcontext()


def reseed(key: tuple[int, int, int], place: str, device: torch.device) -> None:
    """Seed the default generator of `device` for one draw."""
    number = seed_of(key, place)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


def seed_of(key: tuple[int, int, int], place: str) -> int:
    """Return what a generator is seeded with for draws of a key at a place."""
    text = f"{key[0]}/{key[1]}/{key[2]}/{place}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


AGAIN = "copy the bundle again, or put a checkpoint into it with `bigbrain-fx load`"


class WeightsError(InputError, ValueError):
    """Report weights that must not be used: which file and tensor, and what to do."""


class HeldWeights:
    """One Parameter for all names of a tensor, in all stages of a device; args as of that.

    Attributes:
        parameters: by their names, in the order of the model.
        of_stage: stage -> the names of its own.
        owner: every trained parameter of the whole model, in its order, and the device that answers
            for its norm.
        divided: tensors of which it has a part -> the part's name.
        untrained: that no device answers for.
    """

    def __init__(
        self, device: str, aliases: Mapping[str, str], tied: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.device, self.aliases, self.tied = device, aliases, tied
        self.parameters: dict[str, nn.Parameter] = {}
        self.of_stage: dict[int, list[str]] = {}
        self.owner: Mapping[str, str] = {}
        self.divided: dict[str, str] = {}
        self.untrained: frozenset[str] = frozenset()

    def share(self, number: int, module: Stage) -> None:
        """Let a stage use the parameters that are here already under one of their names."""
        self.of_stage[number] = []
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            if parameter.requires_grad:
                canonical = self.aliases.get(name, name)
                shared = self.parameters.setdefault(canonical, parameter)
                set_parameter(module, name, shared)
                self.of_stage[number].append(canonical)

    def put_in_order(self) -> None:
        """Keep what is trained, in the order of the model."""
        held = self.parameters
        self.untrained = frozenset(held.keys() - self.owner.keys())
        self.parameters = {name: held[name] for name in self.owner if name in held}
        self.of_stage = {
            number: [n for n in self.parameters if n in names]
            for number, names in self.of_stage.items()
        }

    def owned_by(self, device: str) -> list[str]:
        """Return the names for whose norms a device answers."""
        return [name for name, owner in self.owner.items() if owner == device]

    def parameter_of(self, name: str) -> str:
        """Return the parameter that a name in the index is of: a part's is "NAME[MEMBER]"."""
        return name if name in self.parameters else name.rpartition("[")[0]

    def stages_of(self, name: str) -> list[int]:
        """Return the stages that hold a parameter, on any device, last first."""
        here = [stage for stage, names in self.of_stage.items() if name in names]
        return sorted(self.tied.get(name, here), reverse=True)


def fill(module: nn.Module, tensors: Mapping[str, Tensor], but: Collection[str] = ()) -> None:
    """Copy tensors into a module's state, one at a time, by their names in it, `but` for some."""
    for name, held in module.state_dict().items():
        if name in but:
            continue
        if name not in tensors and name.endswith(".num_batches_tracked"):
            held.zero_()  # a counter of batch norms that inference does not read
            continue
        found = tensors[name]
        if found.shape != held.shape:
            want = f"{name} should have the shape {tuple(held.shape)}"
            raise WeightsError(f"{want}, found {tuple(found.shape)}: {AGAIN}", code="BX5183")
        held.copy_(found)
