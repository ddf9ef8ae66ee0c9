"""Attempts after a failed trace: answers from plain runs, an opaque loss.

    export ─▶ yes and no from plain runs ─▶ the user's loss as one op

Each step is tried only when the error calls for it, so a model that exports pays for none. This
module has the attempts; `trace` traces.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from torch import Tensor

from bigbrain_fx.core import Graph
from bigbrain_fx.errors import BigBrainError
from bigbrain_fx.frontend.budget import budget
from bigbrain_fx.frontend.tracing.lines.untraced_queries import (
    Asked,
    both,
    code_of,
    require_seen,
)
from bigbrain_fx.frontend.tracing.opaque.recording import Leaves
from bigbrain_fx.frontend.tracing.opaque.whole_loss import SAID_OF_VARYING, VARIES, KeptLoss
from bigbrain_fx.frontend.tracing.plain import Plain, another, same_numbers
from bigbrain_fx.frontend.tracing.state.python_rng import where_rolled
from bigbrain_fx.frontend.tracing.step import Step
from bigbrain_fx.frontend.translation import oracle as questions
from bigbrain_fx.frontend.translation.batch import Batch
from bigbrain_fx.frontend.translation.kept import FUNCTION, LEAF, LOSS, Keeper, keeping
from bigbrain_fx.frontend.translation.opaque import Recorder, paused
from bigbrain_fx.frontend.translation.oracle import Oracle, Question
from bigbrain_fx.frontend.translation.refusals import (
    is_about_size,
    is_final,
    place,
    reads_a_value,
)
from bigbrain_fx.frontend.translation.trace_refusals import BAKED_DICE

_LISTEN_S = 2.0  # more plain runs than two are made for so long
_MOST_RUNS = 8
_Found = TypeVar("_Found")


@dataclass
class Ladder:
    """The steps taken so far in one capture.

    Attributes:
        has_numbers: the model has weights, so that it can be run.
        left: plain runs do not answer the loss's queries of data: an opaque loss makes them for
            each batch.
    """

    step: Step
    batch: Batch
    plain: Plain
    has_numbers: bool
    oracle: Oracle = field(default_factory=Oracle)
    leaves: Leaves = field(default_factory=lambda: Leaves({}))
    listened: bool = False
    left: bool | None = None
    asked: Asked = field(default_factory=Asked)
    loss: KeptLoss | None = None
    recorder: Recorder | None = None
    why: tuple[str | None, str] = (None, "")

    def climb(self, attempt: Callable[[], _Found]) -> _Found:
        """Make an attempt, with more help as long as its error names a further step.

        Raises:
            Exception: the error of the last attempt.
        """
        try:
            return attempt()
        except Exception as error:
            failed = error
        if self._hear(failed):  # out here, or what comes would name this one's line
            return self.climb(attempt)
        if self._keep_loss(failed):
            try:
                return attempt()
            except Exception as error:
                if is_final(error):
                    raise  # without the loss, this is what no trace can hold
                self.loss = None  # it was not the loss
        if self._answer_loss():
            return self.climb(attempt)
        raise failed

    @contextlib.contextmanager
    def helping(self, rows: int, free: bool) -> Iterator[Keeper]:
        """Help the step's calls during a trace; yield the recorder of opaque calls."""
        sizes = self._run_leaves((rows, rows + 1, rows + 3) if free else (rows,))
        self.asked = asked = Asked()
        stood_in = self.leaves.stood_in
        with keeping() as keeper, stood_in(keeper, sizes), asked.tracing(), asked.formatting():
            watch = self.step.watch
            watch.listening = lambda: both(self.oracle.replaying(), asked)
            watch.loss = self.loss.traced(keeper) if self.loss else None
            watch.tracing = True
            try:
                yield keeper
            finally:
                watch.listening, watch.loss = contextlib.nullcontext, None
                watch.tracing = False

    def kept_functions(self) -> dict[str, object]:
        """Return the user's own Python behind the targets of opaque calls."""
        found: dict[str, object] = {f"{LEAF}{p}": m for p, m in self.leaves.modules.items()}
        return found | ({LOSS: self.loss.loss} if self.loss else {})

    def judge_questions(self) -> None:
        """Refuse a model that reads data in plain runs but not in a trace."""
        if not self.has_numbers:
            return
        kept = (*self.kept_functions().values(), self.step.own_loss if self.loss else None)
        own = self.recorder.functions.values() if self.recorder else ()
        codes = frozenset(filter(None, map(code_of, (*kept, *own))))
        asked, rows = Asked(codes), max(2, self.batch.rows)
        self.step.watch.listening = lambda: asked
        try:
            with contextlib.suppress(Exception):
                self.plain.run(list(self.batch.sized(rows).values()), 0)
        finally:
            self.step.watch.listening = contextlib.nullcontext
        require_seen(asked.answered, self.asked)

    def _run_leaves(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Record opaque modules' results at these batch sizes; return the sizes that run."""
        if not self.leaves or not self.has_numbers:
            return ()
        for rows in sizes:
            if rows in self.leaves.known:
                continue
            is_over = budget(_LISTEN_S / len(sizes))
            for seed in range(_MOST_RUNS):
                tensors = list(self.batch.sized(rows).values())
                tensors = another(self.batch, rows, seed) if seed else tensors
                if seed >= 2 and is_over():
                    break
                refusal = contextlib.suppress(RuntimeError, ValueError, IndexError)
                with refusal, paused(), self.leaves.observed(rows):
                    self.plain.run(tensors, seed)
        return tuple(rows for rows in sizes if rows in self.leaves.known)

    def _hear(self, error: Exception) -> bool:
        """Get truth values from plain runs, when a trace lacks them."""
        if not reads_a_value(error) or not self.has_numbers or self.listened:
            return False
        self._listen()
        return True

    def _keep_loss(self, error: Exception) -> bool:
        """Make the user's loss opaque, when the trace failed in the loss."""
        own, part = self.step.own_loss, self.step.seen.part
        if own is None or self.loss is not None or part == "model" or is_about_size(error):
            return False
        return self.keep_loss(_why(error))

    def keep_loss(self, why: tuple[str | None, str]) -> bool:
        """Make the user's loss opaque, where it can be run; record the reason."""
        own = self.step.own_loss
        if own is None:
            return False
        self.loss, self.why = KeptLoss(own), why
        if self.has_numbers:
            rows = max(2, self.batch.rows)
            watch = self.step.watch
            watch.loss = self.loss.observed
            try:
                for seed in range(2):
                    self.plain.run(list(self.batch.sized(rows).values()), seed)
            except Exception:
                self.loss = None  # it cannot be run at all
            finally:
                watch.loss = None
        return self.loss is not None

    def _listen(self) -> None:
        """Run the model under two seeds or more, on two batches, and write down yes and no."""
        self.listened = True
        rows = max(2, self.batch.rows)
        example = list(self.batch.sized(rows).values())
        watch, is_over = self.step.watch, budget(_LISTEN_S)
        try:
            for run in range(_MOST_RUNS):
                if run >= 2 and is_over():
                    break
                watch.listening = partial(self.oracle.recording, run, self._leaves)
                with contextlib.suppress(Exception):  # `trace` says what is wrong with the example
                    self.plain.run(another(self.batch, rows, run) if run % 2 else example, run)
        finally:
            watch.listening = contextlib.nullcontext

    def _leaves(self, question: Question) -> bool:
        """Whether a question is the loss's own; an assertion has one answer for all data."""
        own = self.step.own_loss is not None and self.step.seen.part == "loss"
        if not own or self.left is False or question.only_raises:
            return False
        self.left = True
        return True

    def _answer_loss(self) -> bool:
        """Let plain runs answer for the loss, too, where it cannot be opaque."""
        if not self.left:
            return False
        self.left = False
        self._listen()
        return True

    def judge_dice(
        self, tensors: Sequence[Tensor], walk: Callable[[Sequence[Tensor]], object]
    ) -> str | None:
        """Refuse random numbers of Python and NumPy where they affect the results.

        Args:
            tensors: of the example batch.
            walk: runs through the model's lines, numbers or not.

        Returns:
            A sentence for the user; None when no line of the model draws any.

        Raises:
            CaptureError: runs that differ in their seed alone give other numbers.
        """
        with self.leaves.unheard():
            place = where_rolled(lambda: walk(tensors))
        if place is None:
            return None  # not the user's: an import that seeds something, say
        drawn = f"{place.at} draws random numbers with Python or NumPy"
        if not self.has_numbers:
            return f"{drawn}: the trace keeps one draw"
        is_over, first = budget(_LISTEN_S), self.plain.run(tensors, 0, 0)
        for seed in range(1, _MOST_RUNS):
            other = self.plain.run(tensors, 0, seed)
            if not all(map(same_numbers, first, other)) or len(first) != len(other):
                drawn_at = "" if place.at == place.of_forward else f"at {place.at}"
                raise BAKED_DICE.error(place.of_forward, drawn_at, inside=place.inside)
            if is_over():
                break
        return f"{drawn}; they changed nothing when tried"

    def remarks(self, graph: Graph) -> Iterator[str]:
        """Yield remarks for the user about the steps taken, a sentence each."""
        yield from questions.remarks(graph)
        for file, line in sorted(self.asked.said):
            at = f"{file.rpartition('/')[2]}:{line}"
            yield f"{at} only prints or logs numbers of tensors: a bundle leaves that line out"
        for target in self.recorder.functions if self.recorder else ():
            name = target.removeprefix(FUNCTION)
            yield f"BX0110: custom backward in {name} is kept: the stage calls the class itself"
        if self.loss is not None and self.why == VARIES:
            yield SAID_OF_VARYING
        elif self.loss is not None:
            why = ": ".join(filter(None, self.why)).rstrip(":")
            yield (
                f"BX0150: the loss cannot be traced ({why}): it is opaque, and the "
                "device that has the output calls loss(output, batch) of the model file"
            )
        for given in self.oracle.unused():
            yield f"--assume {given}: no tensor is asked for yes or no there"


def _why(error: Exception) -> tuple[str | None, str]:
    """Return the line of the user's that an error names, and its text.

    The subject of our own refusal comes first: an error that came before depends on it, too.
    """
    what = error.what if isinstance(error, BigBrainError) else ""
    if isinstance(error, BigBrainError) and error.at:
        return error.at, what.partition(": ")[2] or what
    at, code = place(error)
    return at, code if at else what.partition(" (")[0]
