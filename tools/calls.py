"""How long one sample takes alone, fast: `tools.instances.latency`, worked out for many placements.

The judge reads like the publication; this one counts the same with integers for sets, so that a
search can ask it thousands of times. A test requires that both agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx

from tools.instances import Instance


class Calls:
    """An instance, with all that is independent of the placement worked out once.

    Args:
        instance: forward nodes, in an order to run or not.
    """

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        net: nx.DiGraph[int] = nx.DiGraph()
        net.add_nodes_from(range(len(instance.nodes)))
        net.add_edges_from((a, b) for a, b, _ in instance.edges)
        self._order: list[int] = list(nx.lexicographical_topological_sort(net))
        self._before = [list(net.pred[node]) for node in range(len(instance.nodes))]
        self._after = [list(net.succ[node]) for node in range(len(instance.nodes))]
        kinds = instance.kind_of_device
        self._times = [[node.times[kind] for kind in kinds] for node in instance.nodes]
        self._factor = [instance.transfer[kind] for kind in kinds]
        self._sent = [0.0] * len(instance.nodes)
        for maker, _, time in instance.edges:
            self._sent[maker] = max(self._sent[maker], time)

    def latency(self, homes: Sequence[int]) -> float:
        """Return how long one sample takes: see `tools.instances.latency`.

        Args:
            homes: the device of every node.
        """
        call_of, members, home_of, before = self._called(homes)
        done = [0.0] * len(members)
        free = [0.0] * len(self._factor)
        for call in _ordered(before):
            home = home_of[call]
            start = free[home]
            for other in before[call]:
                start = max(start, done[other])
            done[call] = start + self._call_s(call, members[call], home, call_of)
            if self._factor[home]:
                free[home] = done[call]
        return max(done, default=0.0)

    def _called(
        self, homes: Sequence[int]
    ) -> tuple[list[int], list[list[int]], list[int], list[set[int]]]:
        """Return each node's call; each call's members, device, and the calls it waits for."""
        call_of = [-1] * len(homes)
        members: list[list[int]] = []
        home_of: list[int] = []
        before: list[set[int]] = []
        ancestors: list[int] = []  # a bit for each call, its own as well
        last = [-1] * len(self._factor)
        for node in self._order:
            home = homes[node]
            makers = {call_of[maker] for maker in self._before[node]}
            call = last[home]
            makers.discard(call)
            if call < 0 or any(ancestors[maker] >> call & 1 for maker in makers):
                call = len(members)
                members.append([])
                home_of.append(home)
                before.append(set())
                ancestors.append(1 << call)
                makers = {call_of[maker] for maker in self._before[node]}
            members[call].append(node)
            call_of[node] = call
            new = makers - before[call]
            if new:
                before[call] |= new
                added = ancestors[call]
                for maker in new:
                    added |= ancestors[maker]
                bit = 1 << call
                ancestors = [each | added if each & bit else each for each in ancestors]
            if self._factor[home]:
                last[home] = call
        return call_of, members, home_of, before

    def _call_s(
        self, call: int, members: Sequence[int], home: int, call_of: Sequence[int]
    ) -> float:
        total = 0.0
        for node in members:
            total += self._times[node][home]
        factor = self._factor[home]
        if not factor:
            return total
        moved = set[int]()
        for node in members:
            for maker in self._before[node]:
                if call_of[maker] != call:
                    moved.add(maker)
            for reader in self._after[node]:
                if call_of[reader] != call:
                    moved.add(node)
                    break
        for maker in moved:
            total += factor * self._sent[maker]
        return total


def _ordered(before: Sequence[set[int]]) -> list[int]:
    """Return the calls in an order in which they can run."""
    waits = [len(each) for each in before]
    after: list[list[int]] = [[] for _ in before]
    for call, makers in enumerate(before):
        for maker in makers:
            after[maker].append(call)
    ready = [call for call, count in enumerate(waits) if not count]
    for call in ready:  # grows while it is gone through
        for later in after[call]:
            waits[later] -= 1
            if not waits[later]:
                ready.append(later)
    return ready
