"""The options of a bundle's launch.py: names, allowed values, and help texts.

The module reads arguments; it starts nothing and opens no file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


def parser_of(program: str) -> argparse.ArgumentParser:
    """Return what reads the command line of a bundle's launch.py."""
    parser = argparse.ArgumentParser(
        prog="launch.py",
        allow_abbrev=False,
        description="Run all devices on this host; processes that die are replaced, and the "
        f"result is the same. Other options go to {program}: see `python {program} --help`.",
    )
    add_flags(parser, FLAGS)
    parser.add_argument("--events", help="append what happens to this file, as JSON lines")
    parser.add_argument("--logs", help="keep what the processes write in this folder")
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="go on without a replica of which a device, or its host, is lost for good (replicas "
        "of ZeRO 0 that are summed by micro or tree; else the run ends, as without it)",
    )
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
        earlier: the name that it had until 0.3.0, which works and is shown nowhere.
    """

    name: str
    field: str
    kind: Literal["count", "positive", "seconds", "folder", "share"]
    help: str
    value: float | None = None
    default: str = ""
    earlier: str = ""

    @property
    def default_text(self) -> str:
        """Return the help text of the default."""
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
)
"""How processes are replaced."""

NEEDS = {
    **dict.fromkeys(("--hang", "--grace", "--log-mib"), "watch"),
    **dict.fromkeys(("--listen", "--join", "--host", "--secret"), "hosts"),
    "--suspect": "suspicion",
}
"""Options of bundles that were split `--with` something, and that."""


def add_flags(parser: argparse.ArgumentParser, flags: Sequence[Flag]) -> None:
    """Add options, by the names that they had before, too."""
    hidden = argparse.SUPPRESS
    for flag in flags:
        read, text = KINDS[flag.kind], f"{flag.help} (default: {flag.default_text})"
        metavar = flag.kind.upper()
        parser.add_argument(
            flag.name, dest=flag.field, type=read, default=flag.value, metavar=metavar, help=text
        )
        if flag.earlier:
            parser.add_argument(
                flag.earlier, dest=flag.field, type=read, default=hidden, help=hidden
            )


def require_parts(parser: argparse.ArgumentParser, given: Collection[str]) -> None:
    """Refuse options, or other words, for which this bundle has no files."""
    for name, extra in NEEDS.items():
        if name in given and not Path(__file__).with_name(f"{extra}.py").is_file():
            parser.error(f"{name} needs a bundle that was split with `--with {extra}`")


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no folder: make it, or give another")
    return Path(text)


def number(
    name: str, kind: type[int] | type[float], is_fine: Callable[[float], bool], expected: str
) -> Callable[[str], float]:
    """Return a reader of numbers of a kind, which `expected` describes."""

    def read(text: str) -> float:
        number = kind(text)
        if not is_fine(number):
            raise argparse.ArgumentTypeError(f"expected {expected}, found {text}")
        return number

    read.__name__ = name  # argparse says it of what is no number
    return read


KINDS: dict[str, Callable[[str], object]] = {
    "count": number("count", int, lambda n: n >= 0, "0 or more"),
    "positive": number("count", int, lambda n: n >= 1, "1 or more"),
    "folder": _folder,
}
