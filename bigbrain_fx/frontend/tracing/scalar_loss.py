"""Check of a loss function's result: it must be one scalar tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from bigbrain_fx.errors import CaptureError


def _place_of_loss(found: Mapping[object, object] | Sequence[object]) -> str:
    """Name the entry of a loss function's result that may be the loss: by name, or a number."""
    entries = dict(found) if isinstance(found, Mapping) else dict(enumerate(found))
    numbers = [k for k, v in entries.items() if isinstance(v, Tensor) and v.dim() == 0]
    key = "loss" if "loss" in entries else next(iter(numbers or entries), "...")
    return f"[{key!r}]"


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape; of a trace, that of the example batch."""
    nodes = (getattr(size, "node", None) for size in tensor.shape)
    return tuple(
        size if node is None else getattr(node, "hint", size)
        for size, node in zip(tensor.shape, nodes, strict=True)
    )


def check_loss(loss: object) -> None:
    """Require a scalar tensor.

    Raises:
        CaptureError: it is something else; the remedy is for what it is.
    """
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return
    found = f"shape {_shape(loss)}" if isinstance(loss, Tensor) else type(loss).__name__
    advice = "return the mean: loss.mean()"
    if loss is None:
        found, advice = "None", "return it: return F.cross_entropy(...)"
    elif isinstance(loss, Mapping | list | tuple):
        advice = f"return the loss alone, {_place_of_loss(loss)} of what it returns now"
    elif not isinstance(loss, Tensor):
        found = {"SymFloat": "float", "SymInt": "int"}.get(found, found)  # a trace's own number
        advice = "keep it a tensor: leave out .item() and float()"
    raise CaptureError(
        f"loss(output, batch) must return a scalar tensor, found {found}",
        code="BX0151",
        help=advice,
    )
