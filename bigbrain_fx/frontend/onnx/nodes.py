"""One ONNX node as data, and the table of operators. Each operator file fills the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar, cast

import onnx
from onnx import helper

from bigbrain_fx.frontend.onnx.values import Value

if TYPE_CHECKING:
    from bigbrain_fx.frontend.onnx.reader import NodeBody

T = TypeVar("T")
Result = Value | Sequence[Value]


@dataclass(frozen=True)
class Node:
    """One call of an operator.

    Attributes:
        name: its name in the file, or "Add_3" when it has none.
        inputs: names of values; "" where an optional one is left out.
        opset: version of the operator set that the file requires.
        bodies: sub-graphs of If, by attribute.
        scope: the modules around the node, outermost first, as (path, class name).
        read: the attributes that its operator has read.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, object]
    opset: int
    bodies: Mapping[str, NodeBody]
    scope: tuple[tuple[str, str], ...] = ()
    read: set[str] = field(default_factory=set, compare=False)

    @property
    def at(self) -> str:
        """Return its place, for messages."""
        return f"node {self.name} ({self.op})"

    def attribute(self, name: str, default: T) -> T:
        """Return an attribute, or the default, which also gives its type."""
        self.read.add(name)
        found = self.attributes.get(name)
        return default if found is None else cast("T", found)

    def optional(self, name: str) -> object:
        """Return an attribute, None when the node does not set it."""
        self.read.add(name)
        return self.attributes.get(name)

    def unread(self) -> list[str]:
        """Return the attributes that are not the default and that no operator has read."""
        return [
            name
            for name, value in self.attributes.items()
            if name not in self.read | _HARMLESS and value != _default(self.op, name)
        ]


# What these say follows from the inputs, or does not matter for the result.
_HARMLESS = {
    "consumed_inputs", "cubic_coeff_a", "exclude_outside", "extrapolation_value", "hidden_size",
    "kernel_shape", "momentum", "num_outputs", "ratio", "saturate", "seed", "softmax_precision",
    "spatial", "stash_type",
}  # fmt: skip


def _default(op: str, name: str) -> object:
    known = onnx.defs.get_schema(op).attributes if onnx.defs.has(op) else {}
    if name not in known or not known[name].default_value.type:
        return None
    found = helper.get_attribute_value(known[name].default_value)
    return found.decode() if isinstance(found, bytes) else found


def attributes_of(node: onnx.NodeProto) -> dict[str, object]:
    """Return a node's attributes as Python values; sub-graphs are left out."""
    found: dict[str, object] = {}
    for attribute in node.attribute:
        if attribute.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS):
            continue
        value = helper.get_attribute_value(attribute)
        if isinstance(value, bytes):
            value = value.decode()
        elif isinstance(value, list | tuple) and value and isinstance(value[0], bytes):
            value = [item.decode() for item in value]
        found[attribute.name] = value
    return found


Operator = Callable[..., Result]
OPERATORS: dict[str, Operator] = {}


def operator(*names: str) -> Callable[[Operator], Operator]:
    """List a function as the meaning of operators: called with the node and its input values."""

    def add(function: Operator) -> Operator:
        OPERATORS.update(dict.fromkeys(names, function))
        return function

    return add
