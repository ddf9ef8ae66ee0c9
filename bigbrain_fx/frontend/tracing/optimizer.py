"""What the user's optimizer holds: two steps on parameters without numbers, tensors counted.

It knows the model file's contract for `optimizer`; it knows nothing of graphs and devices. Whether
the optimizer can be made once per device: see `parted`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bigbrain_fx.frontend.tracing.live import LiveBytes


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """What an optimizer holds.

    Attributes:
        state: bytes kept from step to step, per byte of parameters; Adam's two moments are 2.
        temporaries: the most held for a moment within a step, in parameters of the largest size.
    """

    state: float = 2.0
    temporaries: float = 2.0


def optimizer_facts(
    model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer] | None
) -> OptimizerFacts:
    """Measure an optimizer on the shapes of a model's parameters.

    Args:
        model: whose parameters it is for: one of each shape, and of that nothing but the shape.
        optimizer: as in a model file; None for AdamW as it comes.

    Returns:
        What AdamW holds where it cannot be measured: it reads numbers, or asks for real tensors.
    """
    shapes = {p.shape: (n, p) for n, p in model.named_parameters() if p.requires_grad}
    named = [(n, _blank(p)) for n, p in shapes.values()]
    if not named:
        return OptimizerFacts(0.0, 0.0)
    try:
        made = torch.optim.AdamW(named) if optimizer is None else optimizer(list(named))
        return _measured(made, [p for _, p in named])
    except Exception:  # the user's own code, on tensors without numbers
        return OptimizerFacts()


def _blank(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"))


def _measured(made: torch.optim.Optimizer, params: list[nn.Parameter]) -> OptimizerFacts:
    live = LiveBytes()
    for _ in range(2):
        for parameter in params:
            parameter.grad = torch.empty_like(parameter)
        live.ignore(p.grad for p in params if p.grad is not None)
        live.reset_peak()
        before = live.now
        with live:
            made.step()
    nbytes = [p.nbytes for p in params]
    state = sum(t.nbytes for t in _state(made) if t.dim())
    return OptimizerFacts(state / sum(nbytes), (live.peak - before) / max(nbytes))


def _state(made: torch.optim.Optimizer) -> Iterator[Tensor]:
    for entry in made.state.values():
        yield from (value for value in entry.values() if isinstance(value, Tensor))
