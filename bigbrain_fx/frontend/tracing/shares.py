"""Do the micro-batches of the example add up to it? Its loss, whole and in parts, in numbers.

`micro` reads in a graph what it knows; this runs the model, in eval mode, so that neither dropout
nor a norm of the batch counts. It knows nothing of graphs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from torch import Tensor, nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.plain import Plain
from bigbrain_fx.frontend.translation.batch import Batch, Entry

_ROUNDING = {2: 3e-2, 4: 1e-3}  # of the loss, by the bytes of its element type
_ALL_DIGITS = 17  # of a double


@dataclass(frozen=True)
class Shares:
    """The loss of the example batch, and the mean of its two halves'; `nbytes` of an element.

    `otherwise` is an entry and the dimension along which it may be split (None: not at all) so that
    the halves add up; None where they do, or where no single entry is the reason.
    """

    whole: float
    halves: float
    nbytes: int = 4
    otherwise: tuple[str | int, int | None] | None = None

    @property
    def is_sum(self) -> bool:
        """Whether the loss grows with the rows."""
        return near(self.whole, 2 * self.halves, self.nbytes) and not self.are_equal

    @property
    def are_equal(self) -> bool:
        """Whether it does not matter for the loss that a batch is split."""
        return near(self.whole, self.halves, self.nbytes)


def near(one: float, other: float, nbytes: int) -> bool:
    """Whether two losses are equal but for rounding."""
    return abs(one - other) <= _ROUNDING.get(nbytes, 1e-6) * max(abs(one), abs(other))


def shares(plain: Plain, batch: Batch) -> Shares | None:
    """Compare; None where it cannot be done: an odd batch, no loss, draws of its own, an error."""
    half = batch.rows // 2
    if batch.rows < 2 or batch.rows % 2:
        return None
    with suppress(Exception), in_eval(plain.model):  # the user's own code, in a way it may not know
        runs = [batch.sized(batch.rows), batch.sized(batch.rows), batch.sized(half)]
        runs.append(batch.last(half))
        found = [plain.run(list(run.values()), seed)[0] for seed, run in enumerate(runs)]
        whole, again, *halves = (float(loss) for loss in found)
        if whole == again and all(map(math.isfinite, (whole, *halves))) and _is_loss(found[0]):
            parts = Shares(whole, sum(halves) / 2, found[0].element_size())
            tries = not (parts.are_equal or parts.is_sum)
            return replace(parts, otherwise=_otherwise(plain, batch, parts)) if tries else parts
    return None


def _otherwise(plain: Plain, batch: Batch, parts: Shares) -> tuple[str | int, int | None] | None:
    """Return which single entry, split otherwise or not at all, makes the halves add up."""
    for entry in (e for e in batch.entries if e.tensor.dim() and not e.said):
        own = entry.tensor
        dims = [d for d in range(own.dim()) if own.shape[d] == batch.rows]
        ways = [None, *dims] if entry.batched else dims
        for dim in ways[: 1 + own.dim()]:
            is_other = dim != 0 or not entry.batched
            if is_other and _add_up(parts, _halves(plain, batch, entry, dim)):
                return _key(entry.key), dim
    return None


def _add_up(parts: Shares, losses: list[float]) -> bool:
    """Whether halves come to the whole; each is the whole where all that counts is given whole."""
    is_all = all(near(parts.whole, loss, parts.nbytes) for loss in losses)
    return not is_all and near(parts.whole, sum(losses) / 2, parts.nbytes)


def _halves(plain: Plain, batch: Batch, entry: Entry, dim: int | None) -> list[float]:
    half, own, losses = batch.rows // 2, entry.tensor, list[float]()
    with suppress(Exception):  # as above: the model may not take it so
        for seed, run in enumerate((batch.sized(half), batch.last(half))):
            part = own if dim is None else own.narrow(dim, seed * half, half)
            run[entry.name] = part.clone()
            losses.append(float(plain.run(list(run.values()), 2 + seed)[0]))
        return losses
    return []


def _is_loss(value: Tensor) -> bool:
    return value.dim() == 0 and value.is_floating_point()


@contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """Let dropout and norms of the batch rest meanwhile."""
    modes = [(part, part.training) for part in model.modules()]
    for part, _ in modes:
        part.training = False
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def remark(found: Shares) -> str:
    """Say that a split changes what is trained."""
    if found.is_sum:
        return (
            "the loss is a sum over rows, and a step's is the mean of its micro-batches' sums: "
            "it depends on their number"
        )
    whole, halves = told_apart(found.whole, found.halves)
    return (
        f"the example batch has the loss {whole}, its two halves {halves}: rows do not stand "
        f"alone, and a step trains on the mean of its micro-batches. {_remedy(found)}"
    )


def _remedy(found: Shares) -> str:
    """Say what was tried: an entry split otherwise, or the batch as it is."""
    if found.otherwise is None:
        return (
            "However any one entry is split, it stays so (rows are compared with each other, or "
            "a mean is taken over what a mask leaves): --micro-batches 1 computes the whole batch"
        )
    key, dim = found.otherwise
    how = "given whole to each" if dim is None else f"split along dimension {dim}"
    return (
        f"With {key!r} {how} they add up: if that is what is meant, say so in the model file: "
        f"batch_dims = {{{key!r}: {dim}}}"
    )


def told_apart(one: float, other: float) -> tuple[str, str]:
    """Return two numbers with as many digits as it takes to see that they differ, four at least."""
    digits = 4
    while digits < _ALL_DIGITS and f"{one:.{digits}g}" == f"{other:.{digits}g}":
        digits += 1
    return f"{one:.{digits}g}", f"{other:.{digits}g}"


def is_guess(batch: Batch) -> bool:
    """Whether entries disagree on the number of rows: no number has a majority, or time is first.

    [time, rows, features] beside labels by row: what is not split has as many as a dimension 1.
    """
    if any(entry.said and entry.batched for entry in batch.entries):
        return False
    own = [e for e in batch.entries if e.tensor.dim() and e.tensor.shape[0] > 1 and not e.said]
    counts = sorted(Counter(entry.tensor.shape[0] for entry in own).values())
    inner = {entry.tensor.shape[1] for entry in own if entry.batched and entry.tensor.dim() > 1}
    outer = {entry.tensor.shape[0] for entry in own if not entry.batched}
    return len(counts) > 1 and (counts[-1] == counts[-2] or bool(inner & outer))


def undeclared(batch: Batch, found: Shares) -> InputError:
    """Refuse to guess which dimension is the batch where it matters."""
    shapes = ", ".join(f"{_key(e.key)!r} {list(e.tensor.shape)}" for e in batch.entries)
    names = ", ".join(f"{_key(e.key)!r}: {0 if e.batched else None}" for e in batch.entries)
    whole, halves = told_apart(found.whole, found.halves)
    return InputError(
        f"which dimension is the batch cannot be told from {shapes}, and it matters: split on "
        f"{batch.rows} rows the loss is {halves}, whole it is {whole}",
        at="example_batch",
        help=f"say it in the model file, such as batch_dims = {{{names}}}: each entry's dimension "
        "that is the batch, or None where every micro-batch gets all of it",
    )


def _key(key: tuple[str | int, ...]) -> str | int:
    return key[0] if len(key) == 1 else ".".join(map(str, key))
