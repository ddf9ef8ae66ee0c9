"""Stages -> Stages whose backward makes ops again: cheap ones, and as many as a plan needs to fit.

Each stage has a menu, from nothing to all that frees memory (`schedule.again`), at its end for
"auto" the whole stage. A device that lacks memory goes one further with all its stages; programs
and forecast are made again, so what counts is the ledger's peak and no sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from bigbrain_fx.core import Costs, Forecast, Graph, Program, Stage, Stages
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan.memory_check import held_bytes, needed_bytes, tensor_bytes
from bigbrain_fx.plan.recompute import Wanted, may_repeat
from bigbrain_fx.plan.schedule import Choice, Part, choices, may_run_again

SHARE = 0.02
"""Of a stage's forward and backward, what "ops" spends where nothing lacks memory."""
Make: TypeAlias = Callable[[Stages], tuple[tuple[Program, ...], Forecast]]


@dataclass(frozen=True)
class Menu:
    """What one stage can make again, each item freeing more than the one before it.

    Attributes:
        items: ops to make again; None: the whole stage.
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
    make: Make,
) -> tuple[Stages, tuple[Program, ...], Forecast]:
    """Choose what is made again; return the stages so marked, with their programs and forecast.

    Args:
        graph: concrete, for one micro-batch.
        stages: the cut.
        costs: of its ops.
        trained: stages with a backward.
        wanted: "ops" makes what is nearly free everywhere, "auto" only where memory lacks; of both
            a device that lacks memory makes more. Anything else: nothing.
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
