"""The next token of a text: the largest score, or one drawn among the likely ones.

    scores / temperature ──softmax──▶ the top_k largest ──▶ the fewest that make up top_p ──▶ drawn

It knows nothing of requests, rows or caches. Each request has its own random numbers: the same seed
gives the same text, whatever else is served.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bigbrain_fx.errors import InputError
from bigbrain_fx.serving.engine import UnansweredError
from bigbrain_fx.serving.rows import RawTensor, scores_at

Choose = Callable[[RawTensor, int], int]  # scores [..., positions, words], a position -> a word


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: scores are divided by it; 0 takes the largest, always.
        top_p: the share of the probability among which is drawn.
        top_k: the number of words among which is drawn; 0: all.
        seed: of the random numbers; None: another one each time.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


def sampling_of(asked: Mapping[str, Any]) -> Sampling:
    """Read what a request asks for.

    Raises:
        InputError: a number is none, or out of its range.
    """
    for name, fits, expected in _RANGES:
        if name in asked and not (type(asked[name]) in (int, float) and fits(asked[name])):
            raise InputError(
                f"expected {name} to be {expected}, found {asked[name]!r}", code="BX3111"
            )
    return Sampling(**{name: asked[name] for name, *_ in _RANGES if name in asked})


_RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("temperature", lambda x: 0.0 <= x < math.inf, "0 (the likeliest token) or more"),
    ("top_p", lambda x: 0.0 < x <= 1.0, "above 0 and at most 1"),
    ("top_k", lambda x: type(x) is int and x >= 0, "a whole number, 0 for all words"),
    ("seed", lambda x: type(x) is int, "a whole number"),
)


def chooser(how: Sampling) -> Choose:
    """Return what chooses the tokens of one text."""
    if how.temperature == 0.0:
        return greedy
    dice = random.Random(how.seed)
    return lambda scores, position: _drawn(_numbers(scores, position), how, dice)


def greedy(scores: RawTensor, position: int) -> int:
    """Return the word of the largest score at a position, the first.

    Raises:
        UnansweredError: a score is not a number.
    """
    found = _numbers(scores, position)
    return max(range(len(found)), key=found.__getitem__)


def _numbers(scores: RawTensor, position: int) -> Sequence[float]:
    found = scores_at(scores, position)
    if math.isnan(sum(found)):
        raise UnansweredError(
            f"the model's scores at position {position} are not all numbers", code="BX3112"
        )
    return found


def _drawn(scores: Sequence[float], how: Sampling, dice: random.Random) -> int:
    top = max(scores)
    weights = [math.exp((score - top) / how.temperature) for score in scores]
    words: Sequence[int] = range(len(weights))
    if how.top_k or how.top_p < 1.0:
        words = sorted(words, key=weights.__getitem__, reverse=True)[: how.top_k or None]
        words = [*_making_up(how.top_p, words, weights)]
    return dice.choices(words, [weights[word] for word in words])[0]


def _making_up(share: float, words: Sequence[int], weights: Sequence[float]) -> Iterator[int]:
    """Yield the likeliest words until they make up a share of all of these; one at least."""
    lacking = share * math.fsum(weights[word] for word in words)
    for word in words:
        yield word
        lacking -= weights[word]
        if lacking <= 0.0:
            return
