"""Pipelines without a graph: stages, costs of small whole numbers, and their simulation."""

from __future__ import annotations

from bigbrain_fx.core import Cluster, Device, Edge, Forecast, Link, Stage, Stages
from bigbrain_fx.plan.schedule import StageCosts, build
from bigbrain_fx.plan.simulate import simulate

FREE = Link(0.0, float("inf"))


def chain(count: int, nbytes: int = 0) -> Stages:
    forth = [Edge(f"x{i}", i, i + 1, "activation", nbytes) for i in range(count - 1)]
    back = [Edge(f"x{i}", i + 1, i, "gradient", nbytes) for i in range(count - 1)]
    return Stages(tuple(Stage(i, f"d{i}", ()) for i in range(count)), (*forth, *back))


def even_costs(count: int, link: Link = FREE, *, f: float = 1.0, b: float = 2.0) -> StageCosts:
    devices = tuple(Device(f"d{i}", "h", "cpu", 1 << 30, 1.0, 1.0) for i in range(count))
    return StageCosts((f,) * count, (b,) * count, (1,) * count, Cluster(devices, link))


def all_of(stages: Stages) -> frozenset[int]:
    return frozenset(range(len(stages.stages)))


def stepped(stages: Stages, costs: StageCosts, name: str = "gpipe", m: int = 1) -> Forecast:
    return simulate(build(name, stages, m, costs, all_of(stages)), stages, costs)
