"""A bound on memory before anything is captured: weights and gradients of the whole model.

`plan` has the exact one, of the tensors that the graph reads, with the optimizer's state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bigbrain_fx.errors import NoPlanError

if TYPE_CHECKING:
    from torch import Tensor, nn

_SURE = 2  # times the memory: a part of the model may be read by nothing


@dataclass(frozen=True)
class Room:
    """Memory that all devices together have for tensors.

    Attributes:
        nbytes: how much.
        notes: a sentence for each device.
    """

    nbytes: float
    notes: tuple[str, ...]


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor; a sparse one, which torch does not count, has none here."""
    return 0 if tensor.is_sparse else tensor.nbytes


def require_room(model: nn.Module, room: Room, *, trains: bool) -> None:
    """Refuse a model that has far more tensors than all devices can hold.

    Raises:
        NoPlanError: with both sizes, and the memory of each device.
    """
    least = sum(_bytes(p) * (1 + (trains and p.requires_grad)) for p in model.parameters())
    least += sum(map(_bytes, model.buffers()))
    if least <= _SURE * room.nbytes:
        return
    what = "weights and gradients" if trains else "weights"
    raise NoPlanError(
        f"no split fits into the devices' memory: {what} take {_mib(least)}, and together the "
        f"devices have {_mib(room.nbytes)} for tensors",
        code="BX1343a",
        notes=room.notes,
        help="use more devices, or devices with more memory: for these alone each needs "
        f"{_mib(least / max(1, len(room.notes)))} beside the process's",
    )


def _mib(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"
