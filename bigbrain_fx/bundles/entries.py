"""Allowed batches of a caller's own loop: each entry of a batch, beside that of the example.

This file knows plans; it starts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bigbrain_fx.core import Input
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SentEntry:
    """One input that stages read.

    Attributes:
        key: where it is in a batch.
        shape: in a whole batch, its rows first.
        dim: where the user has the rows.
        is_split: whether it has rows; `fewer` are let through, and with `pad` what is shorter.
        free: dimensions, rows first, that may be shorter: as long as one of `buckets`, if any.
        varies: each batch has it in another shape: only an opaque loss reads it.
    """

    key: tuple[str | int, ...]
    dtype: str
    shape: tuple[int, ...]
    dim: int
    is_split: bool
    fewer: bool
    pad: bool
    free: tuple[int, ...] = ()
    buckets: tuple[int, ...] = ()
    varies: bool = False


def entries(plan: Plan) -> dict[str, SentEntry]:
    """Return each input that stages read."""
    used = {name for stage in plan.stages.stages for name in stage.inputs}
    return {entry.name: _entry(entry, plan) for entry in plan.graph.inputs if entry.name in used}


def _entry(entry: Input, plan: Plan) -> SentEntry:
    said = plan.source
    return SentEntry(
        entry.key,
        entry.spec.dtype,
        _shape(entry, plan),
        said.batch_dims.get(entry.name, 0),
        entry.batched,
        entry.batched and said.drop_last is False,
        entry.name in said.pad,
        tuple(dim for dim, _ in said.lengths.get(entry.name, ())),
        said.buckets,
        entry.varies,
    )


def _shape(entry: Input, plan: Plan) -> tuple[int, ...]:
    """Return the shape of an entry in a whole batch; in a part, where the caller cuts."""
    shape = entry.spec.at(plan.rows).shape
    sizes = tuple(int(size) for size in shape)
    if plan.source.has_micro:
        return sizes
    return (plan.micro_batches * plan.rows, *sizes[1:]) if entry.batched else sizes


def _reached(batch: object, key: tuple[str | int, ...]) -> object:
    found: Any = batch
    for part in key:
        try:
            found = found[part]
        except (KeyError, IndexError, TypeError) as error:
            raise InputError(
                f"the batch has no entry {'.'.join(map(str, key))!r}",
                code="BX3029",
                help="give batches like example_batch",
            ) from error
    return found


def has_fewer(batch: object, entry: SentEntry) -> bool:
    """Whether an entry has fewer rows than the example's."""
    shape = getattr(_reached(batch, entry.key), "shape", ())
    return len(shape) > entry.dim and shape[entry.dim] < entry.shape[0]


def entry_tensor(name: str, batch: object, entry: SentEntry) -> Tensor:
    """Return one entry of a batch, its rows first, if it is like the example's.

    Raises:
        InputError: it is not.
    """
    import torch

    from bigbrain_fx.runtime import is_plain, said

    found = _reached(batch, entry.key)
    if isinstance(found, torch.Tensor) and not is_plain(found):
        raise InputError(
            f"batch entry {name!r} is {said(found)}, and messages take plain tensors",
            code="BX3030",
            help="give x.to_dense(), or what is nested filled up to one length",
        )
    if isinstance(found, torch.Tensor) and found.grad_fn is not None:
        raise InputError(
            f"batch entry {name!r} is computed from what wants a gradient, and devices send none "
            "back to it: what computes it would not be trained",
            code="BX3030a",
            help="let the model's forward compute it; or give x.detach(), where it is not trained",
        )
    if isinstance(found, torch.Tensor) and 0 < entry.dim < found.dim():
        found = found.movedim(entry.dim, 0)
    if not isinstance(found, torch.Tensor) or str(found.dtype) != f"torch.{entry.dtype}":
        shown = str(getattr(found, "dtype", type(found).__name__)).removeprefix("torch.")
        raise InputError(
            f"batch entry {name!r} is {shown}, but the model was split for {entry.dtype}",
            code="BX3031a",
            help="give all batches one type, as x.to(torch.float32) does",
        )
    shown = f"{entry.dtype}{list(found.shape)}"
    wanted = f"{entry.dtype}{list(entry.shape)}"
    if shown != wanted and not _may_be(entry, found):
        raise InputError(
            f"batch entry {name!r} is {shown}, but the model was split for {wanted}",
            code="BX3031",
            help="show some batches, from which it is found what varies: seen=list(itertools."
            "islice(loader, 16)), beside example_batch; or give all batches one shape: "
            "drop_last=False trains on a smaller last one, drop_last=True leaves it out, "
            "pad={entry: number} fills up what is shorter, and with lengths=(64, 128) to the next "
            "of these",
        )
    return found.detach().cpu().contiguous()


def _may_be(entry: SentEntry, found: Tensor) -> bool:
    """Whether an entry may have a shape that is not the example's."""
    if found.dim() != len(entry.shape):
        return False
    if entry.varies:
        return True
    pairs = [(h == w, h <= w) for h, w in zip(found.shape, entry.shape, strict=True)]
    rows = pairs[: int(entry.is_split)]
    rest = pairs[int(entry.is_split) :]
    are_rows = all(less and found.shape[0] if entry.fewer else same for same, less in rows)
    first = len(rows)
    fits = ((less if entry.pad else same) for same, less in rest)
    return are_rows and all(
        fit or _is_bucket(entry, dim, found.shape[dim]) for dim, fit in enumerate(fits, first)
    )


def _is_bucket(entry: SentEntry, dim: int, size: int) -> bool:
    """Whether a length is one that batches may have; any, where each keeps its own."""
    if dim not in entry.free:
        return False
    return size in entry.buckets if entry.buckets else 1 < size <= entry.shape[dim]


def require_one_number(found: Mapping[str, Tensor], known: Mapping[str, SentEntry]) -> None:
    """Refuse a batch whose entries disagree in their rows."""
    rows = {name: len(tensor) for name, tensor in found.items() if known[name].is_split}
    if len({*rows.values()}) > 1:
        said = ", ".join(f"{name} {count}" for name, count in rows.items())
        raise InputError(
            f"the batch's entries have unequal rows: {said}", code="BX3032", help="give equal rows"
        )


@dataclass(frozen=True)
class RowCounts:
    """How many elements of each row the loss is a mean over: sent with every batch.

    Attributes:
        count: of a batch, or a part of it.
        dims: `batch_dims` of the recipe.
    """

    count: Callable[[Any], object]
    dims: Mapping[str | int, int | str | None]

    def of(self, batch: object) -> Tensor:
        """Return the counts of a batch's rows.

        Raises:
            InputError: they are no counts, or do not add up to the batch's.
        """
        from bigbrain_fx.frontend import counts_by_row, take_apart

        return counts_by_row(self.count, take_apart(batch, dims=self.dims))


@dataclass(frozen=True)
class Cutter:
    """The caller's function that cuts batches, and into how many parts."""

    micro: Callable[[Any, int], Any]
    count: int

    def of(self, batch: object) -> list[Any]:
        """Return the parts of a batch.

        Raises:
            InputError: their number is another, they differ, or the function fails.
        """
        from bigbrain_fx.runtime import BatchError, parts_of

        try:
            return parts_of(self.micro, batch, self.count, 0)
        except BatchError as error:
            what, _, remedy = str(error).removeprefix("step 0: ").rpartition(": ")
            raise InputError(what, code="BX3153", help=remedy) from error
