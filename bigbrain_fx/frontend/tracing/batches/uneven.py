"""Unequal batches of a model file, tried: a smaller last one, shorter rows filled up.

    drop_last = False: rows must be free, and the loss a mean of them
    pad = {...}: padding of an entry must count nothing

This file runs the model in eval mode; it knows no data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.plain import Plain
from bigbrain_fx.frontend.tracing.step import Loss, Route, Step, modes_kept, route
from bigbrain_fx.frontend.translation.batch import Batch, Entry, fill
from bigbrain_fx.frontend.translation.batch_dims import named
from bigbrain_fx.frontend.translation.trace_refusals import FROM_THE_INPUT

if TYPE_CHECKING:
    from bigbrain_fx.frontend.tracing.captured import Captured

Pad = Mapping[str | int, int | float]
_ROUNDING = {2: 3e-2, 4: 1e-3}  # of the loss, by the bytes of its element type


def near(one: float, other: float, nbytes: int) -> bool:
    """Whether two losses are equal but for rounding."""
    return abs(one - other) <= _ROUNDING.get(nbytes, 1e-6) * max(abs(one), abs(other))


@contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """Let dropout and norms of the batch rest meanwhile."""
    with modes_kept(model):
        for part in model.modules():
            part.training = False
        yield


def require_rows(drop_last: bool | None, captured: Captured, training: bool) -> None:
    """Refuse to split a smaller batch unevenly where that is impossible or not intended.

    Raises:
        InputError: the trace holds for one number of rows; or rows of a model for inference are
            not in dimension 0.
    """
    if not training and any(entry.dim for entry in captured.batch.entries):
        raise InputError(
            "batch_dims has rows in another dimension than 0, and inference reads rows first",
            code="BX2160",
            help="let forward take rows first, and begin with x = x.transpose(0, 1)",
        )
    if drop_last is not False or not training:
        return
    fixed = captured.graph.static_batch
    if fixed is not None:
        raise InputError(
            f"drop_last = False, and the trace holds for micro-batches of {fixed} rows only",
            code="BX2161",
            notes=captured.warnings[:1],
            help=f"{FROM_THE_INPUT}; or drop_last = True, which leaves a smaller last batch out",
        )


def pads(batch: Batch, pad: Pad) -> dict[str, int | float]:
    """Return the pad values of model inputs.

    Raises:
        InputError: an entry is not there.
    """
    found = [(entry.key, entry.tensor) for entry in batch.entries]
    fills = {key: fill for name, fill in pad.items() for key, _ in named(found, name, "pad")}
    return {entry.name: fills[entry.key] for entry in batch.entries if entry.key in fills}


def require_padding(
    model: nn.Module, loss: Loss | None, pad: Pad, captured: Captured, autocast: str | None
) -> str:
    """Refuse to pad entries where the model or the loss counts the padding.

    The example is cut by a quarter along the dimension after its rows, and padded again.

    Returns:
        A remark for the user where no trial was possible; else empty.

    Raises:
        InputError: the loss of the padded example differs.
    """
    fills, batch = pads(captured.batch, pad), captured.batch
    if not fills or captured.graph.loss is None:
        return ""
    step = Step(model, loss, batch, _route(model, captured, loss))
    with suppress(*_CANNOT_RUN), in_eval(model):
        plain = Plain(step, model, autocast)
        one, other, twice = _losses(plain, batch, fills, dict(_all(batch)))
        if one == twice and math.isfinite(one):
            if near(one, other, 4):
                return ""
            shorter = dict(_with_lengths(batch, fills))
            if not near(*_losses(plain, batch, fills, shorter)[:2], 4):
                raise _counts(one, other)
            return ""
    return (
        "pad: it could not be tried whether what shorter entries are filled up with counts in the "
        "loss; a mask, and labels that the loss leaves out, keep it from that"
    )


def _losses(
    plain: Plain, batch: Batch, fills: Mapping[str, int | float], given: Mapping[str, Tensor]
) -> tuple[float, float, float]:
    """Return the losses of a batch that is cut, of one filled up again, and of the first again."""
    short = {e.name: _cut(given[e.name], e.name in fills, e.batched) for e in batch.entries}
    again = {n: _filled(t, short[n], fills[n]) if n in fills else t for n, t in given.items()}
    one, other, twice = (
        float(plain.run(list(tensors.values()), seed)[0])
        for seed, tensors in enumerate((short, again, short))
    )
    return one, other, twice


def _with_lengths(batch: Batch, fills: Mapping[str, int | float]) -> Iterator[tuple[str, Tensor]]:
    """Yield a batch's tensors; a number for each row that may be its length, of a cut row.

    `lengths` of an example are those of its uncut rows: a mask made of them would count the padding
    of cut rows. Labels look like lengths; for these both losses change equally.
    """
    cut = {e.name: _cut(e.tensor, e.name in fills, e.batched) for e in batch.entries}
    sizes = [(e.tensor.shape[1], cut[e.name].shape[1]) for e in batch.entries if _is_cut(e, cut)]
    most, left = max(sizes, default=(0, 0))
    for entry in batch.entries:
        tensor = entry.tensor
        is_number = entry.batched and tensor.dim() == 1 and not tensor.dtype.is_floating_point
        fits = is_number and tensor.dtype != torch.bool and bool((tensor <= most).all())
        yield entry.name, tensor.clamp(max=left) if fits and entry.name not in fills else tensor


def _is_cut(entry: Entry, cut: Mapping[str, Tensor]) -> bool:
    return entry.batched and entry.tensor.dim() > 1 and cut[entry.name].shape != entry.tensor.shape


_CANNOT_RUN = (RuntimeError, ValueError, IndexError, TypeError, KeyError)


def _route(model: nn.Module, captured: Captured, loss: Loss | None) -> Route:
    example = fill(captured.batch.template, dict(_all(captured.batch)))
    return route(model, example, loss is not None)


def _all(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    return ((entry.name, entry.tensor) for entry in batch.entries)


def _cut(tensor: Tensor, padded: bool, batched: bool) -> Tensor:
    dim = 1 if batched else 0
    if not padded or tensor.dim() <= dim:
        return tensor
    length = tensor.shape[dim]
    return tensor.narrow(dim, 0, max(1, length - max(1, length // 4))).clone()


def _filled(tensor: Tensor, short: Tensor, fill: float) -> Tensor:
    made = tensor.new_full(tensor.shape, fill)
    made[tuple(slice(size) for size in short.shape)] = short
    return made


def _counts(one: float, other: float) -> InputError:
    return InputError(
        f"pad fills up what counts: the example, cut by a quarter, has the loss {one:.4g}, and "
        f"filled up again {other:.4g}",
        code="BX2163",
        at="pad",
        help="give a mask with the batch, filled up with 0, that forward and loss multiply by; and "
        "labels that the loss leaves out, such as -100 for F.cross_entropy",
    )
