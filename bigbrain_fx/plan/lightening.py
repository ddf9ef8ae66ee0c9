"""Recompute selection: cheap ops, and as many as a plan needs to fit memory.

Each stage has a menu, from nothing to all that frees memory (`schedule.again`), at its end for
"auto" the whole stage. A device that lacks memory goes one further with all its stages. Programs
and forecast are recomputed: the ledger's peak decides, and no sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from bigbrain_fx.core import (
    Cluster,
    Costs,
    Device,
    Forecast,
    Graph,
    Offloaded,
    Param,
    Program,
    Stage,
    Stages,
)
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan.memory_check import (
    held_bytes,
    mib,
    needed_bytes,
    process_of,
    tensor_bytes,
    with_data,
)
from bigbrain_fx.plan.nouns import Source
from bigbrain_fx.plan.recompute import Wanted, may_repeat
from bigbrain_fx.plan.schedule import (
    Choice,
    Part,
    StageCosts,
    build,
    choices,
    may_run_again,
    require_sound,
    traits,
    virtual_stages,
)
from bigbrain_fx.plan.simulate import simulate

# ------------------------------------------------------------------------------------------------
# What any plan holds at least, before anything is planned: a bound that refuses at once.
#
#   weights + gradients + state of the whole model  <=  what all devices hold together
#
# Replicas and tensor groups divide that or hold it several times; recompute and more micro-
# batches change none of it.


def whole_bytes(
    graph: Graph, source: Source, offload: Sequence[Offloaded] = ()
) -> Mapping[str, float]:
    """Return what each tensor of the model takes where it is whole, by its own name."""
    read = {name for op in graph.ops for name in op.params}
    return {
        param.canonical: param.spec.nbytes * (1 + _besides(param, graph, source, offload))
        for param in graph.params
        if param.name in read
    }


def _besides(param: Param, graph: Graph, source: Source, offload: Sequence[Offloaded]) -> float:
    """Return how many times a tensor's own bytes its gradient and state take."""
    if not (graph.training and param.is_trained):
        return 0.0
    if "state" in offload:
        return 1.0
    return 1 + source.optimizer_states.get(param.canonical, source.optimizer_state)


def require_enough(
    graph: Graph, cluster: Cluster, source: Source, offload: Sequence[Offloaded]
) -> None:
    """Refuse a model that all devices together cannot hold, however it is split.

    Raises:
        NoPlanError: with the least that it holds, and the memory of each device.
    """
    if "weights" in offload:
        return
    least = sum(whole_bytes(graph, source, offload).values())
    room = sum(map(_room_bytes, cluster.devices))
    if least <= room + len(cluster.devices):  # what each needs is rounded down
        return
    raise NoPlanError(
        f"no split fits into the devices' memory: the model needs {mib(int(least))} at least, and "
        f"together they have {mib(int(room))} for tensors",
        code="BX1343",
        notes=(_arithmetic(graph, source, offload, room), *map(_has, cluster.devices)),
        help="use more devices, or devices with more memory",
    )


def room_of_all(cluster: Cluster) -> tuple[float, tuple[str, ...]]:
    """Return the bytes that all devices have for tensors, and a sentence for each device."""
    return sum(map(_room_bytes, cluster.devices)), tuple(map(_has, cluster.devices))


def _arithmetic(graph: Graph, source: Source, offload: Sequence[Offloaded], room: float) -> str:
    """Return what the whole model needs and the cluster has, and what the need is made of."""
    least = sum(whole_bytes(graph, source, offload).values())
    weights = sum(whole_bytes(replace(graph, training=False), source).values())
    both = sum(whole_bytes(graph, source, ("state",)).values())
    parts = {"weights": weights, "gradients": both - weights, "optimizer": least - both}
    made_of = ", ".join(f"{name} {mib(int(count))}" for name, count in parts.items() if count)
    return f"the cluster needs {mib(int(least))} and has {mib(int(room))} for tensors: {made_of}"


def _room_bytes(device: Device) -> float:
    return max(0.0, tensor_bytes(device))


def _has(device: Device) -> str:
    """Say what a device has, and how much of it tensors may take."""
    context = f"{mib(process_of(device).context_bytes)} are the process's"
    room = int(_room_bytes(device))
    holds = f"{mib(room)} are for tensors" if room else "there is no free memory for tensors"
    return f"{device.name} has {mib(device.memory_bytes)}: {context}, and {holds}"


# ------------------------------------------------------------------------------------------------
# Programs under the bytes that devices have: an order that is searched is told its room.
#
# What a device takes beside activations is seen from a step with one micro-batch in flight, whose
# ledger is exact; the room is what that leaves. Where a plan still does not fit, the room was
# told too large (messages that have not left, workspace), and the order is made again with less.


TRIES = 4
LESS = 0.9
"""Part of the free memory that is left for the next try, where a device lacks memory."""


@dataclass(frozen=True)
class Step:
    """Input to an order: stages of a graph for so many micro-batches.

    `is_trial`: one of many, unchecked. If it is stuck the simulator says so, and the caller that
    answers with it checks it.
    """

    graph: Graph
    stages: Stages
    micro_batches: int
    costs: StageCosts
    trained: frozenset[int]
    cluster: Cluster
    is_trial: bool = False

    def forecast(self, programs: tuple[Program, ...]) -> Forecast:
        """Simulate programs, and count the batch."""
        found = simulate(programs, self.stages, self.costs, timeline=False)
        return with_data(found, self.graph, self.stages, self.micro_batches, self.cluster)

    def programs(
        self,
        schedule: str,
        in_flight: tuple[int, ...] | None = None,
        room: Mapping[str, float] | None = None,
    ) -> tuple[Program, ...]:
        """Order, and check unless it is a trial."""
        given = self.stages, self.micro_batches, self.costs, self.trained
        found = build(schedule, *given, in_flight, room)
        if not self.is_trial:
            require_sound(found, self.stages)
        return found


def scheduled(
    step: Step, schedule: str, in_flight: tuple[int, ...] | None
) -> tuple[tuple[Program, ...], Forecast]:
    """Return the programs and their forecast; whether they fit is for the caller to say."""
    if traits(schedule).searches:
        return _searched(step, schedule, in_flight)[:2]
    programs = step.programs(schedule, in_flight)
    return programs, step.forecast(programs)


def room_of(step: Step, schedule: str) -> Mapping[str, float]:
    """Return the memory by device under which a searched order was found."""
    return _searched(step, schedule, None)[2]


def _searched(
    step: Step, schedule: str, in_flight: tuple[int, ...] | None
) -> tuple[tuple[Program, ...], Forecast, Mapping[str, float]]:
    least, less = _claimed(step), room_bytes(step)
    for _ in range(TRIES):
        room = less
        programs = step.programs(schedule, in_flight, room)
        forecast = step.forecast(programs)
        short = [e.device for e in forecast.devices if e.peak_bytes > _most(step, e.device)]
        less = {d: max(least[d], room[d] * LESS) if d in short else room[d] for d in room}
        if less == room:
            break
    return programs, forecast, room


def room_bytes(step: Step) -> Mapping[str, float]:
    """Return what each device has for what is saved and what waits; enough for one micro-batch."""
    devices, claimed = step.stages.devices, _claimed(step)
    one = step.forecast(step.programs("list", (1,) * len(devices)))
    # with one micro-batch in flight all of it is there at once: what else is, stays
    return {
        name: max(claimed[name], _most(step, name) - (one.of(name).peak_bytes - claimed[name]))
        for name in devices
    }


def _claimed(step: Step) -> dict[str, float]:
    """Return what one micro-batch takes of each device's room."""
    given = virtual_stages(step.stages, step.micro_batches, step.costs, step.trained)
    return {
        name: sum(given.claim_bytes(stage) for stage in given.on[place])
        for place, name in enumerate(step.stages.devices)
    }


def _most(step: Step, device: str) -> float:
    return tensor_bytes(step.cluster.device[device])


# ------------------------------------------------------------------------------------------------
# Stages -> Stages whose backward makes ops again: cheap ones, and as many as a plan needs to fit.


SHARE = 0.02
"""Of a stage's forward and backward, what "ops" spends where nothing lacks memory."""
Order: TypeAlias = Callable[[Stages], tuple[tuple[Program, ...], Forecast]]


@dataclass(frozen=True)
class Menu:
    """Recomputations that one stage offers, each item freeing more than the one before it.

    Attributes:
        items: ops to recompute; None: the whole stage.
        start: the item for a device that lacks nothing.
    """

    items: tuple[Choice | None, ...]
    start: int = 0


def lightened(
    graph: Graph,
    stages: Stages,
    costs: Costs,
    trained: Iterable[int],
    wanted: Wanted,
    micro_batches: int,
    make: Order,
) -> tuple[Stages, tuple[Program, ...], Forecast]:
    """Choose what is recomputed; return the stages so marked, with their programs and forecast.

    Args:
        graph: concrete, for one micro-batch.
        stages: the cut.
        costs: of its ops.
        trained: stages with a backward.
        wanted: "ops" recomputes what is nearly free everywhere, "auto" only where memory lacks. In
            both, a device that lacks memory recomputes more. Anything else: nothing.
        micro_batches: of a step: at most so many are kept at once.
        make: orders and simulates stages.

    Raises:
        InputError: "ops" was asked for, and a stage splits its backward, or nothing trains.
    """
    if wanted not in ("ops", "auto"):
        return stages, *make(stages)
    known = sorted(trained)
    if wanted == "ops":
        _require_whole_backwards(stages, known)
    menus = {number: _menu(graph, stages, number, costs, wanted) for number in known}
    level = {number: menu.start for number, menu in menus.items()}
    while True:
        marked = _marked(graph, stages, costs, {n: menus[n].items[i] for n, i in level.items()})
        more = [n for n in known if level[n] + 1 < len(menus[n].items)]
        lacking: dict[str, float] = {}
        try:
            programs, forecast = make(marked)
        except NoPlanError:  # an order that is searched for found no room
            if not more:
                raise
        else:
            found = {e.device: _lacking_bytes(e.device, forecast, costs) for e in forecast.devices}
            lacking = {d: n / len(stages.of(d)) for d, n in found.items() if n > 0}
            more = [n for n in more if stages.stages[n].device in lacking]
            if not more:
                return marked, programs, forecast
        for number in more:
            least_bytes = lacking.get(stages.stages[number].device, 0.0) / micro_batches
            level[number] = _next(menus[number], level[number], least_bytes)


def _lacking_bytes(device: str, forecast: Forecast, costs: Costs) -> float:
    """Return the tensors that a device has no room for; 0 where all fit."""
    found, entry = costs.cluster.device[device], forecast.of(device)
    if needed_bytes(entry, found) <= found.memory_bytes:
        return 0
    return max(1, held_bytes(entry, found) - tensor_bytes(found))


def _next(menu: Menu, level: int, least_bytes: float) -> int:
    """Return the next item, past those that free too little of a micro-batch whatever happens."""
    now = menu.items[level]
    after = range(level + 1, len(menu.items))
    ops = [place for place in after if menu.items[place] is not None]
    for place in ops:
        item = menu.items[place]
        if now and item and now.kept_bytes - item.kept_bytes >= least_bytes:
            return place
    return ops[-1] if ops else after[-1]


def _menu(graph: Graph, stages: Stages, number: int, costs: Costs, wanted: Wanted) -> Menu:
    stage = stages.stages[number]
    whole = (None,) if wanted == "auto" and may_repeat(graph, stage) else ()
    if stage.deferred or stage.runs_again:
        return Menu((Choice((), 0.0, 0), *(() if stage.runs_again else whole)))
    each = [costs.op_cost(op, stage.device) for op in stage.ops]
    forward_s = sum(cost.forward_s for cost in each)
    found = choices(Part(graph, stages, stage, costs))
    found = tuple(item for item in found if not whole or item.seconds < forward_s)
    if wanted == "auto":
        return Menu((*found, *whole))
    share_s = SHARE * (forward_s + sum(cost.backward_s for cost in each))
    return Menu(found, max(i for i, item in enumerate(found) if item.seconds <= share_s))


def _marked(
    graph: Graph, stages: Stages, costs: Costs, chosen: Mapping[int, Choice | None]
) -> Stages:
    """Mark what is made again; an op of several replicas is in all of them, or in none."""
    wanted = {name for item in chosen.values() if item is not None for name in item.ops}
    for stage in stages.stages if wanted and stages.micros else ():
        own = wanted & (set(stage.ops) - set(stage.recomputed))
        wanted -= own - may_run_again(Part(graph, stages, stage, costs))

    def one(stage: Stage) -> Stage:
        if stage.index not in chosen:
            return stage
        if chosen[stage.index] is None:
            return replace(stage, runs_again=True)
        own = set() if stage.runs_again or stage.deferred else wanted - set(stage.recomputed)
        return replace(stage, again=tuple(name for name in stage.ops if name in own))

    return replace(stages, stages=tuple(map(one, stages.stages)))


def _require_whole_backwards(stages: Stages, trained: list[int]) -> None:
    if not trained:
        raise InputError(
            "there is no backward to make ops again for",
            code="BX1240",
            at="--activation-checkpointing",
            help="leave it out: nothing trains",
        )
    if stages.deferring:
        raise InputError(
            f"stage {stages.deferring[0]} splits its backward, and keeps for its second half what "
            "making ops again would let go of",
            code="BX1241",
            at="--activation-checkpointing",
            help="use --schedule 1f1b and no --delay-weight-gradients, or "
            "--activation-checkpointing all",
        )
