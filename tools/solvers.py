"""The planners of `partitioners` on a published instance: the same cores, without a graph.

Each takes an instance, whether one sample counts alone (latency), and an effort, and returns the
device of every node and whether it is proven that none of its class is better; or None: it found
nothing that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np

from bigbrain_fx.errors import NoPlanError
from partitioners.favourites import favourites
from partitioners.jobs import Jobs, timetable
from partitioners.m_topo import filled
from tools.calls import Calls
from tools.instances import Instance
from tools.latency_walk import sooner
from tools.load_solvers.best_load import Effort, best_load, packed
from tools.load_solvers.contiguous import MOST_IDEALS, Objective, best_contiguous
from tools.load_solvers.least_load import least_load
from tools.load_solvers.load_bound import load_bound
from tools.load_solvers.loads import improved
from tools.load_solvers.problem import Problem
from tools.load_solvers.reduce import reduced


class Answer(NamedTuple):
    """The device of every node; no placement of the planner's class is better when `proven`."""

    homes: tuple[int, ...]
    proven: bool
    bound: float = 0.0


Solver = Callable[[Instance, bool, Effort], Answer | None]


def naive(instance: Instance, alone: bool, effort: Effort = "normal") -> Answer:
    """Give each accelerator as many nodes."""
    count, devices = instance.problem.count, len(_accelerators(instance))
    return Answer(instance.spread([i * devices // count for i in range(count)]), False)


def m_topo(instance: Instance, alone: bool, effort: Effort = "normal") -> Answer:
    """Fill one accelerator after the other by memory."""
    memory = [
        instance.kinds[instance.kind_of_device[device]].memory_bytes
        for device in _accelerators(instance)
    ]
    return Answer(instance.spread(filled(list(instance.problem.nbytes), memory)), False)


def m_etf(instance: Instance, alone: bool, effort: Effort = "normal") -> Answer | None:
    """Place by earliest start."""
    return _listed(instance, lambda jobs: {})


def m_sct(instance: Instance, alone: bool, effort: Effort = "normal") -> Answer | None:
    """Place by earliest start, with favourite children."""
    return _listed(instance, favourites)


def chain_dp(instance: Instance, alone: bool, effort: Effort = "normal") -> Answer | None:
    """Cut a few topological orders in the best places."""
    return _contiguous(instance, alone, most_ideals=1)


def ideal_dp(instance: Instance, alone: bool, effort: Effort = "normal") -> Answer | None:
    """Find the contiguous optimum."""
    return _contiguous(instance, alone)


def mcmc(instance: Instance, alone: bool, effort: Effort = "normal") -> Answer | None:
    """Improve the contiguous placement by a random walk; the largest load only."""
    start = best_contiguous(instance.problem, _QUICK_IDEALS, "sum" if alone else "max")
    if start is None or alone:
        return None if start is None else Answer(instance.spread(start.homes), False)
    smaller = reduced(instance.problem, start.load * (1 + 1e-9), contiguous=False)
    homes = [0] * smaller.problem.count
    for node, group in enumerate(smaller.group_of):
        homes[group] = start.homes[node]
    walks = [improved(smaller.problem, homes, _STEPS, seed) for seed in range(_WALKS)]
    best = min(walks, key=smaller.problem.max_load)
    return Answer(instance.spread(smaller.spread(best)), False)


def best_load_answer(instance: Instance, alone: bool, effort: Effort = "normal") -> Answer | None:
    """Find the best placement, contiguous or not, that some work allows."""
    if alone:
        return _soonest(instance, effort)
    found = best_load(instance.problem, effort)
    if found is None:
        return None
    return Answer(instance.spread(found.homes), found.load <= found.bound * _CLOSE, found.bound)


def cp_sat(instance: Instance, alone: bool, effort: Effort = "normal") -> Answer | None:
    """Solve a constraint program for the largest load, with a bound; no latencies."""
    found = None if alone else least_load(instance.problem, work=_PROVING[effort])
    if found is None:
        return None
    close = found.load <= found.bound * _CLOSE
    return Answer(instance.spread(found.homes), close, found.bound)


def _soonest(instance: Instance, effort: Effort) -> Answer | None:
    """Improve the best of a few starts by random walks over latencies."""
    calls = Calls(instance)
    starts = sorted(_starts(instance, effort), key=lambda h: calls.latency(instance.spread(h)))
    if not starts:
        return None
    evaluations, walks = _EVALUATIONS[effort]
    each = max(50, evaluations * 100 // max(100, len(instance.nodes)))
    found = [sooner(instance, starts[0], each, seed) for seed in range(walks)]
    found += [sooner(instance, start, each) for start in starts[1:walks]]
    best = min((*starts, *found), key=lambda h: calls.latency(instance.spread(h)))
    return Answer(instance.spread(best), False)


def _starts(instance: Instance, effort: Effort) -> list[tuple[int, ...]]:
    """Return contiguous placements of the least sum, those by earliest start, and what fits."""
    problem, found = instance.problem, list[tuple[int, ...]]()
    contiguous = best_contiguous(problem, 1 if effort == "fast" else MOST_IDEALS, "sum")
    if contiguous is not None:
        found.append(contiguous.homes)
    for listed in (m_etf, m_sct):
        answer = listed(instance, True)
        if answer is not None:
            home_of = dict(zip(instance.group_of, answer.homes, strict=True))
            found.append(tuple(home_of[group] for group in range(problem.count)))
    if not found:
        homes = packed(problem)
        found += [] if homes is None else [homes]
    return list(dict.fromkeys(found))


_CLOSE = 1 + 1e-6
_EVALUATIONS: Mapping[Effort, tuple[int, int]] = {  # of 100 nodes; and how many walks
    "fast": (500, 1),
    "normal": (5_000, 1),
    "high": (60_000, 3),
}
_PROVING: Mapping[Effort, float] = {"fast": 2.0, "normal": 15.0, "high": 120.0}
_QUICK_IDEALS = 3000  # a start for improvement need not be proven
_STEPS, _WALKS = 200_000, 2

SOLVERS: Mapping[str, Solver] = {
    "naive": naive,
    "m-topo": m_topo,
    "m-etf": m_etf,
    "m-sct": m_sct,
    "chain-dp": chain_dp,
    "ideal-dp": ideal_dp,
    "mcmc": mcmc,
    "best-load": best_load_answer,
    **({"cp-sat": cp_sat} if find_spec("ortools") else {}),
}


def bound(instance: Instance, alone: bool) -> float:
    """Return what no placement is below.

    The largest load: `tools.load_solvers.load_bound`. The latency: the longest path, each node on
    its fastest device.
    """
    if not alone:
        try:
            return load_bound(instance.problem)
        except NoPlanError:
            return float("inf")
    ready = np.zeros(len(instance.nodes))
    fastest = [min(node.times) for node in instance.nodes]
    for _ in instance.nodes:  # as often as a path has nodes at most; stops when it settles
        before = ready.copy()
        for maker, reader, _ in instance.edges:
            ready[reader] = max(ready[reader], ready[maker] + fastest[maker])
        if (ready == before).all():
            break
    return float((ready + fastest).max())


def jobs_of(problem: Problem) -> Jobs:
    """Return a job per node; a net is a value of the first of its nodes, and its device's wires."""
    after: list[set[int]] = [set() for _ in range(problem.count)]
    reads: list[list[int]] = [[] for _ in range(problem.count)]
    makers = [min(net.members) for net in problem.nets]
    for a, b in problem.edges:
        after[b].add(a)
    for number, (net, maker) in enumerate(zip(problem.nets, makers, strict=True)):
        for reader in sorted(set(net.members) - {maker}):
            after[reader].add(maker)
            reads[reader].append(number)
    kinds = problem.kind_of_device

    def move(value: int, a: int, b: int) -> float:
        return problem.nets[value].times[kinds[a]] + problem.nets[value].times[kinds[b]]

    return Jobs(
        problem.times[list(kinds)],
        tuple(tuple(sorted(before)) for before in after),
        tuple(makers),
        tuple(map(tuple, reads)),
        move,
    )


class Held:
    """Room by the sum of the nodes' bytes."""

    def __init__(self, problem: Problem) -> None:
        self._nbytes = problem.nbytes
        self._left = [problem.kinds[kind].memory_bytes for kind in problem.kind_of_device]

    def fits(self, job: int, device: int) -> bool:
        """Whether the job fits besides what the device took already."""
        return bool(self._nbytes[job] <= self._left[device])

    def take(self, job: int, device: int) -> None:
        """Put the job there."""
        self._left[device] -= float(self._nbytes[job])


def _accelerators(instance: Instance) -> list[int]:
    """Return the devices that are not the host's."""
    kinds = instance.kind_of_device
    return [device for device, kind in enumerate(kinds) if instance.transfer[kind]]


def _listed(instance: Instance, favourite: Callable[[Jobs], dict[int, int]]) -> Answer | None:
    """Place by earliest start on accelerators; where that does not fit, on CPUs too.

    CPUs pay for no transfer, so a rule that looks at starts alone would give them everything.
    """
    smaller = reduced(instance.problem)
    hosts = [kind for kind, factor in enumerate(instance.transfer) if not factor]
    problem = smaller.problem
    times = problem.times.copy()
    elsewhere = np.isfinite(np.delete(times, hosts, axis=0)).any(axis=0)
    for host in hosts:
        times[host, elsewhere] = np.inf
    for each in (times, problem.times):
        jobs = jobs_of(replace(problem, times=each))
        homes = timetable(jobs, Held(problem), favourite(jobs)).homes
        if -1 not in homes:
            return Answer(instance.spread(smaller.spread(homes)), False)
    return None


def _contiguous(instance: Instance, alone: bool, most_ideals: int = MOST_IDEALS) -> Answer | None:
    objective: Objective = "sum" if alone else "max"
    found = best_contiguous(instance.problem, most_ideals, objective)
    return None if found is None else Answer(instance.spread(found.homes), found.proven)
