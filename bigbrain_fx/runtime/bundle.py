"""What `train.py` says of its bundle, and how a device is made from it and saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .data import Spec, Stream
from .device import Device, Training
from .hooks import Hooks
from .tensor_file import write_tensors
from .transport import Transport
from .weights import OwnWeights


@dataclass(frozen=True)
class Bundle:
    """What `train.py` says of the bundle."""

    folder: Path
    plan: str
    devices: tuple[type[Device], ...]
    kinds: tuple[str, ...]
    threads: tuple[int, ...]
    seed: int
    batches: Callable[..., Iterator[object]]
    inputs: Mapping[str, tuple[str | int, ...]]
    whole: tuple[str, ...]
    training: Training
    specs: Mapping[str, Spec] = field(default_factory=dict)
    hooks: Hooks = field(default_factory=Hooks)


def make_device(
    bundle: Bundle, rank: int, transport: Transport, seed: int, where: torch.device
) -> Device:
    """Build one device with its weights, its data stream and its optimizer."""
    cls = bundle.devices[rank]
    stream = Stream(
        bundle.batches, seed, bundle.inputs, bundle.whole, cls.micro_batches, where, bundle.specs
    )
    device = cls(transport, stream, seed, where)
    device.hooks = bundle.hooks
    weights = bundle.folder / "weights"
    owner = json.loads((weights / "index.json").read_text())
    device.load(OwnWeights(weights, cls.name), owner)
    device.train_with(bundle.training)
    return device


def save(device: Device, folder: Path) -> None:
    """Write a device's tensors into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(device.state(), folder / f"{device.name}.safetensors")


def save_first_gradients(folder: Path, device: Device, step: int) -> None:
    """Write the gradients of step 0 into a folder, after that step."""
    if step == 0 and device.first_gradients:
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(device.first_gradients, folder / f"{device.name}.safetensors")
