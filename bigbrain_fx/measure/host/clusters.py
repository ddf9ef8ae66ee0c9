"""Figures of devices and of their links -> a cluster, and its file.

This room writes cluster files; it measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from bigbrain_fx.cluster import to_json
from bigbrain_fx.core import KERNEL, Cluster, Device, Link, Overheads
from bigbrain_fx.errors import InputError
from bigbrain_fx.measure.host.figures import Kind, Rates, slowest, tf32_flops_per_s, three_digits

_MIB = 2**20


def device_of(
    name: str,
    host: str,
    kind: Kind,
    threads: int,
    memory_bytes: int,
    rates: Rates,
    overheads: Overheads,
    half_flops_per_s: float | None = None,
    blas_bytes: int | None = None,
    processor: str = "",
    kernels: Mapping[str, float] = MappingProxyType({}),
) -> Device:
    """Return a device as planners get it: figures to three digits, memory in whole MiB."""
    tf32 = tf32_flops_per_s(kernels)
    return Device(
        name=name,
        host=host,
        kind=kind,
        memory_bytes=memory_bytes // _MIB * _MIB,
        flops_per_s=three_digits(rates.flops_per_s),
        memory_bytes_per_s=three_digits(rates.memory_bytes_per_s),
        launch_s=three_digits(rates.launch_s),
        threads=threads,
        overheads=overheads,
        half_flops_per_s=None if half_flops_per_s is None else three_digits(half_flops_per_s),
        blas_bytes=blas_bytes or None,  # of a cuBLAS told to take none a file can say nothing
        processor=processor,
        tf32_flops_per_s=None if tf32 is None else three_digits(tf32),
        kernels=tuple((name, three_digits(kernels[name])) for name in KERNEL if name in kernels),
    )


def linked(devices: Sequence[Device], links: Sequence[tuple[str, str, Link]]) -> Cluster:
    """Return a cluster with the link of every pair; the default link is the slowest."""
    known = tuple((a, b, rounded(link)) for a, b, link in links)
    return Cluster(tuple(devices), slowest([link for *_, link in known]), known)


def rounded(link: Link) -> Link:
    """Return a link to three digits."""
    return Link(three_digits(link.latency_s), three_digits(link.bytes_per_s))


def write_cluster(cluster: Cluster, path: str | Path, force: bool = False) -> None:
    """Write a cluster file; an existing file stays unless `force`.

    Raises:
        InputError: the file exists, or cannot be written.
    """
    text = to_json(cluster)
    try:
        with Path(path).open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise InputError(
            "the cluster file exists already",
            code="BX1500",
            at=str(path),
            help="add --force to replace it",
        ) from error
    except OSError as error:
        raise InputError(
            f"cannot write the cluster file: {error.strerror or error}",
            code="BX1501",
            at=str(path),
            help="name a file in a folder that exists and can be written",
        ) from error
