"""An estimator for one cluster: each device's ops by its own profile, on processors as of now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from bigbrain_fx.core import Cluster, Costs, Estimator, Graph
from bigbrain_fx.planning.registry import estimator, load
from tools.studies.fidelity.bench import Sitting
from tools.studies.fidelity.drift import at_speed

NAME = "seated"


@dataclass(frozen=True)
class Seated:
    """Estimate each device's ops by the profile made on it, taking `slower` times as long."""

    sitting: Sitting
    slower: float

    name = NAME

    def estimate(self, graph: Graph, cluster: Cluster) -> Costs:
        """Return the costs of a concrete graph's ops; what was not profiled is a roofline's."""
        stores = {d.name: str(self.sitting.stores[d.name]) for d in cluster.devices}
        each = {
            name: estimator("measured", profiles=store).estimate(graph, self.sitting.cluster)
            for name, store in stores.items()
        }
        costs = replace(
            next(iter(each.values())),
            ops={name: own.ops[name] for name, own in each.items()},
            measured={name: own.measured[name] for name, own in each.items()},
            optimizer_s_per_byte={n: c.optimizer_s_per_byte[n] for n, c in each.items()},
            optimizer_s_per_tensor={n: c.optimizer_s_per_tensor[n] for n, c in each.items()},
        )
        return replace(at_speed(costs, self.slower), cluster=cluster)


@contextmanager
def seated(sitting: Sitting, slower: float = 1.0) -> Iterator[None]:
    """Let the planner ask for "seated" by its name."""
    table = cast(MutableMapping[str, Callable[[], Estimator]], load("estimator").TABLE)
    before = table.pop(NAME, None)
    table[NAME] = partial(Seated, sitting, slower)
    try:
        yield
    finally:
        del table[NAME]
        if before is not None:
            table[NAME] = before
