"""A trial of the form of one position, step by step, against the untouched model.

The caches are full of NaN before: numbers of an earlier request may not count.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.cached.module import Cached
from bigbrain_fx.frontend.cached.row import LEAVE_OUT, Row
from bigbrain_fx.frontend.tracing.export import ambient
from bigbrain_fx.frontend.tracing.step import without_fast_path

SHORT = 24  # positions that are tried one by one
LONG = 512  # and together
TOGETHER = 16  # positions of a frame of the long trial
LAG = 3  # positions that the second row is behind
UNLIKE = {torch.float64: 1e-12, torch.float32: 1e-5}  # of the largest score
UNLIKE_HALVES = 3e-2
Positions = Callable[[Tensor, Tensor, Tensor], Tensor]  # tokens, rows, positions -> scores


def require_same(row: Row, module: Cached, run: Positions | None = None) -> float:
    """Compare the form with the model; return the greatest difference, of the largest score.

    Args:
        row: the trace.
        module: of one position; its caches are empty afterwards.
        run: a function that computes in its place, such as a bundle of it.

    Raises:
        CaptureError: results differ.
    """
    tokens = _tokens(row)
    try:
        with torch.no_grad(), without_fast_path():
            _fill_caches(module, float("nan"))
            worst = _one_by_one(row, module, run or module, tokens)
            if row.longest > SHORT:
                worst = max(worst, _many_at_once(row, run or module, tokens))
    finally:
        _fill_caches(module, 0.0)
    return worst


def _tokens(row: Row) -> Tensor:
    """Return two rows of tokens: the example's, rolled so that identical rows differ."""
    entry = next(e for e in row.batch.entries if e.name == row.entry)
    two = entry.tensor[torch.arange(2) % row.batch.rows].clone()
    two[1] = two[1].roll(1)
    return two


def _fill_caches(module: Cached, value: float) -> None:
    with torch.no_grad():
        for name in module.caches:
            cache = module.get_buffer(name)
            if cache.is_floating_point():
                cache.fill_(value)
            else:
                cache.zero_()


def _one_by_one(row: Row, module: Cached, run: Positions, tokens: Tensor) -> float:
    """Generate as a server does, two rows at different positions."""
    count, most = min(SHORT, row.longest), 0.0
    expected = _expected(row, tokens[:, :count])
    second = min(1, module.places - 1)
    for at in range(count + LAG):
        now = [(r, at - LAG * r) for r in range(1 + second) if 0 <= at - LAG * r < count]
        rows, positions = (torch.tensor(part) for part in zip(*now, strict=True))
        found = run(tokens[rows, positions].unsqueeze(1), rows, positions)[:, 0]
        for scores, (r, position) in zip(found, now, strict=True):
            most = max(most, _unlike(row, scores, expected[r, position], r, position))
    return most


def _many_at_once(row: Row, run: Positions, tokens: Tensor) -> float:
    """Read a long row, several positions a frame, as a prompt is read."""
    count, most = min(LONG, row.longest), 0.0
    expected = _expected(row, tokens[:1, :count], from_position=count - 1)
    for start in range(0, count, TOGETHER):
        positions = torch.arange(start, min(start + TOGETHER, count))
        rows = torch.zeros_like(positions)
        found = run(tokens[0, positions].unsqueeze(1), rows, positions)[:, 0]
    most = _unlike(row, found[-1], expected[0, -1], 0, count - 1)
    return most


def _expected(row: Row, tokens: Tensor, from_position: int = 0) -> Tensor:
    """Return the untouched model's scores at each position."""
    found = _scores(row, tokens)
    if found.shape[1] == tokens.shape[1]:
        return found
    lengths = range(from_position + 1, tokens.shape[1] + 1)  # it gives those of the last alone
    return torch.cat([_scores(row, tokens[:, :length]) for length in lengths], 1)


def _scores(row: Row, tokens: Tensor) -> Tensor:
    tensors = [
        tokens if entry.name == row.entry else _alike(entry.tensor, row, tokens)
        for entry in row.batch.entries
    ]
    with ambient(row.autocast, tensors):
        found: Tensor = row.step(*tensors)[row.step.seen.output_names.index(row.output)]
    return found


def _alike(tensor: Tensor, row: Row, tokens: Tensor) -> Tensor:
    """Cut another entry, which the scores do not read, to the tokens' shape."""
    fits = tensor[torch.arange(tokens.shape[0]) % tensor.shape[0]] if tensor.dim() else tensor
    is_row = fits.dim() > 1 and fits.shape[1] == row.longest
    return fits[:, : tokens.shape[1]] if is_row else fits


def _unlike(row: Row, found: Tensor, want: Tensor, number: int, position: int) -> float:
    kinds = {want.dtype, *(p.dtype for p in row.model.parameters() if p.is_floating_point())}
    most = max(UNLIKE.get(kind, UNLIKE_HALVES) for kind in kinds)
    most = UNLIKE_HALVES if row.autocast else most
    size = max(1.0, float(want.abs().max()))
    unlike = float((found - want).abs().max()) / size
    if unlike <= most:  # and not NaN
        return unlike
    what = f"scores at position {position} of row {number} differ by {unlike:.2g} of the largest"
    raise CaptureError(
        f"--kv-cache: one position at a time is another model: {what}",
        code="BX2027",
        help=LEAVE_OUT,
    )
