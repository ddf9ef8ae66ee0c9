"""Times of a bundle's process beside computing: messages and instructions.

Measured with the runtime's own classes. This file knows no files; it runs inside a worker.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from bigbrain_fx.measure.host.measure import synchronise
from bigbrain_fx.runtime import (
    Channel,
    Device,
    Hub,
    LocalTransport,
    Stage,
    Stream,
    Training,
    Transport,
    adamw,
)

_SMALL, _LARGE = 2**10, 2**18  # elements: 4 KiB, where the message counts, and 1 MiB
_BATCH = 8  # messages that are timed together: a process's clock is coarse
_BETWEEN = 2**21  # elements written between messages, 8 MiB: a stage's pass leaves caches so
_MICRO_BATCHES = 16
_ROWS = 16 * 8
_STEPS = 15

Clock = Callable[[], float]
Ways = tuple[Channel, Channel]
"""There and back between two devices."""


def message_costs(
    transport: Transport,
    names: tuple[str, str],
    leads: bool,
    rounds: int,
    shared_cores: bool,
    device: torch.device,
) -> tuple[float, float]:
    """Send and receive in turn with a peer; both call this, and one leads.

    Args:
        transport: of this process; of those over nccl one that was made with `channels`.
        names: of the two devices, the leader's first.
        leads: whether this is the leader.
        rounds: how often.
        shared_cores: whether devices leave no core idle: then what gloo's own threads do for a
            message is time that the device cannot compute in.
        device: where the messages' tensors are.

    Returns:
        Seconds of this process for one message, and the bytes a second of larger ones beyond that.
        Both are the middle of sending and receiving.
    """
    now: Clock = time.process_time if shared_cores else time.thread_time
    with _one_thread():
        small_s, large_s = (
            _handled_s(transport, ways, leads, rounds, now, device) for ways in channels(names)
        )
    beyond_s = max(large_s - small_s, large_s / 10)  # a noisy clock must not make bytes free
    return small_s, 4 * (_LARGE - _SMALL) / beyond_s


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let no other thread compute: a process's clock counts those, too, and that they spin."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def stretched(own: Mapping[str, float], share: float) -> dict[str, float]:
    """Turn seconds of a processor into a device's: it has a share of one, `processor_share`.

    A device that may run an eighth of the time is held up eight times as long by a message.
    """
    return {
        key: each * share if key.endswith("_per_s") else each / share for key, each in own.items()
    }


def round_s(link: Mapping[str, float]) -> float:
    """Return what a round of large messages takes at least on a link that was measured."""
    return 2 * _BATCH * (link["latency_s"] + 4 * _LARGE / link["bytes_per_s"])


def channels(names: tuple[str, str]) -> tuple[Ways, Ways]:
    """Return what `message_costs` sends on: small messages there and back, and large ones.

    Over nccl each is a group of two processes, made with the transport.
    """
    return _ways(names, 900, _SMALL), _ways(names, 902, _LARGE)


def _ways(names: tuple[str, str], tag: int, numel: int) -> Ways:
    leader, peer = names
    there = Channel(tag, "activation", "x", 0, 1, leader, peer, (numel,), torch.float32)
    back = Channel(tag + 1, "activation", "x", 1, 0, peer, leader, (numel,), torch.float32)
    return there, back


def _handled_s(
    transport: Transport, ways: Ways, leads: bool, rounds: int, now: Clock, device: torch.device
) -> float:
    there, back = ways
    transport.begin_step(((back if leads else there, rounds * _BATCH),))
    message, taken_s = torch.zeros(there.shape, device=device), []
    between = torch.zeros(_BETWEEN if device.type == "cpu" else 0)
    for _ in range(rounds):
        synchronise(device)  # the time is this process's own: a GPU's queue must not be full
        start_s, computed_s = now(), 0.0
        for turn in range(2 * _BATCH):
            computed_s += _computed_s(between)
            if leads == (turn % 2 == 0):
                transport.send(there if leads else back, message)
            else:
                transport.recv(back if leads else there)
        taken_s.append((now() - start_s - computed_s) / (2 * _BATCH))
    transport.finish()
    synchronise(device)
    return statistics.median(taken_s[1:] or taken_s)  # the first carries the header


def _computed_s(between: Tensor) -> float:
    """Write what is in no cache afterwards, as a stage does between its messages; return its time.

    Messages sent in a row find all of theirs in caches, and take a third of what they take in a
    step.
    """
    start_s = time.thread_time()
    between.add_(1.0)
    return time.thread_time() - start_s


# ---------------------------------------------------------------------- instructions


class _Tiny(Stage):
    returns = ("loss",)
    w: Tensor

    def __init__(self) -> None:
        super().__init__(w=(8,))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w).sum()


class _Alone(Device):
    name = "alone"
    names = ("alone",)
    stages: Mapping[int, type[Stage]] = {0: _Tiny}
    loss = 0, "loss"

    def step_once(self) -> None:
        for micro in range(self.micro_batches):
            self.forward(0, micro, x=self.batch("x", micro))
            self.backward(0, micro)
        self.optimizer_step()


class _Many(_Alone):
    micro_batches = _MICRO_BATCHES


def _batches(seed: int) -> Iterator[dict[str, Tensor]]:
    batch = {"x": torch.ones(_ROWS, 8)}
    while True:
        yield batch


def instruction_costs(device: torch.device) -> tuple[float, float]:
    """Run the smallest of stages in the runtime, on a device.

    Returns:
        Seconds around each forward or backward of a stage, and once a step. They leave out the ops
        themselves and their part of autograd's walk.
    """
    many_s, one_s = _step_s(_Many, device), _step_s(_Alone, device)
    each_s = (many_s - one_s) / (_MICRO_BATCHES - 1)
    around_s = max(0.0, (each_s - _ops_s(device)) / 2)
    return around_s, max(0.0, one_s - each_s)


def _step_s(cls: type[Device], where: torch.device) -> float:
    stream = Stream(_batches, 0, {"x": ("x",)}, (), cls.micro_batches, where)
    device = cls(LocalTransport(Hub()), stream, 0, where)
    device.load({"w": torch.ones(8)}, {"w": cls.name})
    device.train_with(Training(adamw))
    taken_s = []
    for step in range(_STEPS):
        synchronise(where)
        start_s = time.thread_time()
        with device.transport.hub.turn:  # type: ignore[attr-defined]  # it is a LocalTransport
            device.run_step(step)
        taken_s.append(time.thread_time() - start_s)
    return statistics.median(taken_s[3:])


def _ops_s(where: torch.device) -> float:
    """Time the same ops without the runtime, as profiles have them."""
    x, seed = torch.ones(8, 8, device=where), torch.ones((), device=where)
    w = torch.ones(8, requires_grad=True, device=where)
    total, taken_s = torch.zeros(8, device=where), []
    for _ in range(_STEPS * 4):
        synchronise(where)
        start_s = time.thread_time()
        loss = (x * w).sum()
        total.add_(torch.autograd.grad([loss], [w], [seed])[0])
        taken_s.append(time.thread_time() - start_s)
    return statistics.median(taken_s[3:])
