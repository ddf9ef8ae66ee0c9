"""The forward of one micro-batch through a stage: live values, and values saved for the backward.

Each op holds its result and its saved values; values that nobody reads or saves any more go. A
recomputed value is gone after its last forward reader.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile

from bigbrain_fx.core import ModuleCall, Op, Saves
from bigbrain_fx.plan.schedule.stage_part import Part, of_graph, places

_OF_TORCH = "torch.nn."
_ASSIGNED = re.compile(r"([A-Za-z_][\w, ]*?)\s*(?:[-+*/@%&|^]|//|\*\*|<<|>>)?=(?!=)")


class ForwardWalk:
    """One forward: what is alive, by storage.

    Attributes:
        live: bytes alive; after `run`, what stays for the backward and what is sent.
        kept_by: root -> the ops that keep its storage.
        held: root -> bytes, of the storages made here that are alive.
        sent: roots that are sent: the ledger of messages has them.
        keeps: op -> the roots that it keeps, itself or through what it recomputes.
        asks: op -> the ops that run again for its backward.
        stored: op -> what its backward asks of the store.
        users: op that runs again -> what asks for its result: backwards, and other such runs.
    """

    def __init__(self, part: Part) -> None:
        self.part = part
        self.live = self.peak = 0
        self.held: dict[str, int] = {}
        self.kept_by: dict[str, set[str]] = {}
        self.keeps: dict[str, set[str]] = {}
        self.asks: dict[str, set[str]] = {}
        self.stored: dict[str, Mapping[str, int]] = {}
        self.users: dict[str, set[str]] = {}
        self.again = frozenset(part.stage.again)
        self._stays: dict[str, frozenset[str]] = {}  # what is made again -> what it is made from
        self.root, calls = of_graph(part.graph)
        self._variables: dict[tuple[tuple[ModuleCall, ...], str], str] = {}
        self._place = {op.name: i for i, op in enumerate(part.ops())}
        self._draws = dict(self._divided_draws())
        here = Counter(call for op in part.ops() for call in op.modules)
        self._cut = {call for call, count in here.items() if count < calls[call]}
        self._ends = frozenset(self._line_ends())
        self.sent = {self.root.get(name, name) for name in part.stage.sends}
        self._last = {
            self.root.get(ref, ref): i for i, op in enumerate(part.ops()) for ref in op.refs
        }

    def run(self) -> None:
        """Follow all ops."""
        for op in self.part.ops():
            if self.part.is_graded(op):
                self._keep(op, self.part.saves(op))
        for i, op in enumerate(self.part.ops()):
            self._one(i, op)
        for root in self._variables.values():
            self.free(root)

    def _one(self, i: int, op: Op) -> None:
        saves = self.part.saves(op)
        self.peak = max(self.peak, self.live + self.part.rounded(saves.forward_bytes))
        if self.root[op.name] == op.name and op.outputs:
            self.held[op.name] = self.part.result_bytes(op)
            self.live += self.held[op.name]
        if self.part.is_graded(op) and op.name not in self.again:
            self.live += self.own_bytes(op, saves)
        self.peak = max(self.peak, self.live)
        self._return_from(op)
        for name in dict.fromkeys((self.root[op.name], *map(self._root, op.refs))):
            if self._last.get(name, -1) <= i and name not in self.kept_by:
                self._read_out(name, op)

    def own_bytes(self, op: Op, saves: Saves) -> int:
        """Return what stays of what an op saves besides values."""
        return 0 if f"{op.name}!" in self.stored[op.name] else self.part.rounded(saves.own_bytes)

    def _keep(self, op: Op, saves: Saves) -> None:
        """Keep what an op's backward needs, or what that can be made of."""
        self.keeps[op.name], self.asks[op.name] = set(), set()
        self.stored[op.name] = self.part.stored(op) if self.part.stores else {}
        if op.name in self.again:
            if saves.values or saves.own_bytes:
                self._ask(op.name, op)
                self.users[op.name] |= {op.name} if -1 in saves.values else set()
            return
        for name in places(op, saves):
            root = self._root(name)
            if root in self.again:
                self._ask(root, op)
                self.users[root].add(op.name)
            elif root not in self.stored[op.name]:
                self._kept(root, op)

    def _ask(self, root: str, op: Op) -> None:
        """Keep what a run again reads, for an op's backward."""
        self.asks[op.name].add(root)
        for read in self._made_from(root):
            self._kept(read, op)

    def _made_from(self, root: str) -> frozenset[str]:
        """Return what stays for a value to be made again, and note who asks for what on the way.

        Each op is looked at once: past every residual block the ways back double.
        """
        waiting = [root]
        while waiting:
            reads = [self._root(ref) for ref in self.part.graph.op[waiting[-1]].refs]
            missing = [r for r in reads if r in self.again and r not in self._stays]
            if missing:
                waiting += missing
            else:
                self._note(waiting.pop(), reads)
        return self._stays[root]

    def _note(self, made: str, reads: Sequence[str]) -> None:
        """Write down what a value is made from, once that is known of all that it reads."""
        again = [read for read in reads if read in self.again]
        stays = (self._stays[read] for read in again)
        self._stays[made] = frozenset(reads).difference(again).union(*stays)
        self.users.setdefault(made, set())
        for read in again:
            self.users[read].add(f"{made} again")

    def _kept(self, root: str, op: Op) -> None:
        self.kept_by.setdefault(root, set()).add(op.name)
        self.keeps[op.name].add(root)

    def _root(self, name: str) -> str:
        return self.root.get(name, name)

    def _read_out(self, root: str, reader: Op) -> None:
        """Free a storage without further readers, unless a variable of the user's still has it.

        A value that another line reads has a name. The value goes when the module's call ends, or
        when another value takes the name: that may be the result of the last op of this line.
        """
        maker = self.part.graph.op.get(root)
        if maker is None or root not in self.held:
            self.free(root)
            return
        if maker.source == reader.source:
            self._read_in_line(maker, reader)
            return
        both = zip(maker.modules, reader.modules, strict=False)
        frame = tuple(a for a, b in takewhile(lambda pair: pair[0] == pair[1], both))
        name = _name_in(frame, maker)
        self._name(frame, name, root)
        if reader.name in self._ends and self._is_given(frame, name, reader):
            self.free(self._variables.pop((frame, name)))

    def _read_in_line(self, maker: Op, reader: Op) -> None:
        """Free a value that its own line has read, unless a device file makes several of that line.

        A device file makes several lines of one where a group draws for all its ranks and each
        takes its part. Values that are made before the draw and read after it have a name there,
        and so have the drawn numbers.
        """
        at, read_at = self._place[maker.name], self._place[reader.name]
        drawn_at = self._draws.get(maker.source, read_at)
        if at <= drawn_at < read_at or (drawn_at < at and at + 1 < read_at):
            self._name(maker.modules, maker.name, maker.name)
        else:
            self.free(maker.name)

    def _divided_draws(self) -> Iterator[tuple[str, int]]:
        """Yield lines with a draw of which a rank takes its part, and the draw's place."""
        ops = self.part.graph.op
        for op in self.part.ops():
            drawn = [ref for ref in op.refs if ref in self._place and ops[ref].random]
            if drawn and op.target.startswith("shard."):
                yield op.source, self._place[drawn[0]]

    def _name(self, frame: tuple[ModuleCall, ...], name: str, root: str) -> None:
        """Give a name to a storage; what had it goes."""
        before = self._variables.get((frame, name))
        self._variables[frame, name] = root
        if before is not None:
            self.free(before)

    def _return_from(self, op: Op) -> None:
        """End the calls that an op is not in; a call that was cut is the stage's own text."""
        for frame, name in list(self._variables):
            ended = op.modules[: len(frame)] != frame
            if ended and frame[-1] in self._cut:
                self._name((), name, self._variables.pop((frame, name)))
            elif ended or self._is_given(frame, name, op):
                self.free(self._variables.pop((frame, name)))

    def _is_given(self, frame: tuple[ModuleCall, ...], name: str, op: Op) -> bool:
        """Whether an op's line gives a call's name another value."""
        return name == _variable(op) and self._text(frame) == self._line(op)

    def _line_ends(self) -> Iterator[str]:
        """Yield the ops that are the last of their lines."""
        ops = list(self.part.ops())
        for op, after in zip(ops, [*ops[1:], None], strict=True):
            if after is None or after.source != op.source or self._line(after) != self._line(op):
                yield op.name

    def _line(self, op: Op) -> tuple[ModuleCall, ...]:
        """Return the call whose text has an op's line: that of a layer of torch has none."""
        calls = op.modules
        while calls and calls[-1].type.startswith(_OF_TORCH):
            calls = calls[:-1]
        return self._text(calls)

    def _text(self, frame: tuple[ModuleCall, ...]) -> tuple[ModuleCall, ...]:
        """Return a call as the device file has it: a call that was cut is the stage's own text."""
        return () if frame and frame[-1] in self._cut else frame

    def free(self, root: str) -> None:
        """Let go of a storage, unless it is sent: then the ledger of messages has it."""
        if root in self.held and root not in self.sent:
            self.live -= self.held.pop(root)


def _name_in(frame: tuple[ModuleCall, ...], maker: Op) -> str:
    """Return the name that a value has in a call; a module's result goes with the next one's.

    A value that a class returns to a loop over such modules has one name there, in every round.
    """
    if len(maker.modules) > len(frame) and maker.code.startswith("return "):
        return f"return of {maker.modules[len(frame)].type}"
    return _variable(maker)


def _variable(op: Op) -> str:
    """Return the name that the user's line gives to what it makes, or the op's own."""
    found = _ASSIGNED.match(op.code)
    return found[1] if found else op.name
