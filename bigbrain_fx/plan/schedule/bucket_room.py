"""Buckets of gradients while one backward fills them: bytes that come and go with each gradient.

    gradient made ──▶ in its bucket, all of which is there from its first gradient on
    bucket full   ──▶ others' parts leave: they are views, and all of it stays until they have left;
                      a copy of what is summed here waits, with those of OUT others, for the parts
                      that come before it

It knows the buckets of one stage, and neither ops nor what else is held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from bigbrain_fx.core import DTYPE_BYTES, Bucket, Stages
from bigbrain_fx.plan.schedule.stage_part import Part

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
