"""Pipelines in a line, given in seconds and bytes: what orders are tried on, here and in tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from bigbrain_fx.planning import Message, TimedStages, VirtualStages


def virtual_line(
    device_of: Sequence[int],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    backward_weight_s: Sequence[float | None],
    micro_batches: int,
    *,
    wire_s: float | Mapping[tuple[int, int], float] = 0.0,
    latency_s: float = 0.0,
    handling_s: float = 0.0,
    instruction_s: float = 0.0,
    saved_bytes: Sequence[float] = (),
    waiting_bytes: Sequence[float] = (),
    memory_bytes: float | Mapping[int, float] = float("inf"),
) -> VirtualStages:
    """Return stages in a line, each of which reads the one before.

    Args:
        device_of: per stage.
        forward_s: per stage.
        backward_s: per stage, of what does not wait.
        backward_weight_s: per stage; None where nothing waits.
        micro_batches: of a step.
        wire_s: of a message between devices, there and back, or by (from, to).
        latency_s: on top.
        handling_s: at each end of a message.
        instruction_s: on top of each job.
        saved_bytes: per stage, from Forward to Backward; 1 where they are left out.
        waiting_bytes: per stage, from Backward to BackwardWeight; likewise.
        memory_bytes: of every device, or by device.
    """
    message = partial(_message, device_of, wire_s, latency_s, handling_s)
    devices = tuple(dict.fromkeys(device_of))
    count, nothing = len(device_of), dict.fromkeys(devices, 0.0)
    room = (
        memory_bytes if isinstance(memory_bytes, Mapping) else dict.fromkeys(devices, memory_bytes)
    )
    timed = TimedStages(
        tuple(device_of),
        tuple(forward_s),
        tuple(backward_s),
        tuple(message(stage, stage + 1) for stage in range(count - 1)),
        tuple(message(stage + 1, stage) for stage in range(count - 1)),
        nothing,
        dict.fromkeys(devices, instruction_s),
        nothing,
    )
    ones = (1.0,) * count
    return VirtualStages(
        timed,
        micro_batches,
        tuple(backward_weight_s),
        tuple(saved_bytes) or ones,
        tuple(waiting_bytes) or ones,
        room,
    )


def _message(
    device_of: Sequence[int],
    wire_s: float | Mapping[tuple[int, int], float],
    latency_s: float,
    handling_s: float,
    source: int,
    target: int,
) -> Message:
    """Return what goes from one stage to another; within a device it takes no time."""
    ends = device_of[source], device_of[target]
    if ends[0] == ends[1]:
        return Message(source, target, 0)
    wire = wire_s if isinstance(wire_s, float | int) else wire_s[ends]
    return Message(source, target, 0, wire, latency_s, handling_s, handling_s)
