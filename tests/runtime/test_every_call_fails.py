"""Every call to the system that a run's commits and files make fails in turn.

Each must end with the same bits as an undisturbed run, or with one line for the user and the newest
commit kept. The places are found, not listed: a new call is struck as well.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors.torch import load_file

from bigbrain_fx.runtime.checkpoint_format import CommitError
from bigbrain_fx.runtime.checkpoint_store import CheckpointStore
from bigbrain_fx.runtime.checkpoints import Checkpoints, begin_together
from bigbrain_fx.runtime.tensor_file import SaveError, UnnamedFile, put_all
from tests.runtime.test_state import OPTIMIZERS, One, device, everything
from tests.support.ledgers import local_ledger

ABOUT = {"plan": "p1", "graph": "g1"}
NAMES = ("d0", "d1")
STEPS = 4
CALLS: dict[str, ModuleType] = {
    **dict.fromkeys(("open", "fsync", "replace", "mkdir", "rmdir", "unlink", "scandir"), os),
    "flock": fcntl,
    "fdopen": builtins,  # open() of a descriptor: its file's writes are struck
}
ERRORS = (errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EROFS)
ROOM = "/bigbrain_fx/runtime/"
Place = tuple[str, str]  # call, and the line of the runtime that makes it


@dataclass
class Strike:
    """Fails the n-th call at a place; counts all."""

    place: Place | None = None
    number: int = 0
    error: int = errno.EIO
    seen: Counter[Place] = field(default_factory=Counter)

    def call(self, name: str) -> None:
        place = name, _line()
        self.seen[place] += 1
        if place == self.place and self.seen[place] == self.number:
            raise OSError(self.error, os.strerror(self.error))


def _line() -> str:
    """Return the line of the runtime that is being run: that of the nearest caller there."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if "/torch/" in frame.f_code.co_filename:
            return ""
        if ROOM in frame.f_code.co_filename:
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class Writes:
    """A file whose writes can fail half way, as those of a full disk do."""

    def __init__(self, file: Any, strike: Strike) -> None:
        self.file, self.strike = file, strike

    def write(self, piece: Any) -> int:
        try:
            self.strike.call("write")
        except OSError:
            self.file.write(bytes(piece)[: len(piece) // 2])
            self.file.flush()
            raise
        return int(self.file.write(piece))

    def __enter__(self) -> Writes:
        self.file.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.file.__exit__(*raised)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@contextmanager
def striking(strike: Strike) -> Iterator[None]:
    """Let calls of the runtime fail as `strike` says."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in CALLS.items():
            own = "open" if name == "fdopen" else name
            patch.setattr(module, own, _wrapped(name, getattr(module, own), strike))
        yield


def _wrapped(name: str, real: Callable[..., Any], strike: Strike) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _line():
            return real(*args, **kwargs)
        if name != "fdopen":
            strike.call(name)
            return real(*args, **kwargs)
        file = real(*args, **kwargs)
        return Writes(file, strike) if args[1:] == ("wb",) else file

    return call


def trained(folder: Path) -> dict[str, One]:
    """Train two devices with commits every two steps and at the end, and save them."""
    made = {name: device(OPTIMIZERS["adamw"]) for name in NAMES}
    ledger, store = local_ledger(20.0), CheckpointStore(folder / "commits")
    parts = {name: Checkpoints(store, 2, name, NAMES, ledger, ABOUT) for name in NAMES}
    begin_together(parts, made, resume=False)
    for step in range(STEPS):
        for name, each in made.items():
            each.run_step(step)
            parts[name].after_step(each, step)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: parts[name].close(made[name]), NAMES))
    files = [UnnamedFile(each.state(), folder / f"out-{name}") for name, each in made.items()]
    put_all(files)
    return made


def struck(folder: Path, strike: Strike) -> tuple[dict[str, One] | None, str]:
    """Train under a strike; return the devices, or what the user is told."""
    folder.mkdir()
    try:
        with striking(strike):
            return trained(folder), ""
    except (CommitError, SaveError) as error:
        return None, str(error)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Mapping[str, Any], Counter[Place]]:
    """What an undisturbed run ends with, and the calls that it makes."""
    strike = Strike()
    made, _ = struck(tmp_path_factory.mktemp("calm") / "run", strike)
    assert made is not None
    return {name: everything(each) for name, each in made.items()}, strike.seen


def newest_loads(folder: Path) -> int:
    """Return the step of the newest commit of a folder, all of which must load; -1: none."""
    found = CheckpointStore(folder).records() if folder.is_dir() else []
    for record in found:
        for name in NAMES:
            CheckpointStore(folder).load(record, name, ABOUT, print)
    return found[0].step if found else -1


def test_the_places_are_many(calm: tuple[Mapping[str, Any], Counter[Place]]) -> None:
    calls = {call for call, _ in calm[1]}
    assert {"open", "write", "fsync", "replace", "mkdir", "flock", "unlink"} <= calls
    assert len(calm[1]) > 15


@pytest.mark.gate("first")
@pytest.mark.parametrize(
    "occurrence", ["first", pytest.param("middle", marks=pytest.mark.nightly), "last"]
)
def test_each_ends_with_the_same_bits_or_one_line_and_the_newest_commit(
    calm: tuple[Mapping[str, Any], Counter[Place]], tmp_path: Path, occurrence: str
) -> None:
    expected, places = calm
    outcomes: Counter[str] = Counter()
    for number, (place, count) in enumerate(sorted(places.items())):
        at = {"first": 1, "middle": (count + 1) // 2, "last": count}[occurrence]
        folder = tmp_path / str(number)
        strike = Strike(place, at, ERRORS[number % len(ERRORS)])
        made, told = struck(folder, strike)
        newest = newest_loads(folder / "commits")
        where = f"{place}, call {at} of {count}: {told}"
        for file in folder.glob("out-*"):
            assert load_file(file).keys(), where
        if made is not None:
            assert {name: everything(each) for name, each in made.items()} == expected, where
            outcomes["the same bits"] += 1
        else:
            assert "\n" not in told, where
            assert told, where
            outcomes["one line"] += 1
        assert newest >= 0 or told.endswith("give another folder"), where  # before the start
        if made is not None and (folder / "commits" / "commit-4.json").exists():
            assert newest == STEPS, where
    assert outcomes["the same bits"] > outcomes["one line"] / 2, outcomes
