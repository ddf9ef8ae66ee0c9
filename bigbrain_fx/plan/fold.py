"""A partitioner's chain of devices -> virtual stages: each device comes again, in a loop or a V.

A chain of one piece a device gives the devices of the model and their order. The pieces are cut
anew for the schedule that will run them. Work is shared as before, then cuts move while the step of
the schedule gets shorter. The module knows units, costs and orders, not programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from bigbrain_fx.core import Costs, Graph, Placement
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.cut import cut
from bigbrain_fx.plan.recompute import LAYERS
from bigbrain_fx.plan.schedule import Fold, traits
from bigbrain_fx.planning import (
    Cuts,
    OrderClock,
    VirtualStages,
    live_ops,
    searched_cuts,
    shared_cuts,
    units,
)

if TYPE_CHECKING:
    from bigbrain_fx.planning import Line, Setting, Work


CUTS = 60
"""Cuts to play a step for, at most."""


def fold_of(schedule: str) -> Fold:
    """Return how a schedule of virtual stages lays its pieces."""
    fold = traits(schedule).fold
    assert fold is not None, f"{schedule} has one piece a device"
    return fold


def folded(
    graph: Graph,
    placement: Placement,
    costs: Costs,
    micro_batches: int,
    schedule: str,
    pieces: int | None = None,
) -> Placement:
    """Return a placement with several pieces a device, as a schedule wants them.

    Args:
        graph: as captured.
        placement: a chain: one piece a device.
        costs: of the graph at the rows of a micro-batch.
        micro_batches: of a step.
        schedule: one of virtual stages.
        pieces: of each device; two where it is left out.

    Raises:
        InputError: the placement is no chain, has one device or too few units for the pieces, or
            the micro-batches do not suit the schedule.
    """
    fold = fold_of(schedule)
    rows = graph.batch // micro_batches
    names = _line_of(graph, placement, rows, schedule, len(costs.cluster.devices))
    _require_taken(graph.batch, schedule, len(names), micro_batches)
    from bigbrain_fx.planning import Line, Setting, work  # numpy: not with every import of a plan

    known = work(graph.at(rows), costs)
    line = fold.line(len(names), pieces or 2)
    if known.count < len(line):
        raise InputError(
            f"schedule '{schedule}' needs {len(line)} pieces, and the model has {known.count} "
            "units that can be cut apart",
            code="BX1230",
            help=_fewer(schedule, known.count, len(names), pieces),
        )
    homes = tuple(names[place] for place in line)
    later_s = _later_s(graph, known, costs, names) if traits(schedule).splits else {}
    every = Line(known, range(known.count), known.count)
    setting = Setting(costs.cluster, micro_batches)
    judge = _Judge(every, setting, homes, fold, pieces or 2, later_s)
    step_s, cuts = searched_cuts(_shared(known, names, line), known.count, judge.step_s, CUTS)
    found = _placed(known, cuts, homes, fold.shape, step_s)
    _require_pieces(graph, found, rows, schedule, homes)
    return found


def taken_counts(batch: int, schedule: str | None, devices: int) -> list[int]:
    """Return the numbers of micro-batches that divide a batch, and that a schedule has orders for.

    Args:
        batch: its rows.
        schedule: one without virtual stages has an order for each number.
        devices: of the line.
    """
    fold = traits(schedule).fold
    even = [count for count in range(1, batch + 1) if batch % count == 0]
    return [count for count in even if fold is None or fold.takes(devices, count)]


def micro_option(counts: Sequence[int]) -> str:
    """Write the option for one of these numbers of micro-batches."""
    listed = ", ".join(map(str, counts))
    return f"--micro-batches {'' if len(counts) == 1 else 'with one of '}{listed}"


def _require_taken(batch: int, schedule: str, devices: int, micro_batches: int) -> None:
    """Raise InputError for micro-batches of which a schedule has no order; say which it has."""
    fold = fold_of(schedule)
    if fold.takes(devices, micro_batches):
        return
    taken = taken_counts(batch, schedule, devices)
    other = "zb-v" if schedule == "dualpipe-v" else "1f1b"
    try:
        fold.order(devices, micro_batches, 2)
    except InputError as error:
        some = f"{micro_option(taken)}, or " if taken else ""
        error.help = f"use {some}--schedule {other}"
        raise


def _fewer(schedule: str, units: int, devices: int, pieces: int | None) -> str:
    """Say how a line has fewer pieces than there are units of the model."""
    most = units // devices
    if fold_of(schedule).any_pieces and 2 <= most < (pieces or 2):
        return f"use --virtual-stages {most} or fewer, or --schedule 1f1b"
    return "use fewer devices, or --schedule 1f1b"


def _line_of(
    graph: Graph, placement: Placement, rows: int, schedule: str, devices: int
) -> tuple[str, ...]:
    """Return the devices of a line, in order; there are so many in all."""
    stages = cut(graph, placement, rows)
    if len(stages.devices) < 2:
        raise InputError(
            f"schedule '{schedule}' goes over several devices, and all of the model is on "
            f"{stages.devices[0]}",
            code="BX1233",
            help="use --partitioner naive, which uses all devices, or --schedule 1f1b"
            if devices > 1
            else "use more devices, or --schedule 1f1b",
        )
    if not stages.is_chain:
        twice = next(device for device in stages.devices if len(stages.of(device)) > 1)
        raise InputError(
            f"schedule '{schedule}' folds a line of one piece a device, and this placement is "
            f"none: device '{twice}' has {len(stages.of(twice))}",
            code="BX1234",
            help="use --partitioner chain-dp or naive, or --schedule list",
        )
    return stages.devices


def _shared(known: Work, names: tuple[str, ...], line: tuple[int, ...]) -> Cuts:
    """Return cuts by which devices work for equally long."""
    seconds = [known.seconds[name] for name in names]
    every = [float(each.sum()) for each in seconds]
    speed = [1.0 / total if total else 1.0 for total in every]
    return shared_cuts([float(unit) for unit in seconds[0]], line, speed)


@dataclass(frozen=True)
class _Judge:
    """Plays the schedule's own order for one cut after another.

    `later_s` is what a BackwardWeight takes of each unit, by device; without a split it is empty.
    """

    line: Line
    setting: Setting
    homes: tuple[str, ...]
    fold: Fold
    pieces: int
    later_s: Mapping[str, Sequence[float]]

    def step_s(self, cuts: Cuts) -> float:
        """Return the seconds of a step."""
        stages = self._stages((0, *cuts, self.line.count))
        devices = stages.timed.devices
        ranked = self.fold.order(len(devices), self.setting.micro_batches, self.pieces)
        return OrderClock(stages).step_s(dict(zip(devices, ranked, strict=True)))

    def _stages(self, ends: Cuts) -> VirtualStages:
        from bigbrain_fx.planning import Split, chain_of

        split = Split(self.homes, ends, 0.0, 0.0)
        again = range(len(self.homes)) if self.line.work.recompute else ()
        timed = chain_of(self.line, split, self.setting, again)
        whole = VirtualStages.unsplit(timed, self.setting.micro_batches)
        if not self.later_s:
            return whole
        pieces = zip(self.homes, pairwise(ends), strict=True)
        later = tuple(sum(self.later_s[name][a:b]) for name, (a, b) in pieces)
        each = zip(timed.backward_s, later, strict=True)
        now = tuple(max(0.0, b - w) for b, w in each)
        return replace(whole, timed=replace(timed, backward_s=now), backward_weight_s=later)


def _later_s(
    graph: Graph, known: Work, costs: Costs, names: Sequence[str]
) -> dict[str, list[float]]:
    """Return, by device, what of each unit's backward makes gradients of weights that may wait."""
    layers = {op.name for op in graph.ops if op.target in LAYERS}
    found = {}
    for name in names:
        of = costs.ops[name]
        found[name] = [
            sum(of[n].backward_s - of[n].backward_input_s for n in group if n in layers)
            for group in known.groups
        ]
    return found


def _placed(known: Work, cuts: Cuts, line: Sequence[str], shape: str, step_s: float) -> Placement:
    ends = (*cuts, known.count)
    homes: list[str] = []
    for device, end in zip(line, ends, strict=True):
        homes += [device] * (end - len(homes))
    seen: set[str] = set()
    breaks = []
    for device, start in zip(line, (0, *cuts), strict=True):
        breaks += [known.groups[start][0]] if device in seen else []
        seen.add(device)
    reason = (
        f"{len(line)} pieces in a {shape}, {' -> '.join(line)}: about {step_s:.4g} s a step alone"
    )
    return Placement(known.placed(homes), reason, breaks=tuple(breaks))


def _require_pieces(
    graph: Graph, placement: Placement, rows: int, schedule: str, line: Sequence[str]
) -> None:
    """Raise where the pieces of a line do not come out as stages: they wait for nobody between."""
    stages = cut(graph, placement, rows, breaks=placement.breaks)
    found = [stage.device for stage in stages.stages]
    if found != [*line]:
        raise InputError(
            f"schedule '{schedule}' needs the stages {' '.join(line)}, but the model's branches "
            f"make {' '.join(found)}",
            code="BX1235",
            help="use --schedule list, which runs any stage graph",
        )


# ------------------------------------------------------------------------------------------------
# Replicas with ZeRO 3 -> the same with breaks: parts of the model whose weights come one by one.
#
#   embed | blocks.0 blocks.1 | blocks.2 blocks.3 | head      a part is a stage: its weights are
#                                                            there while it runs, and no others
#
# A device would else gather all of its weights at once, and save nothing where it holds most.
# Parts end where a layer or a repeated block does.


PARTS = (8, 16, 32)
"""Into so many, about, a device's weights are divided: its file grows no further with depth.

Into the least of them with which a plan fits.
"""
LEAST_PART = 256 << 10
"""Bytes below which a part would cost more in latency than it saves."""


@dataclass(frozen=True)
class _ModelLayer:
    """Neighbouring ops of one layer or one repeated block, and the weights that they read."""

    first: str
    params: frozenset[str]


def in_parts(graph: Graph, placement: Placement, rows: int) -> Iterator[Placement]:
    """Begin a stage, the same in all replicas, wherever the weights of one would be too many.

    A device's part of the model becomes about `PARTS` stages. Few large ones come first, then
    smaller ones, which take less memory, down to a layer each.
    """
    layers, sizes = [*_layers(graph, rows)], _sizes(graph)
    devices = max(len(set(each.device_of.values())) for each in placement.replicas)
    most_bytes = (max(LEAST_PART, sum(sizes.values()) // (n * devices)) for n in PARTS)
    for breaks in dict.fromkeys(tuple(_breaks(layers, sizes, most)) for most in most_bytes):
        yield _broken(placement, breaks)


def _broken(placement: Placement, breaks: tuple[str, ...]) -> Placement:
    replicas = tuple(
        replace(each, breaks=tuple(dict.fromkeys((*each.breaks, *breaks))))
        for each in placement.replicas
    )
    return replace(placement, replicas=replicas)


def breaks_at_layers(graph: Graph, rows: int) -> tuple[str, ...]:
    """Return the first op of each layer, small ones together: weights come as they are needed."""
    return tuple(_breaks([*_layers(graph, rows)], _sizes(graph), LEAST_PART))


def _breaks(layers: list[_ModelLayer], sizes: dict[str, int], most_bytes: int) -> Iterator[str]:
    held: frozenset[str] = frozenset()
    for layer in layers:
        together = held | layer.params
        if held and layer.params and sum(sizes[name] for name in together) > most_bytes:
            yield layer.first
            together = layer.params
        held = together


def _sizes(graph: Graph) -> dict[str, int]:
    """Return the bytes of each trained parameter, by canonical name."""
    return {name: param.spec.nbytes for name, param in graph.trained.items()}


def _layers(graph: Graph, rows: int) -> Iterator[_ModelLayer]:
    """Yield the layers in the order in which they run; a unit is never divided."""
    live, sizes = live_ops(graph), _sizes(graph)
    where, first, params = "", "", set[str]()
    for group in units(graph.at(rows)).groups:
        ops = [graph.op[name] for name in group if name in live]
        if not ops:
            continue
        here = ops[0].layer or ops[0].module_path
        if first and here != where:
            yield _ModelLayer(first, frozenset(params))
            first, params = "", set()
        where, first = here, first or ops[0].name
        read = {graph.param[name].canonical for op in ops for name in op.params}
        params |= read & sizes.keys()
    if first:
        yield _ModelLayer(first, frozenset(params))


def in_layers(graph: Graph, placement: Placement, rows: int) -> Placement:
    """Begin a stage at each layer that has weights worth moving."""
    breaks = dict.fromkeys((*placement.breaks, *breaks_at_layers(graph, rows)))
    return replace(placement, breaks=tuple(breaks))
