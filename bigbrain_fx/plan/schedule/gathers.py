"""Programs -> the same with ZeRO 3's messages: weights to and from other replicas, before each run.

    Recv activations, [Send own weights, Recv the others'], Forward, Send activations

A stage's weights arrive before each of its Forwards and Backwards; messages are numbered by these
turns. Replicas may have different orders and numbers of turns. The programs are therefore played
through as they are, all devices side by side. The owner of weights sends them before the last
computation that it had begun when another device began to need them. An order that was played once
cannot deadlock. Weights that are needed before their owner begins anything leave at the beginning
of its program.

Parts of gradients are also taken as soon as they are there, after the next backward of a device.
The sender of one holds its memory until then.

Collectives have all replicas in one order: each device joins one a computation before its weights
are needed. Parts of gradients are taken where they are due.

This file knows instructions; it knows no time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from bigbrain_fx.core import (
    Backward,
    BackwardWeight,
    Compute,
    Edge,
    Forward,
    Instruction,
    Program,
    Recv,
    Send,
    Stages,
)

COMPUTES = (Forward, Backward, BackwardWeight)
_Sends = Mapping[tuple[str, int], Sequence[Send]]  # by device, and how much it has begun
_Early = Mapping[Instruction, int]  # parts that are taken early, and after how much that is


def with_gathers(stages: Stages, programs: Sequence[Program]) -> tuple[Program, ...]:
    """Return the programs with the messages of weights; without ZeRO 3, as they are."""
    if not stages.gathers:
        return tuple(programs)
    if stages.by_backend:
        return tuple(
            replace(program, instructions=tuple(_joining(stages, program))) for program in programs
        )
    order = [*_played(programs)]
    sends, early = _sends(stages, order), _early(stages, programs, order)
    return tuple(
        replace(program, instructions=tuple(_gathering(stages, program, sends, early)))
        for program in programs
    )


def _joining(stages: Stages, program: Program) -> Iterator[Instruction]:
    """Join the gathers of each computation's weights before the one that comes before it."""
    computes, turns = [*_computes(program)], Counter[int]()
    sends: list[list[Send]] = []
    for compute in computes:
        turn = turns[compute.stage]
        sends.append([Send(edge, turn) for edge in stages.out_of(compute.stage, "gather")])
        turns[compute.stage] += 1
    ahead = iter(sends)
    yield from next(ahead, ())
    turns.clear()
    for instruction in program.instructions:
        if isinstance(instruction, COMPUTES):
            yield from next(ahead, ())
            for edge in stages.into(instruction.stage, "gather"):
                yield Recv(edge, turns[instruction.stage])
            turns[instruction.stage] += 1
        yield instruction


def turns_of(stages: Stages, stage: int) -> int:
    """Return how often a stage runs in a step: forward and backward, for each micro-batch."""
    return 2 * len(stages.micros_of(stage, 0))


def _sends(stages: Stages, order: Sequence[tuple[str, Compute]]) -> _Sends:
    found: dict[tuple[str, int], list[Send]] = defaultdict(list)
    begun: Counter[str] = Counter()
    turns: Counter[int] = Counter()
    for device, compute in order:
        begun[device] += 1
        for edge in stages.into(compute.stage, "gather"):
            sender = stages.stages[edge.source].device
            found[sender, begun[sender]].append(Send(edge, turns[compute.stage]))
        turns[compute.stage] += 1
    return found


def _early(
    stages: Stages, programs: Sequence[Program], order: Sequence[tuple[str, Compute]]
) -> _Early:
    """Return, of parts that can be taken sooner than they are, after how much else of the device.

    Parts of a bucket are taken ascending, each after the own micro-batches before it.
    """
    when = {compute: place for place, (_, compute) in enumerate(order)}
    found: dict[Instruction, int] = {}
    for program in programs:
        number = {c: n for n, c in enumerate(_computes(program), start=1)}
        hooks = [c for c in number if _sums(stages, c)]
        lastly: Counter[str] = Counter()
        for recv, now in _parts(program):
            bucket, target = recv.edge.value, recv.edge.target
            assert recv.micro is not None
            own = [m for m in stages.micros_of(target, 0) if m < recv.micro]
            least = max(lastly[bucket], *(number.get(Backward(target, m), 0) for m in (*own, -1)))
            sent = when.get(Backward(recv.edge.source, recv.micro), len(order))
            after = (number[c] for c in hooks if when.get(c, 0) > sent and number[c] >= least)
            lastly[bucket] = min(next(after, now), now)
            if lastly[bucket] < now:
                found[recv] = lastly[bucket]
    return found


def _sums(stages: Stages, compute: Compute) -> bool:
    """Whether it ends by exchanging parts of gradients."""
    summed = any(compute.stage in bucket.stages for bucket in stages.buckets)
    return isinstance(compute, Backward) and summed


def _computes(program: Program) -> Iterator[Compute]:
    yield from (each for each in program.instructions if isinstance(each, COMPUTES))


def _parts(program: Program) -> Iterator[tuple[Recv, int]]:
    """Yield what is received of parts, and how much the device has begun then."""
    begun = 0
    for instruction in program.instructions:
        begun += isinstance(instruction, COMPUTES)
        if isinstance(instruction, Recv) and instruction.edge.kind == "reduce":
            yield instruction, begun


def _gathering(
    stages: Stages, program: Program, sends: _Sends, early: _Early
) -> Iterator[Instruction]:
    begun = 0
    turns: Counter[int] = Counter()
    after: dict[int, list[Recv]] = defaultdict(list)
    for recv, _ in _parts(program):
        if recv in early:
            after[early[recv]].append(recv)
    yield from sends.get((program.device, 0), ())
    for instruction in program.instructions:
        if instruction in early:
            continue
        if _begins(instruction):
            yield from after.pop(begun, ())
        if isinstance(instruction, COMPUTES):
            begun += 1
            yield from sends.get((program.device, begun), ())
            for edge in stages.into(instruction.stage, "gather"):
                yield Recv(edge, turns[instruction.stage])
            turns[instruction.stage] += 1
        yield instruction


def _begins(instruction: Instruction) -> bool:
    """Whether an instruction belongs to the next computation, and not to the one before it."""
    if isinstance(instruction, Recv):
        return instruction.edge.kind in ("activation", "gradient")
    return isinstance(instruction, COMPUTES)


def early_takes(program: Program) -> dict[int, dict[int, Counter[str]]]:
    """Return how many parts a device takes early: by the stage that sums them, computation, bucket.

    That is beside those that are due before an own micro-batch is added, and those at last.
    """
    found: dict[int, dict[int, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    computes = [None, *_computes(program)]
    for recv, begun in _parts(program):
        last = computes[begun]
        assert last is not None
        assert recv.micro is not None
        is_due = last.stage == recv.edge.target and last.micro > recv.micro
        if begun < len(computes) - 1 and not is_due:
            found[recv.edge.target][begun][recv.edge.value] += 1
    return found


def begun_at(program: Program) -> dict[Edge, list[int]]:
    """Return, for each edge of weights that leaves here, before which computation each Send stands.

    Computations count from 1; 0 is before all that the device receives.
    """
    found: dict[Edge, list[int]] = defaultdict(list)
    begun, is_first = 0, True
    for instruction in program.instructions:
        if isinstance(instruction, Send) and instruction.edge.kind == "gather":
            found[instruction.edge].append(0 if is_first else begun + 1)
        is_first = is_first and isinstance(instruction, Send)
        begun += isinstance(instruction, COMPUTES)
    return found


class _PlayedProgram:
    """One program while it is played: how far it is. Mutable."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.at = self.begun = 0
        self.all = sum(isinstance(i, COMPUTES) for i in program.instructions) or 1

    def advance(self, sent: set[tuple[Edge, int | None]]) -> Compute | None:
        """Run up to the next computation, and it; None where a message is not there, or at last."""
        while self.at < len(self.program.instructions):
            instruction = self.program.instructions[self.at]
            if isinstance(instruction, Recv) and (instruction.edge, instruction.micro) not in sent:
                return None
            if isinstance(instruction, Send):
                sent.add((instruction.edge, instruction.micro))
            self.at += 1
            if isinstance(instruction, COMPUTES):
                self.begun += 1
                return instruction
        return None


def _played(programs: Sequence[Program]) -> Iterator[tuple[str, Compute]]:
    """Yield all computations, with their devices, in an order in which they can run.

    A device with less to do goes on more slowly, so that all end together. Computations that hang
    are left out: the checker says why.
    """
    lines = [_PlayedProgram(program) for program in programs]
    sent: set[tuple[Edge, int | None]] = set()
    before = -1
    while before < (before := sum(line.at for line in lines)):
        for line in sorted(lines, key=lambda line: (line.begun + 1) / line.all):
            compute = line.advance(sent)
            if compute is not None:
                yield line.program.device, compute
                break


# ------------------------------------------------------------------------------------------------
# Order of sums x micro-batches of a replica -> the parts that it sends of each bucket.
#
#   replica   [0 1 2 3]        one part: all that it adds itself
#   micro     [0] [1] [2] [3]  each micro-batch by itself, as soon as it is there
#   tree      [0..3] [4 5]     nodes of the binary tree over the numbers of a step
#
# With ZeRO 2, where no replica keeps all gradients, a tree's micro-batches are sent by
# themselves.
#
# A part is known by the first micro-batch in it.


def parts(stages: Stages, replica: int) -> tuple[int | None, ...]:
    """Return the messages of one bucket that a replica sends, in order.

    Each is the number of the first micro-batch in it; None stands for the only one.
    """
    micros = stages.micros[replica]
    if stages.sums_each:
        return micros
    if stages.sum_order in ("replica", "backend"):
        return (None,)
    return tuple(start for start, _ in nodes(micros))


def nodes(micros: Sequence[int]) -> list[tuple[int, int]]:
    """Return the largest nodes of the binary tree that these leaves fill: (first, how many)."""
    found: list[tuple[int, int]] = []
    for micro in micros:
        _add(found, micro)
    return found


def _add(found: list[tuple[int, int]], micro: int) -> None:
    found.append((micro, 1))
    while len(found) > 1 and _are_siblings(*found[-2:]):
        (start, size), _ = found[-2:]
        found[-2:] = [(start, 2 * size)]


def _are_siblings(left: tuple[int, int], right: tuple[int, int]) -> bool:
    (start, size), (after, same) = left, right
    return size == same and after == start + size and start % (2 * size) == 0
