"""Checkpoints where a replica is lost for good: others that have its states write its parts.

So a commit has the parts of all devices, and is read by all. Copied into bundles with replicas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .board import last_due, miss
from .checkpoints import Checkpoints
from .ledger import part_key, text_of
from .state import State
from .state_parts import part_of_state

if TYPE_CHECKING:
    from .checked_device import CheckedDevice


class InheritingCheckpoints(Checkpoints):
    """A device's part in checkpoints, and those of devices that are lost."""

    def __init__(self, *given: Any, **more: Any) -> None:  # noqa: ANN401  # as of Checkpoints
        super().__init__(*given, **more)
        self.also: dict[str, frozenset[str]] = {}  # lost devices -> what this has of their states
        self.images: dict[str, bytearray] = {}  # of them

    def go_on_with(
        self, names: Sequence[str], also: Mapping[str, frozenset[str]], finished: int
    ) -> None:
        """Be one of fewer devices, and write parts of lost ones.

        Args:
            names: of the devices.
            also: lost ones whose parts this writes -> what their states have.
            finished: steps.
        """
        led, self.names = self.leads, tuple(names)
        if self.leads and not led:
            self._lead()
        for name in also.keys() - self.also.keys():
            self._give_up(name, finished)
        self.also = dict(also)

    def _lead(self) -> None:
        """Write the records from now on; the one that is under way is nobody's."""
        self.misses.newest = self.newest()
        if self.misses.newest < self.begun:
            self.misses.miss(self.begun, "the device that writes the record was lost")

    def _give_up(self, lost: str, finished: int) -> None:
        """Miss commits under way for a device that writes its part no more."""
        for step in last_due(self, finished):
            is_begun = step <= max(self.begun, finished - 1)
            if is_begun and self.ledger.look(part_key(step, lost)) is None:
                miss(self.ledger, step, lost, f"{lost} was lost")

    def _copy(self, device: CheckedDevice, state: State) -> None:
        super()._copy(device, state)
        for name, held in self.also.items():
            part = part_of_state(state, held)
            if len(self.images.get(name, b"")) < part.nbytes:
                self.images[name] = bytearray(part.nbytes)
            part.copy_into(self.images[name])

    def _write_part(self, step: int) -> None:
        for name, image in self.images.items():  # its own part comes last: then all are there
            self.ledger.post(part_key(step, name), text_of(self.written(name, image)))
        super()._write_part(step)
