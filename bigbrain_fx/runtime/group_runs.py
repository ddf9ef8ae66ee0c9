"""Stages that the ranks of a tensor group run together, as a feature of a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .feature import Feature
from .group import Group
from .modules import active


class GroupRuns(Feature):
    """Let stages find their group while they run, and add up what ranks wait to add."""

    def setup(self, device: Any) -> None:  # noqa: ANN401  # a PlannedDevice, which knows this file
        """Join the group."""
        self.device = device
        about = device.members, device.name, device.channels
        self.group = device.group = Group(*about, device._send, device._receive)

    @contextmanager
    def running(self, stage: int, micro: int, phase: str) -> Iterator[None]:
        """Let the ranks exchange parts of one micro-batch."""
        self.group.begin(*self.device.stream.rows_of(micro))
        if phase == "backward":
            yield
            self._add_waiting(stage, micro)
            return
        active.group = self.group
        try:
            yield
        finally:
            active.group = None

    def _add_waiting(self, stage: int, micro: int) -> None:
        found = self.group.sums_of_waiting(self.device.parameters)
        for name, gradient in found.items():
            self.device._add(name, stage, micro, gradient)
