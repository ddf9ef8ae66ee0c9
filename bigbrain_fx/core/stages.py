"""Costs, where each op goes, and the graph cut into stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

from bigbrain_fx.core.cluster import Cluster


@dataclass(frozen=True, slots=True)
class OpCost:
    """What one op costs on one device, for one micro-batch.

    `backward_s` is the whole backward, `backward_input_s` the part that the previous stage waits
    for. `saved_bytes` stay from forward to backward; `workspace_bytes` are gone when the op is.
    """

    forward_s: float
    backward_s: float = 0.0
    backward_input_s: float = 0.0
    saved_bytes: int = 0
    workspace_bytes: int = 0


@dataclass(frozen=True)
class Costs:
    """What every op costs on every device, and what moving bytes costs.

    `ops[device][op]`. The optimizer's step takes `optimizer_s_per_tensor[device]` for each trained
    tensor (0 where it is left out) and `optimizer_s_per_byte[device]` for each byte of them.
    `measured[device]` are the ops whose times were measured; an estimator that measures nothing
    leaves it out. `recompute`: every stage will run its forward again before each backward, which
    the ops' costs do not count. `alone`: where devices of a host slow each other, these costs are
    of the time when all of them compute, and `alone` has those of each by itself.
    """

    ops: Mapping[str, Mapping[str, OpCost]]
    cluster: Cluster
    optimizer_s_per_byte: Mapping[str, float]
    optimizer_state_per_byte: float = 2.0  # Adam keeps two moments
    optimizer_temporaries: float = 2.0  # Adam's: a root, and a quotient
    measured: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    optimizer_s_per_tensor: Mapping[str, float] = field(default_factory=dict)
    recompute: bool = False
    alone: Costs | None = None

    def op_cost(self, op: str, device: str) -> OpCost:
        """Return the cost of the op named `op` on the device named `device`."""
        return self.ops[device][op]

    def optimizer_s(self, device: str, tensors: int, nbytes: int) -> float:
        """Seconds of an optimizer's step over so many trained tensors of `nbytes` bytes together.

        A tied parameter is one tensor on each device. What a step costs beside them is in
        `Overheads.step_s`.
        """
        per_tensor_s = self.optimizer_s_per_tensor.get(device, 0.0)
        return tensors * per_tensor_s + nbytes * self.optimizer_s_per_byte[device]

    def transfer_s(self, nbytes: int, a: str, b: str) -> float:
        """Seconds to move `nbytes` bytes from device `a` to device `b`."""
        return self.cluster.link(a, b).transfer_s(nbytes)


@dataclass(frozen=True)
class Placement:
    """Which device runs which op: anything, contiguous pipelines and scattered ops alike."""

    device_of: Mapping[str, str]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Stage:
    """A set of ops that one device runs in one go, once a micro-batch.

    Attributes:
        ops: in execution order, cheap ones that other stages run too included.
        recomputed: those of `ops` that are copies: run here instead of received.
        params: parameters and buffers that its ops touch.
        inputs: model inputs that it takes from its device's own data loader.
        receives: values of earlier stages that it reads. sends: its values that later stages read.
        runs_again: its forward keeps only what it received, and runs again before each backward.
    """

    index: int
    device: str
    ops: tuple[str, ...]
    recomputed: tuple[str, ...] = ()
    params: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    receives: tuple[str, ...] = ()
    sends: tuple[str, ...] = ()
    runs_again: bool = False


EdgeKind: TypeAlias = Literal["activation", "gradient", "tied", "norm"]


@dataclass(frozen=True, slots=True)
class Edge:
    """One channel of messages from stage `source` to stage `target`, in a fixed order.

    Both ends on one device: no message, the tensor is handed over. The kinds:

    - "activation" goes to a later stage.
    - "gradient" goes back: from the last stage that reads the value to the one before it, and so on
      to the stage that made it (the relay).
    - "tied", once a step, carries stage `source`'s gradient of a parameter that stage `target`'s
      device holds too.
    - "norm", once a step, carries the norms of one device's gradients, for clipping.
    """

    value: str
    source: int
    target: int
    kind: EdgeKind
    nbytes: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.value} {self.source}->{self.target}"


@dataclass(frozen=True)
class Stages:
    """The cut graph: stages in topological order, and everything that crosses between them.

    `moved` lists ops that run elsewhere than placed, because they must stay together with others.
    """

    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    moved: tuple[str, ...] = ()

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices in use, in order of their first stage."""
        return tuple(dict.fromkeys(stage.device for stage in self.stages))

    @property
    def is_chain(self) -> bool:
        """Whether every device has exactly one stage."""
        return len(self.devices) == len(self.stages)

    @property
    def recompute(self) -> tuple[int, ...]:
        """Numbers of the stages that run their forward again before each backward."""
        return tuple(stage.index for stage in self.stages if stage.runs_again)

    def of(self, device: str) -> tuple[Stage, ...]:
        """Return the stages of one device, in order."""
        return tuple(stage for stage in self.stages if stage.device == device)

    def is_local(self, edge: Edge) -> bool:
        """Whether both ends of the edge are on one device."""
        return self.stages[edge.source].device == self.stages[edge.target].device

    def into(self, stage: int, kind: EdgeKind) -> tuple[Edge, ...]:
        """Return the edges of one kind that end at a stage, in the order they are received."""
        return self._into.get((stage, kind), ())

    def out_of(self, stage: int, kind: EdgeKind) -> tuple[Edge, ...]:
        """Return the edges of one kind that start at a stage, in the order they are sent."""
        return self._out_of.get((stage, kind), ())

    @cached_property
    def _into(self) -> Mapping[tuple[int, EdgeKind], tuple[Edge, ...]]:
        return _grouped((edge.target, edge) for edge in self.edges)

    @cached_property
    def _out_of(self) -> Mapping[tuple[int, EdgeKind], tuple[Edge, ...]]:
        return _grouped((edge.source, edge) for edge in self.edges)


def _grouped(ends: Iterable[tuple[int, Edge]]) -> Mapping[tuple[int, EdgeKind], tuple[Edge, ...]]:
    groups: dict[tuple[int, EdgeKind], list[Edge]] = {}
    for stage, edge in ends:
        groups.setdefault((stage, edge.kind), []).append(edge)
    return {key: tuple(group) for key, group in groups.items()}
