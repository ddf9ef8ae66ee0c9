"""Profile in a child process: start it, follow its progress, end it. No torch here."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from bigbrain_fx import errors
from bigbrain_fx.capture.location import resolved
from bigbrain_fx.errors import BigBrainError, InputError
from bigbrain_fx.profiles import ProfileStore

ROUNDS = 20

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of one number of rows.

    Attributes:
        rows: of a micro-batch.
        ops: how many the graph has. signatures: how many differ.
        lacking: how many were not in the database; 0: nothing was run.
        ops_s: seconds of all ops added up. step_s: of a whole step in one process, without the
            optimizer, measured in turn with them.
    """

    rows: int
    ops: int
    signatures: int
    lacking: int
    ops_s: float = 0.0
    step_s: float = 0.0

    @property
    def agreement(self) -> float | None:
        """Sum of the ops over the whole step; None if nothing was run."""
        return self.ops_s / self.step_s if self.step_s else None

    def __str__(self) -> str:
        known = f"{self.rows} rows: {self.ops} ops, {self.signatures} of them distinct"
        if self.agreement is None:
            return f"{known}; all are in the database"
        return (
            f"{known}; {self.lacking} measured: their sum is {1e3 * self.ops_s:.2f} ms, "
            f"a whole step {1e3 * self.step_s:.2f} ms (ratio {self.agreement:.3f})"
        )


@dataclass(frozen=True, slots=True)
class Profiled:
    """What a run of `profile` did: the model, the machine's key, and each number of rows."""

    model: str
    machine: str
    measured: tuple[Measured, ...]


@dataclass(frozen=True)
class ProfileOptions:
    """What to measure.

    Attributes:
        rows: of a micro-batch, each; the example batch's when empty.
        threads: that the child computes with. rounds: runs of every op, at least.
        training: as in `capture`. time_limit_s: for the whole run.
        device: "cpu", "cuda", "cuda:1", or "auto": the first CUDA device, else the CPU.
    """

    rows: tuple[int, ...] = ()
    threads: int = 1
    rounds: int = ROUNDS
    seed: int = 0
    training: bool = True
    assume: Mapping[str, bool] | None = None
    leaves: tuple[str, ...] = ()
    time_limit_s: float = 3600.0
    device: str = "auto"


def profile(
    model: str | Path,
    store: str | Path,
    options: ProfileOptions | None = None,
    show: Callable[[str], None] = lambda said: None,
) -> Profiled:
    """Measure the distinct ops of a model on a device of this host, and put them into a database.

    What the database has already is not measured again, so that a run that was stopped goes on
    where it was.

    Args:
        model: as in `capture_file`.
        store: the SQLite file; made when it is not there.
        options: what to measure.
        show: called with each step of progress.

    Raises:
        InputError: the model file or the database cannot be used, or there is no such device.
        CaptureError: torch.export cannot follow the model.
    """
    options = options or ProfileOptions()
    file, location = resolved(model)
    ProfileStore(store)  # refuse a foreign file before the model is loaded
    wanted = {
        "location": location,
        "store": str(Path(store).resolve()),
        "rows": list(options.rows),
        "threads": options.threads,
        "rounds": options.rounds,
        "seed": options.seed,
        "training": options.training,
        "assume": dict(options.assume or {}),
        "leaves": list(options.leaves),
        "device": options.device,
    }
    facts: Message = {}
    measured: list[Measured] = []
    for message in _messages(wanted, file, options):
        facts = facts or message  # the first one names model and machine
        if "round" in message:
            show(f"{message['rows']} rows, round {message['round']} of {message['of']}")
        elif "measured" in message:
            measured.append(Measured(**message["measured"]))
            show(str(measured[-1]))
        elif "optimizer" in message:
            show(message["optimizer"])
    return Profiled(str(facts["name"]), str(facts["machine"]), tuple(measured))


def _messages(
    wanted: Mapping[str, object], file: Path, options: ProfileOptions
) -> Iterator[Message]:
    """Yield what the child says until it ends; raise what it reports."""
    child = _start(wanted, options.threads)
    try:
        for line in _lines(child, file, options.time_limit_s):
            message = cast("Message", json.loads(line))
            if "internal" in message:
                raise RuntimeError(f"profiling failed in its child process\n{message['internal']}")
            if "error" in message:
                raise _error(message["error"])
            yield message
        if child.wait() != 0:
            raise _ended(child.returncode, file)
    finally:
        _end(child)


def _start(wanted: Mapping[str, object], threads: int) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    # -P: the working directory must not shadow modules of the child.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "bigbrain_fx.profiler.child", json.dumps(wanted)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
        },
        start_new_session=True,  # whatever the model file starts ends with it
    )


def _lines(child: subprocess.Popen[bytes], file: Path, limit_s: float) -> Iterator[bytes]:
    assert child.stdout is not None
    pipe, rest = child.stdout.fileno(), b""
    deadline_s = time.monotonic() + limit_s
    while True:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not select.select([pipe], [], [], left_s)[0]:
            raise InputError(
                f"profiling {file.name} took longer than {limit_s:g} s",
                at=str(file),
                help="run it again, it goes on where it was; or raise --time-limit",
            )
        data = os.read(pipe, 65536)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def _ended(code: int, file: Path) -> InputError:
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return InputError(
        f"{file.name} ended its process ({how})",
        at=str(file),
        notes=("SIGKILL often means: out of memory",) if code == -signal.SIGKILL else (),
        help="profile fewer rows, or keep os._exit and the like out of the model file",
    )


def _end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    if child.stdout is not None:
        child.stdout.close()


def _error(message: Mapping[str, Any]) -> BigBrainError:
    kind = getattr(errors, str(message["kind"]), BigBrainError)
    notes = tuple(str(note) for note in cast("Sequence[str]", message["notes"]))
    return cast(
        "BigBrainError",
        kind(str(message["what"]), at=message["at"], notes=notes, help=message["help"]),
    )
