"""`m-topo`: fill one device after the other, in topological order, by memory alone.

Source: Baechi (Jeon et al., SoCC'20), section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bigbrain_fx.core import Cluster, Costs, Graph, Placement
from bigbrain_fx.planning import canonical, work

from .baechi import bytes_by_unit


@dataclass(frozen=True)
class MTopo:
    """Give each device consecutive ops up to its share of the memory needed, plus the largest op.

    Baechi's devices are identical and get total / devices each; here shares go by memory. Devices
    come in the kernel's order, the fastest first, wherever they stand in the list.
    """

    name = "m-topo"

    def partition(self, graph: Graph, cluster: Cluster, costs: Costs) -> Placement:
        """Place every op of a concrete graph."""
        known, cluster = work(graph, costs), canonical(cluster, costs)
        names = [device.name for device in cluster.devices]
        needs = bytes_by_unit(known, known.saved_bytes[names[0]])
        homes = [names[home] for home in filled(needs, [d.memory_bytes for d in cluster.devices])]
        used = ", ".join(dict.fromkeys(homes)) or names[0]
        reason = f"{len(homes)} groups of ops in order, by memory, over {used}"
        return Placement(known.placed(homes, names[0]), reason)


def filled(nbytes: Sequence[float], memory: Sequence[float]) -> list[int]:
    """Return the device of each item, taken in order."""
    if not len(nbytes):
        return []
    finite = np.asarray(memory, dtype=np.float64)
    share = finite / finite.sum() if np.isfinite(finite).all() else 1.0 / len(finite)
    caps = np.broadcast_to(sum(nbytes) * share + max(nbytes), len(finite))
    homes: list[int] = []
    device, used = 0, 0.0
    for need in nbytes:
        if used + need > caps[device] * (1 + 1e-12) and device < len(caps) - 1:
            device, used = device + 1, 0.0
        homes.append(device)
        used += need
    return homes
