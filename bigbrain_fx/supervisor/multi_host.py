"""`python launch.py` on several hosts: the first listens and decides, the others join it.

    host a: --listen a:29400 ◀──── TLS ──── host b: --join a:29400 --host b
            Head                                    an Agent

Only bundles for several hosts have this file, and those that it imports beside command.py's.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .console import console_of
from .hosts import LAST_COMMIT_S, Agent, admit, start_on
from .judging import BAD_INPUT
from .limits import headline, require_limit, with_remedy
from .processes import ADDRESS, Start
from .remaining import Places
from .secured import Pair, Secured, SilentError, StrangerError, how_to_make
from .stopping import stopped_by_sigterm

AGENTS_S = 300.0  # longest wait for the agents of all hosts
AGAIN_S = 0.2  # between two tries to reach the first host
MOST_PORT = 65535


class Head:
    """The first host's end of the run: it listens, and has a bridge to each other host.

    Args:
        options: `--listen`, `--secret` and `--hang`.
        hosts: of each device.
    """

    def __init__(self, options: argparse.Namespace, hosts: Sequence[str]) -> None:
        self.door = _door(_address(options.listen))
        pair = Pair(Path(options.secret))
        self.bridges = admit(self.door, pair, set(hosts) - {hosts[0]}, AGENTS_S, options.hang_s)

    def environment(self) -> dict[str, str]:
        """Return what lets devices here listen where the other hosts reach this one."""
        return _address_of(next(iter(self.bridges.values())).connection)

    def start(self) -> Start:
        """Return what starts each process on its host."""
        return start_on(self.bridges)

    def pass_on_stop(self, ask: Callable[[], None]) -> None:
        """Let every host ask the run to stop."""
        for bridge in self.bridges.values():
            bridge.pass_on_stop(ask)

    def close(self, code: int) -> None:
        """Report the end of the run; the socket takes calls, which nobody answers, until then."""
        for bridge in self.bridges.values():
            bridge.close(code)
        self.door.close()


def head_or_agent(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    environment: Mapping[str, str],
    logs: Path,
    folder: Path,
    where: Sequence[tuple[str, str]],
) -> Head:
    """Listen as the first host; on another one be its agent, and exit with the run's exit code.

    Args:
        parser: ends the process with what is wrong.
        options: from the command line.
        environment: of every process.
        logs: folder of what each writes.
        folder: of the bundle.
        where: each device and its host.
    """
    try:
        if options.listen is not None:
            return Head(options, [host for _, host in where])
        sys.exit(_join(options, folder, environment, logs, _places(where)))
    except SilentError as error:
        parser.exit(1, f"{headline(error, _lost_head(error))}\n")
    except StrangerError as error:
        parser.exit(BAD_INPUT, f"{headline(error)}\n")
    except OSError as error:
        parser.exit(BAD_INPUT, f"error[BX6907]: {error}\n")
    except RuntimeError as error:
        require_limit(error)
        parser.exit(1, f"error[BX6902]: {with_remedy(error)}\n")


def require_hosts(
    parser: argparse.ArgumentParser, options: argparse.Namespace, hosts: Sequence[str]
) -> None:
    """Refuse what no supervisor of another host could be found by."""
    if not options.secret:
        how = how_to_make("secret")
        parser.error(f"several hosts need --secret FILE, the same on all of them: {how}")
    if options.join and not options.host:
        parser.error("--join needs --host NAME: which of the plan's hosts this is")
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


def _places(where: Sequence[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """Return all hosts but the first, which decides, and the devices of each."""
    first = where[0][1]
    others = dict.fromkeys(host for _, host in where if host != first)
    return [(host, [device for device, at in where if at == host]) for host in others]


def _join(
    options: argparse.Namespace,
    folder: Path,
    environment: Mapping[str, str],
    logs: Path,
    places: Places,
) -> int:
    """Be the agent of a host; return the exit code of the run."""
    pair = Pair(Path(options.secret))
    connection = _reached(_address(options.join))
    secured = Secured(connection, pair, is_head=False)
    own = {**environment, **_address_of(secured)}
    grace_s = LAST_COMMIT_S if options.grace_s is None else options.grace_s
    room = options.snapshots
    agent = Agent(secured, folder, own, logs, places=places, grace_s=grace_s, snapshots=room)
    with stopped_by_sigterm(agent):
        code = agent.run(options.host)
    if code:
        err = console_of(sys.stderr)
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
