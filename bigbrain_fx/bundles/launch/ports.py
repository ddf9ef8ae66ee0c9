"""TCP ports of this host: which is free."""

from __future__ import annotations

import socket

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
    """Raise when a port is taken."""
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
            raise InputError(
                f"port {port} is in use", code="BX3054", help="give another port"
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
