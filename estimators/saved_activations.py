"""Saved activations of an op, in bytes.

A storage counts once, at the first op that keeps it; parameters and the batch are held anyway and
do not count. A view keeps the whole storage of its base. What capture measured (`Op.saves`)
comes first; the rules, for graphs that nobody measured, are in `op_rules`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from bigbrain_fx.core import DTYPE_BYTES, Saves, TensorSpec

from .calls import PricedCall, number
from .op_rules import Kept, OpRule

_SCORES_KEPT = 3  # the scores after softmax, their noise, and the product of both


def saved_bytes(call: PricedCall, rule: OpRule, device_kind: str, kept: set[str]) -> int:
    """Return the bytes that stay from this op's forward to its backward.

    Args:
        call: an op through which a gradient flows.
        rule: its family's.
        device_kind: some kernels of "cpu" keep more than those of "cuda".
        kept: names of the values whose storage is kept already; new ones are added.
    """
    if call.op.saves is not None:
        return _measured_bytes(call, call.op.saves, device_kind, kept)
    found = sum(_bytes_of(call, part, device_kind, kept) for part in rule.keeps)
    if rule.floats_per_row and call.values:
        shape = call.values[0][1].shape
        found += 4 * rule.floats_per_row * prod(number(dim) for dim in shape[:-1])
    if rule.kind == "attention":
        found += scores_bytes(call, device_kind) or _log_sums_bytes(call)
    return found + rule.bytes_per_element * call.result.numel


def _measured_bytes(call: PricedCall, saves: Saves, device_kind: str, kept: set[str]) -> int:
    """Return what capture measured; where CUDA's kernels keep other things, its rule."""
    values, own = saves.values, saves.own_bytes
    if device_kind == "cuda" and saves.cuda_own_bytes is not None:
        values, own = saves.cuda_values or (), saves.cuda_own_bytes
    names = [call.op.refs[place] if place >= 0 else call.op.name for place in values]
    found = ((name, call.scope.spec(name)) for name in names)
    return number(own) + _fresh_bytes(call, [(n, s) for n, s in found if s is not None], kept)


def scores_bytes(call: PricedCall, device_kind: str) -> int:
    """Return the bytes of attention's scores where they are kept as matrices; 0 for fused kernels.

    With dropout on a CPU torch falls back on plain products.
    """
    if not call.op.random or device_kind != "cpu" or len(call.values) < 2:
        return 0
    query, key = call.values[0][1], call.values[1][1]
    scores = prod(number(dim) for dim in query.shape[:-1]) * number(key.shape[-2])
    return _SCORES_KEPT * scores * DTYPE_BYTES[query.dtype]


def _log_sums_bytes(call: PricedCall) -> int:
    return 4 * prod(number(dim) for dim in call.result.shape[:-1])


def _bytes_of(call: PricedCall, part: Kept, device_kind: str, kept: set[str]) -> int:
    match part:
        case "noise":  # CPU kernels multiply by a tensor, fused ones keep a bit (in a byte)
            size = DTYPE_BYTES[call.result.dtype] if device_kind == "cpu" else 1
            return size * call.result.numel
        case "copy":
            return call.values[0][1].nbytes if call.values else 0
        case "result":
            return _fresh_bytes(call, [(call.op.name, call.result)], kept)
    return _fresh_bytes(call, list(_inputs(call, part)), kept)


def _fresh_bytes(
    call: PricedCall, tensors: Sequence[tuple[str, TensorSpec]], kept: set[str]
) -> int:
    found = 0
    for name, spec in tensors:
        root = call.scope.root(name)
        if root in kept or call.scope.is_batch(root) or call.scope.param(root):
            continue
        kept.add(root)
        found += (call.scope.spec(root) or spec).nbytes
    return found


def _inputs(call: PricedCall, part: Kept) -> Iterator[tuple[str, TensorSpec]]:
    floats = [(name, spec) for name, spec in call.values if _is_float(spec)]
    match part:
        case "factors":
            yield from _factors(call, floats)
        case "first":
            yield from floats[:1]
        case "inputs":
            yield from call.values
        case "integers":
            yield from ((name, spec) for name, spec in call.values if not _is_float(spec))


def _factors(
    call: PricedCall, values: Sequence[tuple[str, TensorSpec]]
) -> Iterator[tuple[str, TensorSpec]]:
    """Yield each factor whose partner, another value, a parameter or itself, wants a gradient."""
    is_square = len(call.op.args) > 1 and call.op.args[0] == call.op.args[1]
    for name, _spec in values:
        partners = [other for other_name, other in values if other_name != name]
        if call.trained or is_square or any(other.requires_grad for other in partners):
            yield name, _spec


def _is_float(spec: TensorSpec) -> bool:
    return spec.dtype.startswith(("float", "bfloat", "complex"))
