"""A message with a checksum: what was changed on the way shows."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from bigbrain_fx.runtime.checksum import is_whole, seal, sealed_length

PAYLOADS = st.binary(max_size=100)


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


@given(PAYLOADS)
def test_what_arrives_as_it_left_is_whole(data: bytes) -> None:
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
