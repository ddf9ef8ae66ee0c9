"""Places of a graph that are computed in another way, and what running them both ways has shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bigbrain_fx.core.graph import Graph, Op

Rewrite = Literal["linears", "scales"]
"""What can be computed otherwise: linear layers that read one value, as one product; a number that
scales a product, moved to its smaller operand."""
REWRITES: tuple[Rewrite, ...] = ("linears", "scales")


@dataclass(frozen=True)
class RewritePlace:
    """Ops of one place, and what stands for them; it reads and gives the same values.

    Attributes:
        ops: those that are left out.
        at: that of them in whose place the others stand.
        made: what is put there.
        layers: modules, or else ops, as the user may know them.
        alike: the same for places that differ in names only: they are rewritten together.
    """

    rewrite: Rewrite
    ops: tuple[str, ...]
    at: str
    made: tuple[Op, ...]
    layers: tuple[str, ...]
    alike: str


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A place that a plan's graph computes otherwise than the captured one.

    Attributes:
        ops: those of the captured graph that are left out.
        apart: the largest difference when both were run, of the largest number.
        same_bits: whether there was none, at the rows that were run.
    """

    rewrite: Rewrite
    ops: tuple[str, ...]
    layers: tuple[str, ...] = ()
    apart: float = 0.0
    same_bits: bool = False


@dataclass(frozen=True, slots=True)
class RewriteTrial:
    """One place both ways: graphs with the same inputs, tensors and outputs, in numbers."""

    before: Graph
    after: Graph


@dataclass(frozen=True, slots=True)
class RewriteProof:
    """What running a place both ways has shown; `why` it may not be used, else None."""

    apart: float
    same_bits: bool
    why: str | None = None
