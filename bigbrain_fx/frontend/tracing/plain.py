"""Run the user's step as plain PyTorch and leave no trace of it: buffers, dice and modes come back.

This file knows steps; it knows nothing of graphs or of tracing.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bigbrain_fx.capture.batch import Batch
from bigbrain_fx.capture.dice import random_state_kept
from bigbrain_fx.capture.export import ambient, quiet


@dataclass(frozen=True)
class Plain:
    """What a plain run needs: the step and how it is cast."""

    step: Callable[..., tuple[Tensor, ...]]
    model: nn.Module
    autocast: str | None

    def run(
        self, tensors: Sequence[Tensor], seed: int, python_seed: int | None = None
    ) -> tuple[Tensor, ...]:
        """Run once with gradients enabled; torch is seeded with `seed`, Python and NumPy, too.

        Args:
            tensors: of the batch; the run gets copies.
            seed: of torch.
            python_seed: of Python and NumPy, `seed` when left out.

        Raises:
            Exception: whatever the model raises.
        """
        copies = [tensor.clone() for tensor in tensors]
        with quiet(), state_kept(self.model), ambient(self.autocast, copies):
            torch.default_generator.manual_seed(seed)
            seed_python(seed if python_seed is None else python_seed)
            with torch.enable_grad():
                return tuple(tensor.detach() for tensor in self.step(*copies))


@contextlib.contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Put every buffer of a model and every random state back at the end."""
    kept = [
        (part, name, tensor, tensor.detach().clone())
        for part in model.modules()
        for name, tensor in part._buffers.items()
        if tensor is not None
    ]
    with random_state_kept(), torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            with torch.no_grad():
                for part, name, tensor, numbers in kept:
                    if not torch.equal(tensor, numbers):
                        tensor.copy_(numbers)
                    part._buffers[name] = tensor


def seed_python(seed: int) -> None:
    """Seed the global generators of Python and NumPy."""
    random.seed(seed)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(seed)


def another(batch: Batch, rows: int, seed: int) -> list[Tensor]:
    """Return a batch unlike the example: other rows of it, and other numbers where any will do.

    Rows are drawn from the example's. Floats of both signs are drawn anew with their own mean and
    spread; other numbers stay what they are: a mask stays a mask, a token a token.
    """
    dice = torch.Generator().manual_seed(seed)
    picked = torch.randint(batch.rows, (rows,), generator=dice)
    return [
        _mixed(entry.tensor, picked, dice) if entry.batched else entry.tensor
        for entry in batch.entries
    ]


def _mixed(tensor: Tensor, picked: Tensor, dice: torch.Generator) -> Tensor:
    rows = tensor[picked]
    if not tensor.is_floating_point() or not rows.numel() or float(tensor.min()) >= 0:
        return rows
    noise = torch.randn(rows.shape, generator=dice).to(rows.dtype)
    return noise * tensor.float().std().nan_to_num().to(rows.dtype) + tensor.mean()
