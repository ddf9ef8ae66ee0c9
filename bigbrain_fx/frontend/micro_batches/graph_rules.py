"""Ops by which micro-batches change the training: a sentence for each kind, for a warning.

A step trains on the mean of its micro-batches' losses. That mean is the batch's loss where rows
stand alone and weigh the same. The module reads graphs, of any origin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from bigbrain_fx.core import Graph, Op, Ref, size_of

_ALONG_ROWS = ("aten.softmax.int", "aten.log_softmax.int", "aten.logsumexp.default")
_RECURRENT = ("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input")
_ATTENTION = "aten.scaled_dot_product_attention.default"
_NORM = "aten.batch_norm.default"
_IGNORED = -100
_BY_INDEX = {"aten.cross_entropy_loss.default": 4, "aten.nll_loss_nd.default": 4}
_THROUGH = ("clamp", "clamp_min", "maximum", "add", "to", "float", "_to_copy")


def remarks(graph: Graph, batch: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield remarks for a comparison with whole batches."""
    ops = list(_all(graph.ops))
    for rule, sentence in _RULES:
        found = [op for op in ops if rule(op, graph, batch)]
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            yield f"{found[0].source or found[0].name}{more}: {sentence}"


def _all(ops: Sequence[Op]) -> Iterator[Op]:
    for op in ops:
        yield op
        if op.body is not None:
            yield from _all(op.body.ops)


def _is_rows(size: object) -> bool:
    """Whether a size is the number of rows."""
    return not isinstance(size, int) and [size_of(size, n) for n in (5, 7)] == [5, 7]  # type: ignore[arg-type]


def _spec(graph: Graph, arg: object) -> Sequence[object]:
    if not isinstance(arg, Ref):
        return ()
    op = graph.op.get(arg.value)
    if op is not None:
        return op.outputs[0].shape if op.outputs else ()
    entry = graph.input.get(arg.value)
    return entry.spec.shape if entry is not None else ()


def _norm_of_batch(op: Op, _graph: Graph, _batch: Mapping[str, Tensor]) -> bool:
    return op.target == _NORM and len(op.args) > 5 and op.args[5] is True


def _row_against_row(op: Op, graph: Graph, _batch: Mapping[str, Tensor]) -> bool:
    """Whether an op relates rows of the batch to each other: a [B, B] matrix, a softmax over B."""
    if op.target in _ALONG_ROWS:
        shape, dim = _spec(graph, op.args[0]), op.args[1]
        dims = dim if isinstance(dim, tuple) else (dim,)
        return any(isinstance(d, int) and shape and _is_rows(shape[d]) for d in dims)
    if not op.target.startswith(("aten.mm.", "aten.matmul.", "aten.linear.", "aten.einsum.")):
        return False
    return sum(_is_rows(size) for size in op.outputs[0].shape) > 1


def _walks_along(op: Op, graph: Graph, _batch: Mapping[str, Tensor]) -> bool:
    """Whether a layer takes dimension 0 of the batch for time."""
    if op.target == _ATTENTION:
        shape = _spec(graph, op.args[0])
        return len(shape) > 1 and _is_rows(shape[-2])
    if op.target not in _RECURRENT or op.args[-1] is not False:
        return False
    shape, given = _spec(graph, op.args[0]), op.args[0]
    if graph.static_batch is not None:
        held = isinstance(given, Ref) and given.value in graph.input
        return held and shape[0] == graph.static_batch
    return bool(shape) and _is_rows(shape[0])


def _ignores(op: Op, graph: Graph, batch: Mapping[str, Tensor]) -> bool:
    """Whether a loss is the mean over the elements that are not ignored."""
    place = _BY_INDEX.get(op.target)
    if place is not None and (len(op.args) < 4 or op.args[3] in (1, None)):
        index = op.args[place] if len(op.args) > place else _IGNORED
        entries = [t for t in batch.values() if not (t.is_floating_point() or t.is_meta)]
        held = any(bool(tensor.eq(index).any()) for tensor in entries)  # type: ignore[arg-type]  # a number
        return index != _IGNORED or held or any(_chooses(o, graph) for o in _all(graph.ops))
    return _is_weighted_mean(op, graph)


def _chooses(op: Op, graph: Graph) -> bool:
    """Whether an op lets data choose the number of ignored elements.

    A loss that skips the last element of each row skips as many of every micro-batch.
    """
    if not op.target.startswith(("aten.where.", "aten.masked_fill")):
        return False
    made = [graph.op[a.value].args for a in op.args if isinstance(a, Ref) and a.value in graph.op]
    return any(_IGNORED in args for args in (op.args, *made))


def _is_weighted_mean(op: Op, graph: Graph) -> bool:
    """Whether an op divides a sum by a number of elements that data decide."""
    if op.target != "aten.div.Tensor" or op.outputs[0].shape or len(op.args) < 2:
        return False
    below, above = _origin(graph, op.args[1]), _origin(graph, op.args[0])
    return below is not None and above is not None and above.outputs[0].requires_grad


def _origin(graph: Graph, arg: object) -> Op | None:
    """Return the sum that a scalar is, but for a clamp or a cast."""
    while isinstance(arg, Ref) and arg.value in graph.op:
        op = graph.op[arg.value]
        family = op.target.split(".")[1] if "." in op.target else ""
        if family in ("sum", "count_nonzero"):
            shape = _spec(graph, op.args[0])
            return op if any(not isinstance(size, int) for size in shape) else None
        if family not in _THROUGH or not op.args:
            return None
        arg = op.args[0]
    return None


_Rule = Callable[[Op, Graph, Mapping[str, Tensor]], bool]
_RULES: tuple[tuple[_Rule, str], ...] = (
    (
        _norm_of_batch,
        "batch norm takes its statistics over a micro-batch, not over the whole batch",
    ),
    (
        _row_against_row,
        "rows of the batch are compared with each other (in-batch negatives): a row meets those of "
        "its micro-batch alone",
    ),
    (
        _walks_along,
        "dimension 0 is taken for the batch and cut into micro-batches, and this layer walks along "
        "it: give batches with their rows first (batch_first=True)",
    ),
    (
        _ignores,
        "the loss is a mean over elements that data choose: micro-batches weigh the same, however "
        "many of theirs count",
    ),
)
