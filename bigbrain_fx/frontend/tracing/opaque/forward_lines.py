"""The lines of one forward kept whole, while the modules that it calls are traced.

    forward of the model ─▶ encoder ─▶ head ─▶ lines that no trace holds ─▶ loss
      traced: encoder, head                      one op: the lines of forward, given what these gave

A loss inside the whole model's forward is the case: no module could be kept around it. Plain runs
show which modules the lines call and what they read; a trace follows forward to the last of those
calls. This file knows forwards and calls; it knows no graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from bigbrain_fx.core import Arg
from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.tracing.opaque.recording import Facts, applied, facts_of, fitted
from bigbrain_fx.frontend.tracing.opaque.tensor_access import TensorReads
from bigbrain_fx.frontend.tracing.opaque.whole_loss import fewer
from bigbrain_fx.frontend.tracing.plain import same_numbers
from bigbrain_fx.frontend.translation.kept import LINES, Keeper, KeptCall, place, placed
from bigbrain_fx.frontend.translation.leaf import own_tensors
from bigbrain_fx.frontend.translation.nests import decode
from bigbrain_fx.runtime import Shell

_Calls = list[tuple[str, object]]
"""Path of a module that was called, and what it gave."""
_Nest = tuple[tuple[object, ...], Mapping[str, object], Mapping[str, list[object]]]
"""What the lines are given: positional, keyword, and what modules gave, by path."""


class _EndError(BaseException):
    """Leave a forward: what follows is kept whole."""


@dataclass(frozen=True)
class LinesRun:
    """What one plain run of the lines showed.

    Attributes:
        calls: paths of the modules that they call, in order.
        reads: numbers of the tensors that they are given and read, or return; where they ask data,
            of all that they do not only pass on: another batch may lead them there.
        own: names of the module's own tensors that they read, or likewise may read.
    """

    calls: tuple[str, ...]
    reads: tuple[int, ...]
    own: tuple[str, ...]
    facts: Facts


@dataclass
class KeptLines:
    """The lines of a module's forward, and what plain runs showed of them, by rows."""

    path: str
    module: nn.Module
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
            calls, passed = _Calls(), list[Tensor]()
            before = {name: b.detach().clone() for name, b in self.module.named_buffers()}
            with _noted(self.module, calls, passed=passed):
                found = forward(*args, **kwargs)
            try:
                seen.append(self._run_again(found, _nest(args, kwargs, calls), calls, passed))
                self._require_unwritten(seen[-1].own, before)
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
        self, found: object, nest: _Nest, calls: _Calls, passed: Sequence[Tensor]
    ) -> LinesRun:
        """Run the lines once more, given what modules gave; it must give the same."""
        if not calls:
            raise self._refused("they call no module that could be apart from them", code="BX0140p")
        given: list[Tensor] = []
        encoded, own = place(nest, given, lenient=True), own_tensors(self.module)
        ends: list[Tensor] = []
        result, reads = place(found, ends), TensorReads()
        self._run(nest, own, reads)
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
        self._require_same(again, facts, ends, result)
        return LinesRun(tuple(path for path, _ in calls), numbers, tuple(held), facts)

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
        args, kwargs, answers = nest
        watch = {"watch": lambda: reads} if reads is not None else {}
        return self._shell.run(self.module.training, answers, own, args, kwargs, **watch)

    def _require_same(
        self, again: object, facts: Facts, ends: Sequence[Tensor], result: Arg
    ) -> None:
        found: list[Tensor] = []
        same = place(again, found) == result and all(map(same_numbers, found, ends))
        if facts.random or not same:
            raise self._refused(
                "they draw random numbers, or do something else when run again", code="BX0140s"
            )
        if facts.written:
            raise self._refused("they write into tensors", code="BX0140t")

    # ------------------------------------------------------------------ traces and graphs

    @contextmanager
    def stood_in(self, keeper: Keeper, sizes: Sequence[int]) -> Iterator[None]:
        """Trace the modules that forward calls, and make one node of its lines.

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
            calls: _Calls = []
            try:
                with _noted(self.module, calls, until=len(runs[0].calls)):
                    forward(*args, **kwargs)
            except _EndError:
                return self._node(keeper, runs, _nest(args, kwargs, calls), calls)
            raise self._refused("they call fewer modules in a trace", code="BX0140v")

        with _forward_as(self.module, stand_in):
            yield

    def _node(self, keeper: Keeper, runs: Sequence[LinesRun], nest: _Nest, calls: _Calls) -> object:
        run, given = runs[0], list[Tensor]()
        encoded, own = place(nest, given, lenient=True), own_tensors(self.module)
        called = tuple(path for path, _ in calls)
        if called != run.calls or max(run.reads, default=-1) >= len(given):
            raise self._refused("they call other modules in a trace", code="BX0140w")
        kept, held = [given[i] for i in run.reads], [own[name] for name in run.own]

        def shapes(call: KeptCall, tensors: list[Tensor]) -> list[Tensor]:
            sizes = [tuple(tensor.shape) for tensor in tensors[: len(kept)]]
            facts = fitted([each.facts for each in runs], sizes, f"{self._kind}.forward")
            return applied(call, facts, tensors, len(kept))

        params = tuple(f"{self.path}.{name}" if self.path else name for name in run.own)
        target = f"{LINES}{self.path}"
        call = KeptCall(target, "output", fewer(encoded, run.reads), params, shapes)
        return keeper.call(call, [*kept, *held])

    def run_op(self, own: Sequence[object], nest: object) -> object:
        """Run the op that stands for the lines: return its tensor, or its tensors in order."""
        run = next(iter(self.known.values()))
        held = dict(zip(run.own, cast("Sequence[Tensor]", own), strict=True))
        found: list[Tensor] = []
        result = place(self._run(cast("_Nest", nest), held), found)
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


def _nest(args: tuple[object, ...], kwargs: Mapping[str, object], calls: _Calls) -> _Nest:
    answers: dict[str, list[object]] = {}
    for path, found in calls:
        answers.setdefault(path, []).append(found)
    return args, kwargs, answers


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
def _noted(
    module: nn.Module,
    calls: _Calls,
    until: int | None = None,
    passed: list[Tensor] | None = None,
) -> Iterator[None]:
    """Note what the outermost calls of modules inside a module give; end after so many.

    `passed` are the tensors that lines pass on to them.
    """
    paths = {id(vars(part)): path for path, part in module.named_modules() if path}
    original, inside = nn.Module.__call__, [False]

    def call(part: nn.Module, *args: object, **kwargs: object) -> object:
        path = paths.get(id(vars(part)))
        if path is None or inside[0]:
            return original(part, *args, **kwargs)
        inside[0] = True
        if passed is not None:
            place((args, kwargs), passed, lenient=True)
        try:
            found: object = original(part, *args, **kwargs)
        finally:
            inside[0] = False
        calls.append((path, found))
        if len(calls) == until:
            raise _EndError
        return found

    nn.Module.__call__ = call  # type: ignore[method-assign]  # put back
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]
