"""A partitioner of a third party: the whole model on the fastest device that holds it."""

from __future__ import annotations

from dataclasses import dataclass

from bigbrain_fx.core import Cluster, Costs, Device, Graph, Placement
from bigbrain_fx.errors import NoPlanError


@dataclass(frozen=True)
class Fastest:
    """Give all ops to the device that computes them fastest, of those that surely hold them."""

    micro_batches: int = 1
    name = "fastest"

    def partition(self, graph: Graph, cluster: Cluster, costs: Costs) -> Placement:
        """Place every op of a concrete graph.

        Raises:
            NoPlanError: no device surely holds the model.
        """
        needs = {each: self._most_bytes(graph, costs, each) for each in cluster.devices}
        fits = [each for each in cluster.devices if needs[each] <= each.memory_bytes]
        if not fits:
            raise NoPlanError(
                "no device has the memory for the whole model",
                notes=tuple(
                    f"{each.name} needs {nbytes} bytes, has {each.memory_bytes} bytes"
                    for each, nbytes in needs.items()
                ),
                help="use --partitioner analytical, which splits it",
            )
        best_s, best = min((_seconds(graph, costs, each), each.name) for each in fits)
        reason = f"{best} computes a micro-batch in {best_s:.3g} s"
        return Placement({op.name: best for op in graph.ops}, reason)

    def _most_bytes(self, graph: Graph, costs: Costs, device: Device) -> int:
        """Return more than a step can hold: every tensor and gradient of all micro-batches."""
        sizes = [param.spec.nbytes for param in graph.params]
        copies = 2 + costs.optimizer_state_per_byte
        kept = copies * sum(sizes) + costs.optimizer_temporaries * max(sizes, default=0)
        each = sum(entry.spec.nbytes for entry in graph.inputs)
        for op in graph.ops:
            cost = costs.op_cost(op.name, device.name)
            each += 2 * sum(spec.nbytes for spec in op.outputs)
            each += cost.saved_bytes + cost.workspace_bytes
        return int(kept + (self.micro_batches + 1) * each)


def _seconds(graph: Graph, costs: Costs, device: Device) -> float:
    found = (costs.op_cost(op.name, device.name) for op in graph.ops)
    return sum(cost.forward_s + cost.backward_s for cost in found)
