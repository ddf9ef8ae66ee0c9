"""Any tensor arrives as it left: same numbers, same shape, same strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from bigbrain_fx.runtime.channel import HEADER_LENGTH, MAX_DIMS, Channel, Layout, unpack
from bigbrain_fx.runtime.coded import MisuseError
from bigbrain_fx.runtime.network import pack
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
