"""Results that equal one process to rounding only: 16-bit sums of gradients, transposed weights.

autograd adds the uses of a weight one by one. In float32 another grouping changes the last place;
in sixteen bits more. The same holds for the uses of a value. A bundle holds weights row by row, or
in a memory format of torch's, and kernels round by memory layout. This module finds such weights
and values; it reads graph and stages, and computes no numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from bigbrain_fx.core import Graph, Op, Param, Stage, Stages, memory_format, shortened

_HALVES = frozenset({"bfloat16", "float16"})
_NAMED = 3
_OWN_CODE = ("leaf.", "forward.", "opaque.")


def half_sums(graph: Graph, stages: Stages) -> tuple[str, ...]:
    """Return the trained parameters whose gradients equal one process's to rounding only.

    - Of sixteen bits: its uses are in several stages, of which each adds its own over the
      micro-batches first; or replicas do.
    - Cast by the model file's autocast: torch casts a weight once for all uses, and adds their
      gradients in the type of the cast; several stages have a cast each, and add in float32.
    """
    trained = {p.canonical: p.spec.dtype for p in graph.params if p.spec.requires_grad}
    readers = {name: _readers(graph, stages, name, dtype) for name, dtype in trained.items()}
    apart = {name for name, uses in readers.items() if len(uses) > 1}
    if stages.replicas > 1:
        apart |= {name for name, dtype in trained.items() if dtype in _HALVES and readers[name]}
    return tuple(name for name in trained if name in apart)


def _readers(graph: Graph, stages: Stages, name: str, dtype: str) -> Counter[int]:
    """Return how often each stage reads a parameter in sixteen bits, casts included."""
    return Counter(
        stage.index
        for stage in stages.of_replica(0)
        if not stage.member
        for op in stage.ops
        if op in graph.op
        and op not in stage.recomputed
        and _in_half(graph, graph.op[op], name, dtype)
    )


def _in_half(graph: Graph, op: Op | None, name: str, dtype: str) -> bool:
    if op is None:  # of a rank's own graph
        return False
    reads = any(graph.param[key].canonical == name for key in op.params)
    return reads and (dtype in _HALVES or (graph.autocast is not None and _is_half(op)))


def _is_half(op: Op) -> bool:
    own_code = op.target.startswith(_OWN_CODE)  # what it casts inside, nobody knows
    return op.requires_grad and (own_code or any(dtype in _HALVES for dtype in _types(op)))


def _types(op: Op) -> Iterator[str]:
    yield from (spec.dtype for spec in op.outputs)
    for inner in op.body.ops if op.body else ():
        yield from _types(inner)


def half_values(graph: Graph, stages: Stages) -> tuple[str, ...]:
    """Return the values of sixteen bits whose gradient stages add up in another order."""
    return tuple(
        name
        for name in values_in_turn(graph, stages)
        if any(spec.dtype in _HALVES for spec in graph.op[name].outputs)
    )


def values_in_turn(graph: Graph, stages: Stages) -> tuple[str, ...]:
    """Return the values whose gradient stages add up in another order than one process.

    One process adds that of the last use first; a bundle adds all uses of a stage, then those of
    the stage before. That is the same unless a stage reads a value before and after another does.
    """
    place = {
        op: stage.index
        for stage in stages.of_replica(0)
        if not stage.member
        for op in stage.ops
        if op not in stage.recomputed
    }
    return tuple(
        op.name
        for op in graph.ops
        if op.name in graph.graded
        and _in_turn(
            [place[r] for r in graph.consumers[op.name] if r in place and r in graph.graded]
        )
    )


def _in_turn(uses: Sequence[int]) -> bool:
    """Whether stages read in turn, which makes another sum: of two numbers no order counts."""
    last_first = list(reversed(uses))
    sums = sorted(uses, reverse=True)
    return len(uses) > 2 and sums not in (last_first, [*last_first[1::-1], *last_first[2:]])


def half_sums_text(graph: Graph, stages: Stages) -> tuple[str, ...]:
    """Say which they are, in at most a sentence each."""
    return (*_values_text(graph, stages), *_params_text(graph, stages))


def in_turn_text(graph: Graph, stages: Stages) -> str:
    """Say which values' gradients stages add up in another order, of any type; "": of none."""
    named = _named(graph, values_in_turn(graph, stages))
    if not named:
        return ""
    return f"{named}: stages that read it in turn add up its gradient in another order"


def _named(graph: Graph, values: Sequence[str]) -> str:
    """Name the first lines that made values, and how many more there are."""
    return shortened([*dict.fromkeys(graph.op[name].source or name for name in values)], _NAMED)


def _values_text(graph: Graph, stages: Stages) -> Iterator[str]:
    named = _named(graph, half_values(graph, stages))
    if named:
        yield (
            f"{named}: stages that read it in turn add up its gradient, "
            f"of {graph.autocast or 'sixteen bits'}, in another order than one process does, so it "
            "is the same to rounding, not bit for bit; another placement may keep the order"
        )


def _params_text(graph: Graph, stages: Stages) -> tuple[str, ...]:
    found = half_sums(graph, stages)
    if not found:
        return ()
    why = "replicas or several stages" if stages.replicas > 1 else "several stages"
    return (
        f"{shortened(found, _NAMED)}: {why} add up gradients that one process adds in "
        f"{graph.autocast or 'sixteen bits'}, so they are the same to rounding, not bit for bit",
    )


def turned_text(
    graph: Graph, stages: Stages, members: Sequence[Graph] | None = None
) -> tuple[str, ...]:
    """Say which weights lie otherwise than on their devices, in at most one sentence.

    Args:
        graph: the model.
        stages: of it.
        members: the graph of each rank of tensor groups; the whole one when left out.
    """
    turned = turned_weights(stages, members or [graph] * stages.members)
    held = {name for stage in stages.stages for name in stage.params} - turned
    names = [p.name for p in graph.params if p.name == p.canonical and p.name in held]
    found = [name for name in names if _is_turned(graph.param[name])]
    if not found:
        return ()
    return (
        f"{shortened(found, _NAMED)}: the model holds them otherwise than row by row, a "
        "bundle row by row, so it is the same to rounding, not bit for bit; the model's .to with a "
        "memory_format turns all weights in both",
    )


def turned_weights(stages: Stages, members: Sequence[Graph]) -> set[str]:
    """Return the weights that their devices turn into a memory format, as the model has them."""
    turned, left = set[str](), set[str]()
    for stage in stages.stages:
        graph = members[stage.member]
        if stage_format(graph, stage):
            held = [graph.param[name] for name in stage.params if name in graph.param]
            turned |= {param.name for param in held if param.spec.is_channels_last}
        else:
            left |= set(stage.params)
    return turned - left


def stage_format(graph: Graph, stage: Stage) -> str | None:
    """Return the memory format of a stage's weights, where the model has them in one of torch's."""
    return memory_format(graph.param[name].spec for name in stage.params if name in graph.param)


def _is_turned(param: Param) -> bool:
    """Whether strides are not a row-major tensor's; those of size 1 count for images alone."""
    sizes = [max(1, int(size)) for size in param.spec.shape]
    rows = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    counted = [dim for dim, size in enumerate(sizes) if size > 1 or len(sizes) > 3]
    other = any(int(param.spec.strides[dim]) != rows[dim] for dim in counted)
    return other and param.kind != "constant"


# ------------------------------------------------------------------------------------------------
# What may get no gradient at all, by the data: only code of the user's own gives back None.
#
#   h ──▶ Function whose backward returns None ──▶ loss      h.grad is None, and so are its weights'
#   h ──▶ Function ──▶ (+) ──▶ loss                          h has one in any case, but a use of it
#   └───────────────────┘                                    may give none
#
# An optimizer leaves a weight alone that has no gradient, and may decay one whose gradient is
# zero.


_TRACED = ("aten.", "operator.", "region.", "math.", "assume.", "shard.")
"""What a target begins with that is not code of the user's own."""
_LOSS = "user.loss"


def may_be_ungiven(graph: Graph) -> frozenset[str]:
    """Return the values and parameters (canonical) of which a use may have no gradient.

    A use in values that are written in place counts as one of these, which costs a few bytes.
    """
    found, sure = set[str](), {graph.loss}
    for op in reversed(graph.ops):
        if op.name in graph.graded:
            gives = op.name in sure and _gives(graph, op)
            read = {graph.param[name].canonical for name in op.params if name in graph.param}
            (sure if gives else found).update(graph.graded.intersection(op.refs), read)
    return frozenset(found)


def _gives(graph: Graph, op: Op) -> bool:
    """Whether all that an op reads gets a gradient; a loss of one value has none else."""
    if op.target == _LOSS:
        return not op.params and sum(name in graph.graded for name in op.refs) == 1
    return not _is_users(op)


def _is_users(op: Op) -> bool:
    inside = op.body.ops if op.body else ()
    return not op.target.startswith(_TRACED) or any(map(_is_users, inside))
