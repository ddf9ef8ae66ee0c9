"""Checkpoints during training: who does what, with a supervisor or without.

    every device   copies its state, and a thread of its own writes it to the store
    rank 0         commits when all have reported, then removes older checkpoints
    after a death  all devices start again from the newest checkpoint that every one of them can
                   load; with a supervisor one process alone, which makes up for the dead one

Training waits for the copy only. A checkpoint that cannot be written is missed, with a warning: the
older ones stay. Devices tell each other what they have written by a ledger, which keeps it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from .checkpoint_format import (
    BrokenError,
    CommitError,
    FencedError,
    Part,
    Record,
    Say,
    about_of,
    graph_in,
    reason_of,
    record_of,
)
from .checkpoint_options import (
    CheckpointOptions,
    Ledger,
    Start,
    decided,
    make_folder,
    part_key,
    read_as,
    text_of,
)
from .checkpoint_store import KEPT, CheckpointStore, Loaded, first_loadable
from .image import Buffer
from .limits import tell
from .state import State, restore, state_of

if TYPE_CHECKING:
    from .bundle import Bundle
    from .checked_device import CheckedDevice


class Checkpoints:
    """One device's part in the checkpoints of a run.

    Args:
        store: of all checkpoints; on several hosts it may be one that each has for itself.
        every: steps from one to the next; 0: at the start and end only.
        name: of the device.
        names: of all devices, by rank; the first commits.
        ledger: that all devices share.
        about: what the states are of: hashes of plan and graph.
        in_background: off: `after_step` returns when the device's part is written.
        keep: how many checkpoints stay; None: as many as the run kept that this goes on with.
    """

    def __init__(
        self,
        store: CheckpointStore,
        every: int,
        name: str,
        names: Sequence[str],
        ledger: Ledger,
        about: Mapping[str, Any],
        *,
        in_background: bool = True,
        keep: int | None = None,
    ) -> None:
        self.wanted_keep, self.keep = keep, keep or KEPT
        self.store, self.every, self.name = store, every, name
        self.names = self.parts = tuple(names)  # who is there, and whose parts make a checkpoint
        self.ledger, self.about = ledger, dict(about)
        self.in_background = in_background
        self.generation = 0
        self.unusable: list[Record] = []
        self.buffer: Buffer = bytearray()
        self.begun_with = ""  # the folder of the checkpoint that the run resumed
        self.begun = -1  # the step of the newest one that this device has begun
        self.misses = Misses(self._say, self._report)
        self.warned = 0  # times
        self.fenced: FencedError | None = None
        self.thread: threading.Thread | None = None
        self.is_written = True  # by its thread

    @property
    def leads(self) -> bool:
        """Whether this device's process decides and commits."""
        return self.name == self.names[0]

    # ------------------------------------------------------------------ the start

    def begin(self, device: CheckedDevice, *, resume: bool, restarted: bool = False) -> int:
        """Start, or go on from the last checkpoint; return the first step to run.

        A new run commits its start first, so that there is always something to go on from.

        Args:
            device: with its weights and optimizer.
            resume: the user asks to go on: then there must be a checkpoint.
            restarted: the launcher has started all processes again: go on if its first start has
                committed anything.

        Raises:
            CommitError: there is none to resume from, or there are some and nobody asked.
            StateError: the checkpoint does not fit the device.
        """
        start, is_first = self.enter(resume=resume, restarted=restarted)
        if start.records:
            return self._resume(device, [record_of(text.encode(), "") for text in start.records])
        self.commit(device)
        if is_first:
            self.settle()
        return 0

    def enter(self, *, resume: bool, restarted: bool = False) -> tuple[Start, bool]:
        """Decide for all devices, or receive it; return also whether no process has before."""
        said = self.ledger.look("begin")
        is_first = said is None or bool(read_as(Start, said).error)
        if self.leads and is_first:
            how = self.store, self.wanted_keep, self._warn
            self.ledger.post("begin", text_of(decided(*how, resume=resume, restarted=restarted)))
        start = read_as(Start, self.ledger.wait("begin"))
        if start.error:
            raise CommitError(start.error, code=start.code)
        self.generation, self.keep = start.generation, start.keep
        if self.leads and not is_first:
            self.misses.newest = self.newest()
        with suppress(*() if is_first else (CommitError,)):  # a later process misses checkpoints
            make_folder(self.store.folder)
        return start, is_first

    def newest(self) -> int:
        """Return the step of the newest checkpoint; -1: there is none, or none can be seen now."""
        with suppress(OSError, CommitError):
            return max((record.step for record in self.store.records()), default=-1)
        return -1

    def _resume(self, device: CheckedDevice, found: Sequence[Record]) -> int:
        loaded: list[Loaded] = []

        def problems(record: Record) -> list[str]:
            all_of_us = self._gathered(record, self._tried(record, loaded))
            for part in all_of_us:
                if part.code:
                    raise CommitError(part.why, code=part.code)
            return [part.why for part in all_of_us if part.why]

        say: Say = self._warn if self.leads else lambda _: None
        record, self.unusable = first_loadable(found, problems, say)
        restore(device, State.from_buffer(loaded[-1].image))
        self.begun_with = record.folder
        self.begun = self.misses.newest = record.step
        if self.leads:
            self._say(f"going on from the checkpoint of step {record.step}")
        return record.step

    def _tried(self, record: Record, loaded: list[Loaded]) -> Part:
        """Load this device's part; return what to say of that: the others wait for a word."""
        expected = {**self.about, "torch": torch.__version__}
        try:
            loaded.append(self.store.load(record, self.name, expected, self._warn))
        except BrokenError as error:
            return Part(why=str(error))
        except CommitError as error:
            return Part(why=str(error), code=error.code)
        except Exception as error:
            return Part(why=f"{self.name}: {reason_of(error)}")
        return Part()

    def _gathered(self, record: Record, mine: Part) -> list[Part]:
        """Tell the others what this device can load; return what all can."""
        what = f"load/{record.folder}"
        before = self.ledger.look(f"{what}/{self.name}")
        is_broken = bool(mine.why) and not mine.code
        if before is not None and is_broken and not read_as(Part, before).why:
            # the others have begun: they say nothing of an older one
            raise CommitError(
                f"{mine.why}: the run has begun with this checkpoint, and there is no "
                "in-memory checkpoint yet: go on from the newest one with --resume",
                code="BX5169",
            )
        self.ledger.post(f"{what}/{self.name}", text_of(mine))
        return [read_as(Part, self.ledger.wait(f"{what}/{name}")) for name in self.names]

    # ------------------------------------------------------------------ during training

    def after_step(self, device: CheckedDevice, step: int) -> None:
        """Begin a checkpoint if it is time for one.

        Raises:
            FencedError: another run has taken over.
        """
        if self.fenced is not None:
            raise self.fenced
        if self.is_due(step):
            self.commit(device)

    def is_due(self, step: int) -> bool:
        """Whether there is a checkpoint after a step."""
        return bool(self.every) and (step + 1) % self.every == 0

    def close(self, device: CheckedDevice) -> None:
        """Commit the end of the run and wait until that is done."""
        self.commit(device)
        self.settle()
        if self.leads:
            self.misses.end(device.finished)

    def settle(self) -> None:
        """Wait for the checkpoint that is being written, and meet the others anew meanwhile.

        Raises:
            FencedError: as `after_step`.
        """
        self.ledger.until(lambda: self.is_written)
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.fenced is not None:
            raise self.fenced

    def commit(self, device: CheckedDevice) -> None:
        """Begin a checkpoint of where a device is, unless its part is written."""
        step = device.finished
        if self.ledger.has_part(self.name, step) and (not self.leads or self.newest() >= step):
            self.begun = step
        if step == self.begun:
            return
        self.settle()  # it has the buffer
        state = state_of(device, self.about)
        self.is_written = False
        self._copy(device, state)
        self.begun = step
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
        try:
            self._write_part(state.step)
            self._commit_all(state)
            self._prune_own()
        finally:
            self.is_written = True
            self.ledger.wake()

    def _write_part(self, step: int) -> None:
        """Write this device's part, and tell all whether that went well: they wait for it."""
        said = self.written(self.name, self.buffer)
        if not self.leads and said.why and not said.code:
            self.misses.miss(step, said.why)
        elif not self.leads and not said.why:
            self.misses.count = 0
        self.ledger.post(part_key(step, self.name), text_of(said))

    def written(self, name: str, image: Buffer) -> Part:
        """Write a device's part of a checkpoint; return what to say of that."""
        try:
            return self.store.write_part(name, image, self.generation)
        except FencedError as error:
            self.fenced = error
            return Part(why=str(error), code=error.code)
        except Exception as error:  # the disk's, and memory that is lacking
            return Part(why=f"{name} cannot write in {self.store.folder}: {reason_of(error)}")

    def _commit_all(self, state: State) -> None:
        """Commit what all devices have written, if this process is to and they have."""
        parts = self._heard(state.step)
        if parts is None:
            return
        try:
            _require_written(parts.values())
            self.store.commit(parts, self.generation, about_of(state.facts))
        except FencedError as error:
            self.fenced = error
        except Exception as error:  # as in `written`
            self.misses.miss(state.step, reason_of(error))
            with suppress(OSError):
                self.store.drop(state.step, self.generation)
        else:
            self.misses.hit(state.step)
            self._prune()

    def _heard(self, step: int) -> dict[str, Part] | None:
        """Return what all devices say of their parts; None: another one commits, or none can."""
        keys = [part_key(step, name) for name in self.parts]
        if not self.in_background:  # devices take turns: the last of them commits
            said = [text for text in map(self.ledger.look, keys) if text is not None]
            if len(said) < len(keys) or not self.ledger.claim(f"shard/{step}"):
                return None
        elif not self.leads:
            return None
        else:
            try:
                said = [self.ledger.wait(key) for key in keys]
            except (TimeoutError, RuntimeError) as error:  # torch's stores raise the latter
                self.misses.miss(step, f"a device did not report: {error}")
                return None
        return {name: read_as(Part, text) for name, text in zip(self.parts, said, strict=True)}

    def _prune(self) -> None:
        """Remove older checkpoints; those that cannot be removed stay, and go another time."""
        needed = (self.begun_with,) if self.ledger.is_beginning else ()
        with suppress(OSError, FencedError):
            kept = self.store.prune(self.generation, self.keep, self.unusable, needed)
            self.ledger.post("kept", json.dumps(kept))

    def _prune_own(self) -> None:
        kept = self.ledger.look("kept")
        if kept is not None and not self.leads:
            with suppress(OSError):
                self.store.prune_folders(json.loads(kept))

    # ------------------------------------------------------------------ what people hear

    def _say(self, text: str) -> None:
        tell(f"{self.name}: {text}")

    def _report(self, event: str, step: int, facts: Mapping[str, object]) -> bool:
        return self.leads and self.ledger.report(event, self.name, step, facts)

    def _warn(self, text: str) -> None:
        """Say what is wrong with checkpoints that are there, to whoever starts the run."""
        self.warned += 1
        plain = text.removeprefix("WARNING: ").removeprefix("warning: ")
        if not self._report("warned", self.warned, {"text": plain}):
            self._say(text)


class Misses:
    """Number of checkpoints missed in a row, and the warnings about them.

    Args:
        say: prints a line.
        tell: receives an event, its step and facts: missed, committed_again, at_risk. Where it
            returns True people see it, and nothing is printed.
    """

    def __init__(
        self, say: Callable[[str], None], tell: Callable[[str, int, Mapping[str, object]], object]
    ) -> None:
        self.say, self.tell = say, tell
        self.count = 0  # in a row
        self.newest = -1  # step of the newest checkpoint

    def miss(self, step: int, why: str) -> None:
        """Note that a checkpoint was not written."""
        self.count += 1
        line = f"WARNING: no checkpoint at step {step}: {why}; training goes on, older ones stay"
        self._report("missed", step, line, text=why, row=self.count, newest=self.newest)

    def hit(self, step: int) -> None:
        """Note that a checkpoint was written."""
        missed, self.count, self.newest = self.count, 0, step
        if missed:
            line = f"checkpoints are written again: step {step}, after {missed} were missed"
            self._report("committed_again", step, line, missed=missed)

    def end(self, step: int) -> None:
        """Note that the run ends at a step; warn of what is on no disk."""
        if self.count and self.newest != step:
            line = (
                f"WARNING: the last {self.count} checkpoints were missed, the newest is of step "
                f"{self.newest} (-1: there is none): what was trained up to step {step} is in the "
                "files of --save only, or nowhere"
            )
            self._report("at_risk", step, line, missed=self.count, newest=self.newest)

    def _report(self, event: str, step: int, line: str, **facts: object) -> None:
        if not self.tell(event, step, {"step": step, **facts}):
            self.say(line)


def _require_written(parts: Collection[Part]) -> None:
    """Raise what kept a device from writing its part: first that another run has taken over."""
    for part in sorted(parts, key=lambda part: not part.code):
        if part.code:
            raise FencedError(part.why, code=part.code)
        if part.why:
            raise OSError(None, part.why)


def begin_together(
    parts: Mapping[str, Checkpoints], devices: Mapping[str, CheckedDevice], *, resume: bool
) -> int:
    """Begin for all devices of one process; return the first step to run."""
    with ThreadPoolExecutor(len(devices)) as pool:
        begun = [
            pool.submit(parts[name].begin, device, resume=resume)
            for name, device in devices.items()
        ]
        return {future.result() for future in begun}.pop()


Kind = TypeVar("Kind", bound=Checkpoints)


def checkpoints_of(
    kind: type[Kind],
    bundle: Bundle,
    device: CheckedDevice,
    ledger: Ledger,
    options: CheckpointOptions,
    *,
    in_background: bool = True,
) -> Kind:
    """Return a device's part in the checkpoints that were asked for."""
    about = {"plan": bundle.plan, "graph": graph_in(bundle.folder)}
    store = CheckpointStore(options.folder)
    own = store, options.every, device.name, device.names, ledger, about
    return kind(*own, in_background=in_background, keep=options.keep)
