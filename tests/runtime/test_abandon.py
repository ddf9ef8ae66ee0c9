"""A mesh that is given up wakes whoever waits on it: gloo by itself wakes nobody."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from bigbrain_fx.runtime.channel import Channel
from bigbrain_fx.runtime.mesh import MeshTransport
from bigbrain_fx.runtime.peers import PeerLostError


def mesh_of(store: Any, rank: int, found: dict[int, Any]) -> None:  # torch exports no names
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch has it
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
    options._timeout = timedelta(seconds=20)
    found[rank] = dist.ProcessGroupGloo(store, rank, 3, options)


def test_a_wait_for_a_living_peer_is_woken_by_another_peers_death() -> None:
    """The alarm of the dead one, here the next by rank, has failed already: it wakes nobody."""
    store, meshes = dist.HashStore(), dict[int, Any]()  # type: ignore[attr-defined]  # torch has it
    makers = [Thread(target=mesh_of, args=(store, rank, meshes)) for rank in range(3)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join(30)
    ranks = {f"d{rank}": rank for rank in range(3)}
    channel = Channel(0, "activation", "x", 0, 1, "d0", "d1", (1,), torch.float32)
    ours = MeshTransport(ranks, torch.device("cpu"), 60.0, mesh=meshes[1])
    del meshes[2]  # its connections close
    ours.begin_step(((channel, 1),))
    woken: list[BaseException] = []

    def wait() -> None:
        try:
            ours.recv(channel)
        except PeerLostError as error:
            woken.append(error)

    waiter = Thread(target=wait, daemon=True)
    waiter.start()
    with suppress(RuntimeError):
        ours.alarms[1][1].wait(timedelta(seconds=30))  # until the death is seen
    ours.abandon()
    waiter.join(20)
    assert not waiter.is_alive()
    assert woken
