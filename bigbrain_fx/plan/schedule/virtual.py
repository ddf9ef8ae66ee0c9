"""Schedules; stages as the planning kernel has them, and its jobs as instructions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from bigbrain_fx.core import Backward, BackwardWeight, Compute, Edge, Forward, Stages
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.schedule.costs import StageCosts
from bigbrain_fx.plan.schedule.messages import Orders
from bigbrain_fx.planning import JobOf, Kind, Message, Ranked, TimedStages, VirtualStages


@dataclass(frozen=True)
class Fold:
    """How a schedule lays several pieces of a device over a line of devices.

    Attributes:
        shape: a phrase.
        line: (devices, pieces) -> the device of each piece.
        order: (devices, micro-batches, pieces) -> what it computes.
        takes: (devices, micro-batches) -> whether it has an order for so many.
        any_pieces: whether a device may have more than two.
    """

    shape: str
    line: Callable[[int, int], tuple[int, ...]]
    order: Callable[[int, int, int], Ranked]
    takes: Callable[[int, int], bool] = lambda _devices, _micro: True
    any_pieces: bool = False


@dataclass(frozen=True)
class Schedule:
    """Decide in which order every device runs forwards and backwards.

    Contract: every stage runs its micro-batches in ascending order, forward and backward; stages
    that are not in `trained` have no backward; the programs pass `check`. A schedule that does not
    place the BackwardWeights of a stage that defers gets each right after its Backward.

    Attributes:
        in_flight: the most micro-batches on each device at once.
        name: that the command line offers.
        splits: it is made for split backwards: all stages defer unless one says which.
        joins: it orders all replicas together; others order each replica by itself.
        searches: its order is searched within the memory of the devices.
        fold: how it brings its own cut of a line, into several pieces of a device.
        takes_in_flight: whether a user may say how many are; else the schedule itself does.
    """

    in_flight: tuple[int, ...] | None = None
    name: ClassVar[str] = ""
    splits: ClassVar[bool] = False
    joins: ClassVar[bool] = False
    searches: ClassVar[bool] = False
    fold: ClassVar[Fold | None] = None
    takes_in_flight: ClassVar[bool] = True

    @classmethod
    def suits(cls, stages: Stages) -> bool:
        """Whether stages lie on the devices as a line, or as it folds one."""
        if cls.fold is None or stages.micros or stages.is_chain:
            return stages.is_chain
        devices = len(stages.devices)
        return line_of(stages) == cls.fold.line(devices, len(stages.stages) // devices)

    def order(
        self, stages: Stages, micro_batches: int, costs: StageCosts, trained: frozenset[int]
    ) -> Orders:
        """Return what each device computes, in order.

        Raises:
            InputError: it does not run such stages.
            NoPlanError: a device has no memory for one micro-batch.
        """
        raise NotImplementedError


def line_of(stages: Stages) -> tuple[int, ...]:
    """Return the device of each stage, by its place in `stages.devices`."""
    places = {device: place for place, device in enumerate(stages.devices)}
    return tuple(places[stage.device] for stage in stages.stages)


def require_line(name: str, stages: Stages, line: Sequence[int]) -> None:
    """Raise InputError unless stages lie on the devices as a schedule has them."""
    if line_of(stages) != tuple(line):
        wanted = " ".join(stages.devices[place] for place in line)
        found = " ".join(stage.device for stage in stages.stages)
        raise InputError(
            f"schedule '{name}' needs stages on {wanted}, but they are on {found}",
            code="BX1319",
            help="use --schedule list, which runs any stage graph",
        )


def with_instructions(
    stages: Stages, ranked: Iterable[Sequence[JobOf]], trained: frozenset[int]
) -> Orders:
    """Return each device's jobs as instructions; what a stage does not have is left out."""
    each = (tuple(_computes(jobs, stages, trained)) for jobs in ranked)
    return dict(zip(stages.devices, each, strict=True))


def _computes(jobs: Iterable[JobOf], stages: Stages, trained: frozenset[int]) -> Iterator[Compute]:
    for kind, stage, micro in jobs:
        if kind == Kind.FORWARD:
            yield Forward(stage, micro)
        elif kind == Kind.BACKWARD and stage in trained:
            yield Backward(stage, micro)
        elif kind == Kind.BACKWARD_WEIGHT and stages.stages[stage].deferred:
            yield BackwardWeight(stage, micro)


def virtual_stages(
    stages: Stages,
    micro_batches: int,
    costs: StageCosts,
    trained: frozenset[int],
    room_bytes: Mapping[str, float] | None = None,
) -> VirtualStages:
    """Return stages for the planning kernel.

    Args:
        stages: the cut graph; devices are numbers in the order of `stages.devices`.
        micro_batches: of a step.
        costs: of the same stages.
        trained: stages that have a Backward.
        room_bytes: by device, for what is saved and what waits; no limit where it is left out.
    """
    waits = [bool(stage.deferred) and stage.index in trained for stage in stages.stages]
    room = room_bytes or {}
    return VirtualStages(
        timed_stages(stages, costs, trained),
        micro_batches,
        tuple(s if wait else None for s, wait in zip(costs.weight_s, waits, strict=True)),
        tuple(float(_saved_bytes(stages, costs, stage)) for stage in range(len(waits))),
        tuple(float(costs.working_of(stage).waiting_bytes) for stage in range(len(waits))),
        {place: room[name] for place, name in enumerate(stages.devices) if name in room},
        without_backward(stages, trained),
    )


def without_backward(stages: Stages, trained: frozenset[int]) -> frozenset[int]:
    """Return the stages that have no Backward."""
    return frozenset(range(len(stages.stages))) - trained


def timed_stages(stages: Stages, costs: StageCosts, trained: frozenset[int]) -> TimedStages:
    """Return the seconds of stages and messages; devices are numbers, as in `virtual_stages`."""
    own = [costs.cluster.device[name].overheads for name in stages.devices]
    return TimedStages(
        line_of(stages),
        costs.forward_s,
        costs.backward_s,
        tuple(_messages(stages, costs, "activation")),
        tuple(_messages(stages, costs, "gradient")) if trained else (),
        {place: each.step_s for place, each in enumerate(own)},
        {place: each.instruction_s for place, each in enumerate(own)},
        {place: costs.optimizer_s.get(name, 0.0) for place, name in enumerate(stages.devices)},
    )


def _messages(stages: Stages, costs: StageCosts, kind: str) -> Iterator[Message]:
    for edge in stages.edges:
        if edge.kind == kind:
            yield _message(stages, costs, edge)


def _message(stages: Stages, costs: StageCosts, edge: Edge) -> Message:
    if stages.is_local(edge):
        return Message(edge.source, edge.target, edge.nbytes)
    ends = (stages.stages[end].device for end in (edge.source, edge.target))
    there, here = (costs.cluster.device[name].overheads for name in ends)
    handled_s = there.handling_s(edge.nbytes), here.handling_s(edge.nbytes)
    return Message(edge.source, edge.target, edge.nbytes, *costs.wire_s(stages, edge), *handled_s)


def _saved_bytes(stages: Stages, costs: StageCosts, stage: int) -> int:
    """Return what a stage keeps from Forward to Backward, messages included, as the ledger does."""
    received = sum(e.nbytes for e in stages.into(stage, "activation") if not stages.is_local(e))
    made = {edge.value: edge.nbytes for edge in stages.out_of(stage, "activation")}
    again = stages.stages[stage].runs_again
    return costs.working_of(stage).saved_bytes + received + (0 if again else sum(made.values()))
