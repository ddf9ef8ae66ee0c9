"""Data by step number, checked: every batch is like the first one, and all devices have the same.

Micro-batches are equal; what a model file says of other batches is `splitting`'s. Bundles of
`split --with checks` have this file, and those whose plan adds to the pipeline's steps.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

from .checksum import checksum
from .entries import (
    as_scalar,
    pick,
    require_plain,
    said,
    spelled,
)
from .known_stream import KnownStream
from .stream import BatchError as BatchError, Spec

_END = object()


class Stream(KnownStream):
    """The batches of one run, by step, in equal micro-batches; args as of a BatchStream.

    Attributes:
        sizes: rows of each micro-batch of this step, as far as they count.
        weights: by which each micro-batch weighs in the step: its count of the loss's elements,
            else its rows.
        drop_last: what becomes of a batch of fewer rows: left out, or split unevenly, or (None)
            refused.
    """

    drop_last: bool | None = None

    def _start(self, step: int = 0) -> None:
        self.sizes: tuple[int, ...] = ()
        self.weights: Sequence[float] = ()
        super()._start(step)

    def _calling(self, step: int) -> AbstractContextManager[None]:
        return in_words(step)

    def _take(self, batch: object) -> None:
        """Split the batch of this step into its micro-batches."""
        self.sizes = ()
        self.parts = {name: self._split(name, batch) for name in self.inputs}
        self.weights = self.sizes

    def _drawn(self, step: int) -> object:
        with self.random, in_words(step):
            batch = next(self.iterator, _END)
        if batch is None:
            raise BatchError(
                f"step {step}: batches(seed) gave None: yield a batch, or leave it out",
                code="BX5024",
            )
        if batch is _END:
            raise BatchError(
                f"batches(seed) ended before step {step}; yield one batch per step: begin "
                "anew at its end (`while True:` around the loop), or run fewer --steps",
                code="BX5025",
            )
        return batch

    def _require_like_first(self, batch: object, step: int) -> None:
        require_plain(self.inputs, batch, step)
        super()._require_like_first(batch, step)

    def rows_of(self, micro: int) -> tuple[int, int]:
        """Return the rows of a micro-batch, and of one of a full batch; 1, 1 where none has any."""
        of_all = [spec[0] for name, (_, spec) in self.specs.items() if name not in self.whole]
        if not (self.sizes and of_all):
            return 1, 1
        return max(1, self.sizes[micro]), of_all[0] // self.micro_batches

    def _split(self, name: str, batch: object) -> list[Tensor]:
        """Return one tensor per micro-batch, each in memory of its own.

        A view may start at any address, and kernels round differently where one is not aligned.
        """
        value = self._digested(name, batch).to(self.device)
        if name in self.whole:
            return [value.clone()] * self.micro_batches
        self._note_sizes(name, value.shape[0])
        return [self._part(name, part) for part in value.tensor_split(self.micro_batches)]

    def _part(self, name: str, rows: Tensor) -> Tensor:
        """Copy a micro-batch's rows of an entry."""
        return rows.clone()

    def _digested(self, name: str, batch: object) -> Tensor:
        """Return a checked entry of the batch, and note its digest."""
        found = self._checked(name, self._fitted(name, pick(batch, self.inputs[name], self.step)))
        self.digests[name] = f"{said(found)} {checksum(found)}"
        return found

    def _fitted(self, name: str, value: object) -> object:
        """Make a number a tensor, where the trace takes one."""
        wanted = self.specs.get(name)
        return as_scalar(value, wanted[0]) if wanted is not None and not wanted[1] else value

    def _note_sizes(self, name: str, rows: int) -> None:
        """Refuse what cannot be split; all entries of a batch are split alike."""
        each, more = divmod(rows, self.micro_batches)
        if more and self.drop_last is not False:
            raise BatchError(
                f"step {self.step}: batch entry {name!r} has {rows} rows, "
                f"not a multiple of {self.micro_batches} micro-batches{_FEWER_ROWS}",
                code="BX5027",
            )
        sizes = (each + 1,) * more + (each,) * (self.micro_batches - more)
        if rows == 0 or self.sizes not in ((), sizes):
            raise BatchError(
                f"step {self.step}: batch entry {name!r} has {rows} rows, "
                f"expected {sum(self.sizes) or 'at least 1'}: give all entries as many",
                code="BX5028",
            )
        self.sizes = sizes

    def _checked(self, name: str, value: object) -> Tensor:
        """Return a batch entry that is like the traced one: messages have room for no other."""
        found, wanted = said(value), self._wanted(name, value)
        expected = spelled(*wanted) if wanted else "a tensor"
        if not isinstance(value, Tensor) or (wanted and found != expected):
            raise BatchError(
                f"step {self.step}: batch entry {name!r} is {found}, "
                f"but the model was split for {expected}{self._remedy(name, value)}",
                code="BX5029",
            )
        return value.resolve_conj().resolve_neg()

    def _wanted(self, name: str, value: object) -> Spec | None:
        """Return what an entry must be."""
        wanted = self.specs.get(name)
        if not (wanted and -1 in wanted[1] and isinstance(value, Tensor)):
            return wanted
        return wanted[0], tuple(value.shape) if value.dim() == len(wanted[1]) else wanted[1]

    def _remedy(self, name: str, value: object) -> str:
        """Say what to change in `batches` so that an entry fits."""
        wanted = self.specs.get(name)
        if not isinstance(value, Tensor) or wanted is None:
            return ": make it a tensor in batches(), as with torch.as_tensor"
        dtype, shape = wanted
        if len(shape) == value.dim() and shape != tuple(value.shape):
            if name in self.whole or shape[1:] != tuple(value.shape[1:]):
                return _pad(name, shape, tuple(value.shape))
            return _FEWER_ROWS if value.shape[0] < shape[0] else _more_rows(shape[0])
        if shape == tuple(value.shape):
            return f": give it the type torch.{dtype} in batches(), with .to(torch.{dtype})"
        return ": reshape it in batches()"


_FEWER_ROWS = (
    ": give all batches as many rows: leave a smaller last one out (DataLoader(..., "
    "drop_last=True), or drop_last = True in the model file); or let the model file say drop_last "
    "= False, so that its rows weigh as much as others, and split again"
)


def _more_rows(rows: int) -> str:
    return (
        f": let batches() give {rows} rows at most, or split again with an example_batch() of the "
        "largest batch (and drop_last = False in the model file where others are smaller)"
    )


def _pad(name: str, wanted: tuple[int, ...], found: tuple[int, ...]) -> str:
    """Say how to pad a tensor; a longer one can only be cut, or the model split for its length."""
    dim = next(d for d in reversed(range(len(wanted))) if wanted[d] != found[d])
    length = wanted[dim]
    if found[dim] > length:
        return (
            f": cut dimension {dim} to {length} in batches(), or split again with an "
            "example_batch() of the greatest length and pad all others to it"
        )
    pads = ", ".join(["0, 0"] * (len(wanted) - 1 - dim) + [f"0, {length} - x.shape[{dim}]"])
    return (
        f": let the model file say what fills it up, pad = {{{name!r}: 0}}, and split again; or "
        f"pad dimension {dim} to {length} in batches(), x = torch.nn.functional.pad(x, ({pads})), "
        "with a value that your loss leaves out"
    )


COMES_AGAIN = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


@contextmanager
def in_words(step: int) -> Iterator[None]:
    """Say of an error of the user's code that would come again what it is, and end the run so.

    Raises:
        BatchError: as it does.
    """
    try:
        yield
    except BatchError:
        raise
    except Exception as error:
        if not _comes_again(error):
            raise
        lines = str(error).strip().splitlines() or [""]
        caught = lines[0].startswith("Caught ")  # in a worker process: the error is the last line
        text = lines[-1] if caught else f"{type(error).__name__}: {lines[0]}"
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames[1:] if "site-packages" not in frame.filename]
        at = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
        raise BatchError(
            f"batches(seed) fails at the batch of step {step}: {text}{at}", code="BX5030"
        ) from error


def _comes_again(error: Exception) -> bool:
    """Whether a new process would meet it, too: no fault of a disk, a network or a worker's end."""
    if isinstance(error, OSError):
        return isinstance(error, COMES_AGAIN)
    return not isinstance(error, MemoryError) and "DataLoader worker (pid" not in str(error)
