"""Facts of a bundle in `train.py`, and how a device is made from the bundle and saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from .compared_stream import AgreeingTransport, ComparedStream
from .hooked_device import Hooks
from .modules import AGAIN, WeightsError
from .recipe import Training
from .stream import Spec
from .tensor_file import write_tensors
from .weights import checked_weights, read_index

if TYPE_CHECKING:  # a bundle has the files of what its plan uses
    from .data import Stream
    from .device import Device  # a plain pipeline has `checked_device` for it
    from .splitting import Splitting

CHECKS = Path(__file__).with_name("data.py")  # plain bundles have it with --with checks
KNOWN = Path(__file__).with_name("known_stream.py")  # and lean ones lack this


@dataclass(frozen=True)
class Bundle:
    """Facts of the bundle in `train.py`."""

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
    splitting: Splitting | None = None
    hooks: Hooks = field(default_factory=Hooks)
    store: str | None = None  # a folder in place of the planned ones


def make_device(
    bundle: Bundle,
    rank: int,
    transport: AgreeingTransport,
    seed: int,
    where: torch.device,
    *,
    offloads: bool = True,
) -> Device:
    """Build one device with its weights, its data stream and its optimizer.

    `offloads`: off, for what is thrown away: a store's room is not taken, and nothing is updated
    whose state would need it.
    """
    cls = bundle.devices[rank]
    device = cls(transport, _stream(bundle, cls, seed, where), seed, where)
    device.hooks = bundle.hooks
    if device.offload and offloads:
        from .offloading import offload_to, open_store  # only bundles that offload have it

        open_store(device, bundle.store)
    with checked_weights(bundle.folder / "weights", cls.name) as weights:
        device.load(weights, _owners(bundle))
        if device.micros:
            from .buckets import read_buckets  # only bundles with replicas have these
            from .joining import join

            join(device, read_buckets(bundle.folder), weights)
    device.train_with(bundle.training)
    if device.offload and offloads:
        offload_to(device, bundle.store)
    elif device.offload:
        device.optimizer = None
    return device


def _stream(bundle: Bundle, cls: type[Device], seed: int, where: torch.device) -> Stream:
    about = bundle.batches, seed, bundle.inputs, bundle.whole, cls.micro_batches, where
    if bundle.splitting is None:
        return _stream_type(cls)(*about, bundle.specs)
    return bundle.splitting.stream(_stream_type(cls), *about, bundle.specs)


def _stream_type(cls: type[Device]) -> type[Stream]:
    """Return what reads batches for a device: it checks them as far as the bundle can."""
    found: type[ComparedStream] = cls.stream_type
    if found is ComparedStream and CHECKS.is_file():
        from .data import Stream

        return Stream
    if found is ComparedStream and KNOWN.is_file():
        from .known_stream import KnownStream

        found = KnownStream
    return cast("type[Stream]", found)


def _owners(bundle: Bundle) -> Mapping[str, str]:
    """Return who answers for each parameter: for its norm, where gradients are clipped."""
    owner = read_index(bundle.folder / "weights").owner
    names = {cls.name for cls in bundle.devices}
    strangers = sorted(set(owner.values()) - names)
    if strangers:
        raise WeightsError(
            f"weights/index.json: it names {strangers[0]!r} as an owner, which is none of the "
            f"devices {', '.join(sorted(names))}: {AGAIN}",
            code="BX5007",
        )
    return owner


def save_first_gradients(folder: Path, device: Device, step: int) -> None:
    """Write the gradients of step 0 into a folder, after that step."""
    if step == 0 and device.first_gradients:
        write_tensors(device.first_gradients, folder / f"{device.name}.safetensors")
