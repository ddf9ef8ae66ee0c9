"""Whether the copies of a weight stay equal: several devices hold it, and each updates its own.

    embed.weight    on d0 and d3, two stages share it     each adds both gradients, and updates
    norm.weight     on d0 and d1, of one tensor group     each has its gradient, and updates
    bucket r0       on d0 and d2, of two replicas         without ZeRO each has the sum, and updates

Exchanged values are bitwise equal on all devices. A value that each device computes for itself is
bitwise equal only where processors round identically. Two kinds of processors may not, and then
copies drift apart in silence. The digests of copies are therefore compared, after the first steps
of a run and every now and then.

The module knows weights and their other holders; it knows no schedule and no optimizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from .checksum import checksum
from .compared_stream import Subject

if TYPE_CHECKING:
    from .checked_device import CheckedDevice

EVERY = 256  # steps; before, after 1, 2, 4, 8, ...


def require_equal_copies(device: CheckedDevice) -> None:
    """Compare what a device has updated with the others' copies, where that is due.

    Not where weights lie in a store, or steps run into each other.

    Raises:
        InputError: another device holds other numbers; under a supervisor the end of the step
            raises it.
    """
    done = device.step + 1
    if done % EVERY and done & (done - 1):
        return
    if device.weights is not None or device.versions is not None:
        return
    for what, tensors in _shared(device):
        subject = Subject(device.step, what)
        device.transport.agree(subject, _digest(tensors), device.name)


def _shared(device: CheckedDevice) -> Iterator[tuple[str, Sequence[Tensor]]]:
    """Yield what others hold as well, and update alike."""
    if device.members:
        yield f"what {', '.join(device.members)} hold whole", _whole(device)
    for name in sorted({c.value for c in device.channels if c.kind == "tied"}):
        if device.zero_stage < 3:
            yield device.held.divided.get(name, name), [device.parameters[name]]
    if device.replicas is not None and not device.zero_stage:
        for bucket in device.replicas.buckets:
            held = [device.parameters[name] for name in bucket.params]
            yield f"{bucket.params[0]} and others in {bucket.name}", held


def _whole(device: CheckedDevice) -> list[Tensor]:
    """Return what a member of a tensor group has not divided."""
    return [
        tensor
        for module in device.modules.values()
        for name, tensor in module.state_dict().items()
        if name not in device.held.divided and device.holds(tensor)
    ]


def _digest(tensors: Sequence[Tensor]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        found.update(checksum(tensor).encode())
    return found.hexdigest()
