"""A message with a checksum: what was changed on the way shows."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, strategies as st

from bigbrain_fx.runtime.checksum import (
    HASHED,
    NARROW,
    TABLE,
    WIDE,
    WIDE_FROM,
    checksum,
)
from bigbrain_fx.runtime.mesh import is_whole, seal, sealed_length

PAYLOADS = st.binary(max_size=100)


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


@given(PAYLOADS)
def test_an_unchanged_message_is_whole(data: bytes) -> None:
    sealed = seal(as_tensor(data))
    assert sealed.numel() == sealed_length(len(data))
    assert bytes(sealed[: len(data)].tolist()) == data
    assert is_whole(sealed, len(data))


@given(PAYLOADS, st.data())
def test_any_changed_byte_shows_also_one_of_the_checksum(data: bytes, draw: st.DataObject) -> None:
    sealed = seal(as_tensor(data))
    place = draw.draw(st.integers(0, sealed.numel() - 1))
    sealed[place] ^= draw.draw(st.integers(1, 255))
    assert not is_whole(sealed, len(data))


def test_a_payload_that_begins_in_the_middle_of_a_word() -> None:
    flat = torch.arange(9, dtype=torch.float32)[1:].view(torch.uint8)
    assert is_whole(seal(flat), 32)


def test_zeros_of_another_length_are_not_whole() -> None:
    """As memory that was never written looks."""
    assert not is_whole(torch.zeros(sealed_length(16), dtype=torch.uint8), 16)


# ------------------------------------------------------------------ words that change places

SIZES = [24, 8 * HASHED, 8 * (HASHED + 1), 8 * (9 * NARROW + 5), 8 * (3 * WIDE + WIDE_FROM)]


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    dice = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=dice)


def places(count: int) -> list[int]:
    """Return words of every kind: of the first rows and the last, and of what fills no row."""
    dice = random.Random(count)
    ends = {0, 1, count - 1, NARROW, WIDE}
    return sorted({p for p in ends | {dice.randrange(count) for _ in range(1)} if 0 <= p < count})


def changes(words: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what is to be noticed of a message, one change each."""
    bits = [0, 32, 63]
    for i, j in itertools.combinations(places(words.numel()), 2):
        for bit in bits:
            flag = torch.tensor(-(2**63) if bit == 63 else 1 << bit)
            for k in (i, j):
                flipped = words.clone()
                flipped[k] ^= flag
                yield f"bit {bit} of word {k}", flipped
            opposite = words.clone()
            opposite[i] |= flag
            opposite[j] &= ~flag
            yield f"bit {bit} set in {i}, cleared in {j}", opposite
            summed = words.clone()
            summed[i] += flag
            summed[j] -= flag
            yield f"bit {bit} added to {i}, taken from {j}", summed
        swapped = words.clone()
        swapped[[i, j]] = words[[j, i]]
        yield f"words {i} and {j} swapped", swapped
    for shift in (1, NARROW, WIDE, words.numel() // 2):
        yield f"rotated by {shift}", words.roll(shift)
    yield "reversed", words.flip(0)
    yield "nothing of it", torch.zeros_like(words)


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("kind", ["random", "halves", "few"])
def test_no_change_of_words_or_of_their_places_goes_unnoticed(nbytes: int, kind: str) -> None:
    """Also of words that differ in their highest bits only, and of many equal ones."""
    payload = random_bytes(nbytes)
    words = payload.view(torch.int64)
    if kind == "halves":
        ends = torch.tensor([0.0, 1.0, 2.0, -1.0], dtype=torch.float64)
        words.copy_(ends[words % 4].view(torch.int64))
    elif kind == "few":
        words.zero_()
        words[:: max(2, words.numel() // 5)] = 7
    sealed = seal(payload)
    last = sealed[-8:].clone()
    for what, changed in changes(words):
        if torch.equal(changed, words):
            continue
        sealed = torch.cat([changed.view(torch.uint8), last])
        assert not is_whole(sealed, nbytes), what


@pytest.mark.nightly
@given(st.lists(st.integers(0, 3), min_size=2, max_size=9), st.data())
def test_no_order_of_a_few_words_is_another(numbers: list[int], draw: st.DataObject) -> None:
    other = draw.draw(st.permutations(numbers))
    one, two = (torch.tensor(found, dtype=torch.int64) for found in (numbers, other))
    assert (checksum(one) == checksum(two)) == (numbers == other)


def test_two_flips_in_a_large_message_with_several_tables() -> None:
    payload = random_bytes(8 * (TABLE + 700))
    sealed = seal(payload)
    assert is_whole(sealed, payload.numel())
    words = sealed.view(torch.int64)
    words[5], words[TABLE + 5] = words[TABLE + 5].clone(), words[5].clone()
    assert not is_whole(sealed, payload.numel())


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (7, 5), (700, 9)])
def test_a_tensor_has_one_checksum_however_it_lies(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = torch.ones(shape).cumsum(0).to(dtype) if shape else torch.ones((), dtype=dtype)
    wide = torch.stack([tensor, tensor], -1)  # strides, and an odd place in memory
    assert checksum(wide[..., 1]) == checksum(tensor)
    if tensor.numel():
        assert checksum(torch.zeros_like(tensor)) != checksum(tensor)
