"""Commits during training: who does what, with a supervisor or without.

    every device   copies its state, and a thread of its own writes it to the disk
    rank 0         writes the record when all have reported, then removes older commits
    after a death  all devices start again from the newest commit that every one of them can load;
                   with a supervisor one process alone, which makes up for what the dead one owes

Training waits for the copy only. A commit that cannot be written is missed, with a warning: the
older ones stay. Devices tell each other what they have written by a ledger, which keeps it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from .commit_start import CommitOptions, Misses, Start, decided, make_folder, reason_of
from .commits import KEPT, drop, prune, prune_folders, write_record, write_shard
from .disk import Disk
from .image import Buffer
from .limits import tell
from .loading import Loadable, Loaded, first_loadable, load_shard
from .records import (
    BrokenError,
    CommitError,
    FencedError,
    Record,
    Shard,
    Told,
    about_of,
    folder_name,
    graph_in,
    part_key,
    read_records,
    record_of,
    told_of,
)
from .state import State, restore, state_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from .bundle import Bundle
    from .checked_device import CheckedDevice


class Ledger:
    """What devices have said, by key.

    Args:
        store: of all processes, or of the threads of one.
        deadline_s: longest wait for a word.
        as_json: whoever started this process reads events, as JSON, from what it writes.
    """

    def __init__(self, store: Store, deadline_s: float, *, as_json: bool = False) -> None:
        self.store: Any = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        self.store.set_timeout(timedelta(seconds=deadline_s))
        self.as_json = as_json

    def post(self, key: str, text: str) -> None:
        """Say something."""
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

    def report(self, event: str, device: str, step: int, facts: Mapping[str, object]) -> bool:
        """Tell who started the run of an event; return whether people hear it from there alone."""
        if self.as_json:
            tell(json.dumps({"event": event, "device": device, **facts}))
        return self.as_json


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
        self.wanted_keep, self.keep = keep, keep or KEPT
        self.folder, self.every, self.name = folder, every, name
        self.names = self.parts = tuple(names)  # who is there, and whose parts make a commit
        self.ledger, self.about = ledger, dict(about)
        self.in_background = in_background
        self.disk = disk or Disk()
        self.generation = 0
        self.unusable: list[Record] = []
        self.buffer: Buffer = bytearray()
        self.begun_with = ""  # the folder of the commit that the run resumed
        self.begun = -1  # the step of the newest commit that this device has begun
        self.misses = Misses(self._say, self._report)
        self.warned = 0  # times
        self.fenced: FencedError | None = None
        self.thread: threading.Thread | None = None

    needed: Collection[str] = ()  # folders of commits that stay, however old

    @property
    def leads(self) -> bool:
        """Whether this device's process decides and writes the records."""
        return self.name == self.names[0]

    # ------------------------------------------------------------------ the start

    def begin(self, device: CheckedDevice, *, resume: bool, restarted: bool = False) -> int:
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
        start, is_first = self.enter(resume=resume, restarted=restarted)
        if start.records:
            return self._resume(device, [record_of(text.encode(), "") for text in start.records])
        self.commit(device)
        if is_first:
            self.settle()
        return 0

    def enter(self, *, resume: bool, restarted: bool = False) -> tuple[Start, bool]:
        """Decide for all devices, or hear it; return also whether no process has before."""
        said = self.ledger.look("begin")
        is_first = said is None or bool(Start(**json.loads(said)).error)
        if self.leads and is_first:
            place = self.folder, self.wanted_keep, self.disk, self._warn
            begin = decided(*place, resume=resume, restarted=restarted)
            self.ledger.post("begin", json.dumps(asdict(begin)))
        start = Start(**json.loads(self.ledger.wait("begin")))
        if start.error:
            raise CommitError(start.error, code=start.code)
        self.generation, self.keep = start.generation, start.keep
        if self.leads and not is_first:
            self.misses.newest = self.newest()
        with suppress(*() if is_first else (CommitError,)):  # who comes later only misses commits
            make_folder(self.folder)
        return start, is_first

    def newest(self) -> int:
        """Return the step of the newest commit; -1: there is none, or none can be seen now."""
        with suppress(OSError, CommitError):
            return max((r.step for r in read_records(self.folder, _nobody)), default=-1)
        return -1

    def _resume(self, device: CheckedDevice, found: Sequence[Record]) -> int:
        loaded: list[Loaded] = []

        def problems(record: Record) -> list[str]:
            all_of_us = self._gathered(record, self._tried(record, loaded))
            for found in all_of_us:
                if found.refused:
                    raise CommitError(found.refused, code=found.code)
            return [found.broken for found in all_of_us if found.broken]

        record, self.unusable = first_loadable(
            found, problems, self._warn if self.leads else _nobody
        )
        restore(device, State.from_buffer(loaded[-1].image))
        self.begun_with = record.folder
        self.begun = self.misses.newest = record.step
        if self.leads:
            self._say(f"going on from the commit of step {record.step}")
        return record.step

    def _tried(self, record: Record, loaded: list[Loaded]) -> Loadable:
        """Load this device's part; return what to say of that: the others wait for a word."""
        expected = {**self.about, "torch": torch.__version__}
        try:
            loaded.append(load_shard(self.folder, record, self.name, expected, self._warn))
        except BrokenError as error:
            return Loadable(broken=str(error))
        except CommitError as error:
            return Loadable(refused=str(error), code=error.code)
        except Exception as error:
            return Loadable(broken=f"{self.name}: {reason_of(error)}")
        return Loadable()

    def _gathered(self, record: Record, mine: Loadable) -> list[Loadable]:
        """Tell the others what this device can load; return what all can."""
        what = f"load/{record.folder}"
        self.ledger.post(f"{what}/{self.name}", json.dumps(asdict(mine)))
        told = [self.ledger.wait(f"{what}/{name}") for name in self.names]
        return [Loadable(**json.loads(text)) for text in told]

    # ------------------------------------------------------------------ commits

    def after_step(self, device: CheckedDevice, step: int) -> None:
        """Begin a commit if it is time for one.

        Raises:
            FencedError: another run has taken over.
        """
        if self.fenced is not None:
            raise self.fenced
        if self.is_due(step):
            self.commit(device)

    def is_due(self, step: int) -> bool:
        """Whether there is a commit after a step."""
        return bool(self.every) and (step + 1) % self.every == 0

    def close(self, device: CheckedDevice) -> None:
        """Commit the end of the run and wait until that is done."""
        self.commit(device)
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

    def commit(self, device: CheckedDevice) -> None:
        """Begin a commit of where a device is, unless its part is written."""
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

    def _copy(self, device: CheckedDevice, state: State) -> None:
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
        if not self.leads and said.missed:
            self.misses.miss(step, said.missed)
        elif not self.leads and said.is_written:
            self.misses.count = 0
        self.ledger.post(part_key(step, self.name), said.text)

    def written(self, name: str, image: Buffer) -> Told:
        """Write a device's part of a commit; return what to say of that."""
        try:
            shard = write_shard(self.folder, name, image, self.generation, disk=self.disk)
        except FencedError as error:
            self.fenced = error
            return Told(fenced=str(error))
        except Exception as error:  # the disk's, and memory that is lacking
            return Told(missed=f"{name} cannot write in {self.folder}: {reason_of(error)}")
        return Told(shard.manifest, shard.size)

    def _record_last(self, state: State) -> None:
        """Write the record if all others have done their parts: the devices take turns."""
        seen = [self.ledger.look(part_key(state.step, name)) for name in self.parts]
        reports = [told_of(text) for text in seen if text is not None]
        if len(reports) == len(seen) and self.ledger.claim(f"shard/{state.step}"):
            self._record(state, reports)

    def _record_all(self, state: State) -> None:
        """Wait for all devices' parts and write the record."""
        try:
            told = [self.ledger.wait(part_key(state.step, name)) for name in self.parts]
        except (TimeoutError, RuntimeError) as error:  # torch's stores raise the latter
            self.misses.miss(state.step, f"a device did not report: {error}")
            return
        self._record(state, [told_of(text) for text in told])

    def _record(self, state: State, reports: Sequence[Told]) -> None:
        try:
            for report in reports:
                if report.fenced:
                    raise FencedError(report.fenced, code="BX5018")
            for report in reports:
                if report.missed:
                    raise OSError(None, report.missed)
            told = zip(self.parts, reports, strict=True)
            shards = [Shard(name, state.step, said.manifest, said.size) for name, said in told]
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
            if not any(record.step == step for record in read_records(self.folder, _nobody)):
                drop(self.folder / folder_name(step, self.generation), self.disk)

    def _prune(self) -> None:
        """Remove older commits; those that cannot be removed stay, and go another time."""
        with suppress(OSError, FencedError):
            how = self.unusable, self.disk, self.keep, self.needed
            kept = prune(self.folder, self.generation, *how)
            self.ledger.post("kept", json.dumps([record.folder for record in kept]))

    def _prune_own(self) -> None:
        kept = self.ledger.look("kept")
        if kept is not None and not self.leads:
            with suppress(OSError):
                prune_folders(self.folder, json.loads(kept), self.disk)

    # ------------------------------------------------------------------ what people hear

    def _say(self, text: str) -> None:
        tell(f"{self.name}: {text}")

    def _report(self, event: str, step: int, facts: Mapping[str, object]) -> bool:
        return self.leads and self.ledger.report(event, self.name, step, facts)

    def _warn(self, text: str) -> None:
        """Say what is wrong with commits that are there; whoever starts the run is to read it."""
        self.warned += 1
        plain = text.removeprefix("WARNING: ").removeprefix("warning: ")
        if not self._report("warned", self.warned, {"text": plain}):
            self._say(text)


def _nobody(text: str) -> None:
    """Say nothing."""


def begin_together(
    committers: Mapping[str, Committer], devices: Mapping[str, CheckedDevice], *, resume: bool
) -> int:
    """Begin for all devices of one process; return the first step to run."""
    with ThreadPoolExecutor(len(devices)) as pool:
        begun = [
            pool.submit(committers[name].begin, device, resume=resume)
            for name, device in devices.items()
        ]
        return {future.result() for future in begun}.pop()


Kind = TypeVar("Kind", bound=Committer)


def committer_of(
    bundle: Bundle,
    device: CheckedDevice,
    ledger: Ledger,
    options: CommitOptions,
    *,
    in_background: bool = True,
    kind: type[Kind],
) -> Kind:
    """Return a device's part in the commits that were asked for."""
    about = {"plan": bundle.plan, "graph": graph_in(bundle.folder)}
    own = options.folder, options.every, device.name, device.names, ledger, about
    return kind(*own, in_background=in_background, keep=options.keep)
