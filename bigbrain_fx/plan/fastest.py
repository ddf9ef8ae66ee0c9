"""Several tries at a plan -> the fastest of them, or why the first made none; or the simplest.

Forecasts of two plans of one model share most of their error (a card's efficiency, its kernels).
Their ratio is therefore known better than either step, whose interval `spread` has. Plans nearer
than `least_gap` count as equally fast, and the simplest of them is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from itertools import chain

from bigbrain_fx.core import Cluster, Graph
from bigbrain_fx.errors import BigBrainError, InputError, NoPlanError
from bigbrain_fx.plan.compatibility import Request, conflict
from bigbrain_fx.plan.nouns import Case, Options, Plan
from bigbrain_fx.plan.schedule import Synthesised, ZeroBubbleH1, ZeroBubbleV
from bigbrain_fx.plan.search import MANY_DEVICES

# ------------------------------------------------------------------------------------------------
# How far planning is, told to whoever listens, and whether it shall stop with what there is.
#
# A search is deep below the one who waits for it, and one of several that make a plan: who
# presses Ctrl-C in one of them wants no other.


Say = Callable[[str], None]  # called often: as cheap as a spinner's new text

_listener: ContextVar[Say | None] = ContextVar("listener", default=None)


@contextmanager
def telling(say: Say) -> Iterator[None]:
    """Have `say` called with how far each plan is that is made meanwhile, in this context."""
    before = _listener.set(say)
    try:
        yield
    finally:
        _listener.reset(before)


def tell(how_far: str) -> None:
    """Report to the listener, if there is one."""
    say = _listener.get()
    if say is not None:
        say(how_far)


_asked: ContextVar[bool | None] = ContextVar("asked", default=None)  # None: nobody would know


@contextmanager
def until_stopped() -> Iterator[None]:
    """Note within whether Ctrl-C was pressed; of several around each other the outermost counts."""
    if _asked.get() is not None:
        yield
        return
    before = _asked.set(False)
    try:
        yield
    finally:
        _asked.reset(before)


def stop() -> None:
    """Note that a search was ended by Ctrl-C, with a plan at hand."""
    if _asked.get() is not None:
        _asked.set(True)


def is_stopped() -> bool:
    """Whether no more searches are wanted."""
    return bool(_asked.get())


# ------------------------------------------------------------------------------------------------
# Several tries at a plan -> the fastest of them, or why the first made none; or the simplest.


CPU = 0.012
"""tools/studies/fidelity: choosing by `steady` lost 1.2 % to the best that was measured. The middle
pair of its cells is 5.6 % off, but one run is 5.4 % off another: more cannot be known there."""
GPU = 0.04
"""`python -m tools.studies.published_gpus.pairs`: the ratio of the middle pair of rows of one model
and card on unlike numbers of GPUs is 4.2 % off. At that distance the forecast's order is right
three times in four, and below it less."""

SPLIT = 1.06
"""Times its forecast a step of split backwards counts, where plans are compared. `python -m
tools.studies.unlike --against whole`, 12 cells of four models: such plans gained 5.5 % less than
forecast in the middle, 11 % in the lowest quarter, 1 % at most for the model of the largest
products. Those devices were emulated on one machine, where the same forward takes 5 to 15 % longer
while others compute, as they do under such schedules: of machines apart it is too much, but none
was tried."""


def least_gap(cluster: Cluster) -> float:
    """Return the share that a plan must be faster by; the largest of a cluster's devices'."""
    return max(CPU if device.kind == "cpu" else GPU for device in cluster.devices)


def times_counted(*, is_split: bool) -> float:
    """Return times its forecast a step counts where plans are compared."""
    return SPLIT if is_split else 1.0


def fastest(tries: Iterable[Callable[[], Plan]], *, but: tuple[type[BigBrainError], ...]) -> Plan:
    """Return the plan with the shortest step; of equals the first.

    Args:
        tries: each makes a plan.
        but: errors by which a try says that it makes none; others end the search.

    Raises:
        BigBrainError: no try makes a plan; the first one's.
    """
    found: list[Plan] = []
    failure: BigBrainError | None = None
    for make in tries:
        try:
            found.append(make())
        except but as error:
            failure = failure or error
    if not found:
        assert failure is not None
        raise failure
    return min(found, key=lambda plan: plan.forecast.step_s)


def fastest_number(
    usual: Iterable[int],
    more: Iterable[int],
    make: Callable[[int], Plan],
    *,
    but: tuple[type[BigBrainError], ...],
) -> Plan:
    """Return the plan with the shortest step of some numbers of micro-batches; of equals the first.

    Args:
        usual: numbers, ascending; all are tried.
        more: further ones: as long as no number fits, or the last one was the fastest.
        make: plans a number.
        but: as for `fastest`.

    Raises:
        BigBrainError: no number makes a plan; the first one's.
    """
    best: Plan | None = None
    failure: BigBrainError | None = None
    last = 0
    for count, is_more in chain(((n, False) for n in usual), ((n, True) for n in more)):
        if is_more and best is not None and best.micro_batches != last:
            break
        last = count
        try:
            plan = make(count)
        except but as error:
            failure = failure or error
            continue
        if best is None or plan.forecast.step_s < best.forecast.step_s:
            best = plan
    if best is None:
        assert failure is not None
        raise failure
    return best


def first(tries: Sequence[Callable[[], Plan]], *, but: tuple[type[BigBrainError], ...]) -> Plan:
    """Return the first plan of these that there is.

    Raises:
        BigBrainError: no try makes a plan; the last one's.
    """
    for make in tries[:-1]:
        with suppress(*but):
            return make()
    return tries[-1]()


def simplest(plans: Sequence[Plan], gap: float) -> Plan:
    """Return the simplest of the plans that are as fast as the fastest.

    Args:
        plans: one at least.
        gap: a plan that is faster by a smaller share counts as equally fast. The simplest combines
            the fewest of replicas, tensor groups and pipelines. Then the fewest replicas, ranks of
            groups and devices count, and the lowest ZeRO stage.
    """
    most_s = min(map(counted_s, plans)) * (1 + gap)
    return min((plan for plan in plans if counted_s(plan) <= most_s), key=_simplicity)


def counted_s(plan: Plan) -> float:
    """Return what a step counts in comparisons: of split backwards more than its forecast."""
    return plan.forecast.step_s * times_counted(is_split=bool(plan.stages.deferring))


def _simplicity(plan: Plan) -> tuple[float, ...]:
    stages, devices = plan.stages, len(plan.stages.devices)
    sizes = stages.replicas, stages.members, devices / stages.replicas / stages.members
    counts = stages.replicas, stages.members, devices, stages.zero_stage
    ways = sum(size > 1 for size in sizes)
    return ways, *counts, bool(stages.deferring), counted_s(plan)


# ------------------------------------------------------------ split backwards that nobody asked for


HALVES: Mapping[str, bool] = {
    ZeroBubbleH1.name: True,
    ZeroBubbleV.name: True,
    Synthesised.name: False,
}
"""By name; whether one is for a line of one piece a device only."""


def open_halves(graph: Graph, cluster: Cluster, options: Options) -> Mapping[str, bool]:
    """Return those of `HALVES` that go with what was asked for, where an order was left open.

    None on GPUs, where halves of a backward were never measured, and none on so many devices that
    one order takes seconds to search.
    """
    is_asked = options.schedule or options.in_flight or options.defer is not None
    if is_asked or not graph.training or options.objective == "memory":
        return {}
    if len(cluster.devices) > MANY_DEVICES or any(d.kind != "cpu" for d in cluster.devices):
        return {}
    asked = {name: replace(options, schedule=name) for name in HALVES}
    return {n: HALVES[n] for n, o in asked.items() if not conflict(Request(o, cluster, graph))}


def halved(best: Plan, case: Case, make: Callable[[Options, int], Plan]) -> Plan:
    """Return the best with split backwards, or as it is: where replicas have a device each, say.

    Args:
        best: with whole backwards.
        case: all devices, and what was asked for of all replicas together.
        make: plans them as other options say, with so many micro-batches.
    """
    if is_stopped() or len(case.cluster.devices) == best.stages.replicas:
        return best
    names = open_halves(case.graph, case.cluster, case.options)
    ways = (case.asking(schedule=name, effort="fast").options for name in names)
    tries = [partial(make, way, best.micro_batches) for way in ways]
    if not tries:
        return best
    try:
        plan = fastest(tries, but=(NoPlanError, InputError))
    except (NoPlanError, InputError):
        return best
    return simplest((best, plan), least_gap(case.cluster))
