"""Graph -> calls: each op with its tensors looked up, whatever region it is in.

This file knows shapes and who reads what; it knows no device and no speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from bigbrain_fx.core import Dim, Graph, Op, TensorSpec

_PASSES = """
add sub rsub neg mul div relu relu6 sqrt rsqrt reciprocal sigmoid tanh exp gelu silu hardswish
hardsigmoid elu leaky_relu hardtanh clamp clamp_min clamp_max pow square abs erf log sin cos
softplus softmax log_softmax layer_norm rms_norm dropout masked_fill where to _to_copy batch_norm
"""
FUSIBLE = frozenset(_PASSES.split())
"""Passes over memory that Inductor puts into one kernel where they follow each other."""


class GraphScope:
    """A graph, or the body of a region within another scope; answers what a name stands for."""

    def __init__(self, graph: Graph, outer: GraphScope | None = None) -> None:
        self.graph, self.outer = graph, outer
        self._roots: dict[str, str] = {}
        for op in graph.ops:
            base = op.view_of
            self._roots[op.name] = op.name if base is None else self._roots.get(base, base)

    @cached_property
    def autocast(self) -> bool:
        """Whether products are cast to half precision here."""
        return self.graph.autocast is not None or (self.outer is not None and self.outer.autocast)

    def calls(self) -> Iterator[PricedCall]:
        """Yield every op as a call, in order."""
        for op in self.graph.ops:
            yield PricedCall(op, self)

    def spec(self, name: str) -> TensorSpec | None:
        """Return the tensor of a value; None for a tuple, a number or an unknown name."""
        if name in self.graph.input:
            return self.graph.input[name].spec
        if name in self.graph.op:
            op = self.graph.op[name]
            return op.outputs[0] if op.outputs and not op.is_tuple else None
        return self.outer.spec(name) if self.outer else None

    def param(self, name: str) -> TensorSpec | None:
        """Return the tensor of a parameter, buffer or constant; None for an unknown name."""
        if name in self.graph.param:
            return self.graph.param[name].spec
        return self.outer.param(name) if self.outer else None

    def root(self, name: str) -> str:
        """Return the value, input or parameter that owns a value's storage."""
        return self._roots.get(name, name)

    def is_batch(self, name: str) -> bool:
        """Whether a value is an entry of the batch: its loader holds it anyway."""
        return self.outer is None and name in self.graph.input

    def inside_bytes(self, op: Op) -> int:
        """Return the bytes that a pass shares with passes before and after it.

        A compiler that fuses them reads intermediate values in registers, and writes a result only
        where another op reads it, too.
        """
        made = (self._maker(name) for name in op.refs)
        read = sum(o.outputs[0].nbytes for o in made if o is not None and self._is_pass(o))
        readers = [self.graph.op[name] for name in self.graph.consumers[op.name]]
        alone = bool(readers) and all(map(self._is_pass, readers))
        return read + (op.outputs[0].nbytes if alone and op.outputs else 0)

    def _maker(self, name: str) -> Op | None:
        """Return the op that made a value, through views of it."""
        root = self.root(name)
        return self.graph.op.get(root)

    def _is_pass(self, op: Op) -> bool:
        if op.view_of is not None:
            readers = self.graph.consumers[op.name]
            return bool(readers) and all(self._is_pass(self.graph.op[name]) for name in readers)
        return op.target.split(".")[1].rstrip("_") in FUSIBLE and len(op.outputs) == 1

    def gradients_into(self, name: str) -> int:
        """Return how many ops send a gradient back to a value."""
        return sum(self.graph.op[reader].requires_grad for reader in self.graph.consumers[name])


@dataclass(frozen=True)
class PricedCall:
    """One op of a concrete graph, with its tensors.

    Attributes:
        op: the call. scope: where its names are known.
    """

    op: Op
    scope: GraphScope

    @cached_property
    def values(self) -> tuple[tuple[str, TensorSpec], ...]:
        """Its tensor inputs that are values, by name, each once."""
        found = ((name, self.scope.spec(name)) for name in self.op.refs)
        return tuple((name, spec) for name, spec in found if spec is not None)

    @cached_property
    def weights(self) -> tuple[TensorSpec, ...]:
        """Its parameters, buffers and constants."""
        found = (self.scope.param(name) for name in self.op.params)
        return tuple(spec for spec in found if spec is not None)

    @cached_property
    def trained(self) -> tuple[TensorSpec, ...]:
        """Its parameters that want a gradient."""
        return tuple(spec for spec in self.weights if spec.requires_grad)

    @cached_property
    def wanted(self) -> int:
        """How many of its values want a gradient."""
        return sum(spec.requires_grad for _, spec in self.values)

    @property
    def moved_bytes(self) -> int:
        """Bytes that the forward reads and writes."""
        return number(self.op.reads_bytes) + number(self.op.writes_bytes)

    @property
    def flops(self) -> int:
        """Floating point operations of the forward."""
        return number(self.op.flops)

    @property
    def result(self) -> TensorSpec:
        """Its (first) output."""
        return self.op.outputs[0]


def number(dim: Dim) -> int:
    """Return a size of a concrete graph."""
    assert isinstance(dim, int), f"expected graph.at(rows), found the size {dim}"
    return dim
