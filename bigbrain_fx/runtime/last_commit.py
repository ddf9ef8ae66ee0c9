"""The last commit of a host's devices when the deciding supervisor is lost: one of all devices.

    every device here  is where its step began, and writes its part, and those of lost devices
                       whose states it holds, too
    the first of them  writes the record, which counts at once where the supervisor has ended; where
                       it may be there, and go on with others, the record is set aside

Only a host that has all devices of a replica can write it. The first of several such hosts does, as
hosts do not receive each other's messages any more. No device updates before all have voted. All
devices of a host are at one step once they know the same votes, which their agent provides.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from .checkpoint_format import Part, about_of, reason_of
from .checkpoint_store import ASIDE
from .hosts import LastDuty
from .standing import alike, heirs
from .state import State
from .state_parts import held_names, part_of_state, state_before_update

if TYPE_CHECKING:
    from .bundle import Bundle
    from .checkpoints import Checkpoints
    from .device import Device
    from .replay import ReplayTransport

Said = dict[str, Any]


class LastCommit:
    """One device's part in it.

    Args:
        bundle: as it was emitted.
        device: of this process.
        transport: of the device.
        checkpoints: of the device.
        duty: who is here, and who else was there.
        deadline_s: longest wait for what a device here says.
    """

    def __init__(
        self,
        bundle: Bundle,
        device: Device,
        transport: ReplayTransport,
        checkpoints: Checkpoints,
        duty: LastDuty,
        deadline_s: float | None,
    ) -> None:
        self.deadline_s = deadline_s
        self.bundle, self.device, self.transport = bundle, device, transport
        self.checkpoints, self.duty = checkpoints, duty
        self.control = transport.control
        self.names = [cls.name for cls in bundle.devices]
        self.lost = set(self.names) - set(duty.here)

    def keep(self) -> Said:
        """Write this device's part; return what to say: the record's file, or why there is none."""
        why = self._why_not()
        if why is not None:
            return {"text": why}
        if self.checkpoints.thread is not None:
            self.checkpoints.thread.join()  # it writes an older commit, or misses one
        parts = self._parts()
        self.control.post(f"last/{self.device.name}", json.dumps(parts))
        leads = self.device.name == min(self.duty.here, key=self.names.index)
        return self._record() if leads else {}

    # ------------------------------------------------------------------ whether there is one

    def _why_not(self) -> str | None:
        if not (self.control.peers and alike(self.bundle)):
            return "only replicas that are cut equally, without ZeRO and in-memory checkpoints, can"
        if not self._is_whole(self.duty.here):
            return "no replica is whole on this host"
        for host, devices in self.duty.places:
            if host == self.duty.host:
                return None
            if self._is_whole(devices):
                return f"{host} has a whole replica, too, and keeps it"
        return None

    def _is_whole(self, devices: Collection[str]) -> bool:
        """Whether some devices are all of a replica, and maybe more."""
        replicas: dict[int, set[str]] = {}
        for cls in self.bundle.devices:
            replicas.setdefault(cls.replica, set()).add(cls.name)
        return any(names <= set(devices) for names in replicas.values())

    # ------------------------------------------------------------------ parts, and the record

    def _parts(self) -> Said:
        """Write this device's part, and lost ones'; return the manifests by device."""
        peers = self.transport.peers
        if peers is None or peers.lacks is not None:
            return {"missed": f"the process of {self.device.name} had no state yet"}
        state, said = self._state(), dict[str, Said]()
        for name, part in self._states(state):
            image = bytearray(part.nbytes)
            part.copy_into(image)
            told = self.checkpoints.written(name, image)
            if told.why:
                return {"missed": told.why}
            said[name] = asdict(told)
        return {"step": state.step, "parts": said}

    def _state(self) -> State:
        state = state_before_update(self.device)
        return replace(state, facts={**self.checkpoints.about, **state.facts})

    def _states(self, state: State) -> Iterator[tuple[str, State]]:
        yield self.device.name, state
        inherit = heirs(self.bundle, self.lost)
        for cls in self.bundle.devices:
            if inherit.get(cls.name) == self.device.name:
                yield cls.name, part_of_state(state, held_names(cls))

    def _record(self) -> Said:
        try:
            return self._written([json.loads(self._heard(name)) for name in self.duty.here])
        except Exception as error:  # the disk's, the fence's: whoever waits must hear why
            return {"text": reason_of(error)}

    def _heard(self, name: str) -> str:
        """Wait for what a device here says of its part."""
        key, board = f"last/{name}", self.control.board
        with self.control.changed:
            if not self.control.changed.wait_for(lambda: key in board, self.deadline_s):
                raise TimeoutError(f"{name} did not say that its part is written")
            return board[key]

    def _written(self, told: list[Mapping[str, Any]]) -> Said:
        missed = [found["missed"] for found in told if "missed" in found]
        steps = {found["step"] for found in told if "missed" not in found}
        if missed or len(steps) != 1:
            return {"text": missed[0] if missed else f"devices were at the steps {sorted(steps)}"}
        parts = {name: part for found in told for name, part in found["parts"].items()}
        step, store = steps.pop(), self.checkpoints.store
        written = {name: Part(**parts[name]) for name in self.names}
        aside, about = not self.duty.is_gone, about_of(self._state().facts)
        store.commit(written, self.checkpoints.generation, about, aside=aside)
        return {"step": step, "file": f"{store.folder.resolve()}/commit-{step}.json{ASIDE * aside}"}
