"""The lines of one forward kept whole, while the modules that it calls are traced.

    forward of the model ─▶ encoder ─▶ lines ─▶ head ─▶ lines that no trace holds ─▶ loss
      the last lines   traced: encoder, lines, head    one op: forward, given what these gave
      all lines        traced: encoder, head           one more before each: it gives the arguments

A loss inside the whole model's forward is the first case: no module could be kept around it. Plain
runs show which modules the lines call and what they read. An op of lines runs forward from its
beginning, and modules give it what they gave. This file knows forwards and calls, and no graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from bigbrain_fx.core import Arg
from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.tracing.opaque.recording import Facts, applied, facts_of, fitted
from bigbrain_fx.frontend.tracing.opaque.tensor_access import TensorReads
from bigbrain_fx.frontend.tracing.opaque.whole_loss import fewer
from bigbrain_fx.frontend.tracing.plain import same_numbers
from bigbrain_fx.frontend.tracing.state.counters import numbers_of
from bigbrain_fx.frontend.translation.kept import LINES, Keeper, KeptCall, place, placed
from bigbrain_fx.frontend.translation.leaf import own_tensors
from bigbrain_fx.frontend.translation.nests import TensorSlot, decode
from bigbrain_fx.runtime import Shell

_MOST_CALLS = 64  # forward is run again from its beginning for each


class _Call(NamedTuple):
    """A call of a module inside: its path, what it was given, and what it gave."""

    path: str
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    found: object


_Nest = tuple[object, ...]
"""What the lines are given: positional, keyword, and what modules gave, by path; and the path of
the module with whose call they end, where they do."""


class _EndError(BaseException):
    """Leave a forward: what follows is kept whole."""


@dataclass(frozen=True)
class Lines:
    """Observations of one plain run on the lines to the end, or to the call of a module.

    Attributes:
        reads: numbers of the input tensors that they read or return; where they ask data, of all
            that they do not only pass on: another batch may lead them there.
        own: names of the module's own tensors that they read, or likewise may read.
    """

    reads: tuple[int, ...]
    own: tuple[str, ...]
    facts: Facts


@dataclass(frozen=True)
class LinesRun:
    """Observations of one plain run of a forward.

    Attributes:
        calls: paths of the modules that its lines call, in order.
        lines: those before each call, where they are opaque, too; and those to the end.
    """

    calls: tuple[str, ...]
    lines: tuple[Lines, ...]


@dataclass
class KeptLines:
    """The lines of a module's forward, and what plain runs showed of them, by rows.

    `all_lines`: those between the modules that it calls are not traced either.
    """

    path: str
    module: nn.Module
    all_lines: bool = False
    known: dict[int, LinesRun] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._kind = type(self.module).__name__
        try:
            self._shell = Shell(self.module, torch.device("cpu"))
        except Exception as error:  # whatever a copy of the user's objects may raise
            raise self._refused("the model cannot be copied", code="BX0140d") from error

    # ------------------------------------------------------------------ plain runs

    @contextmanager
    def observed(self, rows: int) -> Iterator[None]:
        """Note what the lines do in a plain run of so many rows.

        Raises:
            CaptureError: they cannot be run apart from the modules that they call.
        """
        seen: list[LinesRun] = []

        def observe(forward: Callable[..., object], *args: object, **kwargs: object) -> object:
            calls: list[_Call] = []
            before = {name: b.detach().clone() for name, b in self.module.named_buffers()}
            with _noted(self.module, calls):
                found = forward(*args, **kwargs)
            try:
                seen.append(self._run_again(found, args, kwargs, calls))
                self._require_unwritten([n for each in seen[-1].lines for n in each.own], before)
            except CaptureError:
                raise
            except Exception as error:  # the user's own lines
                raise self._refused(
                    f"run apart they fail: {type(error).__name__}", code="BX0140n"
                ) from error
            return found

        with _forward_as(self.module, observe):
            yield
        if len(seen) != 1 or self.known.setdefault(rows, seen[0]) != seen[0]:
            raise self._refused(
                "they do other things for other data of the same batch size", code="BX0140o"
            )

    def _run_again(
        self,
        found: object,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        calls: Sequence[_Call],
    ) -> LinesRun:
        """Run the lines once more, given what modules gave; they must give the same."""
        if not calls:
            raise self._refused("they call no module that could be apart from them", code="BX0140p")
        if self.all_lines and len(calls) > _MOST_CALLS:
            raise self._refused(f"they call {len(calls)} modules", code="BX0140z")
        lines, counts = [], self._counts()
        for number in self._ends(len(calls)):
            ends = found if number == len(calls) else calls[number][1:3]
            until = [calls[number].path] if number < len(calls) else []
            nest = _nest(args, kwargs, calls[:number], *until)
            lines.append(self._lines(nest, ends, calls[:number]))
        if self.all_lines and self._counts() != counts:  # they run again before each module
            raise self._refused("they count in an attribute", code="BX0140y")
        return LinesRun(tuple(call.path for call in calls), tuple(lines))

    def _counts(self) -> object:
        """Return the numbers in plain attributes."""
        return {name: now for name, (_, now) in numbers_of(self._shell.module, None).items()}

    def _ends(self, calls: int) -> range:
        """Return before which calls lines end that are kept; the last number is that of none."""
        return range(0 if self.all_lines else calls, calls + 1)

    def _lines(self, nest: _Nest, found: object, calls: Sequence[_Call]) -> Lines:
        given: list[Tensor] = []
        encoded, own = place(nest, given, lenient=True), own_tensors(self.module)
        ends, passed = list[Tensor](), list[Tensor]()
        result, reads = place(found, ends), TensorReads()
        place([call[1:3] for call in calls], passed, lenient=True)
        dice = [torch.default_generator.get_state()]
        self._run(nest, own, reads)
        dice.append(torch.default_generator.get_state())
        if reads.freezes:
            raise self._refused("they freeze parameters of modules", code="BX0140x")
        if len(nest) > 3 and reads.asks and not _is_of_tensors(result):
            raise self._refused("data decide what they call a module with", code="BX2125")
        if any(id(tensor) in reads.seen for tensor in self._shell.plain_tensors()):
            raise self._refused(
                "they read a tensor that is neither a parameter nor a buffer", code="BX0140q"
            )
        reads.seen |= {id(tensor) for tensor in ends}
        numbers = tuple(sorted(reads.numbers(given, apart_from=passed)))
        held = {n: t for n, t in own.items() if id(t) in reads.seen or _may_read(n, reads)}
        # as on the device that runs them: what modules gave has no history there
        kept = [given[i].detach().requires_grad_(given[i].requires_grad) for i in numbers]
        less = cast("_Nest", decode(fewer(encoded, numbers), lambda arg: placed(arg, kept)))
        again, facts = facts_of(lambda: self._run(less, held), less, list(held.values()))
        dice.append(torch.default_generator.get_state())
        draws = facts.random and not any(map(torch.equal, dice, dice[1:]))
        self._require_same(again, facts, ends, result, draws=draws)
        return Lines(numbers, tuple(held), facts)

    def _require_unwritten(self, read: Sequence[str], before: Mapping[str, Tensor]) -> None:
        """Refuse buffers that a module writes: each device would read its own, before or after."""
        held = own_tensors(self.module)
        for name in (name for name in read if name in before):
            if not torch.equal(held[name], before[name]):
                raise self._refused(
                    f"they read the buffer {name}, which forward writes", code="BX0140r"
                )

    def _run(
        self, nest: _Nest, own: Mapping[str, Tensor], reads: TensorReads | None = None
    ) -> object:
        args, kwargs, answers, *until = nest
        watch = {"watch": lambda: reads} if reads is not None else {}
        return self._shell.run(
            self.module.training,
            cast("_Answers", answers),
            own,
            cast("tuple[object, ...]", args),
            cast("Mapping[str, object]", kwargs),
            until=cast("str", until[0]) if until else None,
            **watch,
        )

    def _require_same(
        self, again: object, facts: Facts, ends: Sequence[Tensor], result: Arg, *, draws: bool
    ) -> None:
        """Refuse lines that go on from where the generator is: seeds of their own are theirs."""
        found: list[Tensor] = []
        same = place(again, found) == result and all(map(same_numbers, found, ends))
        if draws or not same:
            raise self._refused(
                "they draw random numbers, or do something else when run again", code="BX0140s"
            )
        if facts.written:
            raise self._refused("they write into tensors", code="BX0140t")

    # ------------------------------------------------------------------ traces and graphs

    @contextmanager
    def stood_in(self, keeper: Keeper, sizes: Sequence[int]) -> Iterator[None]:
        """Trace the modules that forward calls, and make a node of its lines.

        Args:
            keeper: of the trace.
            sizes: rows of the runs whose facts hold for the trace.
        """
        runs = [self.known[rows] for rows in sizes]
        if not runs or any(run.calls != runs[0].calls for run in runs):
            raise self._refused(
                "they were not run, or call other modules at another batch size", code="BX0140u"
            )

        def stand_in(forward: Callable[..., object], *args: object, **kwargs: object) -> object:
            if self.all_lines:
                calls = self._called_in_turn(keeper, runs, args, kwargs)
            else:
                calls = self._followed(len(runs[0].calls), forward, args, kwargs)
            return self._node(keeper, runs, _nest(args, kwargs, calls), len(calls))

        with _forward_as(self.module, stand_in):
            yield

    def _followed(
        self,
        count: int,
        forward: Callable[..., object],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> list[_Call]:
        """Trace forward to the last call of a module; return the calls."""
        calls: list[_Call] = []
        try:
            with _noted(self.module, calls, until=count):
                forward(*args, **kwargs)
        except _EndError:
            return calls
        raise self._refused("they call fewer modules in a trace", code="BX0140v")

    def _called_in_turn(
        self,
        keeper: Keeper,
        runs: Sequence[LinesRun],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> list[_Call]:
        """Call the modules, each with what a node of the lines before it gives."""
        calls: list[_Call] = []
        for number, path in enumerate(runs[0].calls):
            nest = _nest(args, kwargs, calls, path)
            own, named = cast("tuple[tuple[object, ...], dict[str, object]]",
                              self._node(keeper, runs, nest, number))  # fmt: skip
            found = self.module.get_submodule(path)(*own, **named)
            calls.append(_Call(path, own, named, found))
        return calls

    def _node(self, keeper: Keeper, runs: Sequence[LinesRun], nest: _Nest, number: int) -> object:
        ends = [run.lines[number if self.all_lines else 0] for run in runs]
        first, given = ends[0], list[Tensor]()
        encoded, own = place(nest, given, lenient=True), own_tensors(self.module)
        answers = cast("_Answers", nest[2])
        called = {path: len(found) for path, found in answers.items()}
        if called != _counted(runs[0].calls[:number]) or max(first.reads, default=-1) >= len(given):
            raise self._refused("they call other modules in a trace", code="BX0140w")
        kept, held = [given[i] for i in first.reads], [own[name] for name in first.own]

        def shapes(call: KeptCall, tensors: list[Tensor]) -> list[Tensor]:
            sizes = [tuple(tensor.shape) for tensor in tensors[: len(kept)]]
            facts = fitted([each.facts for each in ends], sizes, f"{self._kind}.forward")
            return applied(call, facts, tensors, len(kept))

        params = tuple(f"{self.path}.{name}" if self.path else name for name in first.own)
        target, name = f"{LINES}{self.path}", "output" if len(nest) == 3 else "given"
        call = KeptCall(target, name, fewer(encoded, first.reads), params, shapes)
        return keeper.call(call, [*kept, *held])

    def run_op(self, own: Sequence[object], nest: object) -> object:
        """Run an op that stands for lines: return its tensor, or its tensors in order."""
        _, _, answers, *_ = given = cast("_Nest", nest)
        number = sum(map(len, cast("_Answers", answers).values())) if self.all_lines else 0
        lines = next(iter(self.known.values())).lines[number]
        held = dict(zip(lines.own, cast("Sequence[Tensor]", own), strict=True))
        found: list[Tensor] = []
        result = place(self._run(given, held), found)
        return found if isinstance(result, tuple) else found[0]

    def _refused(self, why: str, *, code: str) -> CaptureError:
        return CaptureError(
            f"the lines of {self._kind}.forward cannot be apart from its modules: {why}",
            code=code,
            help="put what no trace can hold into a module of its own and keep that whole: "
            "--opaque "
            "with its class",
        )


def _may_read(name: str, reads: TensorReads) -> bool:
    """Whether lines that ask data may come to read a tensor: one of the module's very own."""
    return reads.asks and "." not in name


_Answers = Mapping[str, Sequence[object]]


def _nest(
    args: tuple[object, ...], kwargs: Mapping[str, object], calls: Sequence[_Call], *until: str
) -> _Nest:
    answers: dict[str, list[object]] = {}
    for call in calls:
        answers.setdefault(call.path, []).append(call.found)
    return args, kwargs, answers, *until


def _is_of_tensors(nest: Arg) -> bool:
    """Whether all leaves are tensors: numbers, texts and None would be constants of the trace."""
    leaves: list[object] = []
    decode(nest, leaves.append)
    return all(isinstance(leaf, TensorSlot) for leaf in leaves)


def _counted(paths: Sequence[str]) -> dict[str, int]:
    return {path: paths.count(path) for path in paths}


@contextmanager
def _forward_as(module: nn.Module, stand_in: Callable[..., object]) -> Iterator[None]:
    """Put something in the place of a module's forward; it is given the forward, bound.

    The class is exchanged: in a trace `self` may be a stand-in of torch's for the module.
    """
    kind = type(module)

    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        own = functools.partial(kind.forward, self)
        return stand_in(own, *args, **kwargs)

    names = {"forward": functools.wraps(kind.forward)(forward), "__module__": kind.__module__}
    module.__class__ = type(kind.__name__, (kind,), {**names, "__qualname__": kind.__qualname__})
    try:
        yield
    finally:
        module.__class__ = kind


@contextmanager
def _noted(module: nn.Module, calls: list[_Call], until: int | None = None) -> Iterator[None]:
    """Note the outermost calls of modules inside a module; end after so many."""
    paths = {id(vars(part)): path for path, part in module.named_modules() if path}
    original, inside = nn.Module.__call__, [False]

    def call(part: nn.Module, *args: object, **kwargs: object) -> object:
        path = paths.get(id(vars(part)))
        if path is None or inside[0]:
            return original(part, *args, **kwargs)
        inside[0] = True
        try:
            found: object = original(part, *args, **kwargs)
        finally:
            inside[0] = False
        calls.append(_Call(path, args, kwargs, found))
        if len(calls) == until:
            raise _EndError
        return found

    nn.Module.__call__ = call  # type: ignore[method-assign]  # put back
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]
