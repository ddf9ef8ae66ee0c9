"""Any tensor arrives as it left; a checksum shows what changed on the way; messages under way."""

from __future__ import annotations

import itertools
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from bigbrain_fx.runtime.channel import HEADER_LENGTH, MAX_DIMS, Channel, Layout, unpack
from bigbrain_fx.runtime.checksum import (
    HASHED,
    NARROW,
    TABLE,
    WIDE,
    WIDE_FROM,
    checksum,
)
from bigbrain_fx.runtime.coded import MisuseError
from bigbrain_fx.runtime.mesh import MeshSends, is_whole, seal, sealed_length
from bigbrain_fx.runtime.network import pack
from bigbrain_fx.runtime.peers import PeerLostError
from bigbrain_fx.runtime.varying import disclose, enclose, enclose_nothing
from tests.support.examples import examples

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)


@st.composite
def tensors(draw: Any) -> Tensor:
    """Draw a view as models make them: permuted, expanded, sliced, unfolded, empty, a scalar."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    count = torch.Size(shape).numel()
    found = torch.arange(count).reshape(shape).to(draw(st.sampled_from(DTYPES)))
    for _ in range(draw(st.integers(0, 4))):
        dim = draw(st.integers(0, max(0, found.dim() - 1)))
        match draw(st.integers(0, 5)):
            case 0:
                found = found.permute(draw(st.permutations(range(found.dim()))))
            case 1 if found.dim() < 6:
                found = found.unsqueeze(dim).expand(
                    *found.shape[:dim], draw(st.integers(0, 3)), *found.shape[dim:]
                )
            case 2 if found.dim():
                start, step = draw(st.integers(0, found.shape[dim])), draw(st.integers(1, 3))
                found = found[(slice(None),) * dim + (slice(start, None, step),)]
            case 3 if found.dim() and found.shape[dim]:
                found = found.select(dim, draw(st.integers(0, found.shape[dim] - 1)))
            case 4 if 0 < found.dim() < 6 and found.shape[dim]:
                found = found.unfold(dim, draw(st.integers(1, found.shape[dim])), 1)
            case _:
                pass
    return found


def arrived(tensor: Tensor, layout: Layout | None = None) -> Tensor:
    """Send a tensor in the mind: its bytes and its header are all that the receiver has."""
    layout = layout or Layout.of(tensor)
    flat = pack(tensor, layout)
    assert flat.dim() == 1
    assert flat.is_contiguous()
    sent = torch.frombuffer(bytearray(raw(flat)), dtype=flat.dtype) if len(flat) else flat.clone()
    return unpack(sent, Layout.from_header(layout.header()))


def raw(flat: Tensor) -> bytes:
    return flat.view(torch.uint8).numpy().tobytes()


@settings(deadline=None, max_examples=examples(400), derandomize=True)
@given(tensors())
def test_any_layout_arrives_as_it_left(tensor: Tensor) -> None:
    found = arrived(tensor)
    assert torch.equal(found, tensor)
    assert found.shape == tensor.shape
    assert found.stride() == tensor.stride()
    assert found.dtype == tensor.dtype


@settings(deadline=None, max_examples=examples(200), derandomize=True)
@given(tensors(), st.data())
def test_a_tensor_of_other_strides_arrives_in_the_channels(tensor: Tensor, data: Any) -> None:
    order = data.draw(st.permutations(range(tensor.dim())))
    planned = torch.empty([tensor.shape[d] for d in order], dtype=tensor.dtype)
    planned = planned.permute([order.index(d) for d in range(tensor.dim())])
    found = arrived(tensor, Layout.of(planned))
    assert torch.equal(found, tensor)
    assert found.stride() == planned.stride()


@pytest.mark.parametrize(
    ("tensor", "elements"),
    [
        (torch.zeros(()), 1),
        (torch.zeros(0, 3), 0),
        (torch.zeros(2, 3), 6),
        (torch.zeros(3, 2).t(), 6),
        (torch.zeros(5, 1).expand(5, 1000), 5),
        (torch.zeros(()).expand(7, 7), 1),
        (torch.zeros(4, 6)[:, ::2], 12),
    ],
)
def test_only_what_is_stored_travels(tensor: Tensor, elements: int) -> None:
    assert len(pack(tensor, Layout.of(tensor))) == elements


def test_dense_tensors_are_sent_without_a_copy() -> None:
    for tensor in (torch.ones(2, 3), torch.ones(3, 2).t(), torch.ones(2, 1).expand(2, 9)):
        assert pack(tensor, Layout.of(tensor)).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("turn", [Tensor.conj, lambda z: z.conj().imag, torch._neg_view])
def test_signs_that_are_turned_when_read_travel_as_numbers(turn: Any) -> None:
    z = torch.randn(3, 4, dtype=torch.complex64)
    for tensor in (turn(z), turn(z.t()), turn(z[:, :2])):
        found = pack(tensor, Layout.of(tensor)).view(torch.uint8).view(tensor.dtype)
        assert torch.equal(unpack(found, Layout.of(tensor)), tensor)


def test_a_header_has_one_length_for_all() -> None:
    assert len(Layout.of(torch.zeros(())).header()) == HEADER_LENGTH
    most = Layout.of(torch.zeros((1,) * MAX_DIMS))
    assert len(most.header()) == HEADER_LENGTH
    assert Layout.from_header(most.header()) == most


def test_too_many_dimensions_are_refused() -> None:
    with pytest.raises(MisuseError, match="17 dimensions cannot be sent; 16 is the most"):
        Layout.of(torch.zeros((1,) * 17)).header()


@pytest.mark.parametrize(
    "first",
    [torch.ones(()).expand(4, 3), torch.ones(6).unfold(0, 3, 1)],
    ids=["expanded", "windows"],
)
def test_a_repeated_message_may_not_differ(first: Tensor) -> None:
    later = torch.arange(12.0).view(4, 3)
    with pytest.raises(MisuseError, match=r"which repeat elements; this one has \(3, 1\)"):
        pack(later, Layout.of(first))


@given(tensors())
@settings(max_examples=examples(60), deadline=None)
def test_messages_of_a_channel_that_varies_have_one_size_and_say_their_own(tensor: Tensor) -> None:
    shape = (*tensor.shape[:1], *(n + 1 for n in tensor.shape[1:]))  # of the largest
    channel = Channel(0, "activation", "x", 0, 1, "a", "b", shape, tensor.dtype, varies=True)
    message = enclose(channel, tensor)
    assert (tuple(message.shape), message.dtype) == channel.wire
    found = disclose(channel, message)
    assert found is not None
    assert torch.equal(found, tensor)
    assert Layout.of(found) == Layout.of(tensor)
    assert found.untyped_storage().data_ptr() != message.untyped_storage().data_ptr()


@pytest.mark.parametrize("shape", [(), (2, 3), (0, 3)])
def test_a_message_may_say_that_there_is_nothing(shape: tuple[int, ...]) -> None:
    channel = Channel(0, "gradient", "x", 1, 0, "b", "a", shape, torch.float32, varies=True)
    message = enclose_nothing(channel, torch.device("cpu"))
    assert (tuple(message.shape), message.dtype) == channel.wire
    assert disclose(channel, message) is None


def test_a_message_larger_than_its_channel_is_refused() -> None:
    channel = Channel(0, "activation", "x", 0, 1, "a", "b", (2, 3), torch.float32, varies=True)
    with pytest.raises(MisuseError, match=r"\(3, 3\) is larger than \(2, 3\)"):
        enclose(channel, torch.zeros(3, 3))


# --------------------------------------------------------------------------- checksums


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


# --------------------------------------------------------------------------- messages under way


GATHER = Channel(4, "gather", "bucket0", 0, 1, "a", "b", (2,), torch.float32, on_demand=True)
PART = replace(GATHER, tag=5, kind="reduce")


class Work:
    """A message under way, as dist.Work: it has left when a test says so."""

    def __init__(self, error: str = "") -> None:
        self.error, self.left = error, threading.Event()

    def wait(self, deadline: timedelta) -> None:
        """Wait until it has left, or fail."""
        assert self.left.wait(deadline.total_seconds())
        if self.error:
            raise RuntimeError(self.error)


@pytest.fixture
def background() -> MeshSends:
    return MeshSends(timedelta(seconds=20))


def send(background: MeshSends, channel: Channel, work: Any) -> weakref.ref[Any]:
    """Send a tensor that nobody else holds; return whether it is there, as a weak reference."""
    payload = torch.zeros(2)
    background.keep(work, payload, channel)
    return weakref.ref(payload.untyped_storage())


def comes(true: Callable[[], bool]) -> bool:
    """Wait until something is so."""
    until = time.monotonic() + 20
    while not true() and time.monotonic() < until:
        time.sleep(0.01)
    return true()


def test_a_part_that_is_taken_late_keeps_no_weights_that_were_taken(
    background: MeshSends,
) -> None:
    late, soon = Work(), Work()
    part, weights = send(background, PART, late), send(background, GATHER, soon)
    soon.left.set()
    assert comes(lambda: weights() is None)
    assert part() is not None
    assert background.current == PART
    late.left.set()
    background.drain()
    assert part() is None
    assert background.current is None
    background.stop()


def test_a_message_that_cannot_leave_ends_the_run_and_no_other_waits_for_it(
    background: MeshSends,
) -> None:
    gone, other = Work("closed"), Work()
    send(background, PART, gone)
    gone.left.set()
    assert comes(lambda: background.failed is not None)
    with pytest.raises(PeerLostError, match="reduce 'bucket0' from stage 0"):
        send(background, GATHER, other)
    with pytest.raises(PeerLostError, match="reduce 'bucket0' from stage 0"):
        background.drain()
    background.stop()
