"""Placement of ops on devices, and the parts of replicas and groups of devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from bigbrain_fx.core.shards import Axis

SumOrder: TypeAlias = Literal["replica", "micro", "tree", "backend"]
"""How gradients of micro-batches are added over replicas.

- "replica": each replica adds its own, ascending; then the replicas' sums, ascending.
- "micro": all ascending by number, whoever computed them, as plain accumulation in one process.
- "tree": by the binary tree of their numbers: the same for any replicas and any shares.
- "backend": each its own, then as the collectives of torch.distributed add: equal to rounding only.
"""

ZeroStage: TypeAlias = Literal[0, 1, 2, 3]
"""What replicas divide among them: nothing, optimizer state, gradients too, weights too."""


Offloaded: TypeAlias = Literal["activations", "state", "weights"]
"""What a device may keep in its store instead of its memory.

- "activations": what a forward saves for its backward.
- "state": what the optimizer keeps.
- "weights": those of stages that do not run now, and gradients until the update.
"""

Asynchronous: TypeAlias = Literal["2bw", "stash"]
"""Whose weights a step computes with: those of one step ago, or each stage those that it has."""


def sums_each(order: SumOrder, zero_stage: ZeroStage) -> bool:
    """Whether each micro-batch is summed by itself: added by number, or its gradients divided."""
    return order == "micro" or zero_stage >= 2


@dataclass(frozen=True)
class Replica:
    """One copy of the model on devices of its own, and the micro-batches that it computes.

    `micros` are numbers of the whole step, ascending; those of all replicas are 0..M-1, each once.
    `in_flight` is as in `schedule.build`, for this replica's devices. `breaks` are ops at which
    their device begins another stage: it makes a tied weight's gradients apart, as others do.
    """

    device_of: Mapping[str, str]
    micros: tuple[int, ...]
    in_flight: tuple[int, ...] | None = None
    breaks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Crossed:
    """A value that goes between tensor groups in parts, and its readers in each other group."""

    value: str
    readers: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class TensorParallel:
    """Groups of devices that compute the same stages together, each with a part of the tensors.

    Attributes:
        groups: devices of each group; their places are the order in which parts are added. The
            first device stands for its group in `Placement.device_of`.
        shares: ratio of the ranks' parts, the same in all groups.
        axes: what is divided in proportion to them; all else is whole on every rank.
        scatters: whether a value in parts that is read whole by parts of others is gathered for
            them alone, its gradient scattered. Plans of older versions gather it for all.
        crossed: values of which each rank sends its part to another group, not all of it.
    """

    groups: tuple[tuple[str, ...], ...]
    shares: tuple[int, ...]
    axes: tuple[Axis, ...]
    scatters: bool = False
    crossed: tuple[Crossed, ...] = ()

    @property
    def members(self) -> int:
        """How many devices a group has."""
        return len(self.shares)


@dataclass(frozen=True)
class Placement:
    """The device of each op, for contiguous pipelines and for scattered ops.

    With several `replicas`, `device_of` is the first one's. `breaks` are ops at which their device
    begins another stage, as of a `Replica`: virtual stages that follow each other on a device.
    With `tensor`, ops are those of a rank's graph. With a `shard_group`, so many consecutive
    replicas divide what ZeRO divides, and each such group has all of it; 0: all replicas.
    """

    device_of: Mapping[str, str]
    reason: str = ""
    replicas: tuple[Replica, ...] = ()
    zero_stage: ZeroStage = 0
    sum_order: SumOrder = "replica"
    breaks: tuple[str, ...] = ()
    tensor: TensorParallel | None = None
    shard_group: int = 0
