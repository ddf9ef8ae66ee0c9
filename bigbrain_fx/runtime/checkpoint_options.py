"""How a run begins with checkpoints: its options; from the start, or from the last checkpoint.

    every device  waits for what rank 0 has decided; this is what that looks at

It reads what is there and begins a generation; it loads no state.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .checkpoint_format import CommitError, Say, reason_of
from .checkpoint_store import KEPT, CheckpointStore
from .launcher import as_called


@dataclass(frozen=True)
class Start:
    """What the devices of a run begin with, or why they do not.

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
                f"{store.folder} has commits up to step {found[0].step}: add --resume to go on "
                "from there, or give an empty folder",
                code="BX5012",
            )
        if restarted:
            say("restarted: all devices go on from the last commit; none kept its state")
        keep = wanted or (before.keep if ours else KEPT)
        generation = store.begin_generation(launcher(), keep)
    except CommitError as error:
        return Start(error=str(error), code=error.code)
    except OSError as error:
        where = error.filename or store.folder
        why = f"commits cannot be written, {where}: {reason_of(error)}: give another folder"
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
    """Where a run commits, how often, and whether it goes on from there."""

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
