"""The device that `tools.bench.gpu` measures: its name, its rates, and the datasheet of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from bigbrain_fx.cluster import BadValueError
from bigbrain_fx.cluster.presets import PRESETS, Preset, preset_name
from bigbrain_fx.core import Cluster, Device
from bigbrain_fx.costs.profiles import Machine
from bigbrain_fx.measure.ops.machine import processor_name
from tools.bench.gpu.rows import Rates

Kind = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class Card:
    """A device by name; `preset` is "" where no datasheet of ours matches."""

    name: str
    preset: str = ""

    @property
    def sheet(self) -> Preset | None:
        """Rates of the datasheet."""
        return PRESETS.get(self.preset)


def lacking(kind: Kind) -> str | None:
    """Return why a kind of device cannot be measured here; None: it can."""
    if kind == "cpu" or torch.cuda.is_available():
        return None
    return (
        f"no CUDA device was found (torch {torch.__version__}): nothing is measured; "
        "--device cpu makes the same table of this host's CPU"
    )


def card(kind: Kind) -> Card:
    """Return the first device of a kind."""
    if kind == "cpu":
        return Card(processor_name())
    name = torch.cuda.get_device_name(0)
    return Card(name, preset_of(name) or "")


def preset_of(name: str) -> str | None:
    """Return the preset of what torch calls a card; None: there is none, or there are several."""
    try:
        return preset_name(name)
    except BadValueError:
        return None


def rates(device: Device) -> Rates:
    """Return what `doctor` says of a device."""
    return Rates(
        device.flops_per_s,
        device.half_flops_per_s,
        device.memory_bytes_per_s,
        device.memory_bytes,
        device.launch_s,
    )


def sheet_rates(sheet: Preset | None) -> Rates | None:
    """Return what a datasheet says."""
    if sheet is None:
        return None
    half = sheet.half_flops_per_s
    return Rates(sheet.flops_per_s, half, sheet.memory_bytes_per_s, sheet.memory_bytes)


def by_datasheet(cluster: Cluster, sheet: Preset) -> Cluster:
    """Return a cluster of one device at what a preset says, which knows no timed kernels.

    Its memory and the start of an op stay measured.
    """
    (device,) = cluster.devices
    said = replace(
        device,
        flops_per_s=sheet.sustained_flops_per_s,
        half_flops_per_s=sheet.sustained_half_flops_per_s,
        tf32_flops_per_s=sheet.sustained_tf32_flops_per_s,
        memory_bytes_per_s=sheet.sustained_memory_bytes_per_s,
        kernels=(),
    )
    return replace(cluster, devices=(said,))


def as_profiled(cluster: Cluster, machine: Machine) -> Cluster:
    """Return a cluster of one device with the rates of the machine that profiled: it is the same.

    The rate of half-precision products stays, of which a profile says nothing.
    """
    (device,) = cluster.devices
    same = replace(
        device,
        threads=machine.threads,
        flops_per_s=machine.flops_per_s,
        memory_bytes_per_s=machine.memory_bytes_per_s,
        launch_s=machine.launch_s,
    )
    return replace(cluster, devices=(same,))


def blas_bytes(kind: Kind) -> int:
    """Return the size of a cuBLAS workspace as torch has it; 0 on a CPU, or if torch cannot say."""
    ask = getattr(torch.backends.cuda, "cublas_workspace_size", None)
    return int(ask()) if kind == "cuda" and ask is not None else 0


def products_use_tf32(kind: Kind) -> bool | None:
    """Return whether float32 products may use TF32 in this process, as in its bundles'."""
    return torch.backends.cuda.matmul.allow_tf32 if kind == "cuda" else None
