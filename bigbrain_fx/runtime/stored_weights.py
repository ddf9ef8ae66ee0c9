"""Weights that lie in a device's store but for those of the stage that runs: layer by layer, L2L.

    a stage runs      store ──▶ its weights                 pages of the file, as they are read
    another one does  its weights go, sums of its gradients ──▶ store
    update            store ──▶ a piece of weights, gradients and state ──▶ store

A weight is a tensor over pages of the store's file, at all times: whoever reads it (commits, the
user's hooks, a backward that has kept it) finds its numbers, and nothing can find it gone. What
comes and goes is this process's memory. Gradients of a stage are added in memory as ever, and lie
in the file from when another stage runs until the update.

Copied into bundles that offload weights. It knows no schedule.

Source: Pudipeddi et al., "Training Large Neural Networks with Constant Memory using a New Execution
Algorithm" (2020): all micro-batches of a layer, then the next; here the update comes at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

import torch
from torch import Tensor, nn

from .gradients import clip_factor
from .malloc import give_freed_memory_back
from .modules import is_released
from .stores import StoreRoom, bytes_of, is_dense, like_in, span_bytes

Sums = MutableMapping[tuple[str, int], Tensor]  # (parameter, stage) -> sum over micro-batches


class StoredWeights:
    """The weights of a device's stages in its store, and the sums of their gradients.

    Args:
        room: the device's store, whose pages a tensor can lie in: a disk.
    """

    def __init__(self, room: StoreRoom) -> None:
        self.room = room
        self.here: int | None = None  # the stage whose weights may be in memory
        self._of: dict[int, list[Tensor]] = {}  # stage -> where its weights lie
        self._sums: dict[tuple[str, int], Tensor] = {}  # where sums of gradients lie
        self._rooms: dict[int, Tensor] = {}  # by address

    def adopt(self, stage: int, module: nn.Module) -> None:
        """Give those of a stage's weights that have no memory their place in the store.

        A weight of two stages has one.
        """
        named = dict.fromkeys(module.parameters())
        for parameter in named:
            if is_released(parameter):
                room = self._take(parameter.nbytes)
                parameter.data = room.view(parameter.dtype).view(parameter.shape)
        stored = (parameter.detach() for parameter in named)
        self._of[stage] = [tensor for tensor in stored if tensor.data_ptr() in self._rooms]

    def visit(self, stage: int | None, sums: Sums) -> None:
        """Before a stage runs, or the update (None): let go of another one's weights and sums."""
        if stage == self.here:
            return
        if self.here is not None:
            self.let_go(self.here)
        for key in [key for key in sums if key[1] == self.here]:
            sums[key] = self._put(key, sums[key])
        self.here = stage
        give_freed_memory_back()  # else what small tensors lie between would be kept

    def weights_of(self, stage: int) -> Sequence[Tensor]:
        """Return the weights of a stage that lie in the store."""
        return self._of[stage]

    def let_go(self, stage: int) -> None:
        """Let go of the memory that a stage's weights have taken."""
        for tensor in self._of[stage]:
            self.leave(tensor)

    def let_go_of_all(self) -> None:
        """Let go of all weights' memory: whoever copied them has had each."""
        for stage in self._of:
            self.let_go(stage)

    def leave(self, tensor: Tensor) -> None:
        """Let go of the memory of a tensor, if it lies in the store; its numbers stay there."""
        room = self._rooms.get(tensor.data_ptr())
        if room is not None:
            self.room.leave(room)

    def leave_all(self, sums: Sums) -> None:
        """Let go of the memory of sums of gradients that were read."""
        for total in sums.values():
            self.leave(total)

    def clip(self, found: Mapping[str, Tensor], norms: Sequence[Tensor], limit: float) -> None:
        """Scale gradients where they are, one after another, as `clipped` does all at once."""
        factor = clip_factor(norms, limit)
        for gradient in found.values():
            gradient.copy_(gradient * factor)
            self.leave(gradient)

    def _take(self, nbytes: int) -> Tensor:
        room = self.room.take(nbytes)
        self._rooms[room.data_ptr()] = room
        return room

    def _put(self, key: tuple[str, int], total: Tensor) -> Tensor:
        """Return a sum's place in the store, which has its numbers; one with gaps stays here."""
        if not is_dense(total):
            return total
        room = self._sums.get(key)
        if room is None:
            room = self._sums[key] = self._take(span_bytes(total))
        if total.data_ptr() != room.data_ptr():
            with torch.no_grad():
                self.room.write(room, bytes_of(total))
        self.room.leave(room)
        return like_in(room, total)
