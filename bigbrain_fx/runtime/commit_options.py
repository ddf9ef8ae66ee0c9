"""Where a run commits and how often, as options of train.py."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from .commits import KEPT
from .launcher import as_called

COMMIT_EVERY = 100  # steps


@dataclass(frozen=True)
class CommitOptions:
    """Where a run commits, how often, and whether it goes on from there."""

    folder: Path
    every: int
    resume: bool = False
    keep: int | None = None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `options_of` reads."""
    parser.add_argument(
        "--commits",
        type=as_called,
        help="write states to this folder, from which a run can go on",
    )
    parser.add_argument(
        "--commit-every",
        type=int,
        default=COMMIT_EVERY,
        help=f"steps between two of them (default {COMMIT_EVERY}); 0: at the start and end only",
    )
    parser.add_argument(
        "--keep",
        type=int,
        help=f"how many commits stay there, {KEPT} or more (default {KEPT}, or with --resume what "
        "it was)",
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
    if given.keep is not None and given.keep < KEPT:
        parser.error(
            f"--keep must be {KEPT} or more, found {given.keep}: where the newest commit is "
            "broken, the one before it counts"
        )
    return CommitOptions(given.commits, given.commit_every, given.resume, given.keep)
