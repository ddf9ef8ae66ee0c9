"""Commits during training, when nothing but the processes of the bundle is there: who does what.

    every device   copies its state, and a thread of its own writes it to the disk
    rank 0         writes the record when all have reported, then removes older commits
    after a death  all devices start again from the newest commit that every one of them can load

Training waits for the copy only. A commit that cannot be written is missed, with a warning: the
older ones stay.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .commits import (
    BrokenError,
    CommitError,
    FencedError,
    Loaded,
    Record,
    Shard,
    committed,
    first_loadable,
    graph_hash,
    launcher_of,
    load_shard,
    open_folder,
    open_generation,
    prune,
    prune_own,
    record_of,
    warn_of_others,
    write_record,
    write_shard,
)
from .disk import Disk
from .ledger import Ledger
from .records import about_of, records
from .state import State, restore, state_of

if TYPE_CHECKING:
    from .bundle import Bundle
    from .device import Device

ALLOWED_MISSES = 10  # in a row
COMMIT_EVERY = 100  # steps


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
        allowed_misses: after more than so many in a row the run ends.
        disk: where to write.
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
        allowed_misses: int = ALLOWED_MISSES,
        disk: Disk | None = None,
    ) -> None:
        self.folder = folder
        self.every = every
        self.name = name
        self.names = tuple(names)
        self.ledger = ledger
        self.about = dict(about)
        self.in_background = in_background
        self.allowed_misses = allowed_misses
        self.disk = disk or Disk()
        self.generation = 0
        self.unusable: list[Record] = []
        self.buffer = bytearray()
        self.begun = -1  # the step of the newest commit that this device has begun
        self.missed = 0
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
            self.ledger.post("begin", json.dumps(self._decided(resume, restarted)))
        decided = json.loads(self.ledger.wait("begin"))
        if "error" in decided:
            raise CommitError(decided["error"])
        self.folder.mkdir(parents=True, exist_ok=True)
        self.generation = decided["generation"]
        if decided["records"]:
            return self._resume(device, [record_of(t.encode(), "") for t in decided["records"]])
        self._commit(device)
        self.settle()
        return 0

    def _decided(self, resume: bool, restarted: bool) -> dict[str, Any]:
        """Look at the folder, for all devices."""
        try:
            if resume:
                found = committed(self.folder, self._say)
                warn_of_others(self.folder, self._say)
            else:
                open_folder(self.folder, self._say)
                found = records(self.folder, self._say)
            ours = restarted and launcher_of(self.folder) == _launcher()
            if found and not (resume or ours):
                raise CommitError(
                    f"{self.folder} has commits up to step {found[0].step}: add --resume to go on "
                    "from there, or give an empty folder"
                )
            if restarted:
                self._say("restarted: all devices go on from the last commit; none kept its state")
            generation = open_generation(self.folder, self.disk, _launcher())
        except (CommitError, OSError) as error:
            return {"error": str(error)}
        return {"generation": generation, "records": [record.text for record in found]}

    def _resume(self, device: Device, found: Sequence[Record]) -> int:
        expected = {**self.about, "torch": torch.__version__}
        loaded: list[Loaded] = []

        def problems(record: Record) -> list[str]:
            mine = {"broken": "", "refused": ""}
            try:
                loaded.append(load_shard(self.folder, record, self.name, expected, self._say))
            except BrokenError as error:
                mine["broken"] = str(error)
            except CommitError as error:
                mine["refused"] = str(error)
            all_of_us = self._gathered(f"load/{record.folder}", mine)
            refused = [found["refused"] for found in all_of_us if found["refused"]]
            if refused:
                raise CommitError(refused[0])
            return [found["broken"] for found in all_of_us if found["broken"]]

        quiet = (lambda _: None) if not self.leads else self._say
        record, self.unusable = first_loadable(found, problems, quiet)
        restore(device, State.from_buffer(loaded[-1].image))
        self.begun = record.step
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
            CommitError: too many were missed.
            FencedError: another run has taken over.
        """
        if self.every and (step + 1) % self.every == 0:
            self._commit(device)

    def close(self, device: Device) -> None:
        """Commit the end of the run and wait until that is done."""
        self._commit(device)
        self.settle()

    def settle(self) -> None:
        """Wait for the commit that is being written.

        Raises:
            CommitError, FencedError: as `after_step`.
        """
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.fenced is not None:
            raise self.fenced
        if self.missed > self.allowed_misses:
            raise CommitError(f"{self.missed} commits in a row were missed: see the warnings above")

    def _commit(self, device: Device) -> None:
        if device.finished == self.begun:
            return
        self.settle()  # it has the buffer
        state = state_of(device, self.about)
        if len(self.buffer) < state.nbytes:
            self.buffer = bytearray(state.nbytes + state.nbytes // 64 + 4096)
        state.copy_into(self.buffer)
        self.begun = state.step
        if not self.in_background:
            self._write(state)
            return
        self.thread = threading.Thread(target=self._write, args=(state,), daemon=True)
        self.thread.start()

    def _write(self, state: State) -> None:
        """Write this device's part and say so; of `state` only step and facts are still right."""
        key = f"shard/{state.step}"
        try:
            shard = write_shard(
                self.folder, self.name, self.buffer, self.generation, disk=self.disk
            )
            said = {"manifest": shard.manifest, "size": shard.size}
        except FencedError as error:
            self.fenced, said = error, {"missed": str(error)}
        except OSError as error:
            said = {"missed": f"{self.name} cannot write in {self.folder}: {error.strerror}"}
        if "missed" in said and not self.leads:
            self._miss(state.step, str(said["missed"]))
        elif not self.leads:
            self.missed = 0
        self.ledger.post(f"{key}/{self.name}", json.dumps(said))
        if self.leads and self.in_background:
            try:
                reports = [self.ledger.wait(f"{key}/{name}") for name in self.names]
            except (TimeoutError, RuntimeError) as error:  # torch's stores raise the latter
                self._miss(state.step, f"a device did not report: {error}")
                return
            self._record(state, reports)
        elif not self.in_background:  # the devices take turns: the last one finds all reports
            seen = [self.ledger.look(f"{key}/{name}") for name in self.names]
            if all(report is not None for report in seen) and self.ledger.claim(key):
                self._record(state, [report for report in seen if report is not None])
        self._prune_own()

    def _record(self, state: State, reports: Sequence[str]) -> None:
        found = dict(zip(self.names, map(json.loads, reports), strict=True))
        missed = [report["missed"] for report in found.values() if "missed" in report]
        try:
            if missed:
                raise OSError(None, missed[0])
            shards = [Shard(n, state.step, r["manifest"], r["size"]) for n, r in found.items()]
            about = about_of(state.facts)
            write_record(self.folder, shards, self.generation, about, self.disk)
            self.missed = 0
            kept = prune(self.folder, self.generation, self.unusable, self.disk)
            self.ledger.post("kept", json.dumps([record.folder for record in kept]))
        except FencedError as error:
            self.fenced = error
        except OSError as error:
            self._miss(state.step, str(error.strerror))

    def _prune_own(self) -> None:
        kept = self.ledger.look("kept")
        if kept is not None and not self.leads:
            prune_own(self.folder, self.name, json.loads(kept), self.disk)

    def _miss(self, step: int, why: str) -> None:
        self.missed += 1
        self._say(f"WARNING: no commit at step {step}: {why}; training goes on, older ones stay")

    def _say(self, text: str) -> None:
        print(f"{self.name}: {text}", file=sys.stderr, flush=True)


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


def _launcher() -> str:
    """Return who started this process: the same for all restarts by one torchrun, and no other."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.getppid()}"


def is_restart() -> bool:
    """Whether torchrun has started this process again after a failure."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


# --------------------------------------------------------------------------- options of train.py


@dataclass(frozen=True)
class CommitOptions:
    """Where a run commits, how often, and whether it goes on from there."""

    folder: Path
    every: int
    resume: bool = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `options_of` reads."""
    parser.add_argument(
        "--commits", type=Path, help="write states to this folder, from which a run can go on"
    )
    parser.add_argument(
        "--commit-every",
        type=int,
        default=COMMIT_EVERY,
        help=f"steps between two of them (default {COMMIT_EVERY}); 0: at the start and end only",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the last commit in --commits"
    )


def options_of(parser: argparse.ArgumentParser, given: argparse.Namespace) -> CommitOptions | None:
    """Return what was asked for; None without commits."""
    if given.commits is None:
        if given.resume:
            parser.error("--resume needs --commits FOLDER: where to go on from")
        return None
    if given.commit_every < 0:
        parser.error(f"--commit-every must not be negative, found {given.commit_every}")
    return CommitOptions(given.commits, given.commit_every, given.resume)


def committer_of(
    bundle: Bundle, device: Device, ledger: Ledger, options: CommitOptions, in_background: bool
) -> Committer:
    """Return a device's part in the commits that were asked for."""
    about = {
        "plan": bundle.plan,
        "graph": graph_hash((bundle.folder / "plan.json").read_bytes()),
    }
    folder, every = options.folder, options.every
    return Committer(
        folder, every, device.name, device.names, ledger, about, in_background=in_background
    )
