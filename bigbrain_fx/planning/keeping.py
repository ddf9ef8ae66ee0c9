"""Saved activations of units, and their memory while they run: storage by storage.

A storage that a piece of a chain receives or sends counts as a message's. A storage that is made
and read for the last time within the piece counts as the piece's. Op by op this is what autograd
saves (`Op.saves`, which capture measured). Where capture did not measure, an op saves the values
that an estimator names, whichever op made them. The module does not know splits or schedules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import add

import numpy as np
from numpy.typing import NDArray

from bigbrain_fx.core import Graph, Op, OpCost
from bigbrain_fx.planning.units import concrete, saves_of

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Kept:
    """A storage that stays until the backward: the units that make it and read it last; bytes."""

    maker: int
    last: int
    nbytes: float


@dataclass(frozen=True)
class Keeping:
    """Memory of units, in bytes of one micro-batch.

    Attributes:
        measured: whether capture measured it; otherwise only the first three mean anything.
        own_bytes: kept by a unit besides its inputs and results: masks, statistics.
        kept: the storages that are kept besides.
        forward_bytes: the most while a unit's forward runs, on top of what is kept before it.
        backward_bytes: the most while its backward runs, on top of what it and those before keep;
            the gradient that comes for its results left out.
        result_bytes: that gradient's, unless it is a message.
        first_reader: the first unit that reads one of its results; the number of units: none.
    """

    measured: bool
    own_bytes: Array
    kept: tuple[Kept, ...]
    forward_bytes: Array
    backward_bytes: Array
    result_bytes: Array
    first_reader: NDArray[np.intp]

    def merged(
        self, flat: Sequence[int], starts: NDArray[np.intp], position: Mapping[int, int]
    ) -> Keeping:
        """Return the same for units made one: blocks of `flat` begin at `starts`."""
        inside = [position.get(int(r)) == position[u] for u, r in enumerate(self.first_reader)]
        backward = self.backward_bytes + np.where(inside, self.result_bytes, 0.0)
        result = np.where(inside, 0.0, self.result_bytes)
        none = len(starts)
        readers = np.array([position.get(int(r), none) for r in self.first_reader])
        readers = np.where(inside, none, readers)
        forward, backward, result = (
            np.maximum.reduceat(each[flat], starts)
            for each in (self.forward_bytes, backward, result)
        )
        return Keeping(
            self.measured,
            np.add.reduceat(self.own_bytes[flat], starts),
            tuple(Kept(position[k.maker], position[k.last], k.nbytes) for k in self.kept),
            forward,
            backward,
            result,
            np.minimum.reduceat(readers[flat], starts),
        )


def keeping(
    graph: Graph, of: Mapping[str, OpCost], paid: Sequence[Sequence[str]], kind: str
) -> Keeping:
    """Return what the units of a concrete graph keep on a kind of device.

    Args:
        graph: concrete.
        of: op -> its costs there.
        paid: the ops of each unit, those replicated ones included that count as its own.
        kind: of the device.
    """
    trains = graph.loss is not None
    if not (trains and any(op.saves for op in graph.ops)):
        return _estimated(graph, of, paid, trains)
    return _Walk(graph, of, paid, kind).keeping()


def _alive_between(graph: Graph, paid: Sequence[Sequence[str]]) -> Iterator[int]:
    """Yield what of other units is alive, at most, where a unit runs an op after its first.

    Only what they make after that first op: the rest counts where the unit stands in an order.
    """
    place = {op.name: place for place, op in enumerate(graph.ops)}
    last = {name: max(map(place.__getitem__, to)) for name, to in graph.consumers.items() if to}
    for names in map(set, paid):
        first, *later = sorted(place[name] for name in names) or [0]
        between = [
            [
                op
                for op in graph.ops[first:at]
                if op.name not in names and last.get(op.name, 0) >= at
            ]
            for at in later
        ]
        yield max((sum(concrete(op.writes_bytes) for op in ops) for ops in between), default=0)


def _estimated(
    graph: Graph, of: Mapping[str, OpCost], paid: Sequence[Sequence[str]], trains: bool
) -> Keeping:
    saved = [sum(of[name].saved_bytes for name in names) if trains else 0 for names in paid]
    made = [[concrete(graph.op[name].writes_bytes) for name in names] for names in paid]
    works = [[of[name].workspace_bytes for name in names] for names in paid]
    pairs = zip(made, works, strict=True)
    if trains:
        most = np.array([max(map(add, *pair)) for pair in pairs], dtype=np.float64)
    else:  # what a forward alone makes may all stay to the end of its unit
        others = _alive_between(graph, paid)
        each = zip(made, works, others, strict=True)
        most = np.array([sum(own) + max(work) + n for own, work, n in each], dtype=np.float64)
    none = np.zeros(len(paid))
    own = np.array(saved, dtype=np.float64)
    return Keeping(False, own, (), most, most, none, np.full(len(paid), len(paid)))


class _Walk:
    """Op by op: `plan.schedule.walk` for all pieces at once, so an upper bound for each."""

    def __init__(
        self, graph: Graph, of: Mapping[str, OpCost], paid: Sequence[Sequence[str]], kind: str
    ) -> None:
        self.graph, self.paid = graph, paid
        self.unit_of = {name: unit for unit, names in enumerate(paid) for name in names}
        self.root: dict[str, str] = {}
        for op in graph.ops:
            base = op.storage_of
            self.root[op.name] = op.name if base is None else self._root(base)
        self.saves = {n: saves_of(graph, graph.op[n], of[n], kind) for n in self.unit_of}

    def keeping(self) -> Keeping:
        own = [self._own_bytes(names) for names in self.paid]
        forward = [self._forward_bytes(names) for names in self.paid]
        pending = self._pending()
        backward = [
            pending[unit] + max(self._backward_bytes(self.graph.op[n]) for n in names)
            for unit, names in enumerate(self.paid)
        ]
        result, first = self._results()
        return Keeping(
            True,
            np.array(own, dtype=np.float64),
            tuple(self._kept()),
            np.array(forward, dtype=np.float64),
            np.array(backward, dtype=np.float64),
            np.array(result, dtype=np.float64),
            np.array(first, dtype=np.intp),
        )

    def _root(self, name: str) -> str:
        return self.root.get(name, name)

    def _is_graded(self, name: str) -> bool:
        return name in self.graph.graded

    def _own_bytes(self, names: Sequence[str]) -> int:
        return sum(concrete(self.saves[name].own_bytes) for name in names if self._is_graded(name))

    def _forward_bytes(self, names: Sequence[str]) -> int:
        """Return the most that a unit's forward holds; all that its ops make stays to its end."""
        made = most = 0
        for name in names:
            op, saves = self.graph.op[name], self.saves[name]
            most = max(most, made + concrete(saves.forward_bytes))
            made += concrete(saves.own_bytes) + (_nbytes(op) if op.storage_of is None else 0)
        return max(most, made)

    def _backward_bytes(self, op: Op) -> int:
        """Return the most of one op's backward, the sums of parameters' gradients included."""
        if not self._is_graded(op.name):
            return 0
        saves = self.saves[op.name]
        refs = list(op.refs)
        passed = {refs[place] for place in saves.passed if 0 <= place < len(refs)}
        graded = [ref for ref in dict.fromkeys(refs) if ref in self.graph.graded]
        new = sum(_nbytes(self.graph.op[ref]) for ref in graded if ref not in passed)
        new += sum(_nbytes(self.graph.op[ref]) for ref in graded if self._is_read_later(ref, op))
        params = {self.graph.param[key].canonical: self.graph.param[key] for key in op.params}
        largest = max((p.spec.nbytes for p in params.values() if p.spec.requires_grad), default=0)
        return max(concrete(saves.backward_bytes), new + 2 * largest)

    def _is_read_later(self, name: str, op: Op) -> bool:
        """Whether another reader's gradient of a value is there already, to be added to."""
        here = self.unit_of[op.name]
        return any(reader > here for reader in self._readers(name, graded=True))

    def _pending(self) -> Array:
        """Return, for each unit, the gradients of values made before it and read after it, too."""
        change = np.zeros(len(self.paid) + 1)
        for name, maker in self.unit_of.items():
            readers = sorted(self._readers(name, graded=True))
            if self._is_graded(name) and len(readers) > 1:
                change[maker + 1] += _nbytes(self.graph.op[name])
                change[max(readers[-1], maker + 1)] -= _nbytes(self.graph.op[name])
        found: Array = change.cumsum()[:-1]
        return found

    def _readers(self, name: str, graded: bool = False) -> Iterator[int]:
        for reader in self.graph.consumers[name]:
            if reader in self.unit_of and (not graded or self._is_graded(reader)):
                yield self.unit_of[reader]

    def _results(self) -> tuple[list[int], list[int]]:
        """Return the bytes of each unit's results, and who reads one of them first."""
        none = len(self.paid)
        nbytes, first = [0] * none, [none] * none
        for name, unit in self.unit_of.items():
            if self._is_graded(name):
                later = [r for r in self._readers(name, graded=True) if r != unit]
                nbytes[unit] = max(nbytes[unit], _nbytes(self.graph.op[name]))
                first[unit] = min([first[unit], *later])
        return nbytes, first

    def _kept(self) -> Iterator[Kept]:
        """Yield the storages that some op keeps; what no unit makes is held by others anyway."""
        keepers: dict[str, int] = {}
        for name in self.unit_of:
            saves = self.saves[name]
            refs = self.graph.op[name].refs
            for place in saves.values if self._is_graded(name) else ():
                keepers.setdefault(self._root(refs[place] if place >= 0 else name), 0)
        last: dict[str, int] = {}
        for name in self.unit_of:
            root = self._root(name)
            units = (self.unit_of[name], *self._readers(name))
            last[root] = max(last.get(root, 0), *units)
        for root in keepers:
            if root in self.unit_of:
                yield Kept(self.unit_of[root], last[root], _nbytes(self.graph.op[root]))


def _nbytes(op: Op) -> int:
    return sum(spec.nbytes for spec in op.outputs)
