"""Start of a run with checkpoints: its options; from the start, or from the last checkpoint.

Every device waits for the decision of rank 0, which this module makes. The module reads the folder
and begins a generation; it loads no state. Devices exchange notes on checkpoints in a `Ledger`:
torch's store, or a supervisor's, `board.Board`, which also has the notes of a dead process.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .checkpoint_format import CommitError, Say, reason_of
from .checkpoint_store import KEPT, CheckpointStore
from .launcher import as_called
from .limits import tell

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Said = TypeVar("Said")


class Ledger:
    """Statements of devices, by key.

    Args:
        store: of all processes, or of the threads of one.
        deadline_s: longest wait for a word.
        as_json: the launcher of this process reads events, as JSON, from its output.
    """

    is_beginning = False  # a process may yet start where the run began

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

    def until(self, is_done: Callable[[], bool]) -> None:
        """Be there for the others until this process has done something; here they need nothing."""

    def wake(self) -> None:
        """Let `until` look again."""

    def has_part(self, device: str, step: int) -> bool:
        """Whether a process before this one has written a device's part of a checkpoint."""
        return False

    def report(self, event: str, device: str, step: int, facts: Mapping[str, object]) -> bool:
        """Report an event to the launcher; return whether people see it from there alone."""
        if self.as_json:
            tell(json.dumps({"event": event, "device": device, **facts}))
        return self.as_json


def part_key(step: int, device: str) -> str:
    """Return the key under which a device says how its part of a checkpoint went."""
    return f"shard/{step}/{device}"


def text_of(said: Any) -> str:  # noqa: ANN401  # any frozen record
    """Return a frozen record as the text that a ledger keeps."""
    return json.dumps(asdict(said))


def read_as(kind: Callable[..., Said], text: str) -> Said:
    """Return the record of which `text_of` made a text."""
    return kind(**json.loads(text))


@dataclass(frozen=True)
class Start:
    """Decision on the start of a run's devices: checkpoints to load, or an error.

    Attributes:
        generation: of this run: older ones write no more.
        keep: how many commits stay.
        records: to go on from, newest first, as texts; none: from the start.
        error, code: why not.
    """

    generation: int = 0
    keep: int = KEPT
    records: Sequence[str] = ()
    error: str = ""
    code: str = ""


def decided(
    store: CheckpointStore, wanted: int | None, say: Say, *, resume: bool, restarted: bool
) -> Start:
    """Look at the checkpoints there, for all devices; `wanted`: how many are to stay there."""
    try:
        if resume:
            found = store.to_resume(say)
            store.warn_of_others(say)
        else:
            store.prepare(say)
            found = store.records(say)
        before = store.fence()
        ours = resume or (restarted and before.launcher == launcher())
        if found and not ours:
            raise CommitError(
                f"{store.folder} has checkpoints up to step {found[0].step}: add --resume to go on "
                "from there, or give an empty folder",
                code="BX5012",
            )
        if restarted:
            say("restarted: all devices go on from the last checkpoint; none kept its state")
        keep = wanted or (before.keep if ours else KEPT)
        generation = store.begin_generation(launcher(), keep)
    except CommitError as error:
        return Start(error=str(error), code=error.code)
    except OSError as error:
        where = error.filename or store.folder
        why = f"checkpoints cannot be written, {where}: {reason_of(error)}: give another folder"
        return Start(error=why, code="BX5903")
    return Start(generation, keep, tuple(record.text for record in found))


def make_folder(folder: Path) -> None:
    """Make the folder of commits.

    Raises:
        CommitError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommitError(
            f"{folder} cannot be made: {reason_of(error)}: give another folder", code="BX5015"
        ) from error


def launcher() -> str:
    """Return who started this process: the same for all restarts by one torchrun, and no other."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.getppid()}"


def is_restart() -> bool:
    """Whether torchrun has started this process again after a failure."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


COMMIT_EVERY = 100  # steps


@dataclass(frozen=True)
class CheckpointOptions:
    """Folder and interval of a run's checkpoints, and whether the run resumes from there."""

    folder: Path
    every: int
    resume: bool = False
    keep: int | None = None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `options_of` reads."""
    add = parser.add_argument
    text = "write checkpoints to this folder, from which a run can go on"
    add("--checkpoint-dir", dest="commits", type=as_called, help=text)
    text = f"steps between two of them (default {COMMIT_EVERY}); 0: at the start and end only"
    add("--checkpoint-every", dest="commit_every", type=int, default=COMMIT_EVERY, help=text)
    least = f"{KEPT} or more (default {KEPT}, or with --resume what it was)"
    add("--keep", type=int, help=f"how many checkpoints stay there, {least}")
    text = "go on from the last checkpoint in --checkpoint-dir"
    add("--resume", action="store_true", help=text)
    add_earlier(parser, "--commits", as_called)  # earlier name
    add_earlier(parser, "--commit-every", int)  # earlier name


def add_earlier(parser: argparse.ArgumentParser, flag: str, kind: Callable[[str], object]) -> None:
    """Take an option by the name that it had until 0.3.0, and show that nowhere."""
    hidden = argparse.SUPPRESS
    parser.add_argument(flag, type=kind, default=hidden, help=hidden)


def options_of(
    parser: argparse.ArgumentParser, given: argparse.Namespace
) -> CheckpointOptions | None:
    """Return what was asked for; None without commits."""
    if given.commits is None:
        if given.resume:
            parser.error("--resume needs --checkpoint-dir FOLDER: where to go on from")
        return None
    if given.commit_every < 0:
        parser.error(f"--checkpoint-every must not be negative, found {given.commit_every}")
    if given.keep is not None and given.keep < KEPT:
        parser.error(
            f"--keep must be {KEPT} or more, found {given.keep}: where the newest checkpoint is "
            "broken, the one before it counts"
        )
    return CheckpointOptions(given.commits, given.commit_every, given.resume, given.keep)
