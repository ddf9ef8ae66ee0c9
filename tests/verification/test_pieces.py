"""Layers whose axes meet others that divide more: each is divided by itself, with equal numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.frontend import Captured, capture
from bigbrain_fx.plan import axes, chosen_axes, priced_axes
from bigbrain_fx.verification.sharding import agree, tried_axes

ROWS, DIM, HIDDEN = 3, 8, 48
SHARES = ((2.0, 1.0), (2.0, 1.0, 1.0))


class Block(nn.Module):
    """Mix along a line by channel, then by position, as ConvNeXt does."""

    def __init__(self, *, tied: nn.Conv1d | None) -> None:
        super().__init__()
        self.mix = tied or nn.Conv1d(DIM, DIM, 41, padding=20, groups=DIM)
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.norm(self.mix(x).transpose(1, 2))
        made: Tensor = self.down(torch.tanh(self.up(mixed))).transpose(1, 2)
        return x + made


class Net(nn.Module):
    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        first = Block(tied=None)
        self.blocks = nn.Sequential(first, Block(tied=first.mix if is_tied else None))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).pow(2).mean()


def captured_of(*, is_tied: bool = False) -> Captured:
    torch.manual_seed(1)
    return capture(Net(is_tied=is_tied), {"x": torch.randn(ROWS, DIM, 6)})


@pytest.mark.nightly
@pytest.mark.parametrize("shares", SHARES)
def test_a_layer_beside_what_divides_more_is_divided_by_itself(shares: tuple[float, ...]) -> None:
    captured = captured_of()
    graph = captured.graph
    chosen, whole = tried_axes(
        graph, chosen_axes(priced_axes(graph, axes(graph)), len(shares)), shares
    )
    assert not whole
    divided = {name for axis in chosen for name in (*axis.along, *axis.summed)}
    assert {op.name for op in graph.ops if op.params and "norm" not in op.name} <= divided
    pieces = [axis for axis in chosen if len(axis.along) == 1 and not axis.summed]
    assert {axis.name for axis in pieces} == {f"blocks.{i}.mix:channels" for i in (0, 1)}
    found = agree(captured, chosen, shares, rows=ROWS, exact=True)
    assert max(found.loss, found.gradients, found.buffers) < 1e-12


@pytest.mark.nightly
def test_a_layer_that_is_called_twice_stays_as_it_was() -> None:
    """What another reads of a divided weight is gathered: that would be sent at every call."""
    captured = captured_of(is_tied=True)
    chosen = chosen_axes(priced_axes(captured.graph, axes(captured.graph)), 2)
    assert not [axis for axis in chosen if "mix" in axis.name]
    found = agree(captured, chosen, SHARES[0], rows=ROWS, exact=True)
    assert max(found.loss, found.gradients) < 1e-12


class Normed(nn.Module):
    """A norm of channels over rows reads what a divided layer adds up, and adds a bias to."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.norm, self.head = nn.BatchNorm1d(DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.norm(self.down(torch.relu(self.up(x))))
        return self.head(torch.relu(made)).pow(2).mean()


@pytest.mark.gate("shares1")
@pytest.mark.parametrize("shares", SHARES)
def test_a_bias_is_added_to_the_whole_sum_of_which_a_piece_reads_parts(
    shares: tuple[float, ...],
) -> None:
    torch.manual_seed(1)
    captured = capture(Normed(), {"x": torch.randn(4, DIM)})
    every = priced_axes(captured.graph, axes(captured.graph))
    of_norm = next(a for a in every if a.along == ("batch_norm",))
    hidden = next(a for a in every if {*a.along} >= {"linear", "relu"})
    chosen, whole = tried_axes(captured.graph, (hidden, of_norm), shares)
    assert len(chosen) == 2
    assert not whole
    found = agree(captured, chosen, shares, rows=4, exact=True)
    assert max(found.loss, found.gradients, found.buffers) < 1e-12
