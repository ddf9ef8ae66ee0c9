"""Text, token by token, by a bundle that keeps keys and values: a step for each position.

    prompt ──as many positions as a slot has──▶ slots ──▶ token ──▶ slot ──▶ token ...

A text holds one row of the caches from its first position to its last. Positions of several texts
share a slot, each at its own place of its own row. Filling goes to a row that no text has.
"""

from __future__ import annotations

import queue
import struct
import threading
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from bigbrain_fx.serving.engine import Engine, QueueFullError, Request, UnansweredError
from bigbrain_fx.serving.generation import answer_to, require_fitting
from bigbrain_fx.serving.rows import Raw, RawTensor
from bigbrain_fx.serving.sampling import Choose, greedy

INPUTS = ("tokens", "row", "position")


@dataclass(eq=False)
class CachedText:
    """Text by one bundle that keeps keys and values.

    Attributes:
        engine: computes positions.
        places: texts that are generated at once; others wait.
        length: tokens of a row.
        deadline_s: longest wait for a row, and for one token.
        words: of the vocabulary.
        output: the scores.
    """

    engine: Engine
    places: int
    length: int
    deadline_s: float
    words: int = 0
    output: str = ""
    _waiting: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._free: queue.Queue[int] = queue.Queue()
        for place in range(self.places):
            self._free.put(place)
        first = Request(step([0], self.places, 0), 1)
        self.engine.ask(first)
        ((self.output, scores),) = answer_to(first, self.deadline_s).items()
        self.words = scores.shape[-1]

    def tokens(
        self, prompt: Sequence[int], count: int, request: Request, choose: Choose = greedy
    ) -> Generator[int, None, None]:
        """Yield one token after another.

        Raises:
            InputError: the prompt is empty or too long, or has a token that there is not.
            UnansweredError, QueueFullError: as `Engine.ask`; or no row came free in time.
        """
        require_fitting(prompt, count, self.length, self.words)
        epoch = self.engine.counted.restarts  # before the row: what is kept there dies with them
        row = self._row()
        try:
            word = self._chosen(self._read(prompt, row, request, epoch), choose)
            yield word
            for position in range(len(prompt), len(prompt) + count - 1):
                asked = Request(step([word], row, position), 1, request.is_gone, epoch=epoch)
                self.engine.ask(asked)
                word = self._chosen(asked, choose)
                yield word
        finally:
            self._free.put(row)

    def _row(self) -> int:
        """Take a row; wait for one where all are taken, if not too many wait already."""
        with self._lock:
            if self._free.empty() and self._waiting >= self.engine.limit:
                raise QueueFullError(self.engine.limit, 1)
            self._waiting += 1
        try:
            return self._free.get(timeout=self.deadline_s)
        except queue.Empty:
            raise UnansweredError(
                f"no row came free within {self.deadline_s:g} s", code="BX3110"
            ) from None
        finally:
            with self._lock:
                self._waiting -= 1

    def _read(self, prompt: Sequence[int], row: int, request: Request, epoch: int) -> Request:
        """Read the prompt, a slot's positions at a time; return what asked for the last ones.

        Several slots are under way at once.
        """
        under_way: deque[Request] = deque()
        most = self.engine.spec.rows
        for start in range(0, len(prompt), most):
            piece = step(prompt[start : start + most], row, start)
            asked = Request(piece, piece["row"].shape[0], request.is_gone, epoch=epoch)
            self.engine.ask(asked)
            under_way.append(asked)
            if len(under_way) > self.engine.depth:
                answer_to(under_way.popleft(), self.deadline_s)
        *before, last = under_way
        for asked in before:
            answer_to(asked, self.deadline_s)
        return last

    def _chosen(self, asked: Request, choose: Choose) -> int:
        scores = answer_to(asked, self.deadline_s)[self.output]
        return choose(scores, scores.shape[0] - 1)


def step(tokens: Sequence[int], row: int, start: int) -> Raw:
    """Return inputs for tokens of one row, from a position on."""
    count = len(tokens)
    columns = tokens, [row] * count, range(start, start + count)
    shapes = (count, 1), (count,), (count,)
    return {
        name: RawTensor("I64", shape, struct.pack(f"<{count}q", *column))
        for name, shape, column in zip(INPUTS, shapes, columns, strict=True)
    }


def filling(places: int) -> Raw:
    """Return inputs that fill a slot up: the first position of the row behind all others."""
    return step([0], places, 0)
