"""Plainer calls for what a trace computes in a roundabout way; the numbers stay the same.

A key-value cache starts as an empty tensor, and the first keys are joined to it: `torch.cat([empty,
keys])` is a copy of the keys. Left as it is, every layer would hold an empty tensor of its own.
This file edits fx nodes; it knows nothing of our graph.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

import torch
from torch import Tensor, fx

from bigbrain_fx.frontend.translation.nodes import spec_of, storage


def without_empty_parts(nodes: Sequence[fx.Node], written: Collection[int]) -> None:
    """Leave tensors without elements out of `torch.cat`, in place; bodies of regions too.

    Args:
        nodes: of a trace.
        written: storages that some call writes into: what is one of them is left alone.
    """
    for node in nodes:
        body = _body(node)
        if body is not None:
            without_empty_parts(list(body.graph.nodes), written)
        elif node.op == "call_function" and node.target is torch.ops.aten.cat.default:
            _simplify(node, written)


def _body(node: fx.Node) -> fx.GraphModule | None:
    found = getattr(node.graph.owning_module, str(node.target), None)
    return found if node.op == "get_attr" and isinstance(found, fx.GraphModule) else None


def _simplify(node: fx.Node, written: Collection[int]) -> None:
    parts = cast("Sequence[fx.Node]", node.args[0])
    left = [part for part in parts if not _is_empty(part)]
    kinds = {cast("Tensor", part.meta["val"]).dtype for part in parts}
    if len(left) == len(parts) or not left or len(kinds) > 1:  # cat promotes to a common dtype
        return
    if len(left) > 1:
        node.args = (left, *node.args[1:])
    elif not {storage(node), storage(left[0])} & set(written):
        _copy(node, left[0])


def _is_empty(node: fx.Node) -> bool:
    """Whether it is a vector of no elements, which `torch.cat` skips whatever the others' shape."""
    return tuple(cast("Tensor", node.meta["val"]).shape) == (0,)


def _copy(node: fx.Node, source: fx.Node) -> None:
    """Make a node a copy of another; nothing of it where nobody could tell them apart."""
    new, old = spec_of(node.meta["val"], False), spec_of(source.meta["val"], False)
    if new.strides == old.strides:
        node.replace_all_uses_with(source)
    elif cast("Tensor", node.meta["val"]).is_contiguous():
        node.target, node.args, node.kwargs = torch.ops.aten.contiguous.default, (source,), {}
