"""The options of a bundle's launch.py: what each is called, what it may be, what is said of it.

It reads words; it starts nothing and opens no file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MOST_SECONDS = 1e8


def parser_of(program: str) -> argparse.ArgumentParser:
    """Return what reads the command line of a bundle's launch.py."""
    parser = argparse.ArgumentParser(
        prog="launch.py",
        allow_abbrev=False,
        description="Run all devices on this host; processes that die are replaced, and the "
        f"result is the same. Other options go to {program}: see `python {program} --help`.",
    )
    _add_limits(parser)
    parser.add_argument("--events", help="append what happens to this file, as JSON lines")
    parser.add_argument("--logs", help="keep what the processes write in this folder")
    _add_hosts(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object a step")
    return parser


@dataclass(frozen=True)
class Flag:
    """An option of launch.py that `bigbrain-fx run` has, too.

    Attributes:
        name: with its dashes.
        field: of `RunOptions`.
        kind: what it takes; `KINDS` reads it.
        help: what it does.
        value: what it is where it is not given.
        default: what the help says of that, where it is no number.
        needs: launch.py has it only in bundles of `split --with` this.
        earlier: the name that it had until 0.3.0, which works and is shown nowhere.
    """

    name: str
    field: str
    kind: Literal["count", "positive", "seconds", "folder", "share"]
    help: str
    value: float | None = None
    default: str = ""
    earlier: str = ""
    needs: str = ""

    @property
    def default_text(self) -> str:
        """What the help says of the default."""
        return self.default if self.value is None else f"{self.value:g}"


FLAGS = (
    Flag(
        "--standby",
        "spares",
        "count",
        "standby workers that replace dead processes of a training",
        1,
        earlier="--spares",
    ),
    Flag("--restarts", "restarts", "count", "processes replaced within ten minutes, at most", 20),
    Flag(
        "--hang",
        "hang_s",
        "seconds",
        "end a process that makes no progress, and give up a host that says nothing, for so many "
        "seconds; time in which a busy host gave it no processor does not count",
        60.0,
        needs="watch",
    ),
    Flag(
        "--grace",
        "grace_s",
        "seconds",
        "when asked to stop, wait so many seconds for the end of a step and the last checkpoint",
        default="3 times the longest recent step, at least --hang and 30",
        needs="watch",
    ),
    Flag(
        "--suspect",
        "suspect",
        "share",
        "let a standby worker recompute this fraction of all devices' steps, and go back where "
        "results differ (silent data corruption)",
        0.0,
        needs="suspicion",
    ),
    Flag(
        "--memory-checkpoint-every",
        "snapshot_every",
        "positive",
        "steps between in-memory checkpoints",
        default="measured",
        earlier="--snapshot-every",
    ),
    Flag(
        "--memory-checkpoint-dir",
        "snapshots",
        "folder",
        "write in-memory checkpoints to this folder of a disk, as files without a name",
        default="in memory",
        earlier="--snapshots",
    ),
    Flag(
        "--log-mib",
        "log_mib",
        "count",
        "memory for sent messages on each device",
        default="a share of half of what is free",
        needs="watch",
    ),
)
"""How processes are replaced, and how long they may take."""


def _add_limits(parser: argparse.ArgumentParser) -> None:
    hidden = argparse.SUPPRESS
    for flag in FLAGS:
        read, text = KINDS[flag.kind], f"{flag.help} (default: {flag.default_text})"
        metavar = flag.kind.upper()
        parser.add_argument(
            flag.name, dest=flag.field, type=read, default=flag.value, metavar=metavar, help=text
        )
        if flag.earlier:
            parser.add_argument(
                flag.earlier, dest=flag.field, type=read, default=hidden, help=hidden
            )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="go on without a replica of which a device, or its host, is lost for good (replicas "
        "of ZeRO 0 that are summed by micro or tree; else the run ends, as without it)",
    )


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    """Add how several hosts find each other."""
    parser.add_argument(
        "--listen", help="[ADDRESS:]PORT for the agents of the other hosts (default: loopback)"
    )
    parser.add_argument("--join", help="ADDRESS:PORT of the first host: be the agent of this one")
    parser.add_argument("--host", help="this host's name in the plan, with --join")
    parser.add_argument(
        "--secret", help="a certificate and its key; all hosts have this file, only you can read it"
    )


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no folder: make it, or give another")
    return Path(text)


def _number(
    name: str, kind: type[int] | type[float], is_fine: Callable[[float], bool], expected: str
) -> Callable[[str], float]:
    """Return what reads a number of a kind, `expected` in words."""

    def read(text: str) -> float:
        number = kind(text)
        if not is_fine(number):
            raise argparse.ArgumentTypeError(f"expected {expected}, found {text}")
        return number

    read.__name__ = name  # argparse says it of what is no number
    return read


KINDS: dict[str, Callable[[str], object]] = {
    "count": _number("count", int, lambda n: n >= 0, "0 or more"),
    "positive": _number("count", int, lambda n: n >= 1, "1 or more"),
    "seconds": _number("seconds", float, lambda n: 0 < n < MOST_SECONDS, "more than 0 seconds"),
    "folder": _folder,
    "share": _number("share", float, lambda n: 0 <= n <= 1, "a share from 0 to 1"),
}
