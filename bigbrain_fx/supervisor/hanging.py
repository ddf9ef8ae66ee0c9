"""Who hangs: of the devices that make no progress, those that wait for nobody.

Devices that wait for a hung one make no progress either; ending them would help nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

NEXT_BATCH = "the caller's next batch"  # what a device that rests says it waits for
SLOW_SHARE = 0.25  # of the limit: a device this long within one instruction is called slow


@dataclass
class Pulse:
    """What is known of a process's progress; times are of a monotonic clock, in seconds.

    Attributes:
        heard: when it last said anything: a stopped process says nothing.
        moved: when its main thread last began an instruction.
        instruction: the number of that.
        waits_for: the device that it waits for, and the message; None while it computes.
        is_at_work: whether it runs steps: before and after that no progress is expected.
        starved_s: how long it has had no processor, though ready to run, since it moved.
    """

    heard: float
    moved: float
    instruction: int = -1
    waits_for: tuple[str, str] | None = None
    is_at_work: bool = False
    starved_s: float = 0.0

    @property
    def computes(self) -> bool:
        """Whether it is up to this process alone that something happens."""
        return self.is_at_work and self.waits_for is None

    def beat(self, now: float, instruction: int, waits_for: tuple[str, str] | None) -> None:
        """Take note of a heartbeat."""
        if instruction != self.instruction or waits_for != self.waits_for:
            self.moved, self.starved_s = now, 0.0
        self.heard, self.instruction, self.waits_for = now, instruction, waits_for

    def excuse(self, seconds: float, now: float) -> None:
        """Take no account of time in which it had no processor."""
        self.starved_s += seconds
        self.heard = min(now, self.heard + seconds)
        self.moved = min(now, self.moved + seconds)


def hung(pulses: Mapping[str, Pulse], now: float, limit_s: float) -> list[str]:
    """Return the devices to end: silent ones, and those within one instruction for too long."""
    return [
        name
        for name, pulse in pulses.items()
        if now - pulse.heard > limit_s or (pulse.computes and now - pulse.moved > limit_s)
    ]


def locked(pulses: Mapping[str, Pulse], now: float, limit_s: float) -> bool:
    """Whether all wait for each other: a message was lost. Who rests waits for the caller."""
    rests = any(p.waits_for and p.waits_for[1] == NEXT_BATCH for p in pulses.values())
    return (
        bool(pulses)
        and not rests
        and all(
            pulse.waits_for is not None and pulse.is_at_work and now - pulse.moved > limit_s
            for pulse in pulses.values()
        )
    )


def slow(pulses: Mapping[str, Pulse], now: float, limit_s: float) -> list[str]:
    """Return the devices that others wait for, and that have long been in one instruction."""
    waited_for = {pulse.waits_for[0] for pulse in pulses.values() if pulse.waits_for}
    return [
        name
        for name, pulse in pulses.items()
        if name in waited_for and pulse.computes and now - pulse.moved > SLOW_SHARE * limit_s
    ]
