"""Tokens of a text: drawn as torch's softmax says, among the words that torch's sort keeps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from bigbrain_fx.errors import InputError
from bigbrain_fx.serving.engine import UnansweredError
from bigbrain_fx.serving.rows import RawTensor
from bigbrain_fx.serving.sampling import Sampling, chooser, greedy, sampling_of

WORDS, DRAWS = 12, 6000
SCORES = torch.randn(1, 3, WORDS, generator=torch.Generator().manual_seed(5))
RAW = RawTensor("F32", (1, 3, WORDS), SCORES.numpy().tobytes())


def probabilities(how: Sampling) -> torch.Tensor:
    """By torch: the scores of the second position, those left out at minus infinity."""
    scores = SCORES[0, 1].double() / how.temperature
    if how.top_k:
        scores[scores < scores.topk(how.top_k).values[-1]] = -torch.inf
    sorted_scores, order = scores.sort(descending=True)
    before = sorted_scores.softmax(0).cumsum(0) - sorted_scores.softmax(0)
    scores[order[before >= how.top_p]] = -torch.inf
    return scores.softmax(0)


@pytest.mark.parametrize(
    "how",
    [
        Sampling(1.0),
        Sampling(0.5),
        Sampling(2.0, top_p=0.7),
        Sampling(1.5, top_k=4),
        Sampling(1.5, 0.6, 5),
    ],
)
def test_words_come_as_often_as_they_are_likely(how: Sampling) -> None:
    choose = chooser(replace(how, seed=1))
    found = Counter(choose(RAW, 1) for _ in range(DRAWS))
    expected = probabilities(how)
    assert set(found) <= set(expected.nonzero().flatten().tolist())
    for word, share in enumerate(expected.tolist()):
        spread = (share * (1 - share) / DRAWS) ** 0.5
        assert abs(found[word] / DRAWS - share) <= 5 * spread, word


def test_the_same_seed_draws_the_same_and_zero_is_greedy() -> None:
    first, again = chooser(Sampling(1.0, seed=7)), chooser(Sampling(1.0, seed=7))
    assert [first(RAW, 0) for _ in range(50)] == [again(RAW, 0) for _ in range(50)]
    assert chooser(Sampling())(RAW, 2) == greedy(RAW, 2) == int(SCORES[0, 2].argmax())
    cold = chooser(Sampling(1e-6))
    assert {cold(RAW, 2) for _ in range(50)} == {greedy(RAW, 2)}
    assert {chooser(Sampling(1.0, top_p=1e-9))(RAW, 2) for _ in range(9)} == {greedy(RAW, 2)}


@pytest.mark.parametrize("how", [Sampling(), Sampling(1.0)])
def test_scores_that_are_no_numbers_choose_nothing(how: Sampling) -> None:
    scores = SCORES.clone()
    scores[0, 1, 3] = torch.nan
    raw = replace(RAW, data=scores.numpy().tobytes())
    assert chooser(how)(raw, 0) in range(WORDS)
    with pytest.raises(UnansweredError, match="scores at position 1 are not all numbers"):
        chooser(how)(raw, 1)


@pytest.mark.parametrize(
    "asked",
    [
        *({"temperature": wrong} for wrong in (True, -1.0, float("nan"), float("inf"))),
        *({"top_k": wrong} for wrong in (1.5, -1)),
        {"top_p": 1.5},
        {"seed": "x"},
    ],
)
def test_numbers_out_of_range(asked: dict[str, object]) -> None:
    (name,) = asked
    with pytest.raises(InputError, match=f"expected {name} to be"):
        sampling_of(asked)
