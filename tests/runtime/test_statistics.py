"""Statistics of BatchNorm over replicas: torch's own bits, as if one process had run it all."""

from __future__ import annotations

import itertools
from collections import deque
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.runtime.channel import Channel, Transport
from bigbrain_fx.runtime.modules import WeightsError
from bigbrain_fx.runtime.statistics import Statistics, groups_of

MICROS = ((0, 1, 4), (2,), (3, 5))
CHANNELS = 24


class Wires:
    """Channels that keep what is sent; a replica takes it later."""

    def __init__(self) -> None:
        self.sent: dict[int, deque[Tensor]] = {}

    def send(self, channel: Channel, tensor: Tensor) -> None:
        self.sent.setdefault(channel.tag, deque()).append(tensor.clone())

    def recv(self, channel: Channel) -> Tensor:
        return self.sent[channel.tag].popleft()


class Norm(nn.Module):
    """A BatchNorm, by the function: momentum and types as wanted."""

    def __init__(self, momentum: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("mean", torch.linspace(-1, 1, CHANNELS).to(dtype))
        self.register_buffer("var", torch.linspace(0.1, 3, CHANNELS).to(dtype))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        cast(Tensor, self.count).add_(1)
        mean, var = cast(Tensor, self.mean), cast(Tensor, self.var)
        return F.batch_norm(x, mean, var, training=True, momentum=self.momentum)


def replica(number: int, norm: Norm, wires: Wires, *, calls: int = 1) -> Statistics:
    entry = {
        "stages": [0, 1, 2],
        "buffers": ["mean", "var"] * calls,
        "counters": [["count", calls]],
    }
    channels = [
        Channel(3 * a + b, "statistics", "s", a, b, f"d{a}", f"d{b}", (1,), torch.float32)
        for a in range(3)
        for b in range(3)
        if a != b
    ]
    groups = groups_of({"s": entry}, f"d{number}", {number: norm}, channels)
    return Statistics([*groups], MICROS, cast(Transport, wires))


SHAPES = ((8, CHANNELS), (3, CHANNELS, 7), (2, CHANNELS, 5, 3), (2, CHANNELS, 2, 3, 2))
TYPES = (
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
)


@pytest.mark.parametrize("types", TYPES, ids=str)
def test_the_bits_are_those_of_one_process(types: tuple[torch.dtype, torch.dtype]) -> None:
    for momentum, shape in itertools.product((0.1, 1 / 3, 0.0, 1.0), SHAPES):
        require_same(momentum, shape, *types)


def require_same(
    momentum: float, shape: tuple[int, ...], reads: torch.dtype, keeps: torch.dtype
) -> None:
    batches = [torch.randn(shape).mul(3).add(1).to(reads) for _ in range(6)]
    if len(shape) > 3:  # channels last, too
        lasts = {4: torch.channels_last, 5: torch.channels_last_3d}
        batches[1::2] = [x.to(memory_format=lasts[len(shape)]) for x in batches[1::2]]
    alone, norms = Norm(momentum, keeps), [Norm(momentum, keeps) for _ in range(3)]
    wanted = [alone(x) for x in batches]
    wires = Wires()
    replicas = [replica(number, norm, wires) for number, norm in enumerate(norms)]
    for number, (statistics, norm) in enumerate(zip(replicas, norms, strict=True)):
        for micro in MICROS[number]:
            with statistics.noting(number, micro):
                assert torch.equal(norm(batches[micro]), wanted[micro])
    exchange(replicas)
    for norm in norms:
        for name, tensor in alone.state_dict().items():
            assert torch.equal(norm.state_dict()[name], tensor), name


def exchange(replicas: list[Statistics]) -> None:
    """Let all send before any takes."""
    for statistics in replicas:
        statistics.tell()
    for statistics in replicas:
        statistics.take()


def test_a_second_run_is_not_noted_and_writes_nothing() -> None:
    norm = Norm(0.1, torch.float32)
    mean = cast(Tensor, norm.mean)
    before = mean.clone()
    statistics = replica(0, norm, Wires())
    x = torch.randn(4, CHANNELS)
    with statistics.noting(0, 0):
        first = norm(x)
    with statistics.noting(0, 0, again=True):
        assert torch.equal(norm(x), first)
    assert torch.equal(mean, before)
    with statistics.noting(7, 0):  # a stage that writes nothing
        norm(x)
    assert not torch.equal(mean, before)


def test_a_call_less_than_planned_is_refused() -> None:
    norm = Norm(0.1, torch.float32)
    statistics = replica(1, norm, Wires(), calls=2)
    with statistics.noting(1, 2):
        norm(torch.randn(4, CHANNELS))
    with pytest.raises(WeightsError, match="ran a BatchNorm less often than planned"):
        statistics.tell()


def test_a_buffer_that_is_not_there_is_refused() -> None:
    entry = {"stages": [0], "buffers": ["mean", "gone"], "counters": []}
    with pytest.raises(WeightsError, match="'gone', no buffer of stage 0"):
        [*groups_of({"s": entry}, "d0", {0: Norm(0.1, torch.float32)}, ())]
