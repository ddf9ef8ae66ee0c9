"""Options that do not go together: the first one met is refused, with what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.nouns import AUTO, Options
from bigbrain_fx.plan.schedule import SPLIT

Conflict = tuple[str, str]  # what was asked for besides, and why not; what to do


def require_none(flag: str, conflicts: Iterable[Conflict], *, code: str) -> None:
    """Refuse the first of what an option does not go with.

    Raises:
        InputError: there is one.
    """
    for what, help_ in conflicts:
        raise InputError(
            f"{flag} does not go with {what}",
            code=code,
            at=flag,
            help=f"{help_}, or leave {flag} out",
        )


def with_split_backwards(options: Options, why: str) -> Iterator[Conflict]:
    """Yield what divides a backward, or makes single ops again."""
    if options.partitioner == AUTO:
        among = "--partitioner auto, which chooses among schedules that do not go with it"
        yield f"{among}: {why}", "name another partitioner (--partitioner analytical)"
    if options.schedule in SPLIT:
        halves = "it may have a backward in two halves"
        yield f"--schedule {options.schedule}: {halves}: {why}", "use --schedule 1f1b or gpipe"
    if options.defer:
        yield f"--defer: {why}", "leave --defer out"
    if options.recompute in ("ops", "auto"):
        yield f"--recompute {options.recompute}: {why}", "use --recompute all, or stages"


def with_members(options: Options, why: str) -> Iterator[Conflict]:
    """Yield what runs a stage on several devices together."""
    if options.tensor not in (None, 1) or options.tensor_shares:
        yield f"--tensor: {why}", "leave --tensor out"


def require_backwards(options: Options, *, trains: bool) -> None:
    """Raise InputError where inference is to do something about backwards."""
    for flag, asked in (("--defer", options.defer), ("--recompute", options.recompute)):
        if asked and not trains:
            raise InputError(
                f"nothing is trained in inference: {flag} is for training",
                code="BX1229",
                at=flag,
                help=f"leave {flag} out, or split with --mode train",
            )
