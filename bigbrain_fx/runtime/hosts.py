"""The word that the supervisor that decides is lost; copied into bundles of `--with hosts`."""

from __future__ import annotations

from dataclasses import dataclass

from .control import Control


@dataclass(frozen=True)
class LastDuty:
    """Task of a device when the supervisor that decides is lost.

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


def listen(control: Control) -> None:
    """Note that the supervisor that decides is lost."""

    def lose(
        files: tuple[int, ...],
        host: str,
        here: list[str],
        places: list[tuple[str, list[str]]],
        is_gone: bool,
    ) -> None:
        hosts = tuple((name, tuple(devices)) for name, devices in places)
        control.last = LastDuty(host, tuple(here), hosts, is_gone)
        control.generation += 1  # which nobody meets in: whoever waits for a message leaves it
        control.on_generation()

    control.listen_to({"last_commit": lose})
