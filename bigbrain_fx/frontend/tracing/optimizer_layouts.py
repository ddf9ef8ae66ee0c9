"""Whether the user's optimizer goes by how a weight lies in memory, where that is not row by row.

    model.to(memory_format=torch.channels_last)  ─▶ step() asks p.is_contiguous(), or p.stride()

A bundle holds every weight row by row. The optimizer is tried on numbers that lie as the model's
do, and on the same ones row by row, in float64. This file knows the contract for `optimizer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.trial import (
    Make,
    Shape,
    apart,
    cut_short,
    numbers_of,
    place_of,
    run_trial,
    shapes_of,
    wide_type,
)

_ALIKE = 1e-9  # of a parameter's largest update


def require_order_idle(make: Make, trained: Mapping[str, nn.Parameter]) -> None:
    """Refuse an optimizer that updates a weight otherwise where it lies row by row.

    Args:
        make: `optimizer` of the model file.
        trained: the model's own parameters.

    Raises:
        InputError: it does.
    """
    orders = {name: _order(p) for name, p in trained.items()}
    turned = {name: order for name, order in orders.items() if order != sorted(order)}
    if not turned:
        return
    few = cut_short(shapes_of(trained))
    few = {name: Shape(shape.size, wide_type(shape.dtype)) for name, shape in few.items()}

    def lie_as_they_do(name: str, numbers: Tensor) -> Tensor:
        return _laid(numbers, turned[name]) if name in turned else numbers

    try:
        rows = run_trial(make, few, list(few))
        own = run_trial(make, few, list(few), lay=lie_as_they_do)
    except Exception:
        return  # it wants the shapes that it is made for
    for name in few:
        update = apart(rows[name], numbers_of(name, few[name])).abs().max()
        if apart(own[name], rows[name]).abs().max() > _ALIKE * update:
            raise _goes_by(make, next(iter(turned)), name)


def _order(parameter: Tensor) -> list[int]:
    """Return the dimensions that count, from the slowest to the fastest."""
    strides: tuple[int, ...] = parameter.stride()
    real = [dim for dim, size in enumerate(parameter.shape) if size > 1]
    return sorted(real, key=lambda dim: (-strides[dim], dim))


def _laid(numbers: Tensor, order: Sequence[int]) -> Tensor:
    """Return the same numbers, whose dimensions lie in this order."""
    whole = [*(dim for dim in range(numbers.dim()) if dim not in order), *order]
    back = [whole.index(dim) for dim in range(numbers.dim())]
    return numbers.permute(whole).contiguous().permute(back)


def _goes_by(make: Make, turned: str, name: str) -> InputError:
    return InputError(
        f"optimizer(named_params) goes by how weights lie in memory: the model holds {turned} "
        f"otherwise than row by row, a bundle row by row, and there it updates {name} otherwise",
        code="BX2125",
        at=place_of(make),
        help="let model() end with: for p in made.parameters(): p.data = p.data.contiguous(); or "
        "let step() compute with p and p.grad alone, without is_contiguous(), stride() and "
        "as_strided()",
    )
