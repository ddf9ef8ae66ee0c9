"""TCP ports of this host: which is free, and who holds one that is not."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from bigbrain_fx.errors import InputError


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free now.

    Raises:
        InputError: that interface is down.
    """
    _require_loopback()
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def require_free(port: int) -> None:
    """Raise when a port is taken; name its holder where the system shows it."""
    _require_loopback()
    if not 0 < port < 65536:
        raise InputError(
            f"port {port} is not between 1 and 65535", code="BX3053", help="give another port"
        )
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            holder = _holder(port)
            by = f" by process {holder}" if holder else ""
            raise InputError(
                f"port {port} is in use{by}", code="BX3054", help="give another port"
            ) from error


def _require_loopback() -> None:
    """Refuse a loopback that is down: a port is given there all the same, and nobody connects."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("127.0.0.1", 9))  # nothing is sent
        except OSError as error:
            raise InputError(
                f"the loopback interface lo is down ({error.strerror or error}), by which "
                "processes of one host connect",
                code="BX3055",
                help="`ip link set lo up` as root (a new network namespace, as of `unshare -n`, "
                "has it down); or train in one process: `python train.py --in-process`",
            ) from error


def _holder(port: int) -> int | None:
    """Find who listens on a port, from /proc; None where that is not shown."""
    inode = _listening_inode(port)
    if inode is None:
        return None
    for folder in sorted(Path("/proc").glob("[0-9]*")):
        try:
            if any(os.readlink(fd) == f"socket:[{inode}]" for fd in (folder / "fd").iterdir()):
                return int(folder.name)
        except OSError:  # gone, or not ours to look at
            continue
    return None


def _listening_inode(port: int) -> str | None:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = [
                line.split() for line in Path(table).read_text(encoding="utf-8").splitlines()[1:]
            ]
        except OSError:
            continue
        for row in rows:
            if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port:
                return row[9]
    return None
