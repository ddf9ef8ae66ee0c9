"""What messages cost a process: timed while nothing else of it computes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from bigbrain_fx.measure.host.overheads import message_costs
from bigbrain_fx.runtime import Channel


class Seen:
    """A transport without another end, which sees how many threads compute."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def begin_step(self, channels: object) -> None: ...

    def finish(self) -> None: ...

    def send(self, channel: Channel, tensor: Tensor) -> None:
        self.threads.add(torch.get_num_threads())

    def recv(self, channel: Channel) -> Tensor:
        self.threads.add(torch.get_num_threads())
        return torch.zeros(channel.shape)


@pytest.fixture
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("shared_cores", [True, False])
def test_no_other_thread_computes_between_messages(shared_cores: bool) -> None:
    """On a host of 16 cores, devices of 14 threads had messages of 62 ms: threads that spun."""
    seen = Seen()
    message_s, bytes_per_s = message_costs(
        seen,
        ("r0", "r1"),
        leads=True,
        rounds=3,
        shared_cores=shared_cores,
        device=torch.device("cpu"),
    )
    assert seen.threads == {1}
    assert torch.get_num_threads() == 2
    assert message_s < 0.01
    assert bytes_per_s > 0
