"""Whether forward goes by the gradients that a backward has left in the weights: refused.

    forward(example), with p.grad of None and with gradients: the same numbers?

Between two micro-batches of a loop every weight has a gradient; a trace is made where none has, and
devices run some forwards before others' backward. This file runs steps; it knows no graphs.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.tracing.hooks import suspect
from bigbrain_fx.frontend.tracing.plain import Plain, alike
from bigbrain_fx.frontend.tracing.step import Step
from bigbrain_fx.frontend.tracing.world import mentions
from bigbrain_fx.frontend.translation.sources import forward_line

_WORD = re.compile(r"\bgrad\b")


def refused_by_gradients(
    step: Step, plain: Plain, example: Sequence[Tensor]
) -> CaptureError | None:
    """Return why forward or loss may not go by p.grad, where they do."""
    if not mentions(step.model, step.own_loss, _WORD):
        return None
    try:
        first = plain.run(example, 0)
        with _gradients_left(step.model):
            if alike(first, plain.run(example, 0)):
                return None
            cause = suspect(lambda: plain.run(example, 0), of_grad=True)
    except Exception:
        return None  # `trace` says what is wrong with the example
    return CaptureError(
        "forward or loss computes otherwise where a backward has left gradients (p.grad) "
        "in the weights: a trace has none, and devices run some forwards before others' backward",
        code="BX0160a",
        at=cause.at if cause is not None and cause.what == "grad" else forward_line(step.model),
        help="let the optimizer's step() do what goes by gradients, which has p.grad: a class "
        "whose step() scales p.grad and then calls super().step(), returned by "
        "optimizer(named_params)",
    )


@contextlib.contextmanager
def _gradients_left(model: nn.Module) -> Iterator[None]:
    """Let trained weights have gradients, as between two micro-batches."""
    before = [(p, p.grad) for p in model.parameters() if p.requires_grad]
    for p, _ in before:
        p.grad = torch.full_like(p, 0.5)
    try:
        yield
    finally:
        for p, gradient in before:
            p.grad = gradient
