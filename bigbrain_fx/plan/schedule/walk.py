"""What one micro-batch of a stage holds while it runs, op by op: as autograd keeps and frees.

    forward    each op holds its result and what it keeps; what nobody reads or keeps any more goes
    backward   the same ops in reverse: an op's gradients come, what only it kept goes

A stage that runs again lets go of all at its forward's end, and its backward begins with another.
What a stage makes again is gone after its last forward reader; the first backward that needs it
runs the op once more, from what the op read: that is kept. Where a stage defers, what the gradients
of its weights are made of is still held at the backward's end; the backward of weights lets go of
it layer by layer, the last one first.

It follows `Op.saves`, which capture measured, and knows storages only: a view is its base. Values
that come from elsewhere (received, from the batch, parameters) are counted by whoever holds them.
It knows no times, and no other stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from bigbrain_fx.core import EdgeKind, Stage
from bigbrain_fx.plan.schedule.bucket_room import BucketRoom, own_buckets, sums_parts
from bigbrain_fx.plan.schedule.stage_part import Part, trained_params, wholes
from bigbrain_fx.plan.schedule.walk_backward import BackwardWalk, GradientStore, Waits
from bigbrain_fx.plan.schedule.walk_forward import ForwardWalk

_KNOWN = "_walked"  # as a cached property is: a graph is frozen


@dataclass(frozen=True, slots=True)
class Working:
    """What one micro-batch of a stage holds, in bytes.

    Attributes:
        saved_bytes: stay from forward to backward; what is sent or received not counted.
        forward_bytes: the most while the forward runs, `saved_bytes` included, what it sends not.
        backward_bytes: the most while the backward of the first micro-batch runs, and of a later
            one, on top of what is saved and of the gradients that it sends; the first's on top of
            the stage's own parameter gradients, too, but for those of which replicas sum parts
            (`bucket_room.sums_parts`). Negative where what is saved is gone before the most is
            there.
        waiting_bytes: stay from a backward to the backward of weights: inputs of deferred layers,
            received ones included, and gradients of their outputs.
        weight_bytes: the most while the backward of weights runs, on top of what waits, of the
            same two; the first's on top of the deferred parameters' own gradients, too.
        lets_go: values that it receives or sends and that its backward has no use for.
    """

    saved_bytes: int
    forward_bytes: int
    backward_bytes: tuple[int, int]
    waiting_bytes: int = 0
    weight_bytes: tuple[int, int] = (0, 0)
    lets_go: frozenset[str] = frozenset()


def walked(part: Part) -> Working:
    """Return what `walk` does, each stage followed once: replicas and trials have the same ones."""
    known = part.graph.__dict__.setdefault(_KNOWN, {})
    costs = part.costs.ops[part.stage.device]
    key = _key(part, id(costs))
    if key not in known:
        known[key] = walk(part), costs  # held, so that its id stays its own
    found: Working = known[key][0]
    return found


def _key(part: Part, costs: int) -> tuple[object, ...]:
    """Return all that a walk depends on, names and numbers of the stage left out."""
    stage, stages = part.stage, part.stages
    ways: tuple[EdgeKind, ...] = ("activation", "gradient")
    sent = tuple(tuple((e.value, e.nbytes) for e in part.edges(kind)) for kind in ways)
    back = tuple(edge.value for edge in stages.into(stage.index, "gradient"))
    kept = tuple((e.value, n) for e, n in wholes(part.graph, stages, part.edges("gradient")))
    alike = replace(stage, index=0, device="", replica=0, member=0)
    return alike, costs, part.kind, part.stores, sent, back, kept, _summed(part)


def _summed(part: Part) -> tuple[object, ...]:
    """Return what a walk needs of a stage's buckets, which is the same in all replicas."""
    stages, own = part.stages, own_buckets(part)
    sizes = tuple((b.params, sum(b.pieces), max(b.pieces), b.dtype) for b in own)
    return (sizes, stages.sum_order, stages.sums_each) if own else ()


def walk(part: Part) -> Working:
    """Follow one stage through its forward and its backward."""
    forward = ForwardWalk(part)
    forward.run()
    sends = {edge.value: edge.nbytes for edge in part.edges("activation")}
    made = sum(map(part.rounded, sends.values()))
    kept = dict(wholes(part.graph, part.stages, part.edges("gradient")))  # as the ledger books them
    back = sum(part.rounded(max(e.nbytes, kept.get(e, 0))) for e in part.edges("gradient"))
    again = part.stage.runs_again
    backwards = [BackwardWalk(part, forward, is_first=first) for first in (True, False)]
    tops = [backward.run() for backward in backwards]
    if again:
        tops = [max(forward.peak, forward.live + top) for top in tops]
    peaks = [top - back for top in tops]
    own = trained_params(part.graph, part.stage)
    first = peaks[0] - _booked(part, own_sizes(part.stage, own))
    saved = _written_bytes(part) if again else max(0, forward.live - made)
    most = forward.peak - made + (saved if again else 0)
    idle = frozenset(_lets_go(part, forward))
    working = Working(saved, max(saved, most), (first, peaks[1]), lets_go=idle)
    if not part.stage.deferred:
        return working
    waiting = backwards[0].waiting
    first, later = (_weights_top(part, waiting, is_first=first) for first in (True, False))
    total = sum(store.nbytes for store in _stores(waiting))
    return replace(working, waiting_bytes=total, weight_bytes=(first, later))


def _lets_go(part: Part, forward: ForwardWalk) -> Iterator[str]:
    """Yield what a stage receives or sends that wants no gradient, and that no backward reads.

    One that runs again keeps all that it received.
    """
    received = () if part.stage.runs_again else part.stage.receives
    for name in (*received, *part.stage.sends):
        is_kept = forward.root.get(name, name) in forward.kept_by
        if not is_kept and not any(spec.requires_grad for spec in part.graph.op[name].outputs):
            yield name


def _booked(part: Part, sizes: Iterable[int]) -> int:
    """Return the gradients that the ledger has from the first backward on: not single parts."""
    return 0 if own_buckets(part) and sums_parts(part.stages) else sum(map(part.rounded, sizes))


def own_sizes(stage: Stage, params: Mapping[str, int]) -> list[int]:
    """Return the bytes of the parameters whose gradients a stage's Backward makes."""
    return [nbytes for name, nbytes in params.items() if name not in stage.deferred]


def _stores(waiting: list[Waits]) -> list[GradientStore]:
    """Return what is held until weights' gradients are made, each storage once."""
    return list({id(store): store for waits in waiting for store in waits.stores}.values())


def _weights_top(part: Part, waiting: list[Waits], *, is_first: bool) -> int:
    """Return the most during a backward of weights, on top of what waits; see `Working`."""
    sizes = trained_params(part.graph, part.stage)
    left = Counter(id(store) for waits in waiting for store in waits.stores)
    uses = Counter(name for waits in waiting for name in waits.params)
    live = top = 0
    made: set[str] = set()
    room = BucketRoom(part, is_first=is_first)
    for waits in waiting:  # in the order of the backward: the last layer first
        for name in waits.params:
            nbytes = part.rounded(sizes[name])
            top = max(top, live + nbytes * (1 + (name in made)))
            live += 0 if name in made else nbytes
            made.add(name)
            uses[name] -= 1
            if uses[name] == 0 and name in room:
                top = max(top, live + room.take(name))
                live += room.done(name) - nbytes
            elif uses[name] == 0:
                live -= 0 if is_first else nbytes
        for store in waits.stores:
            left[id(store)] -= 1
            live -= 0 if left[id(store)] else store.nbytes
    return top - (_booked(part, (sizes[name] for name in made)) if is_first else 0)


def _written_bytes(part: Part) -> int:
    """Return the bytes of the buffers that a stage writes: copies are kept for its second run."""
    names = {name for op in part.ops() for name in op.mutates if name in part.graph.param}
    canonical = {part.graph.param[name].canonical: part.graph.param[name] for name in names}
    return sum(part.rounded(param.spec.nbytes) for param in canonical.values())
