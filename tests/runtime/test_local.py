"""All devices in one process: turns, order, dead ends, and one device's failure ends all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bigbrain_fx.runtime.channel import Channel
from bigbrain_fx.runtime.compared_stream import Subject
from bigbrain_fx.runtime.local import Hub, LocalTransport
from bigbrain_fx.runtime.stream import BatchError


def channel(tag: int, sender: str, receiver: str) -> Channel:
    return Channel(tag, "activation", "x", 0, 1, sender, receiver, (2, 3), torch.float32)


THERE, BACK = channel(0, "a", "b"), channel(1, "b", "a")


def test_messages_keep_their_order_and_their_strides() -> None:
    hub = Hub()
    transport = LocalTransport(hub)
    sent = [torch.full((3, 2), float(i)).t() for i in range(3)]

    def a() -> list[torch.Tensor]:
        for tensor in sent:
            transport.send(THERE, tensor)
        return sent

    def b() -> list[torch.Tensor]:
        return [transport.recv(THERE) for _ in sent]

    found = hub.run({"b": b, "a": a})["b"]
    assert [t[0, 0].item() for t in found] == [0, 1, 2]
    assert {t.stride() for t in found} == {(1, 2)}


def test_a_message_is_a_copy() -> None:
    hub = Hub()
    transport = LocalTransport(hub)
    tensor = torch.zeros(2, 3)
    with hub.turn:
        transport.send(THERE, tensor)
        tensor.add_(1)
        assert transport.recv(THERE).sum() == 0


def test_devices_take_turns() -> None:
    """Each runs until it waits; no other runs meanwhile."""
    hub = Hub()
    transport = LocalTransport(hub)
    log: list[str] = []

    def program(name: str, first: Channel, second: Channel) -> Callable[[], None]:
        def run() -> None:
            for i in range(3):
                log.append(f"{name}{i} begins")
                torch.ones(64, 64) @ torch.ones(64, 64)  # torch lets go of Python's own lock here
                log.append(f"{name}{i} ends")
                transport.send(first, torch.zeros(2, 3))
                transport.recv(second)

        return run

    hub.run({"a": program("a", THERE, BACK), "b": program("b", BACK, THERE)})
    assert len(log) == 12
    for begin, end in zip(log[::2], log[1::2], strict=True):
        assert end == begin.replace("begins", "ends")


def test_a_message_that_never_comes_is_named() -> None:
    """At once: whoever could send it waits, too, or has ended."""
    hub = Hub()
    transport = LocalTransport(hub)
    with pytest.raises(RuntimeError, match=r"waits for activation 'x' from stage 0 \(a\)"):
        hub.run({"b": lambda: transport.recv(THERE)})
    hub = Hub()
    transport = LocalTransport(hub)
    both = {"a": lambda: transport.recv(BACK), "b": lambda: transport.recv(THERE)}
    with pytest.raises(RuntimeError, match="nobody is left to send"):
        hub.run(both)
    hub = Hub()
    transport = LocalTransport(hub)
    with pytest.raises(RuntimeError, match="nobody is left to send"):
        hub.run({"a": lambda: torch.zeros(1), "b": lambda: transport.recv(THERE)})


def test_one_devices_failure_ends_all() -> None:
    hub = Hub()
    transport = LocalTransport(hub)

    def fails() -> torch.Tensor:
        transport.recv(THERE)
        raise ZeroDivisionError("in the model")

    def waits() -> torch.Tensor:
        transport.send(THERE, torch.zeros(2, 3))
        return transport.recv(BACK)

    with pytest.raises(ZeroDivisionError, match="in the model"):
        hub.run({"a": waits, "b": fails})


def test_devices_must_agree() -> None:
    transport = LocalTransport(Hub())
    transport.agree(Subject(0), "1234", "a")
    transport.agree(Subject(0), "1234", "b")
    with pytest.raises(BatchError, match=r"the batch of step 0 differs .* a has 1234, c has 5678"):
        transport.agree(Subject(0), "5678", "c")


def test_each_device_computes_with_its_own_number_of_threads() -> None:
    """Also after a wait, in which another device may have set another number."""
    before = torch.get_num_threads()
    hub = Hub({"a": 1, "b": 2})
    transport = LocalTransport(hub)
    found: dict[str, list[int]] = {"a": [], "b": []}

    def a() -> None:
        found["a"].append(torch.get_num_threads())
        transport.send(THERE, torch.ones(2, 3))
        transport.recv(BACK)
        found["a"].append(torch.get_num_threads())

    def b() -> None:
        found["b"].append(torch.get_num_threads())
        transport.recv(THERE)
        found["b"].append(torch.get_num_threads())
        transport.send(BACK, torch.ones(2, 3))

    try:
        hub.run({"a": a, "b": b})
    finally:
        torch.set_num_threads(before)
    assert found == {"a": [1, 1], "b": [2, 2]}
