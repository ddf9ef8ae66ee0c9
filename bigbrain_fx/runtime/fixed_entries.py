"""Fixed entries of a model's trace: every batch must have them as the example has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .entries import pick, said, walk
from .stream import BatchError, Key

_MOST = 2**24  # bytes: of larger entries of one memory it is not looked at which places they share


def require_fixed(fixed: Sequence[tuple[Key, object]], batch: object, step: int) -> None:
    """Refuse a batch in which something that the model goes by is otherwise than in the example.

    Args:
        fixed: the path to it, and what is there: a value, a list's length, an object's repr, or the
            names of a dict.
        batch: the batch of a step.
        step: that takes it.

    Raises:
        BatchError: it is.
    """
    for key, want in fixed:
        found = pick(batch, key, step)
        if isinstance(found, Mapping):
            _require_order(found, want, key, step)
            continue
        if isinstance(found, Tensor) and want == APART:
            _require_apart(found, batch, key, step)
            continue
        found = len(found) if isinstance(found, list | tuple) else found
        if not (found is None or isinstance(found, bool | int | float | str | Tensor)):
            found = repr(found)  # of an object
        if isinstance(found, Tensor) or not (found == want or found != found):  # NaN
            name, shown = ".".join(map(str, key)), said(found)
            shown = shown if isinstance(found, Tensor) else repr(found)[:80]
            raise BatchError(
                _OTHERWISE.format(step=step, name=name, shown=shown, want=want), code="BX5039"
            )


def _require_order(found: Mapping[object, object], want: object, key: Key, step: int) -> None:
    order = ", ".join(map(str, found))
    if order != want:
        name = f"entries of {'.'.join(map(str, key))!r}" if key else "batch's entries"
        raise BatchError(_ORDER.format(step=step, name=name, order=order, want=want), code="BX5040")


def _require_apart(found: Tensor, batch: object, key: Key, step: int) -> None:
    for place, other in walk(batch):
        if isinstance(other, Tensor) and place != key and overlap(found, other):
            name, shared = (".".join(map(str, each)) for each in (key, place))
            raise BatchError(_SHARED.format(step=step, name=name, shared=shared), code="BX5042")


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether an element of two tensors is the same memory."""
    home = one.untyped_storage()
    if not home.nbytes() or home.data_ptr() != other.untyped_storage().data_ptr():
        return False
    if one.dtype != other.dtype or home.nbytes() > _MOST:
        return True  # for all that is known
    places = torch.arange(home.nbytes() // one.element_size())
    inner = [places.as_strided(t.shape, t.stride(), t.storage_offset()) for t in (one, other)]
    return bool(torch.isin(inner[0].reshape(-1), inner[1].reshape(-1)).any())


APART = "in memory of its own"  # what is to be said of an entry that forward writes into
_SHARED = (
    "step {step}: forward or loss writes into {name} of the batch in place, and {shared} is the "
    "same memory here: in a bundle each entry has its own, and is not written with it: compute "
    "with a copy (x = x * 2 for x.mul_(2)), or let batches() give {shared} as a copy "
    "(y = x.clone())"
)
_ORDER = (
    "step {step}: the {name} come in the order {order}, and the model, which takes them one after "
    "another, was split for {want}: give them in one order, in example_batch() as well"
)
_OTHERWISE = (
    "step {step}: batch entry {name!r} is {shown}, and the model was split for {want!r}, which it "
    "goes by: give what changes as a tensor that the model computes with (torch.where chooses by "
    "one), in example_batch() as well, or split a model for each value"
)
