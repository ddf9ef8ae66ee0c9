"""Graph x groups of ops -> the tensors that groups make for each other, and the weights they read.

Whoever plans adds up bytes from these, each in its own way. This room knows no splits, no schedules
and no method; of devices only what the optimizer takes on one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bigbrain_fx.core import Costs, Graph

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

AHEAD = 2
"""Receives that the runtime posts ahead on every channel: so much memory is taken for them."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that unit `maker` makes and other units read, in ascending order.

    `nbytes` go forward to every device that reads it; `gradient_bytes` (0 when no gradient flows
    through it) come back.
    """

    maker: int
    readers: tuple[int, ...]
    nbytes: int
    gradient_bytes: int


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter, buffer or constant, tied names counted once, and the units that read it.

    `trained_bytes` are `nbytes` where the optimizer updates it, else 0.
    """

    readers: tuple[int, ...]
    nbytes: int
    trained_bytes: int


def values_of(graph: Graph, unit_of: Mapping[str, int]) -> Iterator[Value]:
    """Yield what crosses between units of a concrete graph, in the order of `unit_of`: op -> unit.

    Ops that are no unit's are replicated: what they make is sent to nobody.
    """
    for name, maker in unit_of.items():
        readers = {unit_of[r] for r in graph.consumers[name] if r in unit_of} - {maker}
        if readers:
            op = graph.op[name]
            nbytes = sum(spec.nbytes for spec in op.outputs)
            gradient = nbytes if graph.loss is not None and op.requires_grad else 0
            yield Value(maker, tuple(sorted(readers)), nbytes, gradient)


def weights_of(graph: Graph, groups: Iterable[Iterable[str]]) -> Iterator[Weight]:
    """Yield the weights that some op reads, in the order in which units first read them.

    Args:
        graph: concrete.
        groups: the ops of each unit, with the replicated ones that count as its own.
    """
    readers: dict[str, dict[int, None]] = {}
    for number, names in enumerate(groups):
        for name in names:
            for key in graph.op[name].params:
                readers.setdefault(graph.param[key].canonical, {})[number] = None
    size_of = {param.canonical: param.spec.nbytes for param in graph.params}
    for canonical, numbers in readers.items():
        nbytes, updated = size_of[canonical], canonical in graph.trained and graph.loss is not None
        yield Weight(tuple(numbers), nbytes, nbytes if updated else 0)


def edges_of(values: Iterable[Value]) -> tuple[tuple[int, int], ...]:
    """Return pairs (maker, reader) of units, each once, sorted."""
    return tuple(sorted({(v.maker, reader) for v in values for reader in v.readers}))


def once_s(costs: Costs, device: str, weights: Sequence[Weight], units: int) -> NDArray[np.float64]:
    """Return the optimizer's seconds a step for each unit: a weight's at its first reader."""
    import numpy as np  # a program that only asks for sizes needs none

    found = np.zeros(units)
    for weight in weights:
        if weight.trained_bytes:
            found[weight.readers[0]] += costs.optimizer_s(device, 1, weight.trained_bytes)
    return found
