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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Protocol

from .arguments import parser_of
from .coded import headline
from .console import Console, hold_streams
from .events import Event, EventLog, status
from .host import Supervisor
from .hosts import LAST_COMMIT_S, Agent, Bridge, admit, start_on
from .job import FailedError, Job, OnStep
from .judging import BAD_INPUT, Death, Failure
from .limits import THREADS, of_abort, remedy_of, with_remedy
from .processes import ADDRESS, CALLED_IN
from .remaining import Places
from .secured import Pair, Secured, SilentError, StrangerError, how_to_make

AGENTS_S = 300.0  # longest wait for the agents of all hosts
AGAIN_S = 0.2  # between two tries to reach the first host
INTERRUPTED = 130  # exit code; as a shell's
TAIL_LINES, TAIL_BYTES = 12, 1 << 16
MIB = 2**20
MOST_PORT = 65535


def main(folder: Path, devices: Sequence[str], program: str, hosts: Sequence[str] = ()) -> None:
    """Run a bundle; end with exit code 0 when it has finished or was asked to stop (SIGTERM).

    With several hosts, the first one's supervisor decides (`--listen`), and the others join it.

    Args:
        folder: of the bundle.
        devices: their names, by rank.
        program: what each process runs, in the folder; it gets all words that are not ours.
        hosts: of each device, where there are several.
    """
    hold_streams()
    parser = parser_of(program)
    options, words = parser.parse_known_args()
    _require_hosts(parser, options, hosts)
    logs = _logs(parser, options)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", CALLED_IN: _called_in()}
    bridges: dict[str, Bridge] = {}
    door: socket.socket | None = None
    try:
        if options.join is not None:
            places = _places(devices, hosts)
            sys.exit(_join(options, folder, environment, logs, places))
        if options.listen is not None:
            door = _door(_address(options.listen))
            bridges = _bridges(door, options, hosts)
            environment |= _address_of(next(iter(bridges.values())).connection)
    except SilentError as error:
        parser.exit(1, f"{headline(error, _lost_head(error))}\n")
    except StrangerError as error:
        parser.exit(BAD_INPUT, f"{headline(error)}\n")
    except OSError as error:
        parser.exit(BAD_INPUT, f"error[BX6907]: {error}\n")
    except RuntimeError as error:
        _require_limit(error)
        parser.exit(1, f"error[BX6902]: {with_remedy(error)}\n")
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
        suspect=options.suspect,
        log_bytes=None if options.log_mib is None else options.log_mib * MIB,
        hosts=tuple(hosts) if bridges else (),
        grace_s=options.grace,
        elastic=options.elastic,
        snapshots=options.snapshots,
    )
    events = Path(options.events) if options.events else None
    code = _run(job, bridges, events, options.json)
    for bridge in bridges.values():
        bridge.close(code)
    if door is not None:  # it takes calls, which nobody answers, as long as this process is there
        door.close()
    sys.exit(code)


def _logs(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Path:
    """Return the folder of logs, which is there then."""
    try:
        logs = Path(options.logs or tempfile.mkdtemp(prefix="logs-")).resolve()
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.exit(BAD_INPUT, f"error[BX6903]: no logs can be kept: {with_remedy(error)}\n")
    return logs


def _called_in() -> str:
    """Return the folder of the call; processes work in the bundle's."""
    try:
        return os.getcwd()
    except FileNotFoundError:  # removed meanwhile; full paths are what they are
        return ""


def _require_hosts(
    parser: argparse.ArgumentParser, options: argparse.Namespace, hosts: Sequence[str]
) -> None:
    """Refuse what no supervisor of another host could be found by."""
    if sys.platform != "linux":
        parser.exit(
            BAD_INPUT, "error[BX6901]: this needs Linux; elsewhere start it with torchrun\n"
        )
    if options.suspect and (hosts or not options.spares):
        parser.error("--suspect needs --spares 1 or more, and all devices on one host")
    if (options.listen or options.join) and not options.secret:
        how = how_to_make("secret")
        parser.error(f"several hosts need --secret FILE, the same on all of them: {how}")
    if options.join and not options.host:
        parser.error("--join needs --host NAME: which of the plan's hosts this is")
    if (options.listen or options.join) and not hosts:
        parser.error("--listen and --join are for plans with several hosts")
    others = dict.fromkeys(host for host in hosts if host != hosts[0])
    if options.join and options.host not in others:
        named = ", ".join(others)
        parser.error(f"--host is one of {named}, found {options.host!r}: {hosts[0]} listens")


def _door(address: tuple[str, int]) -> socket.socket:
    """Listen at an address, of IPv4 or IPv6.

    Raises:
        StrangerError: it is none of this host's, or another process listens there.
    """
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        return socket.create_server(address, family=family)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        remedy = "--listen takes a name or address of this host, and a port that is free"
        raise StrangerError(
            f"cannot listen at {_shown(address)}: {why}: {remedy}", code="BX6000"
        ) from error


def _shown(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bridges(
    door: socket.socket, options: argparse.Namespace, hosts: Sequence[str]
) -> dict[str, Bridge]:
    """Wait for the agents of all hosts but the first."""
    pair = Pair(Path(options.secret))
    return admit(door, pair, set(hosts) - {hosts[0]}, AGENTS_S, options.hang)


def _places(devices: Sequence[str], hosts: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return all hosts but the first, which decides, and the devices of each."""
    where = list(zip(devices, hosts, strict=True))
    others = dict.fromkeys(host for host in hosts if host != hosts[0])
    return [(host, [device for device, at in where if at == host]) for host in others]


def _join(
    options: argparse.Namespace,
    folder: Path,
    environment: dict[str, str],
    logs: Path,
    places: Places,
) -> int:
    """Be the agent of a host; return the exit code of the run."""
    pair = Pair(Path(options.secret))
    connection = _reached(_address(options.join))
    secured = Secured(connection, pair, is_head=False)
    own = {**environment, **_address_of(secured)}
    grace_s = LAST_COMMIT_S if options.grace is None else options.grace
    room = options.snapshots
    agent = Agent(secured, folder, own, logs, places=places, grace_s=grace_s, snapshots=room)
    with stopped_by_sigterm(agent):
        code = agent.run(options.host)
    if code:
        err = Console(sys.stderr)
        err.say(f"error[BX6904]: the run has ended with exit code {code}: the first host says why")
        err.close()
    return code


def _lost_head(error: SilentError) -> str:
    """Say what follows where nobody decides any more."""
    return f"the supervisor, on the first host, is lost; all processes here were ended: {error}"


def _reached(address: tuple[str, int]) -> socket.socket:
    """Connect to the first host, which may not be there yet."""
    until = time.monotonic() + AGENTS_S
    while True:
        try:
            return socket.create_connection(address, AGENTS_S)
        except (socket.gaierror, UnicodeError) as error:  # a name may be too long to be one
            reason = getattr(error, "strerror", None) or error
            why = f"no host {address[0]!r} is known here ({reason})"
            raise StrangerError(
                f"{why}: --join takes the first host's name or address", code="BX6001"
            ) from error
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(AGAIN_S)


def _address_of(connection: Secured) -> dict[str, str]:
    """Let devices listen where the other hosts reach this one: at its end of a connection."""
    return {ADDRESS: connection.connection.getsockname()[0]}


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > MOST_PORT:
        raise StrangerError(
            f"expected HOST:PORT after --listen or --join, found {text!r}", code="BX6002"
        )
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


def _run(job: Job, bridges: Mapping[str, Bridge], events: Path | None, as_json: bool) -> int:
    """Run a job and tell of it; nobody who reads that, or does not, changes the run."""
    try:
        out, err = Console(sys.stdout), Console(sys.stderr)
    except RuntimeError as error:  # each has a thread
        sys.stderr.write(f"error[BX6905]: {error}: {THREADS}\n")
        return 1
    try:
        return _run_telling(job, bridges, events, as_json, out, err)
    finally:
        unread = out.close()
        if unread:
            err.say(f"{unread} lines of steps were not written: nobody read them")
        err.close()


def _run_telling(
    job: Job,
    bridges: Mapping[str, Bridge],
    events: Path | None,
    as_json: bool,
    out: Console,
    err: Console,
) -> int:
    def tell(entry: Event) -> None:
        line = status(entry)
        if line is not None:
            err.say(line)

    log: EventLog | None = None
    try:
        log = EventLog(events, tell)
        supervisor = Supervisor(job, start_on(bridges), _printer(as_json, out), log)
        for bridge in bridges.values():
            bridge.pass_on_stop(supervisor.ask_to_stop)
        with stopped_by_sigterm(supervisor):
            outcome = supervisor.run()
    except FailedError as error:
        said = tail(error.death) or tuple(filter(None, (error.death.text,)))
        help_ = of_abort(error.death.code, said)
        more = () if help_ is None else (f"help: {help_}",)
        err.say("\n  ".join((headline(error), f"log: {error.death.log}", *said, *more)))
        return BAD_INPUT if error.death.code == BAD_INPUT else 1
    except KeyboardInterrupt:
        err.say("interrupted; all processes are ended")
        return INTERRUPTED
    except (OSError, RuntimeError) as error:
        _require_limit(error)
        err.say(f"error[BX6906]: {with_remedy(error)}")
        return BAD_INPUT if log is None else 1
    finally:
        if log is not None:
            log.close()
    if outcome.stopped_at is not None:
        err.say(f"stopped before step {outcome.stopped_at}, as asked")
    return 0


def _require_limit(error: OSError | RuntimeError) -> None:
    """Raise what is a fault, and no limit of the system that was met."""
    if isinstance(error, RuntimeError) and remedy_of(error) is None:
        raise error


class Stops(Protocol):
    """What can be asked to stop: a supervisor, or the agent of another host."""

    def ask_to_stop(self) -> None:
        """End the run after the step that it is in; signal handlers may call this."""


@contextmanager
def stopped_by_sigterm(supervisor: Stops) -> Iterator[None]:
    """Let SIGTERM, or the end of the terminal, stop the run after its step.

    Only the main thread can take signals; who ignores the terminal's end (nohup) goes on doing so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: FrameType | None) -> None:
        supervisor.ask_to_stop()

    kinds = (signal.SIGTERM, signal.SIGHUP)
    before = {kind: signal.getsignal(kind) for kind in kinds}
    for kind in kinds:
        if kind == signal.SIGTERM or before[kind] == signal.SIG_DFL:
            signal.signal(kind, stop)
    try:
        yield
    finally:
        for kind, handler in before.items():
            if handler is not None:  # it is Python's to give back
                signal.signal(kind, handler)


def tail(death: Death | Failure) -> tuple[str, ...]:
    """Return the last lines that a dead process wrote."""
    return last_lines(Path(death.log))


def last_lines(log: Path) -> tuple[str, ...]:
    """Return the last lines of a log, which may be of any length, or gone."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            return tuple(file.read().decode(errors="replace").splitlines()[-TAIL_LINES:])
    except OSError:
        return ()


def _printer(as_json: bool, out: Console) -> OnStep:
    def show(step: int, loss: float, step_s: float) -> None:
        line = json.dumps({"step": step, "loss": loss, "step_s": step_s})
        out.say(line if as_json else f"step {step:5d}   loss {loss:.6f}   {step_s:.3f} s")

    return show
