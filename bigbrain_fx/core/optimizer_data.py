"""An optimizer as data: its class by name, its options, and its groups of parameters by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

Option: TypeAlias = bool | int | float | str | tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """A group of an optimizer.

    Attributes:
        params: names of its parameters.
        options: its own, where they are not the optimizer's.
    """

    params: tuple[str, ...]
    options: dict[str, Option] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OptimizerData:
    """Data that make an optimizer again, of all parameters or of some.

    Attributes:
        module: where its class can be imported; "": the model file has it.
        name: of its class there.
        groups: each has the parameters of all devices.
        options: keyword arguments of the class.
    """

    module: str
    name: str
    groups: tuple[ParameterGroup, ...]
    options: dict[str, Option] = field(default_factory=dict)
