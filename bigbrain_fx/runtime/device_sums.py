"""Sums of a step: a gradient is added in place where one place alone holds its memory.

autograd may hand out one tensor twice (those of a sum's two sides are one), or keep it, or give a
view. To write into it is right only where nobody else can read it; torch's own accumulation asks
the same. (A new tensor for each sum's second gradient took 1 % of a step on a processor.)

The counts are Python's and what torch has for its own tests. What they are where nobody else holds
a tensor, and whether they show each way of holding one, is tried when first asked (not as the file
is loaded: autograd must not have run where processes are forked); where they do not, nothing is
alone, and sums are new tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from .gradients import StepSums, laid_out
from .layout import is_dense

Counts: TypeAlias = tuple[int, ...]


def is_alone(held: Mapping[Any, Tensor], key: object) -> bool:
    """Whether only `held[key]` has this tensor and its memory, each element of it once."""
    if held[key].layout != torch.strided or not is_dense(held[key]):
        return False
    alone = _alone()
    return bool(alone) and _counts(held, key) in alone


def _counts(held: Mapping[Any, Any], key: object) -> Counts:
    """Return how often a tensor, its memory, and what it is a view of are held."""
    tensor = held[key]
    memory = tensor.untyped_storage()
    of_memory = sys.getrefcount(memory), torch._C._storage_Use_Count(memory._cdata)
    found = sys.getrefcount(tensor), tensor._use_count(), *of_memory
    base = tensor._base
    return found if base is None else (*found, sys.getrefcount(base), base._use_count())


# --------------------------------------------------------------------------- what counts say


@cache
def _alone() -> frozenset[Counts]:
    """Return the counts of what nobody else holds, a view or not; none: they say nothing."""
    try:
        made = _gradients()
        counts = frozenset(_counts(made, key) for key in made)
        return frozenset() if any(seen in counts for seen in _held_twice()) else counts
    except (AttributeError, TypeError):
        return frozenset()


def _gradients() -> dict[str, Tensor]:
    """Return two gradients as autograd hands them out: one a view, the other not."""
    found: dict[str, Tensor] = {}
    with torch.inference_mode(mode=False), torch.enable_grad():
        weight, scale, x = (torch.ones(size, device="cpu") for size in ((2, 2), (2,), (1, 2)))
        named = {"view": weight.requires_grad_(), "own": scale.requires_grad_()}
        for name, leaf in named.items():
            leaf.register_hook(lambda gradient, name=name: found.__setitem__(name, gradient))
        total = F.layer_norm(F.linear(x, weight), (2,), scale).sum()
        torch.autograd.grad([total], [*named.values()])
    return found


def _held_twice() -> Iterator[Counts]:
    """Yield the counts of gradients that something else holds, too, in each way that there is."""
    for name in ("view", "own"):
        made = _gradients()
        other: list[Tensor | torch.UntypedStorage | None] = [made[name]]
        yield _counts(made, name)
        other[:] = [made[name].untyped_storage()]
        yield _counts(made, name)
        other[:] = [made[name].detach()]
        yield _counts(made, name)
        other[:] = [_kept(made[name])]
        yield _counts(made, name)
    made = _gradients()
    other[:] = [made["view"]._base]
    yield _counts(made, "view")
    other[:] = [_kept(made["view"]._base)]
    yield _counts(made, "view")


def _kept(tensor: Tensor | None) -> Tensor:
    """Return something of which autograd keeps a tensor, for a backward."""
    assert tensor is not None
    with torch.inference_mode(mode=False), torch.enable_grad():
        return torch.ones_like(tensor).requires_grad_() * tensor


@dataclass
class DeviceSums(StepSums):
    """One step's sums on a device."""

    _counts: dict[tuple[str, int], int] = field(default_factory=dict)

    def add(self, name: str, stage: int, gradient: Tensor) -> None:
        """Add one micro-batch's gradient of a parameter.

        It is laid out as `.grad` would be. The first sum makes a new tensor where something else
        holds the one that autograd has handed out.
        """
        key = name, stage
        count = self._counts.get(key, 0)
        if count == 0:
            like = self.held.parameters.get(name)
            self.gradients[key] = gradient if like is None else laid_out(gradient, like)
        elif count == 1 and not is_alone(self.gradients, key):
            self.gradients[key] = self.gradients[key] + gradient
        else:
            self.gradients[key].add_(gradient)
        self._counts[key] = count + 1

    def _own_all(self) -> None:
        """Let no gradient be another one's memory, too: an optimizer may write into it.

        autograd hands out one tensor for both sides of a sum, and parts of one memory where it was
        stacked. (Of those, where they lie as their parameters do, torch's own `.grad` are one
        memory, too: clipping and sums of micro-batches write there several times. `verify` says
        so.) What was added up is a tensor anew.
        """
        for key, count in self._counts.items():
            if count == 1 and key in self.gradients and not is_alone(self.gradients, key):
                self.gradients[key] = self.gradients[key].clone()

    def summed(self) -> dict[str, Tensor]:
        """Return this device's gradients; tied ones with what other devices have sent."""
        self._own_all()
        return super().summed()

    def clear(self) -> None:
        """Forget the gradients: they were used."""
        super().clear()
        self._counts.clear()
