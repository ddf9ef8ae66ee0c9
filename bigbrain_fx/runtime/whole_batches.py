"""Batches for a step of the user's own Python: as the user has them, of any shape, cut by rows.

Nothing of them is sent, so nothing needs the example's shapes. One micro-batch is the batch itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

from torch import Tensor

from .checksum import checksum
from .entries import is_plain, pick, said
from .loss_weight import Path, mapped, part_of_rows
from .splitting import SplitStream
from .stream import BatchError, RandomState


class WholeBatches(SplitStream):
    """The batches of one run, by step.

    Attributes:
        batch: the one of this step, on the stream's device.
    """

    batch: Any = None

    def micro_batch(self, micro: int) -> Any:  # noqa: ANN401  # a nest of any kind
        """Return a micro-batch; of several, each in memory of its own."""
        if self.micro_batches == 1:
            return self.batch
        part = part_of_rows(self._dims(), sum(self.sizes), len(self._parts()), micro)
        return mapped(self.batch, lambda tensor, path: part(tensor, path).clone())

    def digest(self) -> str:
        """Return a hash of the current batch: type, shape and a checksum of each tensor."""
        found = hashlib.blake2b(digest_size=12)

        def note(tensor: Tensor, path: Path) -> Tensor:
            numbers = checksum(tensor) if is_plain(tensor) else ""
            found.update(f"{path} {said(tensor)} {numbers}\n".encode())
            return tensor

        mapped(self.batch, note)
        return found.hexdigest()

    def read_up_to(self, step: int) -> None:
        """Read on, so that the batch of `step` is the next."""
        while self.step < step - 1:
            self._next(self.step + 1)
            self.step += 1

    def _random_state(self) -> RandomState:
        """Share the file's own generators with model and loss, as one loop does."""
        return RandomState(self.seed)

    def _require_like_first(self, batch: object, step: int) -> None:
        """Take any batch: the user's code reads it."""

    def _take(self, batch: object) -> None:
        self.sizes, self.weights = (), ()
        if self.micro_batches > 1:
            self._note_rows(batch)
        moves = self.device.type != "cpu"
        self.batch = mapped(batch, lambda t, _: t.to(self.device)) if moves else batch

    def _note_rows(self, batch: object) -> None:
        """Note the rows of each micro-batch, and by what it weighs.

        Raises:
            BatchError: the entries that are cut have unequal rows.
        """
        self._require_known(batch)
        rows = {name: self._rows(name, batch) for name in self.inputs if name not in self.whole}
        if len(set(rows.values())) != 1 or not min(rows.values()):
            raise BatchError(
                f"step {self.step}: the entries of a batch have {rows} rows, which "
                f"{self.micro_batches} micro-batches cannot share: split again with "
                "--micro-batches 1, which cuts nothing",
                code="BX5194",
            )
        each, more = divmod(next(iter(rows.values())), self.micro_batches)
        self.sizes = (each + 1,) * more + (each,) * (self.micro_batches - more)
        weigh, parts = self.splitting.weigh, len(self._parts())
        counted = (
            self.sizes if weigh is None else weigh.counts(batch, sum(self.sizes), parts, self.step)
        )
        self.weights = (*counted, *repeat(0, self.micro_batches - len(counted)))

    def _require_known(self, batch: object) -> None:
        """Refuse a tensor that the example lacks: nobody knows whether it has the batch's rows.

        Raises:
            BatchError: there is one, or one that is sparse or nested by now.
        """

        def look(tensor: Tensor, path: Path) -> Tensor:
            if path not in self.inputs.values() or not is_plain(tensor):
                name = ".".join(map(str, path))
                raise BatchError(
                    f"step {self.step}: batch entry {name!r} is {said(tensor)}, and the example "
                    f"has no such entry: {self.micro_batches} micro-batches cannot share it: split "
                    "again with --micro-batches 1, which cuts nothing",
                    code="BX5195",
                )
            return tensor

        mapped(batch, look)

    def _parts(self) -> list[int]:
        """Return the micro-batches that have rows."""
        return [micro for micro, rows in enumerate(self.sizes) if rows]

    def _rows(self, name: str, batch: object) -> int:
        value, dim = pick(batch, self.inputs[name], self.step), self.splitting.dims.get(name, 0)
        return value.shape[dim] if isinstance(value, Tensor) and value.dim() > dim else 0

    def _dims(self) -> dict[Path, int | None]:
        """Return where the rows are of entries that have them elsewhere than in dimension 0."""
        dims: dict[Path, int | None] = {self.inputs[name]: None for name in self.whole}
        return dims | {self.inputs[name]: dim for name, dim in self.splitting.dims.items()}


def repeated(example: object) -> Callable[[int], Iterator[object]]:
    """Return `batches` of a model file that has none: its example batch, again and again.

    Args:
        example: the batch, or what makes it.
    """
    return lambda _seed: repeat(example() if callable(example) else example)
