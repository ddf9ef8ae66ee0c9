"""Data by step number: step t takes the t-th batch, split on dimension 0 into micro-batches.

They are equal. With `drop_last = False` a smaller batch is split as evenly as it goes, larger parts
first; where it has fewer rows than there are micro-batches, the rest of them run the first one's
rows again and count nothing. With `drop_last = True` it is left out, and step t takes the next.

Every device reads the same stream and keeps what its stages need, so no input is ever sent. The
stream has random state of its own, of generators that the user's file has made, too (`own_dice`):
drawing data never moves the generators of the model, nor those of another device in this process.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .checksum import checksum
from .entries import (
    as_scalar,
    names_of,
    pick,
    require_fixed,
    require_known,
    require_plain,
    said,
    spelled,
)
from .own_dice import own_dice
from .reading import OwnRandomState, in_words
from .stream import BatchError, BatchStream, Key, Spec
from .user_parts import parts_of

if TYPE_CHECKING:
    from .loss_weight import LossWeight
    from .user_parts import Micro

_END = object()


@dataclass(frozen=True)
class Splitting:
    """How batches become micro-batches, where a model file says it.

    Attributes:
        drop_last: what becomes of a batch of fewer rows: left out, or split unevenly, or (None)
            refused.
        dims: model inputs whose rows are in another dimension than 0; it comes first in the graph.
        pad: model inputs that may be shorter: what fills them up, at their ends.
        fixed: what else the model goes by, which a trace keeps: its place in a batch, its value,
            of a list its length, of an object what repr says, of a dict its names in their order,
            of a tensor how it is laid out; every batch must have the same there.
        divided: model inputs that count what a batch has, of which each micro-batch has its part.
        micro: cuts a batch into its micro-batches, in the place of all this.
        offsets: model inputs that hold offsets into the rows laid end to end -> positions of a row.
        weigh: by which count micro-batches weigh; None: by their rows.
    """

    drop_last: bool | None = None
    dims: Mapping[str, int] = field(default_factory=dict)
    pad: Mapping[str, float] = field(default_factory=dict)
    fixed: Sequence[tuple[tuple[str | int, ...], object]] = ()
    offsets: Mapping[str, int] = field(default_factory=dict)
    weigh: LossWeight | None = None
    divided: Sequence[str] = ()
    micro: Micro | None = None


class Stream(BatchStream):
    """The batches of one run, by step, of any plan.

    Args:
        batches: `batches(seed)` gives one batch after another; `batches(seed, start)`, if it takes
            that, the same from batch `start` on, which must depend on no random state of before.
        seed, inputs, whole, micro_batches, device, specs: as of a BatchStream.
        splitting: what the model file says of how batches are split.

    Attributes:
        sizes: rows of each micro-batch of this step, as far as they count.
        weights: by which each micro-batch weighs in the step: its count of the loss's elements,
            else its rows.
    """

    def __init__(
        self,
        batches: Callable[..., Iterator[object]],
        seed: int,
        inputs: Mapping[str, Key],
        whole: tuple[str, ...],
        micro_batches: int,
        device: torch.device,
        specs: Mapping[str, Spec] | None = None,
        splitting: Splitting | None = None,
    ) -> None:
        self.splitting = splitting or Splitting()
        self.drop_last = self.splitting.drop_last
        self.names: object = None  # of the first batch's entries
        super().__init__(batches, seed, inputs, whole, micro_batches, device, specs)

    def _start(self, step: int = 0) -> None:
        self.step = step - 1
        self.parts = {}
        self.sizes: tuple[int, ...] = ()
        self.weights: Sequence[float] = ()
        self.digests: dict[str, str] = {}
        self.random = OwnRandomState(self.seed, self._generators())
        with self.random, in_words(step):
            batches = self.batches(self.seed, start=step) if step else self.batches(self.seed)
            self.iterator = iter(batches)

    def _generators(self) -> list[Any]:
        """Return the file's own generators, of which the stream has states for itself."""
        return own_dice(self.batches)

    def rewind(self, step: int) -> None:
        """Be ready for `step`, which may have been read already.

        `batches(seed, start)` starts there; a function without `start` is read up to it, and so is
        one whose small batches are left out: it knows nothing of our steps.
        """
        if "start" in inspect.signature(self.batches).parameters and not self.drop_last:
            self._note_first()
            self._start(step)
        elif step < self.step:
            self._start()

    def _note_first(self) -> None:
        """Learn what the first batch has: a run that goes on from a commit begins with another."""
        stay = getattr(self.batches, "names_stay", False)  # of those that the caller sends
        if self.names is None and self.step < 0 and not stay:
            with self.random, in_words(0):
                self.names = names_of(next(self.iterator, None))

    def _take(self, batch: object) -> None:
        """Split the batch of this step into its micro-batches."""
        if self._cuts:
            self._take_parts(batch)
            return
        self.sizes = ()
        self.parts = {name: self._split(name, batch) for name in self.inputs}
        for name in self.splitting.divided:
            self.parts[name] = self._divided(self.parts[name][0])
        self._weigh(batch)

    @property
    def _cuts(self) -> bool:
        """Whether the model file's own function cuts the batches."""
        return self.splitting.micro is not None and self.micro_batches > 1

    def _take_parts(self, batch: object) -> None:
        """Take the parts that the model file's `micro` cuts, each like the traced one."""
        assert self.splitting.micro is not None
        found = parts_of(self.splitting.micro, batch, self.micro_batches, self.step)
        for part in found:
            self._require_like_first(part, self.step)
        self.parts = {name: [self._own(name, part) for part in found] for name in self.inputs}
        self.digests = {
            name: " ".join(f"{said(part)} {checksum(part)}" for part in parts)
            for name, parts in self.parts.items()
        }
        self.sizes = (1,) * self.micro_batches
        weigh = self.splitting.weigh
        counts = None
        if weigh is not None:
            counts = weigh.checked((weigh.of(part, self.step) for part in found), self.step)
        self._set_weights(counts or self.sizes, ())

    def _own(self, name: str, batch: object) -> Tensor:
        """Return an entry of a batch as the trace takes it, in memory of its own."""
        found = self._fitted(name, pick(batch, self.inputs[name], self.step))
        return self._checked(name, found).to(self.device).clone()

    def _divided(self, count: Tensor) -> list[Tensor]:
        """Return each micro-batch's part of a count, by its rows; one without any has a whole."""
        sizes = self.sizes or (1,) * self.micro_batches
        parts = [float(count) * (rows or sum(sizes)) / sum(sizes) for rows in sizes]
        return [torch.tensor(part, dtype=count.dtype, device=count.device) for part in parts]

    def _weigh(self, batch: object) -> None:
        """Set the weights of the micro-batches; one that weighs nothing runs another's rows again.

        A mean over no elements is NaN, and so is nothing times its gradient.
        """
        weigh = self.splitting.weigh
        if weigh is None:
            self.weights = self.sizes
            return
        rows = sum(self.sizes)
        self._set_weights(weigh.counts(batch, rows, self.micro_batches, self.step), self.whole)

    def _set_weights(self, weights: Sequence[float], whole: Sequence[str]) -> None:
        self.weights = weights
        some = next(m for m, weight in enumerate(self.weights) if weight)
        for name, parts in self.parts.items():
            if name not in whole:
                pairs = zip(parts, self.weights, strict=True)
                self.parts[name] = [p if weight else parts[some].clone() for p, weight in pairs]

    def _next(self, step: int) -> object:
        """Draw a batch; of those to be left out, one at most comes between two others."""
        for _ in range(2):
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
            if not (self.drop_last and self._is_small(batch)):
                if not self._cuts:
                    self._require_like_first(batch, step)
                return batch
        raise BatchError(
            f"step {step}: two batches in a row have too few rows, and drop_last = True leaves "
            "them out: let batches() give larger ones, or split again with drop_last = False",
            code="BX5026",
        )

    def _require_like_first(self, batch: object, step: int) -> None:
        """Refuse a batch that a trace of the example does not hold for."""
        require_plain(self.inputs, batch, step)
        require_fixed(self.splitting.fixed, batch, step)
        self.names = names_of(batch) if self.names is None else self.names
        require_known(self.names, batch, step)

    def _is_small(self, batch: object) -> bool:
        """Whether an entry has fewer rows than the model was split for."""
        for name, (_, shape) in self.specs.items():
            dim = self.splitting.dims.get(name, 0)
            found = None if name in self.whole else pick(batch, self.inputs[name], self.step + 1)
            if isinstance(found, Tensor) and found.dim() > dim and found.shape[dim] < shape[0]:
                return True
        return False

    def rows_of(self, micro: int) -> tuple[int, int]:
        """Return the rows of a micro-batch, and of one of a full batch; 1, 1 where none has any."""
        of_all = [spec[0] for name, (_, spec) in self.specs.items() if name not in self.whole]
        if self._cuts or not (self.sizes and of_all):
            return 1, 1
        return max(1, self.sizes[micro]), of_all[0] // self.micro_batches

    def digest(self) -> str:
        """Return a hash of the current batch: shapes, types, and a checksum of every entry."""
        text = json.dumps(self.digests, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

    def _split(self, name: str, batch: object) -> list[Tensor]:
        """Return one tensor per micro-batch, each in memory of its own.

        A view may start at any address, and kernels round differently where one is not aligned.
        """
        found = self._checked(name, self._fitted(name, pick(batch, self.inputs[name], self.step)))
        self.digests[name] = f"{said(found)} {checksum(found)}"
        value = found.to(self.device)
        if name in self.splitting.offsets:
            return self._offsets(name, value)
        if name in self.whole:
            return [value.clone()] * self.micro_batches
        self._note_sizes(name, value.shape[0])
        dim = self.splitting.dims.get(name, 0)
        parts = [_as_user_has(part, dim) for part in value.tensor_split(self.micro_batches)]
        pairs = zip(parts, self.sizes, strict=True)
        return [part if rows else parts[0].clone() for part, rows in pairs]

    def _offsets(self, name: str, offsets: Tensor) -> list[Tensor]:
        """Return the offsets of each micro-batch, counted from its own first row.

        Those into other rows are where it begins or ends: there are as many in each.
        """
        rows = next(s[0] for n, (_, s) in self.specs.items() if n not in self.whole)
        each, per_row = rows // self.micro_batches, self.splitting.offsets[name]
        if int(offsets[-1]) != rows * per_row:
            raise BatchError(
                f"step {self.step}: batch entry {name!r} holds offsets that end at "
                f"{int(offsets[-1])}, expected {rows * per_row}, the positions of {rows} rows: "
                "fill it up with that number",
                code="BX5190",
            )
        starts = [m * each * per_row for m in range(self.micro_batches)]
        return [offsets.clamp(start, start + each * per_row) - start for start in starts]

    def _fitted(self, name: str, value: object) -> object:
        """Put an entry's rows first, fill up what is shorter than planned; make numbers tensors."""
        dim, fill = self.splitting.dims.get(name, 0), self.splitting.pad.get(name)
        wanted = self.specs.get(name)
        if wanted is not None and not wanted[1]:
            return as_scalar(value, wanted[0])
        if isinstance(value, Tensor) and 0 < dim < value.dim():
            value = value.movedim(dim, 0)
        if isinstance(value, Tensor) and fill is not None and wanted is not None:
            return filled_up(value, wanted[1], fill, first=name not in self.whole)
        return value

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
        """Return what an entry must be; one that may be smaller keeps its own rows."""
        wanted = self.specs.get(name)
        if wanted is None or self.drop_last is not False or name in self.whole:
            return wanted
        few = isinstance(value, Tensor) and value.dim() and value.shape[0] <= wanted[1][0]
        return (wanted[0], (len(value), *wanted[1][1:])) if few else wanted  # type: ignore[arg-type]

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


def filled_up(value: Tensor, shape: Sequence[int], fill: float, first: bool) -> Tensor:
    """Fill up a tensor at the ends of its dimensions, but for its rows where they come first."""
    if value.dim() != len(shape):
        return value
    missing = [max(0, want - have) for want, have in zip(shape, value.shape, strict=True)]
    missing[:1] = [] if not missing else [0 if first else missing[0]]
    ends = [count for more in reversed(missing) for count in (0, more)]
    return torch.nn.functional.pad(value, ends, value=fill) if any(missing) else value


def _as_user_has(part: Tensor, dim: int) -> Tensor:
    """Copy a part so that it lies in memory as the user's own would, its rows first."""
    if not dim:
        return part.clone()
    return part.movedim(0, dim).clone(memory_format=torch.contiguous_format).movedim(dim, 0)


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
