"""Start the product's Python processes as forks of one that has imported torch: seconds less each.

What `split`, `verify`, `run` and `export` start are then real processes with their own environment,
folder, streams and words, children of this one; only the import of torch is not done again. What
tests start themselves (`subprocess.run`) is always a new Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE
from types import SimpleNamespace
from typing import Any

import pytest

from bigbrain_fx.processes import PROGRAM
from tests.support.quick import COLLECTED_EACH

__all__ = ["DEVNULL", "PIPE", "Nursery", "Popen", "cold_starts", "run", "warm_starts"]

IMPORTED = (
    "safetensors.torch",
    "torch.distributed",
    # What torch imports when it first exports, and when one of its optimizers first steps.
    "sympy.combinatorics.tensor_can",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch._inductor.output_code",
    "torch.export._trace",
    # What the children of capture, verify and export import.
    "bigbrain_fx.frontend.translation.leaf",
    "bigbrain_fx.frontend.modelfile",
    "bigbrain_fx.frontend.translation.oracle",
    "bigbrain_fx.frontend.tracing.trace",
    "bigbrain_fx.bundles.launch",
    "bigbrain_fx.verification.inference",
    "bigbrain_fx.verification.plain",
    "bigbrain_fx.verification.reference",
    # Extras, which a machine may not have.
    "onnxscript",
    "torch.onnx._internal.exporter._core",
    "transformers.modeling_utils",
)
WARMED = Path(__file__).with_name("warmed.py")
# Forks keep these thresholds.
RARELY_COLLECTED = f"""import gc, runpy, sys
gc.set_threshold{COLLECTED_EACH}
del sys.argv[0]
runpy.run_path({str(WARMED)!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""
STARTERS = (
    "bigbrain_fx.bundles.child_programs",
    "bigbrain_fx.bundles.launch.process",
    "bigbrain_fx.bundles.launch.supervised",
    "bigbrain_fx.processes.forks",
    "bigbrain_fx.serving.crew",
    "bigbrain_fx.cli.background",
    "bigbrain_fx.frontend.client",
    "bigbrain_fx.supervisor.processes",
)
READ_AT_START = ("GLIBC_TUNABLES", "LD_PRELOAD", "PYTHONHASHSEED")  # a fork would not read them
PR_SET_CHILD_SUBREAPER = 36


class Nursery:
    """The warm process, started when it is first needed."""

    def __init__(self) -> None:
        self.owner = os.getpid()  # it adopts what is started; a fork of it would wait in vain
        self._turn = threading.Lock()
        self._door: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, order: dict[str, object], fds: Sequence[int]) -> int:
        """Start a process, a child of this one, with its three streams and more; return its id."""
        with self._turn:  # threads would take each other's answers
            door = self._door or self._open()
            own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with own, theirs:
                socket.send_fds(door, [json.dumps(order).encode()], [*fds, theirs.fileno()])
                theirs.close()
                answer = own.recv(100)
        if not answer:
            raise RuntimeError("the process that forks the others has ended")
        return _adopted(int(answer))

    def _open(self) -> socket.socket:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        plain = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", RARELY_COLLECTED, str(PROGRAM), *IMPORTED],
                cwd="/",
                env={**plain, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                stdin=theirs.fileno(),
            )
        return self._door

    def close(self) -> None:
        """End it; what it started is not its own."""
        if self._door is not None and self._process is not None:
            self._door.close()
            self._process.wait()


def _adopted(pid: int) -> int:
    """Require that a process is a child of this one: only then its exit code comes to us."""
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    if parent != os.getpid():
        raise RuntimeError(f"process {pid} is a child of {parent}, not of {os.getpid()}")
    return pid


class Popen(subprocess.Popen[Any]):
    """A `Popen` whose process is a fork of the nursery, if it is a Python."""

    nursery: Nursery

    def _execute_child(self, args: Any, *rest: Any) -> None:
        """Start it, as `subprocess.Popen` does in a method of this name.

        `rest` is executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags,
        shell, the two ends of stdin, of stdout and of stderr, and then how to start.
        """
        cwd, env, pipes, session = rest[4], rest[5], rest[9:15], rest[20]
        plain = rest[1] is None  # no function to call before exec
        known = plain and _is_known(list(map(str, args)), os.environ if env is None else env)
        if not known or os.getpid() != self.nursery.owner:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        more = [int(fd) for fd in rest[3]]
        order = {
            "words": [str(word) for word in args[1:]],
            "folder": str(Path(cwd or ".").absolute()),
            "environment": dict(os.environ if env is None else env),
            "session": bool(session),
            "numbers": more,
            "apart": True,
        }
        given = (pipes[0], pipes[3], pipes[5])
        fds = [own if own != -1 else place for place, own in enumerate(given)]
        self.pid = self.nursery.start(order, [*fds, *more])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _is_known(words: list[str], env: Mapping[str, str]) -> bool:
    if words[0] != sys.executable or len(words) == 1:
        return False
    if any(env.get(name) != os.environ.get(name) for name in READ_AT_START):
        return False
    program = words[2:] if words[1] == "-P" else words[1:]
    return words[1:3] == ["-P", "-m"] or not program[0].startswith("-")


def run(
    words: list[str],
    *,
    timeout: float | None = None,
    check: bool = False,
    capture_output: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run a process to its end, as `subprocess.run` does."""
    if capture_output:
        options |= {"stdin": DEVNULL, "stdout": PIPE, "stderr": PIPE}
    with Popen(words, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(words, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


@contextlib.contextmanager
def warm_starts(nursery: Nursery) -> Iterator[None]:
    """Let the product start its processes from the nursery."""
    Popen.nursery = nursery
    with _starters_use(SimpleNamespace(**{**vars(subprocess), "Popen": Popen, "run": run})):
        yield


@contextlib.contextmanager
def cold_starts() -> Iterator[None]:
    """Let it start new Pythons again."""
    with _starters_use(subprocess):
        yield


@contextlib.contextmanager
def _starters_use(module: object) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in STARTERS:
            patch.setattr(importlib.import_module(name), "subprocess", module)
        yield
