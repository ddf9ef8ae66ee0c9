"""`python launch.py` of a bundle: run all its devices on this host and keep them going."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from .events import Event, EventLog, status
from .host import Supervisor
from .hosts import Agent, Bridge, admit, start_on
from .job import FailedError, Job, OnStep
from .judging import BAD_INPUT, Death
from .processes import ADDRESS, Start
from .secured import Secured, StrangerError, read_secret

AGENTS_S = 300.0  # longest wait for the agents of all hosts
AGAIN_S = 0.2  # between two tries to reach the first host
INTERRUPTED = 130  # exit code; as a shell's
TAIL_LINES = 12
MIB = 2**20


def main(folder: Path, devices: Sequence[str], program: str, hosts: Sequence[str] = ()) -> None:
    """Run a bundle; end with exit code 0 when it has finished or was asked to stop (SIGTERM).

    With several hosts, the first one's supervisor decides (`--listen`), and the others join it.

    Args:
        folder: of the bundle.
        devices: their names, by rank.
        program: what each process runs, in the folder; it gets all words that are not ours.
        hosts: of each device, where there are several.
    """
    parser = _parser(program)
    options, words = parser.parse_known_args()
    if (options.listen or options.join) and not options.secret:
        parser.error("several hosts need --secret FILE, the same on all of them")
    if options.join and not options.host:
        parser.error("--join needs --host NAME: which of the plan's hosts this is")
    if options.listen and not hosts:
        parser.error("--listen is for plans with several hosts")
    if sys.platform != "linux":
        parser.exit(BAD_INPUT, "error: this needs Linux; elsewhere start it with torchrun\n")
    logs = Path(options.logs or tempfile.mkdtemp(prefix="logs-")).resolve()
    logs.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    bridges: dict[str, Bridge] = {}
    try:
        if options.join is not None:
            _join(options, folder, environment, logs)
            return
        if options.listen is not None:
            bridges = _bridges(options, hosts)
            environment |= _address_of(next(iter(bridges.values())).connection)
    except (StrangerError, OSError) as error:
        parser.exit(BAD_INPUT, f"error: {error}\n")
    job = Job(
        devices=tuple(devices),
        words=(sys.executable, program, *words),
        folder=folder,
        environment=environment,
        logs=logs,
        spares=options.spares,
        restarts=options.restarts,
        hang_s=options.hang,
        every=options.snapshot_every,
        log_bytes=None if options.log_mib is None else options.log_mib * MIB,
        hosts=tuple(hosts) if bridges else (),
    )
    events = Path(options.events) if options.events else None
    code = _run(job, start_on(bridges), events, options.json)
    for bridge in bridges.values():
        bridge.close()
    sys.exit(code)


def _bridges(options: argparse.Namespace, hosts: Sequence[str]) -> dict[str, Bridge]:
    """Wait for the agents of all hosts but the first."""
    secret = read_secret(Path(options.secret))
    with socket.create_server(_address(options.listen)) as listener:
        return admit(listener, secret, set(hosts) - {hosts[0]}, AGENTS_S)


def _join(
    options: argparse.Namespace, folder: Path, environment: dict[str, str], logs: Path
) -> None:
    """Be the agent of a host."""
    secret = read_secret(Path(options.secret))
    connection = _reached(_address(options.join))
    secured = Secured(connection, secret, is_head=False)
    Agent(secured, folder, {**environment, **_address_of(secured)}, logs).run(options.host)


def _reached(address: tuple[str, int]) -> socket.socket:
    """Connect to the first host, which may not be there yet."""
    until = time.monotonic() + AGENTS_S
    while True:
        try:
            return socket.create_connection(address, AGENTS_S)
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(AGAIN_S)


def _address_of(connection: Secured) -> dict[str, str]:
    """Let devices listen where the other hosts reach this one: at its end of a connection."""
    return {ADDRESS: connection.connection.getsockname()[0]}


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdecimal():
        raise StrangerError(f"expected HOST:PORT after --listen or --join, found {text!r}")
    return host or "127.0.0.1", int(port)


def _run(job: Job, start: Start, events: Path | None, as_json: bool) -> int:
    log = EventLog(events, _tell)
    supervisor = Supervisor(job, start, _printer(as_json), log)
    try:
        with stopped_by_sigterm(supervisor):
            outcome = supervisor.run()
    except FailedError as error:
        print(
            f"error: {error}\n  log: {error.death.log}",
            *tail(error.death),
            sep="\n  ",
            file=sys.stderr,
        )
        return BAD_INPUT if error.death.code == BAD_INPUT else 1
    except KeyboardInterrupt:
        print("interrupted; all processes are ended", file=sys.stderr)
        return INTERRUPTED
    finally:
        log.close()
    if outcome.stopped_at is not None:
        print(f"stopped before step {outcome.stopped_at}, as asked", file=sys.stderr)
    return 0


@contextmanager
def stopped_by_sigterm(supervisor: Supervisor) -> Iterator[None]:
    """Let SIGTERM stop the run after its step; only the main thread can take signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: FrameType | None) -> None:
        supervisor.ask_to_stop()

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def tail(death: Death) -> tuple[str, ...]:
    """Return the last lines that a dead process wrote."""
    try:
        return tuple(Path(death.log).read_text(errors="replace").splitlines()[-TAIL_LINES:])
    except OSError:
        return ()


def _tell(entry: Event) -> None:
    line = status(entry)
    if line is not None:
        print(line, file=sys.stderr, flush=True)


def _printer(as_json: bool) -> OnStep:
    def show(step: int, loss: float, step_s: float) -> None:
        line = json.dumps({"step": step, "loss": loss, "step_s": step_s})
        print(line if as_json else f"step {step:5d}   loss {loss:.6f}   {step_s:.3f} s", flush=True)

    return show


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="launch.py",
        allow_abbrev=False,
        description="Run all devices on this host; processes that die are replaced, and the "
        f"result is the same. Other options go to {program}: see `python {program} --help`.",
    )
    parser.add_argument("--spares", type=_count, default=1, help="warm processes (default 1)")
    parser.add_argument(
        "--restarts", type=_count, default=20, help="allowed within ten minutes (default 20)"
    )
    parser.add_argument(
        "--hang",
        type=float,
        default=60.0,
        help="end a process that makes no progress for so many seconds (default 60)",
    )
    parser.add_argument(
        "--snapshot-every",
        type=_positive,
        default=None,
        help="steps between snapshots in memory (default: measured)",
    )
    parser.add_argument(
        "--log-mib",
        type=_count,
        default=None,
        help="memory for sent messages on each device (default: a share of half of what is free)",
    )
    parser.add_argument("--events", help="append what happens to this file, as JSON lines")
    parser.add_argument("--logs", help="keep what the processes write in this folder")
    parser.add_argument(
        "--listen", help="[ADDRESS:]PORT for the agents of the other hosts (default: loopback)"
    )
    parser.add_argument("--join", help="ADDRESS:PORT of the first host: be the agent of this one")
    parser.add_argument("--host", help="this host's name in the plan, with --join")
    parser.add_argument("--secret", help="a file that all hosts have and only you can read")
    parser.add_argument("--json", action="store_true", help="print one JSON object a step")
    return parser


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
