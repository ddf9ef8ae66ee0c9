"""The options of a bundle's launch.py: what each is called, what it may be, what is said of it.

It reads words; it starts nothing and opens no file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

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
    _add_earlier(parser)
    parser.add_argument("--events", help="append what happens to this file, as JSON lines")
    parser.add_argument("--logs", help="keep what the processes write in this folder")
    _add_hosts(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object a step")
    return parser


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """Add how processes are replaced, and how long they may take."""
    parser.add_argument(
        "--standby", dest="spares", type=_count, default=1, help="standby workers (default 1)"
    )
    parser.add_argument(
        "--restarts", type=_count, default=20, help="allowed within ten minutes (default 20)"
    )
    parser.add_argument(
        "--hang",
        type=_seconds,
        default=60.0,
        help="end a process that makes no progress, and give up a host that says nothing, for so "
        "many seconds (default 60); time in which a busy host gave it no processor does not count",
    )
    parser.add_argument(
        "--grace",
        type=_seconds,
        default=None,
        help="when asked to stop, wait so many seconds for the end of a step, and for the last "
        "commit (default: 3 times the longest recent step, at least --hang and 30)",
    )
    parser.add_argument(
        "--memory-checkpoint-every",
        dest="snapshot_every",
        type=_positive,
        default=None,
        help="steps between in-memory checkpoints (default: measured)",
    )
    parser.add_argument(
        "--memory-checkpoint-dir",
        dest="snapshots",
        type=_folder,
        metavar="FOLDER",
        help="write in-memory checkpoints to a folder of a disk instead, as files without a name",
    )
    parser.add_argument(
        "--suspect",
        type=_share,
        default=0.0,
        metavar="RATE",
        help="let a standby worker recompute this fraction of all devices' steps, and go back "
        "where it "
        "finds another result (default 0)",
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="go on without a replica of which a device, or its host, is lost for good (replicas "
        "of ZeRO 0 that are summed by micro or tree; else the run ends, as without it)",
    )
    parser.add_argument(
        "--log-mib",
        type=_count,
        default=None,
        help="memory for sent messages on each device (default: a share of half of what is free)",
    )


def _add_earlier(parser: argparse.ArgumentParser) -> None:
    """Take options by the names that they had until 0.3.0, and show those nowhere."""
    earlier: dict[str, Callable[[str], object]] = {
        "--spares": _count,  # earlier name
        "--snapshot-every": _positive,  # earlier name
        "--snapshots": _folder,  # earlier name
    }
    for flag, kind in earlier.items():
        hidden = argparse.SUPPRESS
        parser.add_argument(flag, type=kind, default=hidden, help=hidden)


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


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"expected 0 or more, found {number}")
    return number


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, found {number}")
    return number


def _share(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"expected a share from 0 to 1, found {text}")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 < number < MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"expected more than 0 seconds, found {text}")
    return number
