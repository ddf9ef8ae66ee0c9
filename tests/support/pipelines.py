"""Pipelines without a graph: stages, costs of small whole numbers, and their simulation."""

from __future__ import annotations

from dataclasses import replace

from bigbrain_fx.core import Cluster, Device, Edge, Forecast, Link, Stage, Stages
from bigbrain_fx.plan.schedule import StageCosts, build
from bigbrain_fx.plan.simulate import simulate

FREE = Link(0.0, float("inf"))


def chain(count: int, nbytes: int = 0) -> Stages:
    forth = [Edge(f"x{i}", i, i + 1, "activation", nbytes) for i in range(count - 1)]
    back = [Edge(f"x{i}", i + 1, i, "gradient", nbytes) for i in range(count - 1)]
    return Stages(tuple(Stage(i, f"d{i}", ()) for i in range(count)), (*forth, *back))


def mirrored(count: int, micro_batches: int, nbytes: int = 0) -> Stages:
    """A chain and, on the same devices in reverse, another: micro-batches are theirs in turn."""
    forth = chain(count, nbytes)
    ends = ((e, first) for first in (0, count) for e in forth.edges)
    edges = (replace(e, source=e.source + by, target=e.target + by) for e, by in ends)
    line = [*range(count), *reversed(range(count))]
    stages = (Stage(i, f"d{at}", (), replica=i // count) for i, at in enumerate(line))
    micros = tuple(range(micro_batches))
    return Stages(tuple(stages), tuple(edges), micros=(micros[::2], micros[1::2]))


def even_costs(count: int, link: Link = FREE, *, f: float = 1.0, b: float = 2.0) -> StageCosts:
    devices = tuple(Device(f"d{i}", "h", "cpu", 1 << 30, 1.0, 1.0) for i in range(count))
    return StageCosts((f,) * count, (b,) * count, (1,) * count, Cluster(devices, link))


def all_of(stages: Stages) -> frozenset[int]:
    return frozenset(range(len(stages.stages)))


def stepped(stages: Stages, costs: StageCosts, name: str = "gpipe", m: int = 1) -> Forecast:
    return simulate(build(name, stages, m, costs, all_of(stages)), stages, costs)
