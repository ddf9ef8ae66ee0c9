"""Variables of values, and free names: one function's local names.

The module knows positions and names; it does not write expressions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from bigbrain_fx.core import Op, Ref, leaves
from bigbrain_fx.emit.modules.names import RESERVED
from bigbrain_fx.emit.modules.rolling import Loop, Step
from bigbrain_fx.emit.ops.items import Item, LayerCall, takes_of


class Variables:
    """The local names of one function.

    Attributes:
        local: value -> the variable that holds it.
        position: of the item at hand; a name is free when its value is read at no later one.
    """

    def __init__(
        self, arguments: Mapping[str, str], barred: Iterable[str], last_use: Mapping[str, int]
    ) -> None:
        self.local = dict(arguments)
        self.holder = {name: value for value, name in self.local.items()}
        self.barred = frozenset(barred)
        self.last_use = dict(last_use)
        self.position = 0

    def give(self, value: str, hint: str, busy: Iterable[str] = ()) -> str:
        """Give a value its variable: its hint when nobody needs what that holds now."""
        name = self.free(hint, busy)
        self.hold(value, name)
        return name

    def hold(self, value: str, name: str) -> None:
        """Say that a variable holds a value now."""
        before = self.local.get(value, name)
        if before != name and self.holder.get(before) == value:
            del self.holder[before]
        self.local[value] = name
        self.holder[name] = value

    def lend(self, value: str, name: str, until: int) -> None:
        """Let a loop's variable stand for a value, until the item that reads it last in a turn."""
        stand_in = f"{name} in a loop"
        self.local[value] = name
        self.holder[name] = stand_in
        self.last_use[stand_in] = until

    def free(self, hint: str, busy: Iterable[str] = ()) -> str:
        """Return the hint, with a number when its name is in use."""
        taken = {name for name, value in self.holder.items() if self.is_used(value)}
        taken |= {*busy, *self.barred}
        name, number = hint, 1
        while name in taken or name in RESERVED:
            number += 1
            name = f"{hint}_{number}"
        return name

    def is_used(self, value: str) -> bool:
        """Whether something after the item at hand reads a value."""
        return self.last_use.get(value, -1) > self.position


def places(steps: Sequence[Step]) -> dict[int, int]:
    """Number the items that are written, by identity: of a loop only the first turn's."""
    found: dict[int, int] = {}
    for step in steps:
        for item in _written(step):
            found[id(item)] = len(found)
    return found


def _inside(step: Step) -> tuple[Item, ...]:
    """Return what is written inside a step: of a loop the first turn, of a region its ops."""
    if isinstance(step, Loop):
        return step.turns[0]
    return step.body.ops if isinstance(step, Op) and step.body else ()


def _written(step: Step) -> Iterator[Item]:
    """Yield the items of a step in the order in which they are written."""
    if not isinstance(step, Loop):
        yield step
    for item in _inside(step):
        yield from _written(item)


def last_uses(steps: Sequence[Step], results: Iterable[str]) -> dict[str, int]:
    """Return the position of the last item that reads each value; results are read at the end.

    A value that a loop reads from outside in every turn is needed until the loop's end.
    """
    position = places(steps)
    last: dict[str, int] = {}
    for step in steps:
        inside = list(_written(step))
        for item in inside:
            last.update(dict.fromkeys(takes_of(item), position[id(item)]))
        if isinstance(step, Loop):
            end = position[id(inside[-1])] + 1
            replaced = {first for first, _ in step.carried}
            last.update(dict.fromkeys((v for v in step.takes if v not in replaced), end))
            for _, made in step.carried:  # what comes in lives on in what each turn makes
                last[made[0]] = max(last.get(made[0], 0), end)
    items = [item for step in steps for item in _written(step)]
    regions = {item.name: item.body for item in items if isinstance(item, Op) and item.body}
    parts = [item for item in items if isinstance(item, Op) and item.target == "operator.getitem"]
    for part in parts:  # a tuple lives on in its parts
        for value in part.refs:
            last[value] = max(last[value], position[id(part)])
    last.update(dict.fromkeys(results, len(position) + 1))
    for part in reversed(parts):  # what a region leaves lives on under another name
        if (body := regions.get(part.refs[0])) is not None:
            inner = body.outputs[int(str(part.args[1]))]
            last[inner] = max(last.get(inner, 0), last.get(part.name, 0))
    return last


def readers(steps: Sequence[Step]) -> Mapping[str, list[Step]]:
    """Return the readers of each value; an item that reads it twice is listed twice.

    The loop or region counts as the reader of a value that it reads from outside.
    """
    found: dict[str, list[Step]] = defaultdict(list)
    for step in steps:
        _collect(step, found, frozenset())
    return found


def _collect(step: Step, found: dict[str, list[Step]], outer: frozenset[str]) -> None:
    inside = _inside(step)
    if not isinstance(step, Loop) and not inside:
        for value in references(step):
            if value not in outer:
                found[value].append(step)
        return
    outside = frozenset(step.takes if isinstance(step, Loop) else takes_of(step))
    for value in sorted(outside - outer):
        found[value].append(step)
    for item in inside:
        _collect(item, found, outer | outside)
    for value in _handed(step):  # it needs a variable
        found[value].append(step)


def _handed(step: Step) -> Iterable[str]:
    """Return the values that a loop hands to its next turn, or a region leaves."""
    if isinstance(step, Loop):
        return [made[0] for _, made in step.carried]
    return step.body.outputs if isinstance(step, Op) and step.body else ()


def references(item: Item) -> list[str]:
    """Return the values that an item reads, once for each place."""
    if isinstance(item, Op):
        arguments = (*item.args, *(value for _, value in item.kwargs))
        return [leaf.value for leaf in leaves(arguments) if isinstance(leaf, Ref)]
    return list(item.takes) if isinstance(item, LayerCall) else list(takes_of(item))
