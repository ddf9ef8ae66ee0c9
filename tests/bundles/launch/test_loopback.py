"""A loopback that is down, as in a new network namespace: said before anything is started."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from bigbrain_fx.bundles.launch import free_port, require_free
from bigbrain_fx.errors import InputError


class Down(socket.socket):
    """The kernel gives ports of an interface that is down, and connects nobody."""

    def connect(self, _: object) -> None:
        """Fail as there."""
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))


def test_a_loopback_that_is_down_is_said_before_processes_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`verify --processes` and `doctor` waited for their deadline, and said nothing of it."""
    port = free_port()
    require_free(port)
    monkeypatch.setattr(socket, "socket", Down)
    with pytest.raises(InputError, match=r"lo is down .*unreachable") as caught:
        free_port()
    assert "ip link set lo up" in str(caught.value.help)
    with pytest.raises(InputError, match="lo is down"):
        require_free(port)
