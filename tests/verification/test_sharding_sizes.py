"""Rules whose sizes or numbers were at fault: such ops were not divided, with exchanges around."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bigbrain_fx.frontend import capture
from bigbrain_fx.plan import axes, chosen_axes, priced_axes
from bigbrain_fx.verification.sharding import agree, tried_axes

HEADS, WIDTH = 6, 12


def _repeated(h: Tensor) -> Tensor:
    """Say how long the result is, as mamba2 does."""
    own = h.unflatten(-1, (3, 4)).repeat_interleave(2, dim=2, output_size=HEADS)
    return own[..., :2].flatten(2)


def _beside_the_batch(h: Tensor) -> Tensor:
    """Name the first size and leave another to be found, as bloom does."""
    rows = h.shape[0] * HEADS
    turned = h.unflatten(-1, (HEADS, 2)).transpose(1, 2)
    scores = turned.reshape(rows, -1, 2) @ turned.reshape(rows, -1, 2).transpose(1, 2)
    return (scores @ turned.reshape(rows, -1, 2)).view(-1, HEADS, 5, 2).transpose(1, 2).flatten(2)


def _expanded(h: Tensor) -> Tensor:
    """Expand one dimension of size 1 to rows times heads, as deberta-v2 does."""
    turned = h.unflatten(-1, (HEADS, 2)).transpose(1, 2).flatten(0, 1)
    near = torch.ones(1, 5, 5, dtype=h.dtype).tril().expand(h.shape[0] * HEADS, 5, 5)
    return (near @ turned).unflatten(0, (-1, HEADS)).transpose(1, 2).flatten(2)


def _masked(h: Tensor) -> Tensor:
    """Hide by a mask of few numbers, all of which may be drawn alike, as mamba2 does."""
    seen = torch.ones(2, 2, dtype=torch.bool).tril()
    pairs = h[:, :2].unflatten(-1, (HEADS, 2)).transpose(1, 2)
    return pairs.masked_fill(~seen, float("-inf")).exp().transpose(1, 2).flatten(2)


def _diverging(h: Tensor) -> Tensor:
    """Compare distributions: the target has a logarithm."""
    both = h.unflatten(-1, (HEADS, 2))
    far = F.kl_div(both.log_softmax(-1), both.flip(1).softmax(-1), reduction="mean")
    return h * (1 + far)


class Between(nn.Module):
    """Something between two layers, whose hidden units are divided."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.call = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8), call

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.call(self.up(x))).square().mean()


@pytest.mark.gate("shares0-_diverging", "shares0-_masked", "shares1-_expanded")
@pytest.mark.parametrize("call", [_repeated, _beside_the_batch, _expanded, _masked, _diverging])
@pytest.mark.parametrize("shares", [(2, 1), (1, 1, 1)])
def test_no_rule_is_dropped_and_shares_agree(
    call: Callable[[Tensor], Tensor], shares: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    found = capture(Between(call), {"x": torch.randn(4, 5, 8)}, None)
    there = priced_axes(found.graph, axes(found.graph))
    chosen, dropped = tried_axes(found.graph, chosen_axes(there, len(shares)), shares)
    assert not dropped
    assert {param.name for axis in chosen for param in axis.params} >= {"up.weight", "down.weight"}
    exact = agree(found, chosen, shares, exact=True)
    assert max(exact.gradients, exact.loss, exact.buffers) <= 1e-12
