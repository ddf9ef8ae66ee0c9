"""Messages of a channel that varies: each says its own layout, or that there is no tensor.

    | layout, 33 int64 | elements | room to spare, up to the largest message |

Copied into bundles whose micro-batches have unequal rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .channel import HEADER_BYTES, Channel, Layout, unpack
from .coded import MisuseError
from .network import pack

_NOTHING = -1  # dimensions of None


def enclose_nothing(channel: Channel, device: torch.device) -> Tensor:
    """Return a message of a channel that varies, which says that there is no tensor."""
    shape, kind = channel.wire
    made = torch.zeros(shape, dtype=kind, device=device)
    made[:HEADER_BYTES].view(torch.int64)[0] = _NOTHING
    return made


def enclose(channel: Channel, tensor: Tensor) -> Tensor:
    """Return a message of a channel that varies: its layout, its elements, and room to spare.

    Raises:
        MisuseError: it has more elements than the channel has room for.
    """
    layout, (shape, kind) = Layout.of(tensor), channel.wire
    flat = pack(tensor, layout).view(torch.uint8)
    if flat.numel() > shape[0] - HEADER_BYTES:
        raise MisuseError(
            f"{channel}: {layout.shape} is larger than {channel.shape}", code="BX5009"
        )
    made = torch.zeros(shape, dtype=kind, device=tensor.device)
    made[:HEADER_BYTES] = layout.header().view(torch.uint8).to(tensor.device)
    made[HEADER_BYTES : HEADER_BYTES + flat.numel()] = flat
    return made


def disclose(channel: Channel, message: Tensor) -> Tensor | None:
    """Return the tensor that `enclose` was given, in memory of its own; None if there was none."""
    header = message[:HEADER_BYTES].clone().view(torch.int64).cpu()
    if header[0] == _NOTHING:
        return None
    layout = Layout.from_header(header)
    end = HEADER_BYTES + layout.numel * channel.dtype.itemsize
    return unpack(message[HEADER_BYTES:end].clone().view(channel.dtype), layout)
