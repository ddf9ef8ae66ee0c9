"""Time the optimizer's step on sets of tensors of different count and size.

The user's optimizer is timed, by its contract: a device calls it with the names and parameters that
it holds. The sets are therefore the model's own parameters, whole and in parts. Two more sets have
names of the model's, one with tiny tensors and one with large ones. They separate the cost of a
tensor from that of its bytes where all of the model's are of one size.

This file times; it knows no graphs and no files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from bigbrain_fx.costs import TimedOptimizer
from bigbrain_fx.frontend import without_gc
from bigbrain_fx.measure.ops.rounds import WARM_UP, trimmed_mean
from bigbrain_fx.measure.ops.stopwatch import Stopwatch
from bigbrain_fx.runtime import adamw

Named: TypeAlias = Sequence[tuple[str, nn.Parameter]]
MakeOptimizer: TypeAlias = Callable[[Named], torch.optim.Optimizer]

MANY = 64  # tensors of the set of tiny ones, at most
TINY = 4  # the longest side of those
LARGE = 2**20  # elements of a large one, about
FEW = 4  # large ones


@dataclass(frozen=True)
class OptimizerTimes:
    """Times of an optimizer: its class, and a row for each set."""

    name: str
    steps: tuple[TimedOptimizer, ...]


def optimizer_times(
    leaves: Sequence[tuple[str, Tensor]], make: MakeOptimizer | None, watch: Stopwatch, rounds: int
) -> OptimizerTimes:
    """Time steps of an optimizer. It changes the parameters.

    Args:
        leaves: the model's trained parameters by name, at least one, tied ones once.
        make: the user's `optimizer`; None for AdamW as it comes. AdamW also stands in for one that
            cannot be timed on the model, as it needs a closure, say.
        watch: to measure with.
        rounds: steps that count, of each set.

    Raises:
        torch.cuda.OutOfMemoryError: a step does not fit.
    """
    named = [(name, nn.Parameter(leaf.detach())) for name, leaf in leaves]
    if make is not None:
        try:
            return _timed(named, make, watch, rounds)
        except torch.cuda.OutOfMemoryError:
            raise  # AdamW would take no less
        except Exception:  # the user's own code
            pass
    return _timed(named, adamw, watch, rounds)


def _timed(named: Named, make: MakeOptimizer, watch: Stopwatch, rounds: int) -> OptimizerTimes:
    name, found = type(make(named)).__name__, []
    for what, some in _sets(named):
        try:
            found.append(_step(what, some, make, watch, rounds))
        except Exception:  # the user's own code, on a part of the model, or on other shapes
            if not found:  # the model itself, which comes first
                raise
    return OptimizerTimes(name, tuple(found))


def _sets(named: Named) -> Iterator[tuple[str, Named]]:
    by_size = sorted(named, key=lambda entry: entry[1].numel())
    half = len(by_size) // 2
    yield "all", named
    if half:
        yield "the smaller half", by_size[:half]
        yield "the larger half", by_size[half:]
    yield "tiny ones", [(name, _tiny(tensor)) for name, tensor in named[:MANY]]
    yield "large ones", [(name, _large(tensor)) for name, tensor in by_size[-FEW:]]


def _tiny(like: Tensor) -> nn.Parameter:
    """Make a tensor of as many dimensions, because optimizers ask for those, and few elements."""
    return _filled([min(size, TINY) for size in like.shape], like)


def _large(like: Tensor) -> nn.Parameter:
    """Make a tensor of as many dimensions, and about LARGE elements; a scalar stays one."""
    rest = like.shape[1:]
    first = max(1, LARGE // max(1, rest.numel()))
    return _filled([first, *rest] if like.dim() else [], like)


def _filled(shape: Sequence[int], like: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape, dtype=like.dtype, device=like.device))


def _step(
    what: str, named: Named, make: MakeOptimizer, watch: Stopwatch, rounds: int
) -> TimedOptimizer:
    """Time steps, gradients given and taken as a device does.

    A GPU's queue is empty when one begins: the device has waited to know that all is finite.
    """
    optimizer = make(named)
    gradients = [torch.full_like(tensor, 1e-3) for _, tensor in named]
    spans = []
    with without_gc():
        for _ in range(rounds + WARM_UP):
            watch.settle()
            begin = watch.mark()
            for (_, tensor), gradient in zip(named, gradients, strict=True):
                tensor.grad = gradient
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            spans.append((begin, watch.mark()))
    watch.settle()
    taken_s = [watch.between_s(begin, end) for begin, end in spans[WARM_UP:]]
    nbytes = sum(tensor.nbytes for _, tensor in named)
    return TimedOptimizer(what, len(named), nbytes, trimmed_mean(taken_s))
