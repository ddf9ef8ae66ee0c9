"""How the processes of a bundle find each other, and how they leave; what each reports of itself.

This file knows torch.distributed and the environment that a launcher sets; it knows no steps.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import socket
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

# torch exports these, but not for mypy
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from .channel import Channel
from .limits import SHARE_GPUS, require_threads
from .network import NetworkTransport

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as AnyStore


LAUNCHERS = tuple(
    dict(zip(("RANK", "WORLD_SIZE", "LOCAL_RANK"), names, strict=True))
    for names in (
        ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),  # before PMI: srun sets some of those
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    )
)
_ADDRESS_OF = 0x8915  # SIOCGIFADDR of Linux
MESH_THREADS = 4  # that gloo and `form_mesh` start: gloo aborts where it cannot


def transport_of(
    ranks: dict[str, int],
    device: torch.device,
    deadline_s: float,
    store: AnyStore,
    channels: Iterable[Channel],
) -> NetworkTransport:
    """Return the transport over the default group, of its backend; see `NcclTransport`."""
    if dist.get_backend() != "nccl":
        return NetworkTransport(ranks, device, deadline_s, store)
    from .gpus import NcclTransport  # only bundles with GPUs have it

    return NcclTransport(ranks, device, deadline_s, store, channels)


def join(
    plan: str, kinds: Sequence[str], rank: int, deadline_s: float, backend: str = ""
) -> AnyStore:
    """Join the group; refuse a process that runs another plan. Return the store that all share.

    Args:
        plan: the plan's key.
        kinds: of each device, by rank: "cpu" or "cuda".
        rank: of this process.
        deadline_s: longest wait for the others.
        backend: "gloo" or "nccl"; "": nccl where all devices are GPUs of their own, else gloo.
    """
    world = len(kinds)
    if (started := environment_number("WORLD_SIZE", world)) != world:
        raise SystemExit(
            f"error[BX5904]: this bundle needs {world} processes, one per device; found {started}"
        )
    require_threads(MESH_THREADS)
    if all_cuda(kinds):
        from .gpus import prepare_cuda  # only bundles with GPUs have it

        prepare_cuda(kinds)
    timeout = timedelta(seconds=deadline_s)
    own = all_cuda(kinds) and SHARE_GPUS not in os.environ  # nccl refuses two on one GPU
    backend = backend or ("nccl" if own else "gloo")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE"):
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        base = TCPStore(host, port, world, is_master=False, timeout=timeout)
        # a restart must not read old addresses
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    else:
        base, attempt = _tcp_store(rank, world, timeout), "0"
    store = PrefixStore(f"bigbrain/{attempt}", base)
    store.set(f"plan/{rank}", plan)
    plans = [store.get(f"plan/{other}").decode() for other in range(world)]
    leave_together(store, rank, world, "read")  # who refuses ends, and rank 0 holds the store
    for other, found in enumerate(plans):
        if found != plan:
            raise SystemExit(
                f"error[BX5905]: rank {other} runs plan {found}, this process runs {plan}: "
                "copy one bundle to all hosts"
            )
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    return store


def _tcp_store(rank: int, world: int, timeout: timedelta) -> TCPStore:
    """Open the rendezvous on MASTER_ADDR only: torch's own listener would take every interface."""
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port = environment_number("MASTER_PORT", 29500)
    if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := _interface_to(host)):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    if rank != 0:
        return TCPStore(host, port, world, is_master=False, timeout=timeout)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise SystemExit(
            f"error[BX5906]: cannot listen on {host}:{port}: {error.strerror or error}; choose "
            "another MASTER_PORT"
        ) from error
    listener.listen(128)
    return TCPStore(
        host,
        port,
        world,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _interface_to(host: str) -> str | None:
    """Return the interface that leads to rank 0; None where the system does not say.

    gloo by itself listens at what this host's own name is, which may be 127.0.1.1.
    """
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, 9))  # chooses a way, and sends nothing
        own = way.getsockname()[0]
        if own.startswith("127."):
            return "lo"
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                asked = struct.pack("256s", name.encode())
                if socket.inet_ntoa(fcntl.ioctl(way, _ADDRESS_OF, asked)[20:24]) == own:
                    return name
    return None


def leave_together(store: AnyStore, rank: int, world: int, where: str = "done") -> None:
    """Rank 0 holds the store: it leaves a place last."""
    store.set(f"{where}/{rank}", "1")
    if rank == 0:
        store.wait([f"{where}/{other}" for other in range(world)])


def own_device(kinds: Sequence[str], rank: int) -> torch.device:
    """Return where this process computes; of GPUs, see `gpus.own_gpu`."""
    if kinds[rank] != "cuda":
        return torch.device("cpu")
    from .gpus import own_cuda  # only bundles with GPUs have it

    return own_cuda(kinds, rank, environment_number("LOCAL_RANK", 0))


def require_gpu(kinds: Sequence[str], rank: int) -> None:
    """Refuse before anything is connected: torch's own words for it are its frames.

    Raises:
        InputError: this process's GPU is not there.
    """
    if kinds[rank] == "cuda":
        from .gpus import require_own_gpu  # only bundles with GPUs have it

        require_own_gpu(kinds, rank, environment_number("LOCAL_RANK", 0))


def all_cuda(kinds: Sequence[str]) -> bool:
    """Whether all devices are GPUs."""
    return all(kind == "cuda" for kind in kinds)


def write_report(name: str, folder: Path) -> None:
    """Write what a device's process held at most, as JSON; on a GPU, what its tensors took, too.

    A disk that does not take it is no reason to fail: the training is done.
    """
    facts: dict[str, str | int] = {"device": name}
    facts["max_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if torch.cuda.is_initialized():  # only where this process computes there: see `own_device`
        facts["max_allocated_bytes"] = torch.cuda.max_memory_allocated()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(facts) + "\n")


def environment_number(name: str, default: int | None) -> int:
    """Return a number that the launcher set; without a default it must be there.

    `name` is as torchrun has it; Open MPI, MPICH and Slurm have names of their own.
    """
    of_launcher = next((names for names in LAUNCHERS if names["RANK"] in os.environ), {})
    text = os.environ.get(name, os.environ.get(of_launcher.get(name, name)))
    if text is None and default is None:
        raise SystemExit(
            f"error[BX5907]: {name} is not set: start with torchrun, mpirun, srun, `bigbrain-fx "
            "run`, or give --rank"
        )
    return int(text) if text is not None else int(default or 0)
