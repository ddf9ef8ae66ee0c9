"""Weights that lie in a device's store but for those of the stage that runs: layer by layer, L2L.

    a stage runs      store ──▶ its weights                 pages of the file, as they are read
    another one does  its weights go, sums of its gradients ──▶ store
    update            store ──▶ a piece of weights, gradients and state ──▶ store

A weight is a tensor over pages of the store's file, at all times. Every reader (commits, the user's
hooks, a backward that has saved it) finds its numbers, and nothing can find it gone. Only the
process's memory comes and goes. Gradients of a stage are added in memory as ever, and lie in the
file from when another stage runs until the update.

Copied into bundles that offload weights. The module knows no schedule.

Source: Pudipeddi et al., "Training Large Neural Networks with Constant Memory using a New Execution
Algorithm" (2020): all micro-batches of a layer, then the next. Here the update comes at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn

from .feature import Feature
from .gradients import clip_factor
from .modules import fill
from .offload_malloc import apart, give_freed_memory_back
from .released import is_released
from .stores import StoreRoom, fetched, is_dense, put, span_bytes

TRIMS_EVERY = 8
"""Visits after which freed memory goes back to the system."""
Sums = MutableMapping[tuple[str, int], Tensor]  # (parameter, stage) -> sum over micro-batches


class StoredWeights:
    """The weights of a device's stages in its store, and the sums of their gradients.

    Args:
        room: the device's store, whose pages a tensor can lie in: a disk.
    """

    def __init__(self, room: StoreRoom) -> None:
        self.room = room
        self.here: int | None = None  # the stage whose weights may be in memory
        self._has_updated, self._visits = False, 0
        self._of: dict[int, list[Tensor]] = {}  # stage -> where its weights lie
        self._sums: dict[tuple[str, int], Tensor] = {}  # where sums of gradients lie
        self._rooms: dict[int, Tensor] = {}  # by address

    def fill(self, stage: int, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Give a stage's weights that have no memory their place in the store, and fill it.

        A weight of two stages has one place.

        Raises:
            WeightsError: one is missing, or has another shape.
        """
        with apart():
            self._adopt(stage, module)
            fill(module, tensors)
        self.let_go(stage)

    def _adopt(self, stage: int, module: nn.Module) -> None:
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
        self._visits += 1
        if self._visits % TRIMS_EVERY == 0 or not self._has_updated:
            give_freed_memory_back()  # what is made once lies between what has gone
        self._has_updated |= stage is None

    def let_go(self, stage: int) -> None:
        """Let go of the memory that a stage's weights have taken."""
        for tensor in self._of[stage]:
            self.leave(tensor)

    def let_go_of_all(self) -> None:
        """Let go of all weights' memory: each has been copied."""
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

    @contextmanager
    def here_for(self, piece: Sequence[nn.Parameter]) -> Iterator[None]:
        """Have weights in memory of their own while they are updated; then they lie there again."""
        homes = {p: room for p in piece if (room := self._rooms.get(p.data_ptr())) is not None}
        places = {parameter: parameter.data for parameter in homes}
        for parameter, room in homes.items():
            parameter.data = fetched(self.room, room, parameter.data, parameter.device)
        try:
            yield
        finally:
            for parameter, room in homes.items():
                self._write(room, places[parameter], parameter.data)
                parameter.data = places[parameter]
        for parameter in piece:
            if parameter.grad is not None:
                self.leave(parameter.grad)

    def _write(self, room: Tensor, place: Tensor, value: Tensor) -> None:
        if value.stride() == place.stride() and value.dtype == place.dtype:
            put(self.room, room, value)
            return
        place.copy_(value)
        self.room.leave(room)

    def _take(self, nbytes: int) -> Tensor:
        room = self.room.take(nbytes)
        self._rooms[room.data_ptr()] = room
        return room

    def _put(self, key: tuple[str, int], total: Tensor) -> Tensor:
        """Return a sum's place in the store, which has its numbers; one with gaps stays here."""
        if not is_dense(total):
            return total
        place = self._sums.get(key)
        if place is total:
            self.leave(total)
            return total
        room = self._take(span_bytes(total)) if place is None else self._rooms[place.data_ptr()]
        self._sums[key] = put(self.room, room, total, place)
        return self._sums[key]


class WeightsByVisit(Feature):
    """Have a stage's weights in memory while it runs."""

    def begin_run(self) -> None:
        """Let go of what was read between the steps: who copied the state has read them all."""
        self.device.weights.let_go_of_all()

    def running(self, stage: int, micro: int, phase: str) -> AbstractContextManager[None]:
        """Let go of another stage's weights; one that runs again is within its backward."""
        if phase != "again":
            self.device.weights.visit(stage, self.device._now.gradients)
        return nullcontext()
