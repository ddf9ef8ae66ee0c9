"""Batches of which a model file says how they become micro-batches: `drop_last`, `pad`, `micro`.

With `drop_last = False` a smaller batch is split as evenly as it goes, larger parts first. Where it
has fewer rows than there are micro-batches, the others run the first one's rows again and count
nothing. With `drop_last = True` it is left out, and step t takes the next.

    micro(batch, 4) ─▶ four batches of one structure and the same shapes, a micro-batch each
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .checksum import checksum
from .data import Stream
from .entries import pick, require_plain, said, walk
from .fixed_entries import require_fixed
from .stream import BatchError, Spec

if TYPE_CHECKING:
    from .loss_weight import LossWeight

Micro = Callable[[Any, int], Any]
_RETURN = "return a list of as many batches, with the same entries of the same shapes"


def parts_of(micro: Micro, batch: object, count: int, step: int) -> list[Any]:
    """Return the parts of a batch.

    Raises:
        BatchError: `micro` fails, or its parts differ or have another number.
    """
    try:
        found = micro(batch, count)
        found = [*found] if isinstance(found, Iterator) else found
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise BatchError(
            f"step {step}: micro(batch, {count}) fails: {type(error).__name__}: {first}: let micro "
            "cut any batch of batches()",
            code="BX5196",
        ) from error
    if not isinstance(found, list | tuple) or len(found) != count:
        shown = len(found) if isinstance(found, list | tuple) else type(found).__name__
        raise BatchError(
            f"step {step}: micro(batch, {count}) must return {count} batches, found {shown}: "
            f"{_RETURN}",
            code="BX5197",
        )
    _require_alike([dict(_entries(part)) for part in found], step)
    return list(found)


def given_parts(batch: Any, count: int) -> list[dict[str, Tensor]]:  # noqa: ANN401  # as micro
    """Return the parts of a batch that its sender has cut: "x.0" is the x of the first."""
    named = [(*name.rpartition("."), tensor) for name, tensor in batch.items()]
    return [{n: t for n, _, m, t in named if m == str(micro)} for micro in range(count)]


def _require_alike(parts: list[dict[tuple[object, ...], str]], step: int) -> None:
    for number, part in enumerate(parts):
        keys = [*dict.fromkeys((*parts[0], *part))]
        key = next((k for k in keys if parts[0].get(k) != part.get(k)), None)
        if key is not None:
            one, other = (p.get(key, "nothing") for p in (parts[0], part))
            raise BatchError(
                f"step {step}: micro(batch, {len(parts)}) gives {'.'.join(map(str, key))!r} as "
                f"{one} in part 0 and as {other} in part {number}: fill the smaller one up in "
                "micro with what the loss leaves out",
                code="BX5198",
            )


def _entries(part: object) -> Iterator[tuple[tuple[object, ...], str]]:
    """Yield what is where in a batch: type and shape of tensors, of all else the type."""
    for key, leaf in walk(part):
        yield key, said(leaf) if isinstance(leaf, Tensor) else type(leaf).__name__


Lengths = Sequence[tuple[int, str]]  # of a tensor, its rows first: dimensions and names


@dataclass(frozen=True)
class Splitting:
    """How batches become micro-batches, where a model file says it.

    Attributes:
        drop_last: what becomes of a batch of fewer rows: left out, or split unevenly, or (None)
            refused.
        dims: model inputs whose rows are in another dimension than 0; it comes first in the graph.
        pad: model inputs that may be shorter: what fills them up, at their ends.
        fixed: what else the model depends on, which a trace keeps: its place in a batch and its
            value. Of a list that is the length, of an object its repr, of a dict its names in
            order. Every batch must have the same there.
        divided: model inputs that count what a batch has, of which each micro-batch has its part.
        micro: cuts a batch into its micro-batches, in the place of all this.
        offsets: model inputs that hold offsets into the rows laid end to end -> positions of a row.
        lengths: dimensions of model inputs that may be shorter than planned, each of a name; those
            of one name are equal.
        buckets: lengths to which they are filled up; none: each batch keeps its own.
        weigh: by which count micro-batches weigh; None: by their rows.
    """

    drop_last: bool | None = None
    dims: Mapping[str, int] = field(default_factory=dict)
    pad: Mapping[str, float] = field(default_factory=dict)
    fixed: Sequence[tuple[tuple[str | int, ...], object]] = ()
    offsets: Mapping[str, int] = field(default_factory=dict)
    lengths: Mapping[str, Lengths] = field(default_factory=dict)
    buckets: Sequence[int] = ()
    weigh: LossWeight | None = None
    divided: Sequence[str] = ()
    micro: Micro | None = None

    def stream(self, kind: type[Stream], *about: Any) -> SplitStream:  # noqa: ANN401  # as below
        """Return a stream of batches that are split so: of a kind, where that cuts them itself."""
        made = kind if issubclass(kind, SplitStream) else SplitStream
        return made(*about, splitting=self)


class SplitStream(Stream):
    """The batches of one run, by step, as a model file says that they are split.

    Args:
        about: as of a BatchStream.
        splitting: what the model file says.
    """

    def __init__(self, *about: Any, splitting: Splitting | None = None, **named: Any) -> None:  # noqa: ANN401  # as of that
        self.splitting = splitting or Splitting()
        self.drop_last = self.splitting.drop_last
        self.found: dict[str, tuple[str, int]] = {}  # free length -> an entry, how long it is
        super().__init__(*about, **named)

    def _starts_anywhere(self) -> bool:
        """Whether `batches` knows our steps: not where small batches are left out."""
        return super()._starts_anywhere() and not self.drop_last

    def _take(self, batch: object) -> None:
        """Split the batch of this step into its micro-batches."""
        self.found = {}
        if self._cuts:
            self._take_parts(batch)
            return
        super()._take(batch)
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
            batch = self._drawn(step)
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
        require_plain(self.inputs, batch, step)
        require_fixed(self.splitting.fixed, batch, step)
        super()._require_like_first(batch, step)

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
        return (1, 1) if self._cuts else super().rows_of(micro)

    def _split(self, name: str, batch: object) -> list[Tensor]:
        """Return one tensor per micro-batch, each in memory of its own."""
        if name in self.splitting.offsets:
            return self._offsets(name, self._digested(name, batch).to(self.device))
        parts = super()._split(name, batch)
        if name in self.whole:
            return parts
        pairs = zip(parts, self.sizes, strict=True)
        return [part if rows else parts[0].clone() for part, rows in pairs]

    def _part(self, name: str, rows: Tensor) -> Tensor:
        """Copy rows so that they lie in memory as the user's own would, the rows first."""
        dim = self.splitting.dims.get(name, 0)
        return _as_user_has(rows, dim) if dim else super()._part(name, rows)

    def _offsets(self, name: str, offsets: Tensor) -> list[Tensor]:
        """Return the offsets of each micro-batch, counted from its own first row.

        Offsets into other rows are where the micro-batch begins or ends: there are as many in each.
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
        value, wanted = super()._fitted(name, value), self.specs.get(name)
        if wanted is not None and not wanted[1]:
            return value
        if isinstance(value, Tensor) and 0 < dim < value.dim():
            value = value.movedim(dim, 0)
        if isinstance(value, Tensor) and fill is not None and wanted is not None:
            shape = self._full(name, value, wanted[1])
            return filled_up(value, shape, fill, first=name not in self.whole)
        return value

    def _full(self, name: str, value: Tensor, planned: Sequence[int]) -> Sequence[int]:
        """Return the shape to which an entry is filled up: planned, or the next of `buckets`."""
        free = [dim for dim, _ in self.splitting.lengths.get(name, ()) if dim < value.dim()]
        if not free:
            return planned
        from .lengths import bucketed

        return bucketed(planned, free, value.shape, self.splitting.buckets)

    def _wanted(self, name: str, value: object) -> Spec | None:
        """Return what an entry must be; one that may be smaller keeps its own rows."""
        wanted = super()._wanted(name, value)
        if wanted is not None and name in self.splitting.lengths and isinstance(value, Tensor):
            from .lengths import own_shape  # only bundles of batches of several lengths have it

            about = name, value, wanted[1], self.splitting, self.step
            wanted = wanted[0], own_shape(*about, self.found)
        if wanted is None or self.drop_last is not False or name in self.whole:
            return wanted
        few = isinstance(value, Tensor) and value.dim() and value.shape[0] <= wanted[1][0]
        return (wanted[0], (len(value), *wanted[1][1:])) if few else wanted  # type: ignore[arg-type]


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
    return part.movedim(0, dim).clone(memory_format=torch.contiguous_format).movedim(dim, 0)
