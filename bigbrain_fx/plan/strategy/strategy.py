"""One point of the space that `auto` looks at: who computes together, and what they divide.

    replicas x members of a tensor group x ZeRO x devices of each replica x rows of a micro-batch

What is left to the search of one pipeline (devices along it, cuts, schedule, what runs again, and
of one replica the rows) is no part of a strategy: `plan.search` finds it. This file knows options
and devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bigbrain_fx.core import Cluster, ZeroStage
from bigbrain_fx.plan.nouns import AUTO, Options
from bigbrain_fx.plan.replicas import Group, only


@dataclass(frozen=True)
class Strategy:
    """A way to use a cluster.

    Attributes:
        replicas: of the model.
        members: of each tensor group; 1: none.
        zero_stage: what replicas divide of weights, gradients and state.
        sets: devices of each replica, group after group; (): all, as `divide` gives them to each.
        shares: of the members; (): as asked.
        axes: that groups divide, by name; (): as asked.
        micro_batches: of a step of all replicas; None: as asked, or not chosen yet.
    """

    replicas: int = 1
    members: int = 1
    zero_stage: ZeroStage = 0
    sets: tuple[Group, ...] = ()
    shares: tuple[int, ...] = ()
    axes: tuple[str, ...] = ()
    micro_batches: int | None = None

    def asked(self, options: Options) -> Options:
        """Return options in which nothing is open but what the search of a pipeline finds."""
        given = replace(
            options,
            tensor=self.members,
            tensor_shares=self.shares or options.tensor_shares,
            tensor_axes=self.axes or options.tensor_axes,
        )
        if self.members > 1 and options.tensor != self.members and given.schedule == AUTO:
            given = replace(given, schedule=None)
        if options.replicas == 0 or self.sets:
            given = replace(given, replicas=self.replicas)
        micro_batches = self.micro_batches or options.micro_batches
        given = replace(given, zero_stage=self.zero_stage, micro_batches=micro_batches)
        if options.replicas == 0 and self.replicas == 1 and options.all_reduce_order != "tree":
            return replace(given, sum_order="replica")  # the tree is for one, too
        return given

    def on(self, cluster: Cluster) -> Cluster:
        """Return the cluster of its devices, in its order."""
        if not self.sets:
            return cluster
        names = [name for own in self.sets for name in own]
        used = only(cluster, names)
        devices = tuple(cluster.device[name] for name in names)
        return replace(used, devices=devices, replicas=self.sets if len(self.sets) > 1 else ())

    def __str__(self) -> str:
        """Name it, in words."""
        counts = f"{self.replicas} replicas" if self.replicas > 1 else ""
        found = " of ".join(filter(None, (counts, self._groups()))) or "one pipeline"
        return found + (f", ZeRO {self.zero_stage}" if self.zero_stage else "")

    def _groups(self) -> str:
        if self.members == 1:
            return self._sizes()
        of = f"of {self.members} devices"
        if not self.sets:
            return f"tensor groups {of}"
        count = len(self.sets[0]) // self.members
        return f"{count} tensor group{'s' * (count > 1)} {of}{_shares_text(self.shares)}"

    def _sizes(self) -> str:
        """Return how many devices the replicas have, where they are told apart by that."""
        sizes = sorted({len(own) for own in self.sets})
        what = f"{' or '.join(map(str, sizes))} device{'s' * (sizes != [1])}"
        return f"{what}, {sum(map(len, self.sets))} in all" if sizes else ""


def _shares_text(shares: Sequence[int]) -> str:
    return f" in shares {':'.join(map(str, shares))}" if len(set(shares)) > 1 else ""
