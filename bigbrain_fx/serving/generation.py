"""Text, token by token, by a bundle that keeps nothing: each token is a whole row again.

The row holds the tokens so far, filled up to the model's length. The scores at the last of them
choose the next token. That needs a model whose scores do not depend on what comes after: this
is tried when the server starts.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from bigbrain_fx.errors import InputError
from bigbrain_fx.serving.crew import SlotSpec
from bigbrain_fx.serving.engine import Engine, Request, UnansweredError
from bigbrain_fx.serving.rows import RawTensor
from bigbrain_fx.serving.sampling import Choose, greedy

BYTES = 256  # words of a vocabulary whose tokens are bytes
_SCORES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class WholeText:
    """Text by whole rows of one bundle.

    Attributes:
        engine: computes rows.
        entry: the model's input.
        output: its scores.
        length: tokens of a row.
        words: of the vocabulary.
        deadline_s: longest wait for one token.
    """

    engine: Engine
    entry: str
    output: str
    length: int
    words: int
    deadline_s: float

    def tokens(
        self, prompt: Sequence[int], count: int, request: Request, choose: Choose = greedy
    ) -> Generator[int, None, None]:
        """Yield one token after another.

        Raises:
            InputError: the prompt is empty or too long, or has a token that there is not.
            UnansweredError, QueueFullError: as `Engine.ask`.
        """
        require_fitting(prompt, count, self.length, self.words)
        known = list(prompt)
        for _ in range(count):
            asked = Request({self.entry: self._row(known)}, 1, request.is_gone)
            scores = answered(self.engine, asked, self.deadline_s)[self.output]
            known.append(choose(scores, len(known) - 1))
            yield known[-1]

    def _row(self, tokens: Sequence[int]) -> RawTensor:
        filled = [*tokens, *[0] * (self.length - len(tokens))]
        return RawTensor("I64", (1, self.length), struct.pack(f"<{self.length}q", *filled))


def require_fitting(prompt: Sequence[int], count: int, length: int, words: int) -> None:
    """Refuse a prompt that a row does not hold.

    Raises:
        InputError: it is empty or too long, or has a token that there is not.
    """
    if not prompt or count < 1 or len(prompt) + count > length + 1:
        raise InputError(
            f"the prompt has {len(prompt)} tokens and max_tokens is {count}: expected one at "
            f"least of each, and together {length + 1} at most, which is what the model "
            "was split for",
            code="BX3117",
        )
    wrong = [token for token in prompt if not 0 <= token < words]
    if wrong:
        raise InputError(
            f"there is no token {wrong[0]}: they go from 0 to {words - 1}", code="BX3118"
        )


def answered(engine: Engine, request: Request, deadline_s: float) -> dict[str, RawTensor]:
    """Ask, wait, and return the outputs by name.

    Raises:
        QueueFullError, UnansweredError: as `Engine.ask`; or none came in time.
    """
    engine.ask(request)
    return answer_to(request, deadline_s)


def answer_to(request: Request, deadline_s: float) -> dict[str, RawTensor]:
    """Wait for what was asked; return the outputs by name.

    Raises:
        UnansweredError: none came in time, or will come.
    """
    if not request.done.wait(deadline_s):
        raise UnansweredError(f"no answer within {deadline_s:g} s", code="BX3119")
    if request.error:
        raise UnansweredError(request.error, code="BX3120")
    return dict(request.outputs)


def writer(engine: Engine, deadline_s: float) -> WholeText | str:
    """Return what generates text, or why this bundle cannot."""
    found = _token_input(engine.spec)
    if found is None:
        return "the model's input is not one row of tokens (int64, two dimensions)"
    entry, length = found
    tried = WholeText(engine, entry, "", length, 0, deadline_s)
    half = length // 2
    first, second = (
        answered(engine, Request({entry: tried._row([0] * half + [word] * half)}, 1), deadline_s)
        for word in (0, 1)
    )
    scores = next((name for name, raw in first.items() if _is_scores(raw, length)), None)
    if scores is None:
        return f"no output has scores for each of {length} tokens"
    words = first[scores].shape[2]
    known = half * words * first[scores].itemsize
    if first[scores].data[:known] != second[scores].data[:known]:
        return "the scores of a token depend on tokens after it"
    return WholeText(engine, entry, scores, length, words, deadline_s)


def _token_input(spec: SlotSpec) -> tuple[str, int] | None:
    if len(spec.inputs) != 1 or spec.whole:
        return None
    ((name, (dtype, shape)),) = spec.inputs.items()
    return (name, shape[1]) if dtype == "int64" and len(shape) == 2 and shape[1] > 1 else None


def _is_scores(raw: RawTensor, length: int) -> bool:
    return len(raw.shape) == 3 and raw.shape[:2] == (1, length) and raw.kind in _SCORES
