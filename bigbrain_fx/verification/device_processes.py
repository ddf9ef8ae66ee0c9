"""A bundle trained as its user runs it: a process a device, over gloo, on this host.

Each is a fork of this process, which has imported torch and has not run the model file. It has its
own random numbers. What functions of the file leave for each other in one process is not there.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bigbrain_fx.plan import Plan
from bigbrain_fx.verification.imported_bundle import trace_of_processes
from bigbrain_fx.verification.trace import Trace

MOST = 8  # processes; a bundle of more devices is trained in one
_LIMIT_S = 300.0
BAD_INPUT = 2  # exit code of a bundle that cannot go on with what its user gave it


class ProcessError(Exception):
    """Say what one of the processes raised."""


def can_start(plan: Plan, *, other_hashes: bool = False) -> bool:
    """Whether a process a device can be started here; one device has one only for other hashes."""
    kinds = {plan.cluster.device[name].kind for name in plan.stages.devices}
    is_plain = not (plan.stages.offload or plan.stages.by_backend or plan.stages.compiled)
    return kinds == {"cpu"} and is_plain and (2 - other_hashes) <= len(plan.stages.devices) <= MOST


def train_by_processes(
    folder: Path, plan: Plan, steps: int, scratch: Path, *, other_hashes: bool = False
) -> Trace | None:
    """Return what training leaves; None where a process ends and says no more than an exit code.

    Raises:
        ProcessError: the code of the bundle, or of its user, raises in one of them.
    """
    words = ["--steps", str(steps), "--threads", "1", "--json", "--on-nan", "ignore"]
    words += ["--save", str(scratch / "saved"), "--first-gradients", str(scratch / "first")]
    count = len(plan.stages.devices)
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_port())}
    pids = []
    for rank in range(count):
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        start = _new_python if other_hashes else _forked
        pids.append(start(folder, words, own, scratch / f"said-{rank}"))
    codes = _waited(pids)
    for rank, code in enumerate(codes):
        _raise_said(scratch / f"said-{rank}", code)
    return None if any(codes) else _trace(scratch, count)


def _forked(folder: Path, words: list[str], environment: dict[str, str], said: Path) -> int:
    """Start one process; return its number."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.environ.update(environment)
        os.chdir(folder)
        out = os.open(said, os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        sys.argv = [str(folder / "train.py"), *words]
        _roll_anew()
        _run(folder / "train.py", _raised(said))
    finally:
        os._exit(1)


def _new_python(folder: Path, words: list[str], environment: dict[str, str], said: Path) -> int:
    """Start a Python of its own hash seed; return its number."""
    own = {**os.environ, **environment, "PYTHONHASHSEED": "1"}
    with said.open("w", encoding="utf-8") as out:
        program = [sys.executable, str(folder / "train.py"), *words]
        return subprocess.Popen(program, cwd=folder, env=own, stdout=out, stderr=out).pid


def _run(path: Path, error_file: Path) -> None:
    """Run a program to this process's end."""
    code = 0
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except Exception as error:
        error_file.write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _raised(said: Path) -> Path:
    """Return the file of what a process raises, beside that of what it says."""
    return said.with_name(f"{said.name}.error")


def _roll_anew() -> None:
    """Give Python's and NumPy's dice a place of their own, as a new Python has one."""
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _waited(pids: Sequence[int]) -> list[int]:
    """Wait until all have ended, or one badly; end the others then. Return their exit codes."""
    codes: dict[int, int] = {}
    end_s = time.monotonic() + _LIMIT_S
    while len(codes) < len(pids) and not any(codes.values()) and time.monotonic() < end_s:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.002)
    for pid in (pid for pid in pids if pid not in codes):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [codes.get(pid, -signal.SIGKILL) for pid in pids]


def _raise_said(said: Path, code: int) -> None:
    """Raise what a process has raised, or what a bundle says of its user's data."""
    if _raised(said).exists():
        raise ProcessError(_raised(said).read_text(encoding="utf-8"))
    if code == BAD_INPUT:
        lines = said.read_text(encoding="utf-8").splitlines()
        raise ProcessError(next((line for line in lines if line.startswith("error[")), "bad input"))


def _trace(scratch: Path, count: int) -> Trace:
    """Read what the processes have left."""
    losses: dict[int, float] = {}
    for rank in range(count):
        for line in (scratch / f"said-{rank}").read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                found = json.loads(line)
                losses[found["step"]] = float(found["loss"])
    made = [losses[step] for step in sorted(losses)]
    with torch.no_grad():
        return trace_of_processes(made, scratch / "first", scratch / "saved")
