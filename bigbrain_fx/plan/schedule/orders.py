"""Schedules whose orders have a name; none knows messages, times or memory.

    gpipe         every forward, then every backward             one stage a device, or stores
    1f1b          forwards until enough are in flight, then one backward, one forward, in turn
    zb-h1         1f1b with split backwards                      one stage a device
    interleaved   1f1b round and round                           several stages a device, in a loop
    zb-v          split backwards, down and up again             two stages a device, in a V
    dualpipe-v    the same from both ends
    forward       micro-batches stream through, for inference    any stages

`planning.known_orders` has the computations of each device; this module has the stages that a
schedule takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

from typing_extensions import override

from bigbrain_fx.core import Backward, Compute, Forward, Stages
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.schedule.costs import StageCosts
from bigbrain_fx.plan.schedule.messages import Orders
from bigbrain_fx.plan.schedule.virtual import (
    Fold,
    Schedule,
    require_line,
    timed_stages,
    virtual_stages,
    with_instructions,
    without_backward,
)
from bigbrain_fx.planning import (
    Ranked,
    Synthesis,
    Taste,
    VirtualStages,
    dualpipe_v,
    fills_both_ways,
    in_flight_to_fill,
    interleaved,
    list_orders,
    loop_line,
    makes_rounds,
    one_f_one_b,
    synthesise,
    v_line,
    zb_h1,
    zb_v,
)


def require_chain(name: str, stages: Stages) -> None:
    """Raise InputError, naming a device with several stages, unless `stages` is a chain."""
    if stages.is_chain:
        return
    device = next(device for device in stages.devices if len(stages.of(device)) > 1)
    indices = ", ".join(str(stage.index) for stage in stages.of(device))
    raise InputError(
        f"schedule '{name}' needs one stage per device, but device '{device}' has stages {indices}",
        code="BX1306",
        help="use --schedule list, which runs any stage graph",
    )


class ForwardOnly(Schedule):
    """Stream micro-batches through any stage graph; there is no backward.

      stage 0  F0 F1 F2 F3 .  .       batch = (m + p - 1) t
      stage 1  .  F0 F1 F2 F3 .       held: the micro-batch that runs, and what waits to be sent
      stage 2  .  .  F0 F1 F2 F3

    A device with several stages takes them along the same diagonal: F(stage, micro) in the order of
    stage + micro. An earlier stage of a micro-batch stands on an earlier diagonal, and so does the
    same stage of an earlier micro-batch. No order of devices can deadlock.
    """

    name = "forward"
    takes_in_flight = False

    @override
    def order(
        self, stages: Stages, micro_batches: int, costs: StageCosts, trained: frozenset[int]
    ) -> Orders:
        if trained:
            raise InputError(
                "schedule 'forward' has no backward, and this plan trains",
                code="BX1308",
                help="use --schedule 1f1b, gpipe or list, or split with --mode eval",
            )
        return {device: _diagonal(stages, device, micro_batches) for device in stages.devices}


def _diagonal(stages: Stages, device: str, micro_batches: int) -> tuple[Forward, ...]:
    own = [stage.index for stage in stages.of(device)]
    cells = [(stage + micro, stage, micro) for stage in own for micro in range(micro_batches)]
    return tuple(Forward(stage, micro) for _, stage, micro in sorted(cells))


class GPipe(Schedule):
    """Run all micro-batches forward, then all backward; needs one stage per device, or stores.

      stage 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 B1 B2 B3      step = (m + p - 1)(tf + tb)
      stage 1  .  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3 .       in flight: m everywhere

    Where weights lie in stores, devices have several stages and run them one after another. The
    weights of each stage then come once for all forwards, and once for all backwards.

    Source: Huang et al., GPipe, NeurIPS 2019. Here backwards go in ascending micro-batch order,
    too, which costs the same and fixes the order in which gradients are summed.
    """

    name = "gpipe"
    takes_in_flight = False

    @override
    def order(
        self, stages: Stages, micro_batches: int, costs: StageCosts, trained: frozenset[int]
    ) -> Orders:
        if "weights" not in stages.offload:
            require_chain(self.name, stages)
        micros = range(micro_batches)
        orders: Orders = {}
        for device in stages.devices:
            own = [stage.index for stage in stages.of(device)]
            forwards = (Forward(stage, m) for stage in own for m in micros)
            backwards = (Backward(s, m) for s in reversed(own) for m in micros if s in trained)
            orders[device] = (*forwards, *backwards)
        return orders


class OneForwardOneBackward(Schedule):
    """Alternate forwards and backwards; needs one stage per device.

      stage 0  F0 F1 F2 .  .  .  B0 F3 .  B1 F4 .  B2 ...     step = (m + p - 1)(tf + tb)
      stage 1  .  F0 F1 .  .  B0 F2 .  B1 F3 .  B2 F4 ...     in flight: min(m, p - s)
      stage 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 ...

    `in_flight[s]` is the most micro-batches that stage s holds between their forward and their
    backward; None is the classic p - s. The steady cycle is at least
    sum over j >= s of (t_j + round trip_j) / in_flight[s].
    """

    name = "1f1b"
    ranked: ClassVar[Callable[..., Ranked]] = staticmethod(one_f_one_b)

    @override
    def order(
        self, stages: Stages, micro_batches: int, costs: StageCosts, trained: frozenset[int]
    ) -> Orders:
        require_chain(self.name, stages)
        count = len(stages.stages)
        in_flight = self.in_flight or tuple(range(count, 0, -1))
        _require_falling(in_flight, trained)
        return with_instructions(stages, self.ranked(count, micro_batches, in_flight), trained)


class ZeroBubbleH1(OneForwardOneBackward):
    """ZB-H1: 1F1B whose backwards are split; gradients of weights fill the gaps at a step's end.

      stage 0  F0 F1 F2 F3 .  .  .  B0 W0 F4 B1 W1 F5 B2 W2 ...  f = b = w, p = 4, M = 8: 27 units,
      stage 1  .  F0 F1 F2 .  .  B0 F3 B1 W0 F4 B2 W1 F5 B3 ...  where 1F1B takes 33 and 24 are work
      stage 2  .  .  F0 F1 .  B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 ...
      stage 3  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 ...  in memory: p micro-batches at most

    Stage s has p - s micro-batches between forward and backward, as with 1F1B, and s more between
    backward and W.
    """

    name = "zb-h1"
    splits = True
    ranked: ClassVar[Callable[..., Ranked]] = staticmethod(zb_h1)


def _require_falling(in_flight: tuple[int, ...], trained: frozenset[int]) -> None:
    """Raise when a stage would wait for more micro-batches than an earlier one lets out."""
    for earlier, later in pairwise(sorted(trained)):
        if in_flight[earlier] < in_flight[later]:
            raise InputError(
                f"in_flight must not grow along the chain, but stage {earlier} has "
                f"{in_flight[earlier]} and stage {later} has {in_flight[later]}",
                code="BX1314",
                notes=(
                    f"stage {later} would wait for a micro-batch that stage {earlier} holds back",
                ),
                help=f"give stage {earlier} at least {in_flight[later]}",
            )


class Folded(Schedule):
    """A schedule of several pieces of a device, each a stage."""

    takes_in_flight = False

    @override
    def order(
        self, stages: Stages, micro_batches: int, costs: StageCosts, trained: frozenset[int]
    ) -> Orders:
        assert self.fold is not None
        devices = len(stages.devices)
        pieces = max(2, len(stages.stages) // devices)
        require_line(self.name, stages, self.fold.line(devices, pieces))
        return with_instructions(stages, self.fold.order(devices, micro_batches, pieces), trained)


class Interleaved(Folded):
    """Alternate forwards and backwards over stages that go round the devices.

    device 0  stages 0, 2      the bubble is that of 1F1B divided by the pieces of a device, and
    device 1  stages 1, 3      every link is crossed as often as there are pieces
    """

    name = "interleaved"
    fold = Fold("loop", loop_line, interleaved, makes_rounds, any_pieces=True)


class ZeroBubbleV(Folded):
    """ZB-V: 1F1B's memory, and no bubble between equal stages of steps in a row.

    device 0  stages 0, 3      the last piece is where the first one is: its gradients need not
    device 1  stages 1, 2      come far, and BackwardWeights fill what is left of the gaps
    """

    name = "zb-v"
    splits = True
    fold = Fold("V", lambda devices, _: v_line(devices), lambda n, micro, _: zb_v(n, micro))


class DualPipeV(ZeroBubbleV):
    """DualPipe-V, whose Forwards and Backwards go one after another here."""

    name = "dualpipe-v"
    fold = replace(
        ZeroBubbleV.fold, order=lambda n, micro, _: dualpipe_v(n, micro), takes=fills_both_ways
    )


# --------------------------------------------------------------------------- gems


class Gems(Schedule):
    """Run one micro-batch after the other on each device, forward and backward, of two replicas."""

    name = "gems"
    joins = True
    takes_in_flight = False

    @override
    @classmethod
    def suits(cls, stages: Stages) -> bool:
        return is_mirrored(stages)

    @override
    def order(
        self, stages: Stages, micro_batches: int, costs: StageCosts, trained: frozenset[int]
    ) -> Orders:
        _require_mirrored(stages)
        return {
            device: tuple(_in_turn(stages, device, micro_batches, trained))
            for device in stages.devices
        }


def is_mirrored(stages: Stages) -> bool:
    """Whether each two replicas lie on the same devices, one in reverse, one stage of each."""
    lines = [[s.device for s in stages.of_replica(n)] for n in range(stages.replicas)]
    pairs = zip(lines[::2], lines[1::2], strict=False)
    return len(lines) % 2 == 0 and all(_are_opposite(*pair) for pair in pairs)


def _are_opposite(line: list[str], back: list[str]) -> bool:
    """Whether no device has the same place in both: it would hold each of its weights twice."""
    return back == line[::-1] and len(set(line)) == len(line) and len(line) % 2 == 0


def _require_mirrored(stages: Stages) -> None:
    if not is_mirrored(stages):
        found = " ".join(f"{stage.device}" for stage in stages.stages)
        raise InputError(
            "schedule 'gems' needs two replicas on one line of an even number of devices, the "
            f"second in reverse, and stages are on {found}",
            code="BX1311",
            help="split with --schedule gems, a partitioner that makes a line, and an even number "
            "of devices, or use --schedule 1f1b",
        )
    counts = [len(own) for own in stages.micros]
    if len(set(counts)) > 1:
        raise InputError(
            "schedule 'gems' takes micro-batches in turn, and replicas have "
            f"{', '.join(map(str, counts))}",
            code="BX1312",
            help=f"use a number of micro-batches that {stages.replicas} divides",
        )


def _in_turn(
    stages: Stages, device: str, micro_batches: int, trained: frozenset[int]
) -> Iterator[Compute]:
    """Yield forward and backward of each micro-batch of a device, by number."""
    own = (stage.index for stage in stages.of(device))
    runs = ((micro, stage) for stage in own for micro in stages.micros_of(stage, micro_batches))
    for micro, stage in sorted(runs):
        yield Forward(stage, micro)
        if stage in trained:
            yield Backward(stage, micro)


# ------------------------------------------------------------------------------------------------
# Orders found by the clock, for any stage graph: `list` and `auto`.
#
# `auto` searches an order under the room that devices have. Where gradients are not clipped, a
# step in a row is made short: a device begins its next step when its own program ends; else a
# step alone. With `list` a device that is free takes what is ready: a backward before a forward,
# an early micro-batch before a late one (`planning.listing`). Played once, such an order cannot
# deadlock.


WORK = 1_000_000
"""Jobs to play for an order, about: a second."""


@dataclass(frozen=True)
class Synthesised(Schedule):
    """Search an order; `room_bytes` is by device for what is saved and what waits."""

    name = "auto"
    splits = True
    searches = True
    takes_in_flight = False
    room_bytes: Mapping[str, float] | None = None
    work: int = WORK

    @override
    def order(
        self, stages: Stages, micro_batches: int, costs: StageCosts, trained: frozenset[int]
    ) -> Orders:
        found = self.found(stages, micro_batches, costs, trained)
        ranked = (found.orders[place] for place in range(len(stages.devices)))
        return with_instructions(stages, ranked, trained)

    def found(
        self, stages: Stages, micro_batches: int, costs: StageCosts, trained: frozenset[int]
    ) -> Synthesis:
        """Return the order with what is known of it."""
        given = virtual_stages(stages, micro_batches, costs, trained, self.room_bytes)
        return synthesise(given, in_row=goes_in_row(stages), work=self.work)


def goes_in_row(stages: Stages) -> bool:
    """Whether devices begin a step without waiting for all others: nothing is clipped."""
    return not any(edge.kind == "norm" for edge in stages.edges)


class ListScheduler(Schedule):
    """Schedule any stage graph greedily in simulated time.

    `in_flight` is the most micro-batches on a device at once, in the order of `stages.devices`.
    None is enough to fill the pipeline (`in_flight_to_fill`).
    """

    name = "list"

    @override
    def order(
        self, stages: Stages, micro_batches: int, costs: StageCosts, trained: frozenset[int]
    ) -> Orders:
        timed = timed_stages(stages, costs.whole, trained)
        untrained = without_backward(stages, trained)
        in_flight = self.in_flight or in_flight_to_fill(timed, micro_batches, untrained)
        whole = VirtualStages.unsplit(timed, micro_batches, untrained)
        orders = list_orders(whole, Taste(deep=False), dict(enumerate(in_flight)))
        assert orders is not None, "nothing lacks memory where no bytes are counted"
        return with_instructions(stages, (orders[device] for device in timed.devices), trained)
