"""The graph cut into stages, and everything that crosses between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from bigbrain_fx.core.placement import Asynchronous, Offloaded, SumOrder, ZeroStage, sums_each
from bigbrain_fx.core.sizes import DTYPE_BYTES

MOST_IN_PAIRS = 8
"""Replicas whose messages a plan lists pair by pair; of more, a bucket's are one exchange."""


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
        deferred: parameters, by canonical name, whose gradients wait for its BackwardWeight. Its
            Backward then makes the gradients of its inputs and of the other parameters.
        again: ops whose results, and what autograd keeps of them, its Backward makes again.
        replica: of which it is a part; a rank's stages of one replica have consecutive numbers.
        member: rank in its tensor group, whose graph it runs; stages of one rank are consecutive.
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
    replica: int = 0
    deferred: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    member: int = 0


EdgeKind: TypeAlias = Literal[
    "activation", "gradient", "reduce", "gather", "across", "statistics", "tied", "norm", "loss"
]


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
    - "reduce" carries a replica's part of a bucket of gradients to the replica that sums the piece;
      of collectives all that a replica sends the next one, as "gather" does; of many replicas all
      that a replica gets: see `has_exchanges`.
    - "gather", once a step, carries a summed piece back; with ZeRO, the piece's updated weights;
      with ZeRO 3 the piece's weights before each Forward and each Backward of the target.
    - "across", once a step, carries what a device sends the same place of the next shard group,
      where torch.distributed's collectives sum the shards of several groups.
    - "statistics", once a step, carries what a replica's micro-batches add to running statistics.
    - "loss", once a step, carries a replica's losses to the first one.
    """

    value: str
    source: int
    target: int
    kind: EdgeKind
    nbytes: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.value} {self.source}->{self.target}"


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that replicas sum together, as one flat tensor of one element type.

    Attributes:
        stages: that make them, one of each replica.
        params: whose they are, by canonical name, in the order of the flat tensor.
        pieces: elements of it that each replica sums; of a shard group each of its replicas.
        marks: elements after each piece that say which parameters got a gradient at all. Code of
            the user's own may give none back in some micro-batches; of other ops all make theirs.
    """

    name: str
    stages: tuple[int, ...]
    params: tuple[str, ...]
    pieces: tuple[int, ...]
    dtype: str
    marks: int = 0


@dataclass(frozen=True, slots=True)
class Statistics:
    """Buffers that forwards write and replicas keep equal: those of BatchNorm, and counters.

    Attributes:
        stages: that write it, one of each replica.
        dtype: of the buffers, or of the counters.
        buffers: running means and variances, a pair for each call in a micro-batch.
        counters: whole numbers, by name, and what a micro-batch adds to each.
    """

    name: str
    stages: tuple[int, ...]
    dtype: str
    buffers: tuple[str, ...] = ()
    counters: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class SavedInStore:
    """Saved activations of a stage, for one micro-batch, as an offload target would take them.

    `write_s` and `read_s` are the seconds of moving it, `compute_s` those of computing forward and
    backward: where moving takes longer, it stays in memory.
    """

    stage: int
    nbytes: int
    write_s: float
    read_s: float
    compute_s: float

    @property
    def pays(self) -> bool:
        """Whether it lies in the store."""
        return self.write_s + self.read_s <= self.compute_s


@dataclass(frozen=True)
class Stages:
    """The cut graph: stages in topological order, and everything that crosses between them.

    Attributes:
        moved: ops that run elsewhere than placed, because they must stay together with others.
        micros: of each replica, the micro-batches that it computes; empty: one replica, all.
        buckets: what replicas sum, in the order in which they sum it.
        statistics: what forwards write, where there are replicas.
        offload: what every device keeps in its store.
        asynchronous: the pipeline does not run empty between two steps; None: it does.
        saves: of activations, by stage. Stages that split their backward or recompute something,
            and those that run code of the user's own, are left out.
        compiled: they run under torch.compile, equal to rounding.
        shard_group: replicas that divide what ZeRO divides; 0: all. See `Placement`.
    """

    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    moved: tuple[str, ...] = ()
    micros: tuple[tuple[int, ...], ...] = ()
    buckets: tuple[Bucket, ...] = ()
    zero_stage: ZeroStage = 0
    sum_order: SumOrder = "replica"
    statistics: tuple[Statistics, ...] = ()
    offload: tuple[Offloaded, ...] = ()
    asynchronous: Asynchronous | None = None
    saves: tuple[SavedInStore, ...] = ()
    compiled: bool = False
    shard_group: int = 0

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices in use, in order of their first stage."""
        return tuple(dict.fromkeys(stage.device for stage in self.stages))

    @property
    def is_chain(self) -> bool:
        """Whether every device has exactly one stage."""
        return len(self.devices) == len(self.stages)

    @property
    def have_peers(self) -> bool:
        """Whether each replica has all of every parameter, and of what the optimizer keeps."""
        return self.replicas > 1 and not self.zero_stage

    @property
    def gathers(self) -> bool:
        """Whether weights are divided too: a stage's are gathered before each run, then freed."""
        return self.zero_stage == 3

    def ahead(self, stage: int) -> int:
        """How many micro-batches of the next batch a stage runs forward in a step: as 1F1B has."""
        return len(self.stages) - 1 - stage if self.asynchronous else 0

    def versions(self, stage: int) -> int:
        """How many versions of its weights a stage holds."""
        return 2 if self.asynchronous == "2bw" else 1 + self.ahead(stage)

    @property
    def recompute(self) -> tuple[int, ...]:
        """Numbers of the stages that run their forward again before each backward."""
        return tuple(stage.index for stage in self.stages if stage.runs_again)

    @property
    def again(self) -> tuple[int, ...]:
        """Numbers of the stages whose backward makes some ops' results again."""
        return tuple(stage.index for stage in self.stages if stage.again)

    @cached_property
    def saving(self) -> Mapping[int, SavedInStore]:
        """By stage, what of its activations lies in its device's store."""
        return {each.stage: each for each in self.saves if each.pays}

    @property
    def deferring(self) -> tuple[int, ...]:
        """Numbers of the stages with a BackwardWeight: gradients of some parameters wait for it."""
        return tuple(stage.index for stage in self.stages if stage.deferred)

    @property
    def sums_each(self) -> bool:
        """Whether replicas sum each micro-batch's gradients by themselves, not all at last."""
        return sums_each(self.sum_order, self.zero_stage)

    @property
    def by_backend(self) -> bool:
        """Whether torch.distributed's collectives add gradients: bits differ between two runs."""
        return self.sum_order == "backend" and bool(self.buckets)

    @property
    def has_exchanges(self) -> bool:
        """Whether all messages of a bucket are one exchange: an edge for each replica, not a pair.

        A collective is one, and a sum of many replicas that each send their parts once a step.
        """
        is_once = self.sum_order == "replica" and not self.sums_each
        is_of_many = is_once and len(self.micros) > MOST_IN_PAIRS and not self.shard_group
        return self.by_backend or is_of_many

    @cached_property
    def piece_bytes(self) -> Mapping[tuple[str, EdgeKind], tuple[int, ...]]:
        """By bucket and kind of edge, the bytes of each replica's piece as it travels."""
        ways: tuple[EdgeKind, ...] = ("reduce", "gather")
        return {
            (each.name, kind): self._pieces(each, kind) for each in self.buckets for kind in ways
        }

    def _pieces(self, bucket: Bucket, kind: EdgeKind) -> tuple[int, ...]:
        marks = 0 if kind == "gather" and self.gathers else bucket.marks
        size, places = DTYPE_BYTES[bucket.dtype], range(self.replicas)
        return tuple(size * (self.piece_elements(bucket, place) + marks) for place in places)

    def piece_elements(self, bucket: Bucket, place: int) -> int:
        """Return how many elements of a bucket travel to or from one replica.

        Collectives want equal pieces: with ZeRO, smaller ones are filled up to the largest. With
        ZeRO 3 each replica has an even part of every parameter.
        """
        if not (self.by_backend and self.zero_stage):
            return bucket.pieces[place % len(bucket.pieces)]
        if self.gathers:
            return -(-sum(bucket.pieces) // len(bucket.pieces))
        return max(bucket.pieces)

    def waits_for(self, summed: str, stage: int) -> bool:
        """Whether a stage's part of a sum is complete only after its BackwardWeight.

        `summed` is a bucket's name, or a parameter's: what a "reduce" or a "tied" edge carries.
        """
        deferred = self.stages[stage].deferred
        params = self.bucket[summed].params if summed in self.bucket else (summed,)
        return not set(deferred).isdisjoint(params)

    @cached_property
    def bucket(self) -> Mapping[str, Bucket]:
        """Bucket by name."""
        return {bucket.name: bucket for bucket in self.buckets}

    @property
    def replicas(self) -> int:
        """How many copies of the model there are."""
        return max(1, len(self.micros))

    @cached_property
    def members(self) -> int:
        """How many devices a tensor group has; 1: none has a part of a tensor."""
        return 1 + max((stage.member for stage in self.stages), default=0)

    @property
    def shards(self) -> int:
        """Into how many pieces replicas divide a bucket."""
        return self.shard_group or self.replicas

    def shard_of(self, replica: int) -> int:
        """Return which of the pieces a replica has: the same in each shard group."""
        return replica % self.shards

    def of_replica(self, replica: int) -> tuple[Stage, ...]:
        """Return the stages of one replica, in order."""
        return self._of_replica.get(replica, ())

    def of_member(self, member: int) -> tuple[Stage, ...]:
        """Return the stages of one rank of each tensor group, in order."""
        return tuple(stage for stage in self.stages if stage.member == member)

    def beside(self, stage: Stage) -> tuple[Stage, ...]:
        """Return the stages of a stage's own replica and rank, in order."""
        own = stage.replica, stage.member
        return tuple(s for s in self.stages if (s.replica, s.member) == own)

    def group_of(self, stage: Stage) -> tuple[Stage, ...]:
        """Return the stages whose devices compute one stage together, by rank."""
        place = self.of_member(stage.member).index(stage)
        return tuple(self.of_member(member)[place] for member in range(self.members))

    def micros_of(self, stage: int, micro_batches: int) -> tuple[int, ...]:
        """Return the numbers of the micro-batches that a stage computes, of so many in a step."""
        if not self.micros:
            return tuple(range(micro_batches))
        return self.micros[self.stages[stage].replica]

    def of(self, device: str) -> tuple[Stage, ...]:
        """Return the stages of one device, in order."""
        return self._on.get(device, ())

    def replicas_on(self, device: str) -> tuple[int, ...]:
        """Return the replicas that a device is part of: one, but where two lie in reverse."""
        return tuple(sorted({stage.replica for stage in self.of(device)}))

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
    def _of_replica(self) -> Mapping[int, tuple[Stage, ...]]:
        found: dict[int, list[Stage]] = {}
        for stage in self.stages:
            found.setdefault(stage.replica, []).append(stage)
        return {replica: tuple(own) for replica, own in found.items()}

    @cached_property
    def _on(self) -> Mapping[str, tuple[Stage, ...]]:
        found: dict[str, list[Stage]] = {}
        for stage in self.stages:
            found.setdefault(stage.device, []).append(stage)
        return {device: tuple(own) for device, own in found.items()}

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
