"""What a supervisor's orders say: what a process is to be, to check, to take. Nouns only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Duty:
    """What a process is to be.

    Attributes:
        device: its name; None for a spare, which warms up and waits.
        rank: its number.
        local_rank: its number among those of this host, which chooses a GPU.
        epoch: the step to go on from, whose snapshot is in one of the slots; -1: from the start.
        slots: the step of the snapshot in each slot, -1 where there is none.
        files: the slots' file descriptors.
        again: all devices begin again, from the newest commit or, without one, from the start.
    """

    device: str | None
    rank: int = -1
    local_rank: int = 0
    epoch: int = -1
    slots: tuple[int, ...] = ()
    files: tuple[int, ...] = ()
    again: bool = False


@dataclass(frozen=True)
class TapeCheck:
    """A step of a device that a spare is to compute again; see `suspicion`.

    Attributes:
        rank: the device's number.
        file: holds the tape, and is this process's to close.
        start: of the tape's second part there.
        number: of the tape.
    """

    rank: int
    file: int
    start: int
    number: int


@dataclass(frozen=True)
class LastDuty:
    """What a device is to do when the supervisor that decides is lost; see `last_commit`.

    Attributes:
        host: where it is.
        here: the devices of that host.
        places: each host but the lost one, and its devices, in the order of the plan.
        is_gone: the supervisor has ended; else it may be there, and go on with others.
    """

    host: str
    here: tuple[str, ...]
    places: tuple[tuple[str, tuple[str, ...]], ...]
    is_gone: bool


@dataclass(frozen=True)
class Meeting:
    """What all devices told each other before they formed a generation.

    Attributes:
        generation: its number.
        expected: channel's tag -> the number of the message that its receiver waits for.
        layouts: tag -> shape and strides of the channel's messages, where somebody knows them.
        lacking: devices that take their state from peers -> the step that it is of.
    """

    generation: int
    expected: Mapping[int, int]
    layouts: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]]
    lacking: Mapping[str, int]


@dataclass(frozen=True)
class FedBatch:
    """Where the batch of a step is: in a file, which is this process's to close."""

    step: int
    file: int
    start: int
    size: int
