"""Messages under way: what they hold, until they have left, and who is waited for."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch

from bigbrain_fx.runtime.channel import Channel
from bigbrain_fx.runtime.mesh import MeshSends
from bigbrain_fx.runtime.peers import PeerLostError

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
