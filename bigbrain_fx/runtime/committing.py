"""Commits during training, when nothing but the processes of the bundle is there: who does what.

    every device   copies its state, and a thread of its own writes it to the disk
    rank 0         writes the record when all have reported, then removes older commits
    after a death  all devices start again from the newest commit that every one of them can load

Training waits for the copy only. A commit that cannot be written is missed, with a warning: the
older ones stay. Devices tell each other what they have written by a ledger, which keeps it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .commit_start import CommitOptions, CommitStart, Misses, make_folder, reason_of
from .commits import (
    KEPT,
    BrokenError,
    CommitError,
    FencedError,
    Loaded,
    Record,
    Shard,
    drop_parts,
    first_loadable,
    graph_in,
    load_shard,
    prune,
    prune_own,
    record_of,
    write_record,
    write_shard,
)
from .disk import Disk
from .image import Buffer
from .records import about_of, read_records
from .state import State, restore, state_of
from .telling import tell

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from .bundle import Bundle
    from .device import Device

SHARD = "shard"  # what a device tells the others of: its part


class Committer:
    """One device's part in the commits of a run.

    Args:
        folder: of all commits; on several hosts it may be one that each has for itself.
        every: how many steps from one commit to the next; 0 commits at the start and end only.
        name: of the device.
        names: of all devices, by rank; the first writes the records.
        ledger: that all devices share.
        about: what the states are of: hashes of plan and graph.
        in_background: off: `after_step` returns when the device's part is written.
        disk: where to write.
        keep: how many commits stay there; None: as many as the run kept that this goes on with.
    """

    def __init__(
        self,
        folder: Path,
        every: int,
        name: str,
        names: Sequence[str],
        ledger: Ledger,
        about: Mapping[str, Any],
        *,
        in_background: bool = True,
        disk: Disk | None = None,
        keep: int | None = None,
    ) -> None:
        self.wanted_keep = keep
        self.keep = keep or KEPT
        self.folder = folder
        self.every = every
        self.name = name
        self.names = self.parts = tuple(names)  # who is there, and whose parts make a commit
        self.ledger = ledger
        self.about = dict(about)
        self.in_background = in_background
        self.disk = disk or Disk()
        self.generation = 0
        self.unusable: list[Record] = []
        self.buffer: Buffer = bytearray()
        self.begun_with = ""  # the folder of the commit that the run resumed
        self.begun = -1  # the step of the newest commit that this device has begun
        self.misses = Misses(self._say)
        self.fenced: FencedError | None = None
        self.thread: threading.Thread | None = None

    @property
    def leads(self) -> bool:
        """Whether this device's process decides and writes the records."""
        return self.name == self.names[0]

    # ------------------------------------------------------------------ the start

    def begin(self, device: Device, *, resume: bool, restarted: bool = False) -> int:
        """Start, or go on from the last commit; return the first step to run.

        A new run commits its start first, so that there is always something to go on from.

        Args:
            device: with its weights and optimizer.
            resume: the user asks to go on: then there must be a commit.
            restarted: the launcher has started all processes again: go on if its first start has
                committed anything.

        Raises:
            CommitError: there is no commit to resume from, or there are some and nobody asked.
            StateError: the commit does not fit the device.
        """
        if self.leads:
            self.ledger.post("begin", json.dumps(self._start().decided(resume, restarted)))
        decided = json.loads(self.ledger.wait("begin"))
        if "error" in decided:
            raise CommitError(decided["error"], code=decided["code"])
        make_folder(self.folder)
        self._take_over(decided)
        if decided["records"]:
            return self._resume(device, [record_of(t.encode(), "") for t in decided["records"]])
        self._commit(device)
        self.settle()
        return 0

    def _start(self) -> CommitStart:
        return CommitStart(self.folder, self.wanted_keep, self.disk, self._warn)

    def _take_over(self, decided: Mapping[str, Any]) -> None:
        """Know what was decided for all devices."""
        self.generation, self.keep = decided["generation"], decided["keep"]

    def _resume(self, device: Device, found: Sequence[Record]) -> int:
        expected = {**self.about, "torch": torch.__version__}
        loaded: list[Loaded] = []

        def problems(record: Record) -> list[str]:
            mine = {"broken": "", "refused": "", "code": ""}
            try:
                loaded.append(load_shard(self.folder, record, self.name, expected, self._warn))
            except BrokenError as error:
                mine["broken"] = str(error)
            except CommitError as error:
                mine |= {"refused": str(error), "code": error.code}
            except Exception as error:  # the others wait for a word
                mine["broken"] = f"{self.name}: {reason_of(error)}"
            all_of_us = self._gathered(f"load/{record.folder}", mine)
            refused = [found for found in all_of_us if found["refused"]]
            if refused:
                raise CommitError(refused[0]["refused"], code=refused[0]["code"])
            return [found["broken"] for found in all_of_us if found["broken"]]

        quiet = (lambda _: None) if not self.leads else self._warn
        record, self.unusable = first_loadable(found, problems, quiet)
        restore(device, State.from_buffer(loaded[-1].image))
        self.begun_with = record.folder
        self.begun = self.misses.newest = record.step
        if self.leads:
            self._say(f"going on from the commit of step {record.step}")
        return record.step

    def _gathered(self, what: str, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        self.ledger.post(f"{what}/{self.name}", json.dumps(mine))
        return [json.loads(self.ledger.wait(f"{what}/{name}")) for name in self.names]

    # ------------------------------------------------------------------ commits

    def after_step(self, device: Device, step: int) -> None:
        """Begin a commit if it is time for one.

        Raises:
            FencedError: another run has taken over.
        """
        if self.fenced is not None:
            raise self.fenced
        if self.is_due(step):
            self._commit(device)

    def is_due(self, step: int) -> bool:
        """Whether there is a commit after a step."""
        return bool(self.every) and (step + 1) % self.every == 0

    def close(self, device: Device) -> None:
        """Commit the end of the run and wait until that is done."""
        self._commit(device)
        self.settle()
        if self.leads:
            self.misses.end(device.finished)

    def settle(self) -> None:
        """Wait for the commit that is being written.

        Raises:
            FencedError: as `after_step`.
        """
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.fenced is not None:
            raise self.fenced

    def _commit(self, device: Device) -> None:
        if device.finished == self.begun:
            return
        self.settle()  # it has the buffer
        state = state_of(device, self.about)
        self._copy(device, state)
        self.begun = state.step
        if not self.in_background:
            self._write(state)
            return
        self.thread = threading.Thread(target=self._write, args=(state,), daemon=True)
        try:
            self.thread.start()
        except RuntimeError:  # the system gives no thread: this one has to wait
            self.thread = None
            self._write(state)

    def _copy(self, device: Device, state: State) -> None:
        if len(self.buffer) < state.nbytes:
            self.buffer = device.room_for_state(state.nbytes + state.nbytes // 64 + 4096)
        state.copy_into(self.buffer)

    def _write(self, state: State) -> None:
        """Write this device's part and say so; of `state` only step and facts are still right."""
        self._write_part(state.step)
        if not self.in_background:
            self._record_last(state)
        elif self.leads:
            self._record_all(state)
        self._prune_own()

    def _write_part(self, step: int) -> None:
        """Write this device's part of a commit, and tell all whether that went well.

        The others wait for the word: whatever goes wrong here, it must be said.
        """
        said = self.written(self.name, self.buffer)
        if not self.leads:
            self._hear_own(step, said)
        self.ledger.post(f"{SHARD}/{step}/{self.name}", json.dumps(said))

    def written(self, name: str, image: Buffer) -> dict[str, str | int]:
        """Write a device's part of a commit; return what to say of that."""
        try:
            shard = write_shard(self.folder, name, image, self.generation, disk=self.disk)
        except FencedError as error:
            self.fenced = error
            return {"fenced": str(error)}
        except Exception as error:  # the disk's, and memory that is lacking
            return {"missed": f"{name} cannot write in {self.folder}: {reason_of(error)}"}
        return {"manifest": shard.manifest, "size": shard.size}

    def _hear_own(self, step: int, said: Mapping[str, Any]) -> None:
        if "missed" in said:
            self.misses.miss(step, str(said["missed"]))
        elif "fenced" not in said:
            self.misses.count = 0

    def _record_last(self, state: State) -> None:
        """Write the record if all others have done their parts: the devices take turns."""
        key = f"{SHARD}/{state.step}"
        seen = [self.ledger.look(f"{key}/{name}") for name in self.parts]
        reports = [report for report in seen if report is not None]
        if len(reports) == len(seen) and self.ledger.claim(key):
            self._record(state, reports)

    def _record_all(self, state: State) -> None:
        """Wait for all devices' parts and write the record."""
        try:
            reports = [self.ledger.wait(f"{SHARD}/{state.step}/{name}") for name in self.parts]
        except (TimeoutError, RuntimeError) as error:  # torch's stores raise the latter
            self.misses.miss(state.step, f"a device did not report: {error}")
            return
        self._record(state, reports)

    def _record(self, state: State, reports: Sequence[str]) -> None:
        found = dict(zip(self.parts, map(json.loads, reports), strict=True))
        missed = [report["missed"] for report in found.values() if "missed" in report]
        fenced = [report["fenced"] for report in found.values() if "fenced" in report]
        try:
            if fenced:
                raise FencedError(fenced[0], code="BX5018")
            if missed:
                raise OSError(None, missed[0])
            shards = [Shard(n, state.step, r["manifest"], r["size"]) for n, r in found.items()]
            about = about_of(state.facts)
            write_record(self.folder, shards, self.generation, about, self.disk)
        except FencedError as error:
            self.fenced = error
        except Exception as error:  # as in `_write_part`
            self.misses.miss(state.step, reason_of(error))
            self._drop(state.step)
        else:
            self.misses.hit(state.step)
            self._prune()

    def _drop(self, step: int) -> None:
        """Remove the parts of a commit of which all have said how theirs went, and one missed."""
        with suppress(OSError):
            if not any(record.step == step for record in read_records(self.folder, lambda _: None)):
                drop_parts(self.folder, step, self.generation, self.disk)

    def _prune(self) -> None:
        """Remove older commits; those that cannot be removed stay, and go another time."""
        with suppress(OSError, FencedError):
            how = self.unusable, self.disk, self.keep, self._needed()
            kept = prune(self.folder, self.generation, *how)
            self.ledger.post("kept", json.dumps([record.folder for record in kept]))

    def _needed(self) -> tuple[str, ...]:
        """Return the commits that stay, however old they are."""
        return ()

    def _prune_own(self) -> None:
        kept = self.ledger.look("kept")
        if kept is not None and not self.leads:
            with suppress(OSError):
                prune_own(self.folder, self.name, json.loads(kept), self.disk)

    def _say(self, text: str) -> None:
        tell(f"{self.name}: {text}")

    def _warn(self, text: str) -> None:
        """Say what is wrong with commits that are there; whoever starts the run is to read it."""
        self._say(text)


def begin_together(
    committers: Mapping[str, Committer], devices: Mapping[str, Device], *, resume: bool
) -> int:
    """Begin for all devices of one process; return the first step to run."""
    with ThreadPoolExecutor(len(devices)) as pool:
        begun = [
            pool.submit(committers[name].begin, device, resume=resume)
            for name, device in devices.items()
        ]
        return {future.result() for future in begun}.pop()


def committer_of(
    bundle: Bundle, device: Device, ledger: Ledger, options: CommitOptions, in_background: bool
) -> Committer:
    """Return a device's part in the commits that were asked for."""
    about = {"plan": bundle.plan, "graph": graph_in(bundle.folder)}
    return Committer(
        options.folder,
        options.every,
        device.name,
        device.names,
        ledger,
        about,
        in_background=in_background,
        keep=options.keep,
    )


class Ledger(Protocol):
    """Where devices tell each other what they have done."""

    def post(self, key: str, text: str) -> None:
        """Say something, once."""

    def look(self, key: str) -> str | None:
        """Return what was said, if it was."""

    def wait(self, key: str) -> str:
        """Return what was said, as soon as it is."""

    def claim(self, key: str) -> bool:
        """Return whether this is the first to ask for something."""


class StoreLedger:
    """A ledger in a store that all processes, or the threads of one, share."""

    def __init__(self, store: Store, deadline_s: float) -> None:
        self.store: Any = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        self.store.set_timeout(timedelta(seconds=deadline_s))

    def post(self, key: str, text: str) -> None:
        """Say something, once."""
        self.store.set(f"commits/{key}", text)

    def look(self, key: str) -> str | None:
        """Return what was said, if it was."""
        return self.wait(key) if self.store.check([f"commits/{key}"]) else None

    def wait(self, key: str) -> str:
        """Return what was said, as soon as it is."""
        return str(self.store.get(f"commits/{key}").decode())

    def claim(self, key: str) -> bool:
        """Return whether this is the first to ask for something."""
        return bool(self.store.add(f"commits/claim/{key}", 1) == 1)
