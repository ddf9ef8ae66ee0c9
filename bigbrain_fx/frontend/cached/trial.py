"""A trial of the form of one position, step by step, against the untouched model.

The caches are full of NaN before: numbers of an earlier request may not count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.cached.module import Cached
from bigbrain_fx.frontend.cached.row import LEAVE_OUT, Row, is_tensor, refuse
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
        CaptureError: results differ; names the first op whose result does.
    """
    tokens = _tokens(row)
    try:
        with torch.no_grad(), without_fast_path():
            _fill_caches(module, float("nan"))
            worst = _one_by_one(row, module, run or module, tokens)
            if row.longest > SHORT:
                worst = max(worst, _many_at_once(row, module, run or module, tokens))
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
            most = max(most, _unlike(row, module, scores, expected[r, position], r, position))
    return most


def _many_at_once(row: Row, module: Cached, run: Positions, tokens: Tensor) -> float:
    """Read a long row, several positions a frame, as a prompt is read."""
    count, most = min(LONG, row.longest), 0.0
    expected = _expected(row, tokens[:1, :count], from_position=count - 1)
    for start in range(0, count, TOGETHER):
        positions = torch.arange(start, min(start + TOGETHER, count))
        rows = torch.zeros_like(positions)
        found = run(tokens[0, positions].unsqueeze(1), rows, positions)[:, 0]
    most = _unlike(row, module, found[-1], expected[0, -1], 0, count - 1)
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


def _unlike(
    row: Row, module: Cached, found: Tensor, want: Tensor, number: int, position: int
) -> float:
    kinds = {want.dtype, *(p.dtype for p in row.model.parameters() if p.is_floating_point())}
    most = max(UNLIKE.get(kind, UNLIKE_HALVES) for kind in kinds)
    most = UNLIKE_HALVES if row.autocast else most
    size = max(1.0, float(want.abs().max()))
    unlike = float((found - want).abs().max()) / size
    if unlike <= most:  # and not NaN
        return unlike
    culprit = first_unlike(row, module, most)
    what = f"scores at position {position} of row {number} differ by {unlike:.2g} of the largest"
    if culprit is not None:
        refuse(culprit, f"{what}, first where positions are mixed", code="BX2026")
    raise CaptureError(
        f"--kv-cache: one position at a time is another model: {what}",
        code="BX2027",
        help=LEAVE_OUT,
    )


def first_unlike(row: Row, module: Cached, most: float) -> fx.Node | None:
    """Return the first op whose value at one position differs from the row's."""
    tokens = _tokens(row)[:1, : min(SHORT, row.longest)]
    whole = _whole(row, tokens)
    _fill_caches(module, 0.0)
    places = range(tokens.shape[1])
    steps = [_values(module, tokens[:, p : p + 1], p) for p in places]
    for node in row.nodes:
        positions = row.positions(node)
        if node not in module.one or not isinstance(whole.get(node), Tensor) or len(positions) != 1:
            continue
        for place in places:
            have = steps[place].get(module.one[node].name)
            want = whole[node].select(positions[0], place)
            if isinstance(have, Tensor) and not _close(have, want, positions[0], most):
                return node
    return None


def _close(have: Tensor, want: Tensor, dim: int, most: float) -> bool:
    if have.dim() != want.dim() + 1 or have.shape[dim] != 1:
        return True
    want = want.double()
    unlike = _largest(have.select(dim, 0).double() - want)
    return unlike <= 10 * most * max(1.0, _largest(want))


def _largest(tensor: Tensor) -> float:
    """Return the largest number but for infinities and NaN, which masks have."""
    return float(tensor.nan_to_num(0.0, 0.0, 0.0).abs().max())


def _whole(row: Row, tokens: Tensor) -> Mapping[fx.Node, Any]:
    """Run the trace on one row; return all values."""
    sizes = {row.rows: 1, row.length: tokens.shape[1]}
    values: dict[fx.Node, Any] = {row.tokens: tokens}

    def value(node: fx.Node) -> Any:  # noqa: ANN401  # a tensor, a number, a graph
        if node not in values and isinstance(node.meta.get("val"), torch.SymInt):
            values[node] = row.number(node.meta["val"], sizes)
        elif node not in values and node in row.held:
            values[node] = row.held[node][1]
        elif node not in values and node.op == "get_attr":
            values[node] = getattr(row.program.graph_module, str(node.target))
        elif node not in values:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), value)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]  # a call
        return values[node]

    for node in row.nodes:
        if is_tensor(node):
            value(node)
    return values


class _Keeping(fx.Interpreter):
    """Run a graph and keep every value."""

    def __init__(self, module: Cached) -> None:
        super().__init__(module, graph=module.form)
        self.kept: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:  # noqa: ANN401  # as torch's
        self.kept[n.name] = super().run_node(n)
        return self.kept[n.name]


def _values(module: Cached, tokens: Tensor, position: int) -> Mapping[str, Any]:
    runs = _Keeping(module)
    runs.run(tokens, torch.tensor([0]), torch.tensor([position]))
    return runs.kept
