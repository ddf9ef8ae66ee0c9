"""`layers`: seconds of whole layers that others measured, by card, rows and tensor degree.

A layer's forward is divided among its ops as `analytical` divides it, and so is its backward. A
layer that a plan cuts through costs each side its share. Between two sizes that were measured time
is a line; beyond them it is the line through the two nearest, and no measurement any more. A degree
that was not measured is the nearest one's, at a time that falls with the degree. What no layer has
takes what `analytical` says, times what the layers of that card took over theirs. `Costs.measured`
says what was there.

Seconds of a layer include its device's, its process's and, in a tensor group, its group's. A
measured op neither waits for its process nor exchanges anything besides.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from bigbrain_fx.core import Cluster, Costs, Device, Graph, Op, OpCost
from bigbrain_fx.costs import LOSS, Layer, LayerTime, LayerTimes, read_layer_times
from bigbrain_fx.errors import InputError

from .analytical import Analytical

VARIABLE = "BIGBRAIN_LAYER_TIMES"
_EXCHANGE = "shard."


@dataclass(frozen=True)
class Layers:
    """Estimate layers by a file of seconds, and the rest by that card's factor.

    Attributes:
        path: of the file, as `bigbrain_fx.costs.layer_times` describes it; when left out, what the
            environment's BIGBRAIN_LAYER_TIMES names.
        members: devices of each tensor group.

    Raises:
        InputError: the file is none.
    """

    path: str = ""
    members: int = 1

    name = "layers"

    def __post_init__(self) -> None:
        """Refuse now, and not when a model has been captured."""
        self.times()

    def times(self) -> LayerTimes:
        """Return what the file says."""
        path = self.path or os.environ.get(VARIABLE, "")
        if path:
            return read_layer_times(path)
        raise InputError(
            "no profile of layers is named",
            code="BX1436",
            help=f"--profile times.json, or set {VARIABLE}; see docs/how-to/choose-a-plan.md",
        )

    def of_group(self, members: int) -> Layers:
        """Return the estimator of one rank's graph in groups of so many devices."""
        return replace(self, members=members)

    def estimate(self, graph: Graph, cluster: Cluster) -> Costs:
        """Estimate every op.

        Raises:
            InputError: the file is of another model or of other cards.
        """
        file, plain = self.times(), Analytical().estimate(graph, cluster)
        _require_inputs(self.path, file, graph)
        found = tuple(_found(self.path, file, graph))
        cards = {device.name: _card(device, file.cards) for device in cluster.devices}
        _require_cards(self.path, file, cluster, cards)
        tables: dict[object, _Table] = {}
        for device in cluster.devices:
            key = cards[device.name], id(plain.ops[device.name])
            if key not in tables:
                ops = plain.ops[device.name]
                tables[key] = _table(graph, found, cards[device.name], ops, self.members)
        each = {d.name: tables[cards[d.name], id(plain.ops[d.name])] for d in cluster.devices}
        per_byte = {
            name: table.update_s_per_byte
            for name, table in each.items()
            if table.update_s_per_byte is not None
        }
        return replace(
            plain,
            ops={name: table.ops for name, table in each.items()},
            measured={name: table.measured for name, table in each.items()},
            optimizer_s_per_byte={**plain.optimizer_s_per_byte, **per_byte},
            optimizer_s_per_tensor={
                name: 0.0 if name in per_byte else s
                for name, s in plain.optimizer_s_per_tensor.items()
            },
        )


# --------------------------------------------------------------------------- which ops


@dataclass(frozen=True)
class _Found:
    """A layer of the file, and the ops of the graph that it is, once for each of its modules."""

    layer: Layer
    ops: tuple[tuple[str, ...], ...]


def _found(path: str, file: LayerTimes, graph: Graph) -> Iterator[_Found]:
    taken: dict[str, str] = {}
    for layer in file.layers:
        each = [_instances(path, graph, name) for name in layer.modules]
        joined = [tuple(op for found in each for ops in found for op in ops)]
        ops = list(each[0]) if len(each) == 1 else joined
        said = ", ".join(layer.modules)
        for name in (name for own in ops for name in own):
            if taken.setdefault(name, said) != said:
                raise InputError(
                    f"the layers {taken[name]!r} and {said!r} of the profile have the same ops",
                    code="BX1431",
                    at=path,
                    help="time each module in one layer",
                )
        _require_parameters(path, layer, graph, ops[0])
        yield _Found(layer, tuple(ops))


def _instances(path: str, graph: Graph, name: str) -> tuple[tuple[str, ...], ...]:
    """Return the ops of each module that a name of the file stands for."""
    if name == LOSS:
        return (tuple(op.name for op in graph.ops if not op.modules),)
    pattern = re.compile("[^.]+".join(map(re.escape, name.split("*"))))
    by_module: dict[str, list[str]] = {}
    for op in graph.ops:
        for module in op.modules:
            is_class = module.type.rpartition(".")[2] == name
            if is_class or pattern.fullmatch(module.path):
                by_module.setdefault(module.path, []).append(op.name)
                break
    if not by_module:
        raise _unknown(path, graph, name)
    return tuple(map(tuple, by_module.values()))


def _unknown(path: str, graph: Graph, name: str) -> InputError:
    calls = [module for op in graph.ops for module in op.modules if module.path]
    known = dict.fromkeys(c.path for c in calls) | dict.fromkeys(
        c.type.rpartition(".")[2] for c in calls
    )
    near = ", ".join(_nearest(name, list(known))) or ", ".join([*known][:4])
    return InputError(
        f"the profile has a layer {name!r}, and {graph.name} has no such module or class",
        code="BX1432",
        at=path,
        help=f"nearest: {near}; name modules of the model, or use the profile of this one",
    )


def _require_parameters(path: str, layer: Layer, graph: Graph, ops: Sequence[str]) -> None:
    """Refuse a layer of other sizes; ranks of a group have parts, of which nothing is said."""
    names = {graph.param[param].canonical for op in ops for param in graph.op[op].params}
    if any(op.target.startswith(_EXCHANGE) for op in graph.ops) or layer.parameters is None:
        return
    count = sum(graph.param[n].spec.numel for n in names if graph.param[n].kind == "parameter")
    if count != layer.parameters:
        raise InputError(
            f"the layer {', '.join(layer.modules)} has {count:,} numbers in {graph.name}, and "
            f"{layer.parameters:,} in the profile",
            code="BX1433",
            at=path,
            help="use a profile of a model of these sizes",
        )


def _require_inputs(path: str, file: LayerTimes, graph: Graph) -> None:
    rows = {entry.name: tuple(entry.spec.shape[1:]) for entry in graph.inputs if entry.batched}
    for name, shape in file.inputs.items():
        if rows.get(name) != shape:
            near = ", ".join(_nearest(name, list(rows))) or ", ".join(rows)
            found = f"rows of {rows[name]}" if name in rows else f"no input {name!r}"
            raise InputError(
                f"the profile is of {name} with rows of {shape}, and {graph.name} has {found}",
                code="BX1434",
                at=path,
                help=f"use a profile of this size; the model's inputs: {near} {rows.get(near, '')}",
            )


def _nearest(name: str, known: Sequence[str]) -> list[str]:
    return difflib.get_close_matches(name, known, n=3, cutoff=0.5)


# --------------------------------------------------------------------------- which card


def _card(device: Device, cards: Sequence[str]) -> str:
    """Return what the file calls a device: by its preset, its processor or its own name."""
    names = {name.lower(): name for name in cards}
    asked = (device.preset, device.processor, device.name)
    return next((names[name.lower()] for name in asked if name.lower() in names), "")


def _require_cards(path: str, file: LayerTimes, cluster: Cluster, cards: Mapping[str, str]) -> None:
    """Refuse a profile that has no card of the cluster."""
    if any(cards.values()):
        return
    own = list(dict.fromkeys(d.preset or d.processor or d.name for d in cluster.devices))
    near = [name for card in own for name in _nearest(card, list(file.cards))]
    raise InputError(
        f"the profile has times of {', '.join(file.cards)}, and the cluster has {', '.join(own)}",
        code="BX1435",
        at=path,
        help=f"nearest: {near[0]}; write the cluster's presets as cards"
        if near
        else f'name a card as the cluster does: "card": "{own[0]}"',
    )


# --------------------------------------------------------------------------- seconds


@dataclass(frozen=True)
class _Table:
    ops: Mapping[str, OpCost]
    measured: tuple[str, ...]
    update_s_per_byte: float | None


@dataclass(frozen=True)
class _Seconds:
    """Of one layer: whether they were measured, or taken from beyond what was."""

    forward_s: float
    backward_s: float
    update_s: float | None
    was_measured: bool
    has_exchanges: bool


def _table(
    graph: Graph,
    found: Sequence[_Found],
    card: str,
    plain: Mapping[str, OpCost],
    members: int,
) -> _Table:
    """Return what ops cost on a card: of layers by the file, of others by the card's factor."""
    ops: dict[str, OpCost] = {}
    measured: list[str] = []
    ratios: list[float] = []
    update_s, nbytes = 0.0, 0
    for each in found:
        seconds = _seconds(each.layer.times, card, graph.batch, members)
        if seconds is None:
            continue
        for own in each.ops:
            scaled = dict(_scaled(graph, own, plain, seconds))
            ratios.append(_whole_s(scaled.values()) / max(1e-12, _whole_s(plain[n] for n in own)))
            ops |= scaled
            measured += scaled if seconds.was_measured else ()
            if seconds.update_s is not None:
                update_s, nbytes = update_s + seconds.update_s, nbytes + _trained(graph, own)
    factor = median(ratios) if ratios else 1.0
    every = {name: ops.get(name) or _times(cost, factor) for name, cost in plain.items()}
    return _Table(every, tuple(measured), update_s / nbytes if nbytes else None)


def _whole_s(costs: Iterable[OpCost]) -> float:
    return sum(cost.forward_s + cost.backward_s for cost in costs)


def _scaled(
    graph: Graph, own: Sequence[str], plain: Mapping[str, OpCost], seconds: _Seconds
) -> Iterator[tuple[str, OpCost]]:
    """Divide a layer's seconds among its ops as `plain` does."""
    inside = [n for n in own if seconds.has_exchanges or not _exchanges(graph.op[n])]
    forward_s = sum(plain[name].forward_s for name in inside)
    backward_s = sum(plain[name].backward_s for name in inside)
    trained = sum(graph.op[name].requires_grad for name in inside)
    for name in inside:
        cost, even = plain[name], graph.op[name].requires_grad / max(1, trained)
        one = cost.forward_s / forward_s if forward_s else 1 / len(inside)
        back = seconds.backward_s * (cost.backward_s / backward_s if backward_s else even)
        share = cost.backward_input_s / cost.backward_s if cost.backward_s else 1.0
        yield (
            name,
            replace(
                cost,
                forward_s=seconds.forward_s * one,
                backward_s=back,
                backward_input_s=back * share,
                host_forward_s=0.0,
                host_backward_s=0.0,
            ),
        )


def _exchanges(op: Op) -> bool:
    return op.target.startswith(_EXCHANGE)


def _times(cost: OpCost, factor: float) -> OpCost:
    return replace(
        cost,
        forward_s=cost.forward_s * factor,
        backward_s=cost.backward_s * factor,
        backward_input_s=cost.backward_input_s * factor,
    )


def _trained(graph: Graph, own: Sequence[str]) -> int:
    names = {graph.param[param].canonical for op in own for param in graph.op[op].params}
    return sum(graph.param[n].spec.nbytes for n in names if graph.param[n].spec.requires_grad)


def _seconds(times: Sequence[LayerTime], card: str, rows: int, members: int) -> _Seconds | None:
    """Return a layer's seconds for so many rows in groups of so many; None: not on this card."""
    own = [time for time in times if time.card == card]
    if not own:
        return None
    degree = min({t.tensor for t in own}, key=lambda n: abs(n - members) / max(n, members))
    known = {time.rows: time for time in own if time.tensor == degree}
    less = degree / members
    forward_s, inside = _line({n: t.forward for n, t in known.items()}, rows)
    backward_s, _ = _line({n: t.backward for n, t in known.items()}, rows)
    updates = {n: t.update for n, t in known.items() if t.update is not None}
    nearest_rows = min(updates, key=lambda n: abs(n - rows), default=None)
    update_s = None if nearest_rows is None else less * updates[nearest_rows]
    is_own = degree == members
    return _Seconds(less * forward_s, less * backward_s, update_s, inside and is_own, is_own)


def _line(points: Mapping[int, float], rows: int) -> tuple[float, bool]:
    """Return a time on the line through the two nearest sizes, and whether it lies between."""
    if rows in points:
        return points[rows], True
    sizes = sorted(points)
    if len(sizes) == 1:
        return points[sizes[0]] * rows / sizes[0], False
    place = next((i for i, size in enumerate(sizes) if size > rows), len(sizes))
    few, many = sizes[min(max(place - 1, 0), len(sizes) - 2) :][:2]
    slope = (points[many] - points[few]) / (many - few)
    inside = sizes[0] < rows < sizes[-1]
    return max(0.0, points[few] + slope * (rows - few)), inside
