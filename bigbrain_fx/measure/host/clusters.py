"""Figures of devices and of their links -> a cluster, and its file.

This module writes cluster files; it measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bigbrain_fx.cluster import to_json
from bigbrain_fx.core import KERNEL, Cluster, Device, Link, Overheads
from bigbrain_fx.errors import InputError
from bigbrain_fx.measure.host.figures import (
    Kind,
    MatmulRate,
    Rates,
    half_flops_per_s,
    slowest,
    tf32_flops_per_s,
    three_digits,
)

_MIB = 2**20


@dataclass(frozen=True)
class DeviceProbe:
    """Rates of one device while all of them computed.

    Attributes:
        matmul: its matrix products by size and dtype, where they were measured.
        kernels: seconds of `core.KERNELS`, by name, those that it can run.
    """

    name: str
    host: str
    threads: int
    memory_bytes: int
    rates: Rates
    overheads: Overheads = field(default_factory=Overheads)
    kind: Kind = "cpu"
    blas_bytes: int | None = None
    processor: str = ""
    matmul: tuple[MatmulRate, ...] = ()
    kernels: Mapping[str, float] = field(default_factory=dict)

    @property
    def device(self) -> Device:
        """The device as planners get it: figures to three digits, memory in whole MiB."""
        rates, kernels = self.rates, self.kernels
        half, tf32 = half_flops_per_s(self.matmul, self.kind), tf32_flops_per_s(kernels)
        return Device(
            name=self.name,
            host=self.host,
            kind=self.kind,
            memory_bytes=self.memory_bytes // _MIB * _MIB,
            flops_per_s=three_digits(rates.flops_per_s),
            memory_bytes_per_s=three_digits(rates.memory_bytes_per_s),
            launch_s=three_digits(rates.launch_s),
            threads=self.threads,
            overheads=self.overheads,
            half_flops_per_s=None if half is None else three_digits(half),
            blas_bytes=self.blas_bytes or None,  # of a cuBLAS told to take none a file is silent
            processor=self.processor,
            tf32_flops_per_s=None if tf32 is None else three_digits(tf32),
            kernels=tuple((n, three_digits(kernels[n])) for n in KERNEL if n in kernels),
        )


@dataclass(frozen=True)
class Findings:
    """A measured cluster, with a file to write and all figures for JSON."""

    @property
    def cluster(self) -> Cluster:
        """The cluster for planners, with figures to three digits."""
        raise NotImplementedError

    @property
    def measured(self) -> dict[str, object]:
        """Everything that was measured, for JSON; `cluster` has less, and to three digits."""
        return asdict(self)

    def write(self, path: str | Path, force: bool = False) -> None:
        """Write the cluster file: see `write_cluster`."""
        write_cluster(self.cluster, path, force)


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
