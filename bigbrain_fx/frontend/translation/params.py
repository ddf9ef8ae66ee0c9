"""The tensors of a model under the names the user gave them; ties known.

This file knows modules; it knows no graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from bigbrain_fx.core import Param, TensorSpec

Kind = Literal["parameter", "buffer", "constant"]


@dataclass(frozen=True)
class Store:
    """Parameters, buffers and constants by name, and which names are one tensor.

    Attributes:
        tensors: the user's own tensors, not copies.
        aliases: all names of a tensor, for names that share one.
    """

    params: tuple[Param, ...]
    tensors: Mapping[str, Tensor]
    aliases: Mapping[str, tuple[str, ...]]

    def spec(self, name: str) -> TensorSpec:
        """Describe a tensor."""
        return _spec(self.tensors[name])

    def name_at(self, name: str, module: str) -> str:
        """Return the name of a tied tensor that its reader would use.

        Returns:
            The name in the reader's own module when there is one, else the first.
        """
        names = self.aliases.get(name)
        if names is None:
            return name
        return next((n for n in names if n.rpartition(".")[0] == module), names[0])


def store(model: nn.Module, constants: Mapping[str, Tensor]) -> Store:
    """List every tensor of a model, in its own order, and the constants that a trace found."""
    constants = {name: tensor.detach() for name, tensor in constants.items()}  # none is trained
    kept = set(model.state_dict(keep_vars=True))
    parameters = list(model.named_parameters(remove_duplicate=False))
    buffers = list(model.named_buffers(remove_duplicate=False))
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, tensor in [*parameters, *buffers]:
        canonical = first.setdefault(id(tensor), name)
        names.setdefault(canonical, []).append(name)
    params = [
        *(_param(name, tensor, first[id(tensor)], "parameter") for name, tensor in parameters),
        *(
            _param(name, tensor, first[id(tensor)], "buffer" if name in kept else "constant")
            for name, tensor in buffers
        ),
        *(_param(name, tensor, name, "constant") for name, tensor in constants.items()),
    ]
    tied = {name: tuple(group) for group in names.values() if len(group) > 1 for name in group}
    return Store(tuple(params), dict(_all(parameters, buffers, constants.items())), tied)


def _all(*groups: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    for group in groups:
        yield from group


def _param(name: str, tensor: Tensor, canonical: str, kind: Kind) -> Param:
    return Param(name, _spec(tensor), canonical, kind)


def _spec(tensor: Tensor) -> TensorSpec:
    """Describe a tensor; a buffer is not trained, though forward may ask it for a gradient."""
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    is_trained = tensor.requires_grad and isinstance(tensor, nn.Parameter)
    return TensorSpec(shape, dtype_name(tensor), strides, is_trained)


def tensor_names(model: nn.Module) -> list[str]:
    """List the names of a model's parameters and buffers, with all names of a shared tensor."""
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    return [name for name, _ in (*parameters, *buffers)]


def dtype_name(tensor: Tensor) -> str:
    """Return the element type's name: "float32"."""
    return str(tensor.dtype).removeprefix("torch.")
