"""One stage of a concrete graph on its own device: memory of its ops there.

The module knows storages only: a view is its base. The module follows `Op.saves`, which capture
measured. `walk` has the order of computations.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from bigbrain_fx.core import (
    BLAS_BYTES,
    BLAS_BYTES_FROM_HOPPER_ON,
    DTYPE_BYTES,
    Bucket,
    Costs,
    Device,
    Dim,
    Edge,
    EdgeKind,
    Graph,
    ModuleCall,
    Op,
    Saves,
    Stage,
    Stages,
)
from bigbrain_fx.plan.offloading import STORED_FROM_BYTES
from bigbrain_fx.planning import concrete, saves_of

# ------------------------------------------------------------------------------------------------
# What torch takes of a CUDA device beyond the bytes that a tensor's shape says.
#
# All of it is read off torch 2.13's source, in the terms of `torch.cuda.max_memory_allocated`; no
# GPU has tested it. On a CPU nothing here changes a byte. Left out, because nobody can foresee
# it:
#
# - what cuDNN takes while a convolution runs: its heuristics choose; a block of the same
# allocator, given back at the end of the call (aten/src/ATen/native/cudnn/Conv_v8.cpp); - up to 1
# MiB of a tensor of more than 1 MiB that gets a block whose rest is too small to be of use
# (CUDACachingAllocator.cpp, `should_split`: the block is counted whole); - a block of 512 bytes
# for each scalar that the runtime keeps.


ROUND_BYTES = 512
"""torch's caching allocator hands out multiples of this (c10/core/AllocatorConfig.h,
`kMinBlockSize`; PYTORCH_ALLOC_CONF can ask for more), and `max_memory_allocated` counts them. Its
segments of 2 and 20 MiB are part of what `memory_check` adds for the process.
"""

_FROM_HOPPER_ON_FLOPS_PER_S = 330e12
"""Where a cluster does not say what cuBLAS takes, the rate of half-precision products has to:
312e12 at most before Hopper (A100's datasheet), 756e12 at least from then on (H100 PCIe's).
"""

_PRODUCTS = {
    *("linear", "mm", "matmul", "bmm", "mv", "dot", "einsum", "bilinear"),
    *("addmm", "baddbmm", "addbmm", "addmv"),
}


def rounded(nbytes: int, kind: str) -> int:
    """Return what the allocator of a kind of device takes for a tensor of so many bytes."""
    return -(-nbytes // ROUND_BYTES) * ROUND_BYTES if kind == "cuda" else nbytes


def library_bytes(device: Device, ops: Iterable[Op], trains: bool) -> int:
    """Return the workspaces that cuBLAS keeps on a device.

    Handles belong to threads: the forward's products are started by the program's, the backward's
    by the thread that autograd has for each GPU. The allocator gives a handle its workspace at the
    first product and keeps it; cuBLASLt uses the same one. torch 2.15 gives it back after each
    product, unless TORCH_CUBLAS_WORKSPACE_CACHE is 1.
    """
    if device.kind != "cuda" or not any(map(_has_product, ops)):
        return 0
    return (2 if trains else 1) * _blas_bytes(device)


def optimizer_temporary_bytes(
    sizes: Sequence[int], temporaries: float, leftover: float, *, at_once: bool
) -> int:
    """Return what an optimizer's step holds for a moment, besides gradients and state.

    On a CPU optimizers go parameter by parameter, as on CUDA with `foreach=False`. They hold the
    temporaries of one, and what Python's loop has not freed of the one before. On CUDA they update
    all at once (`foreach` is the default there). AdamW has the roots of all second moments there
    (torch/optim/adam.py, `_multi_tensor_adam`), SGD with weight decay the sums with all parameters.
    These, NAdam, RAdam, Adamax and RMSprop have one byte for each byte of parameters. Adagrad,
    Adadelta, and RMSprop with weight decay have two; an optimizer that was made with `fused` has
    none. Of several groups of parameters only the largest counts really; all do here.

    Args:
        sizes: bytes of each trained parameter of a device, as allocated, in their order.
        temporaries: measured as on a CPU, in the parameter's size.
        leftover: the same, of the parameter before, in its size.
        at_once: whether all parameters are updated together.
    """
    if at_once:
        return int(min(1.0, temporaries) * sum(sizes))
    pairs = zip(sizes, (0, *sizes), strict=False)
    return int(max((temporaries * own + leftover * last for own, last in pairs), default=0))


def _blas_bytes(device: Device) -> int:
    if device.blas_bytes is not None:
        return device.blas_bytes
    from_hopper_on = (device.half_flops_per_s or 0.0) > _FROM_HOPPER_ON_FLOPS_PER_S
    return BLAS_BYTES_FROM_HOPPER_ON if from_hopper_on else BLAS_BYTES


def _has_product(op: Op) -> bool:
    if op.body is not None:
        return any(map(_has_product, op.body.ops))
    return any(name in _PRODUCTS for name in op.target.split(".")[1:2])  # "aten.linear.default"


# ------------------------------------------------------------------------------------------------
# One stage of a concrete graph on its own device: what its ops hold there.


_REMEMBERED = "_walk"  # as a cached property is: a graph is frozen, and every stage asks


@dataclass(frozen=True)
class Part:
    """One stage of a concrete graph, on its own device."""

    graph: Graph
    stages: Stages
    stage: Stage
    costs: Costs

    @property
    def kind(self) -> str:
        """The kind of its device."""
        return self.costs.cluster.device[self.stage.device].kind

    def rounded(self, nbytes: Dim) -> int:
        """Return what the device's allocator takes for so many bytes."""
        return rounded(concrete(nbytes), self.kind)

    def ops(self) -> Iterator[Op]:
        """Yield its ops, in order."""
        return (self.graph.op[name] for name in self.stage.ops)

    def saves(self, op: Op) -> Saves:
        """Return what an op holds here; by the estimator's rule where nobody has measured it."""
        cost = self.costs.op_cost(op.name, self.stage.device)
        return saves_of(self.graph, op, cost, self.kind)

    @property
    def stores(self) -> bool:
        """Whether what its forward saves lies in its device's store."""
        return self.stage.index in self.stages.saving and not self.stage.runs_again

    def stored(self, op: Op) -> Mapping[str, int]:
        """Return the bytes that an op's backward asks of the store, by the storage's value.

        A storage that is made elsewhere is held anyway; tensors that an op saves besides have the
        op's name and "!".
        """
        saves, roots = self.saves(op), roots_of(self.graph)
        kept = (roots.get(name, name) for name in places(op, saves))
        made = {root: self.result_bytes(self.graph.op[root]) for root in kept if root in self.own}
        made[f"{op.name}!"] = self.rounded(saves.own_bytes)
        return {name: nbytes for name, nbytes in made.items() if nbytes >= STORED_FROM_BYTES}

    @cached_property
    def own(self) -> frozenset[str]:
        """The names of its ops."""
        return frozenset(self.stage.ops)

    def result_bytes(self, op: Op) -> int:
        """Return the bytes of an op's fresh results."""
        return sum(self.rounded(spec.nbytes) for spec in op.outputs)

    def edges(self, kind: EdgeKind) -> tuple[Edge, ...]:
        """Return what it sends of a kind."""
        return self.stages.out_of(self.stage.index, kind)

    def is_graded(self, op: Op) -> bool:
        """Whether the backward runs it."""
        return op.name in self.graph.graded


def trained_params(graph: Graph, stage: Stage) -> Mapping[str, int]:
    """Return the bytes of each parameter of a stage that wants a gradient, by canonical name."""
    found = (graph.param[name] for name in stage.params)
    return {param.canonical: param.spec.nbytes for param in found if param.is_trained}


def of_graph(graph: Graph) -> tuple[Mapping[str, str], Mapping[ModuleCall, int]]:
    """Return the storage of every value, and how many ops every call has: once for all stages."""
    known = graph.__dict__.get(_REMEMBERED)
    if known is None:
        root: dict[str, str] = {}
        for op in graph.ops:
            base = op.storage_of
            root[op.name] = op.name if base is None else root.get(base, base)
        known = root, Counter(call for op in graph.ops for call in op.modules)
        graph.__dict__[_REMEMBERED] = known
    found: tuple[Mapping[str, str], Mapping[ModuleCall, int]] = known
    return found


def roots_of(graph: Graph) -> Mapping[str, str]:
    """Return the value whose storage each op's result is: its own, but for views."""
    return of_graph(graph)[0]


def places(op: Op, saves: Saves) -> Iterator[str]:
    """Name the values that an op keeps."""
    refs = op.refs
    return (refs[place] if place >= 0 else op.name for place in saves.values)


# --------------------------------------------------------- gradients that are parts of a larger one


def wholes(graph: Graph, stages: Stages, edges: Iterable[Edge]) -> Iterator[tuple[Edge, int]]:
    """Yield the edges of gradients that no message copies, each a part that keeps the whole.

    The whole counts once for all parts, of which `edges` have those of a stage together. The first
    of several parts of one whole therefore has the bytes that the others leave of it.
    """
    parts: dict[tuple[str, int], list[Edge]] = {}
    for edge in edges:
        is_local = stages.stages[edge.source].device == stages.stages[edge.target].device
        whole = divided(graph, stages, edge) if edge.kind == "gradient" and is_local else None
        if whole is not None:
            parts.setdefault((whole.name, edge.source), []).append(edge)
    for (name, _), alike in parts.items():
        others = sum(edge.nbytes for edge in alike[1:])
        yield alike[0], concrete(graph.op[name].outputs[0].nbytes) - others


def divided(graph: Graph, stages: Stages, edge: Edge) -> Op | None:
    """Return the only reader of a gradient's value whose gradient it is a part of, as of `cat`."""
    here = set(stages.stages[edge.source].ops) & graph.graded
    readers = [graph.op[name] for name in graph.consumers[edge.value] if name in here]
    if len(readers) != 1 or readers[0].saves is None:
        return None
    whole, part = readers[0].outputs[0], graph.op[edge.value].outputs[0]
    passed = readers[0].refs.index(edge.value) in readers[0].saves.passed
    larger = len(whole.shape) == len(part.shape) and whole.numel > part.numel
    return readers[0] if passed and larger else None


# ------------------------------------------------------------------------------------------------
# Buckets of gradients while one backward fills them: bytes that come and go with each gradient.
#
#   gradient made ──▶ in its bucket, all of which is there from its first gradient on
#   bucket full   ──▶ others' parts leave: they are views, and all of it stays until they have left;
#                     a copy of what is summed here waits, with those of OUT others, for the parts
#                     that come before it


OUT = 2
"""Buckets of a backward that have left and wait for parts of others: see `runtime.replicas`."""


def sums_parts(stages: Stages) -> bool:
    """Whether replicas' sums are of single micro-batches, or of nodes of their tree."""
    is_of_parts = stages.sums_each or stages.sum_order == "tree"
    return is_of_parts and bool(stages.buckets) and not stages.by_backend


def summed_bytes(stages: Stages, bucket: Bucket, stage: int) -> int:
    """Return the bytes of one sum of a bucket on the device of a stage: of its own piece, or all.

    A tree whose parts are sent at last is one of whole buckets.
    """
    place = stages.shard_of(stages.stages[stage].replica)
    elements = bucket.pieces[place] if stages.sums_each else sum(bucket.pieces)
    return elements * DTYPE_BYTES[bucket.dtype]


@dataclass
class _Filling:
    """One bucket: its bytes, those of the largest piece, and what it still lacks."""

    nbytes: int
    piece_bytes: int
    lacks: set[str]
    is_there: bool


@dataclass
class BucketRoom:
    """The buckets of one stage in the backward of its first micro-batch, or of a later one.

    Pieces are counted as the largest of any replica's, so that their stages are followed once.
    """

    part: Part
    is_first: bool
    out: deque[_Filling] = field(default_factory=deque)

    def __post_init__(self) -> None:
        """Find the bucket of each parameter."""
        self.each = self.part.stages.sums_each
        self.keeps = self.part.stages.sum_order == "replica" and not self.each
        self.leaves = self.each and self.part.kind == "cpu"
        self.of = dict(self._all())

    def __contains__(self, name: str) -> bool:
        """Whether a parameter's gradient goes into a bucket."""
        return name in self.of

    def take(self, name: str) -> int:
        """Return the bytes that come before a gradient is put into its bucket."""
        found = self.of[name]
        more = 0 if found.is_there else found.nbytes
        found.is_there = True
        return more

    def done(self, name: str) -> int:
        """Return the bytes that come, less than 0: go, after a gradient was put into its bucket."""
        found = self.of[name]
        found.lacks.discard(name)
        if found.lacks or not self.leaves:
            return 0
        self.out.append(found)
        if len(self.out) <= OUT:
            return found.piece_bytes
        settled = self.out.popleft()
        gone = settled.nbytes + (0 if self.is_first else settled.piece_bytes)
        return found.piece_bytes - gone

    def _all(self) -> Iterator[tuple[str, _Filling]]:
        for bucket in own_buckets(self.part):
            size = DTYPE_BYTES[bucket.dtype]
            whole, piece = sum(bucket.pieces) * size, max(bucket.pieces) * size
            was_there = self.keeps and not self.is_first
            sizes = self.part.rounded(whole), self.part.rounded(piece)
            found = _Filling(*sizes, set(bucket.params), was_there)
            yield from ((name, found) for name in bucket.params)


def own_buckets(part: Part) -> tuple[Bucket, ...]:
    """Return the buckets of a stage; none where torch's own collectives add."""
    if part.stages.by_backend:
        return ()
    return tuple(b for b in part.stages.buckets if part.stage.index in b.stages)
