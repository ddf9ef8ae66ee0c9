"""Answers to `if tensor:`: recorded from plain runs, replayed while tracing, checked ever after.

torch.export cannot follow a branch that depends on data. If every plain run takes the same side,
the trace takes it too, and an op `assume.true` or `assume.false` keeps the question. The op
computes nothing; a run of the graph or of a bundle reports when the answer is another one. Only yes
and no are replayed, never a number.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from bigbrain_fx.core import Graph, Op
from bigbrain_fx.frontend.translation.batch import unique
from bigbrain_fx.frontend.translation.nodes import place_of
from bigbrain_fx.frontend.translation.refusals import undecided
from bigbrain_fx.frontend.translation.sources import is_users

if TYPE_CHECKING:
    from bigbrain_fx.frontend.translation.scope import Scope

ASSUME = "bigbrain_fx.assume.default"
PREFIX = "assume."
_TRACERS = ("/torch/fx/", "/torch/_", "/torch/export/", "/torch/nn/modules/module.py")
_HEARS_FIRST = "/frontend/tracing/lines/untraced_queries.py"


class WrongAnswerError(RuntimeError):
    """Report that an assumption on a tensor's truth is wrong, `at` a line of the user's."""

    def __init__(self, what: str, at: str = "") -> None:
        super().__init__(what)
        self.at = at


@torch.library.custom_op(
    "bigbrain_fx::assume", mutates_args=(), schema="(Tensor value, bool answer) -> ()"
)
def _assume(value: Tensor, answer: bool) -> None:
    raise WrongAnswerError("an assumption exists in a trace only; run the captured graph instead")


@_assume.register_fake
def _(value: Tensor, answer: bool) -> None:
    return None


fx.node.has_side_effect(torch.ops.bigbrain_fx.assume.default)  # nobody reads it, and it stays


# --------------------------------------------------------------------------- questions


@dataclass(frozen=True, slots=True)
class Question:
    """One place in the user's code that takes the truth of a tensor.

    `path` has the user's instruction, and torch's instructions between it and the tensor. So
    `a.any() or b.any()` are two questions, in any order. `asserted`: torch itself takes the truth,
    to raise an error when it is false (`torch._check_tensor_all`). `checked`: the line may raise,
    as lines of distributions do.
    """

    file: str
    line: int
    path: tuple[tuple[str, int], ...]
    asserted: bool = field(default=False, compare=False)
    checked: bool = field(default=False, compare=False)

    @property
    def at(self) -> str:
        """The place, "model.py:31"."""
        return f"{Path(self.file).name}:{self.line}"

    @property
    def code(self) -> str:
        """The text of the line."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def only_raises(self) -> bool:
        """Whether the other answer is an error in plain PyTorch, too: assert, or raise below."""
        by_line = self.code.startswith("assert ") or _raises_below(self.file, self.line)
        return self.asserted or self.checked or by_line


def _question(frame: FrameType | None) -> Question:
    """Describe the innermost line of the user's that takes the truth."""
    while frame is not None and frame.f_code.co_filename.endswith(_HEARS_FIRST):
        frame = frame.f_back
    path: list[tuple[str, int]] = []
    asserted = frame is not None and _is_assertion(frame)
    checked = frame is not None and _raises_below(frame.f_code.co_filename, frame.f_lineno)
    while frame is not None:
        if not any(part in frame.f_code.co_filename for part in _TRACERS):
            path.append((frame.f_code.co_filename, frame.f_lasti))
        if is_users(frame.f_code.co_filename):
            code = frame.f_code
            return Question(code.co_filename, frame.f_lineno, tuple(path), asserted, checked)
        frame = frame.f_back
    return Question("forward", 0, ())


def _is_assertion(frame: FrameType) -> bool:
    """Whether a line of `torch._check...` takes the truth."""
    code = frame.f_code
    return code.co_name.startswith("_check") and code.co_filename == torch.__file__


def _raises_below(file: str, line: int) -> bool:
    return linecache.getline(file, line + 1).strip().startswith("raise ")


class _Listener(TorchFunctionMode):
    """Hand every question about a tensor's truth to `answer`; None from it means: torch decides."""

    def __init__(self, answer: Callable[[Tensor, Question], bool | None]) -> None:
        super().__init__()
        self._answer = answer

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        asked = _asked(func, args, kwargs or {})
        if asked is not None:
            answer = self._answer(asked, _question(sys._getframe(1)))
            if answer is not None:
                return answer
        return func(*args, **(kwargs or {}))


def _asked(func: object, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Tensor | None:
    """Return the tensor that a call takes the truth of; None for any other call."""
    if func in (Tensor.__bool__, torch.is_nonzero, Tensor.is_nonzero):
        return cast("Tensor", args[0])
    if func is Tensor.item and cast("Tensor", args[0]).dtype is torch.bool:
        return cast("Tensor", args[0])
    if func in (torch.equal, Tensor.equal):
        one, other = cast("tuple[Tensor, Tensor]", args)
        return torch.eq(one, other).all() if one.shape == other.shape else None
    if func in (torch.allclose, Tensor.allclose):
        return torch.isclose(*args, **kwargs).all()  # type: ignore[arg-type]  # as they came
    return None


# --------------------------------------------------------------------------- recording


@dataclass
class Oracle:
    """Questions and answers of a model.

    Attributes:
        given: the user's own answers: "model.py:31" -> whether the condition in that line holds.
        recorded: answers of plain runs: question -> number of the run -> answers in order.
            Runs of even numbers have the example batch, and those of odd numbers others.
        used: places of `given` that were reached.
    """

    given: Mapping[str, bool] = field(default_factory=dict)
    recorded: dict[Question, dict[int, list[bool]]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def recording(
        self, run: int, leaves: Callable[[Question], bool] = lambda _: False
    ) -> AbstractContextManager[object]:
        """Record every answer of a plain run, except within opaque modules, `leaves`."""

        def listen(tensor: Tensor, question: Question) -> bool:
            answer = bool(tensor)
            if leaves(question):
                return answer
            self.recorded.setdefault(question, {}).setdefault(run, []).append(answer)
            return answer

        return _Listener(listen)

    def replaying(self) -> AbstractContextManager[object]:
        """Answer a trace's questions, and leave an op for each."""
        return _Listener(self._replay)

    def _replay(self, tensor: Tensor, question: Question) -> bool | None:
        if getattr(tensor, "constant", None) is not None:
            return None  # the trace knows its number
        answer = self._answer(question)
        if answer is not None:
            torch.ops.bigbrain_fx.assume.default(tensor, answer)
        return answer

    def _answer(self, question: Question) -> bool | None:
        given = self._given(question)
        if given is not None:
            return given is not is_negated(question.code)
        runs = self.recorded.get(question, {})
        answers = {answer for run in runs.values() for answer in run}
        if len(answers) > 1:
            by_dice = any(runs[i] != runs[i + 2] for i in runs if i % 2 == 0 and i + 2 in runs)
            raise undecided(question.at, question.code, by_dice=by_dice)
        # A library may assert in other words while it is traced: whoever ran, ran past it.
        return next(iter(answers), True if question.asserted else None)

    def _given(self, question: Question) -> bool | None:
        for place, answer in self.given.items():
            file, _, line = place.rpartition(":")
            if line == str(question.line) and f"/{question.file}".endswith(f"/{file}"):
                self.used.add(place)
                return answer
        return None

    def unused(self) -> Iterator[str]:
        """Yield the places given by the user that no trace reached."""
        yield from (place for place in self.given if place not in self.used)


def is_negated(code: str) -> bool:
    """Whether a line negates its tensor: `if not x.isfinite().all():`."""
    text = code.removeprefix("el").rstrip()
    for form in (text, f"{text}\n    pass"):
        try:
            found = ast.parse(form).body
        except SyntaxError:
            continue
        test = getattr(found[0], "test", None) if found else None
        return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    return False


# --------------------------------------------------------------------------- ops of the graph


def translate_assumption(scope: Scope, node: fx.Node) -> None:
    """Add the op that keeps a question."""
    value, answer = node.args
    name = unique("assume", scope.world.names)
    target = f"{PREFIX}{str(bool(answer)).lower()}"
    scope.add(Op(name, target, (scope.arg(value),), **place_of(node)))


def assumptions(graph: Graph) -> Iterator[Op]:
    """Yield every assumption of a graph, in regions too."""
    for op in graph.ops:
        if op.target.startswith(PREFIX):
            yield op
        elif op.body is not None:
            yield from assumptions(op.body)


def asked_at(graph: Graph, place: str) -> str | None:
    """Return the path of the module that has a question in a line; None without one."""
    return next((op.module_path for op in assumptions(graph) if op.source == place), None)


def holds(op: Op) -> bool:
    """Whether the condition in a question's line is assumed to hold."""
    return (op.target == f"{PREFIX}true") is not is_negated(op.code)


def remarks(graph: Graph) -> Iterator[str]:
    """Yield a sentence for each assumption: "assumed False at model.py:31: if x.isnan().any()"."""
    for op in assumptions(graph):
        yield f"assumed {holds(op)} at {op.source}: {op.code.rstrip(':')}"


def answers_in(graph: Graph) -> dict[str, bool]:
    """Return the assumptions of a graph as a user would give them, to trace the model again."""
    found: dict[str, set[bool]] = {}
    for op in assumptions(graph):
        found.setdefault(op.source, set()).add(holds(op))
    return {at: answers.pop() for at, answers in found.items() if at and len(answers) == 1}


def check(op: Op, value: object) -> None:
    """Check an assumption while a graph runs.

    Raises:
        AssumptionError: it does not hold; names the line.
    """
    assert isinstance(value, Tensor)
    if bool(value) is not (op.target == f"{PREFIX}true"):
        raise WrongAnswerError(
            f"the condition at {op.source} was assumed to be {holds(op)}, and is {not holds(op)} "
            f"here: {op.code}",
            op.source,
        )
