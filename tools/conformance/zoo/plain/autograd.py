"""Autograd and dtypes: custom functions, checkpoints, casts, frozen parts, buffers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tools.conformance.zoo.case import Case
from tools.conformance.zoo.plain.shared import WIDTH, mse, stack, vectors


class RoundSTE(torch.autograd.Function):
    """Round, and let the gradient through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        """Round to steps of 1/scale."""
        ctx.scale = scale
        return torch.round(x * scale) / scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Hand the gradient on, a little smaller."""
        return gradients[0] * 0.5, None


class Rounded(nn.Module):
    """Quantise activations with a straight-through estimator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = RoundSTE.apply(self.linear(x), 8.0)  # type: ignore[no-untyped-call]
        return torch.tanh(made)


class Inner(nn.Module):
    """Dropout between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 32)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(F.gelu(self.up(x))))


class Checkpointed(Inner):
    """The same, computed again in the backward pass."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(super().forward, x, use_reentrant=self.reentrant)
        return made


class Reentrant(Checkpointed):
    """The older kind of checkpoint."""

    reentrant = True


class Mixed(Inner):
    """A region in bfloat16, another that is kept out of it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.up(x)
            with torch.autocast("cpu", enabled=False):
                y = F.gelu(y.float())
            y = self.down(self.drop(y))
        return x + y.float()


class Frozen(Inner):
    """A teacher under no_grad beside a student; the difference is detached in part."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = torch.sigmoid(self.up(x))
        return x + self.down(self.drop(self.up(x)) * target).detach() * 0.5 + self.down(target)


class PartFrozen(Inner):
    """Parameters that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)


class Normed(nn.Module):
    """BatchNorm in train mode moves its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.linear(x)))


class InPlace(nn.Module):
    """Writes into what it made: whole tensors, views, slices, masks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y += x
        y.mul_(0.5).add_(1.0)
        y[:, 0] = 0.0
        y[:, 4:8] *= 2.0
        y = F.relu_(y)
        z = y.clone()
        z.masked_fill_(z > 2.0, 2.0)
        z[:, 8:].copy_(x[:, 8:])
        return z


class Counting(nn.Module):
    """Keeps a running mean and a counter in buffers, as a quantiser does."""

    mean: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(y.detach().mean(0), 0.1)
                self.seen += 1
        return torch.tanh(y - self.mean)


class Reassigning(nn.Module):
    """Gives its buffer a new tensor instead of writing into it."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return torch.tanh(y - self.mean)


class Noisy(nn.Module):
    """Draws."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.rand(x.size(0), 1) < 0.5
        return self.linear(torch.where(kept, x, 0.0))


class Conditioned(nn.Module):
    """Has a part that draws; a cut may go between that part and the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Noisy()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.other(x)


class SharedDraws(nn.Module):
    """Calls one module, which draws, from two places."""

    def __init__(self) -> None:
        super().__init__()
        self.condition = Conditioned()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.condition(x) * self.condition(2 * x))


CASES = (
    stack("custom-function", Rounded),
    stack("checkpoint", Checkpointed),
    stack("checkpoint-reentrant", Reentrant),
    stack("autocast-region", Mixed),
    stack("autocast-whole", Inner, autocast="bfloat16"),
    stack("no-grad", Frozen),
    stack("frozen", PartFrozen),
    Case("shared-draws", lambda _: SharedDraws(), vectors, mse, depth=0),
    stack("batch-norm", Normed),
    stack("in-place", InPlace),
    stack("buffer", Counting),
    stack("buffer-reassigned", Reassigning),
)
