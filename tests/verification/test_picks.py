"""Ops that pick and mix, divided: the numbers of the undivided model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.frontend import Captured, capture
from bigbrain_fx.plan import axes, chosen_axes, priced_axes
from bigbrain_fx.verification.sharding import agree, tried_axes

ROWS, LENGTH, DIM = 3, 5, 12


class Between(nn.Module):
    """A function between two linear layers."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor], first: int, last: int) -> None:
        super().__init__()
        self.call = call
        self.first, self.last = nn.Linear(DIM, first), nn.Linear(last, DIM)
        self.register_buffer("rows", torch.tensor([3, 0, 1]))
        self.register_buffer("scale", torch.randn(1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.call(self, self.first(x))).pow(2).mean()


def gathered(own: Any, h: Tensor) -> Tensor:
    index = torch.arange(LENGTH).flip(0).view(1, LENGTH, 1).expand(h.shape[0], LENGTH, DIM)
    return torch.gather(h, 1, index)


def written(own: Any, h: Tensor) -> Tensor:
    found = torch.zeros_like(h)
    found[:, 1] = h[:, 0]
    found[:, 2] = h[:, 1] * 2
    found[:, 3] = 0.5
    return found


def written_whole(own: Any, h: Tensor) -> Tensor:
    """What an op without a rule makes stays whole, and so do writes into it, not their source."""
    k, v = h.unflatten(-1, (2, DIM)).unbind(-2)
    room = h.new_empty((*k.shape[:-1], DIM + 1))
    room[..., :DIM] = k
    room[..., DIM:] = 0.5
    return v * room.tanh().mean(-1, keepdim=True)


def one_head(own: Any, h: Tensor) -> Tensor:
    q = h.unflatten(-1, (4, 3)).transpose(1, 2)
    k = v = q.mean(1, keepdim=True)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def repeated(own: Any, h: Tensor) -> Tensor:
    return h * torch.tanh(own.scale).repeat(1, LENGTH, 3)


CASES: dict[str, tuple[Callable[[Any, Tensor], Tensor], int, int]] = {
    "gather": (gathered, DIM, DIM),
    "written whole": (written_whole, 2 * DIM, DIM),
    "index": (lambda own, h: h[:, own.rows], DIM, DIM),
    "index_select": (lambda own, h: torch.index_select(h, 1, own.rows), DIM, DIM),
    "flip": (lambda own, h: h.flip(1), DIM, DIM),
    "roll": (lambda own, h: torch.roll(h, 1, 1), DIM, DIM),
    "cumprod": (lambda own, h: torch.cumprod(h, 1), DIM, DIM),
    "logsumexp": (lambda own, h: torch.logsumexp(h, 1), DIM, DIM),
    "var": (lambda own, h: h.var(1) + h.std(1, keepdim=True).squeeze(1), DIM, DIM),
    "max": (lambda own, h: sum(h.max(1)) + h.min(1).values, DIM, DIM),
    "norm": (lambda own, h: torch.linalg.vector_norm(h, dim=1), DIM, DIM),
    "repeat": (lambda own, h: h.repeat(1, 1, 3), 4, DIM),
    "repeat of what is whole": (repeated, DIM, DIM),
    "glu": (lambda own, h: F.glu(h), 2 * DIM, DIM),
    "copy_ and fill_": (written, DIM, DIM),
    "one head": (one_head, DIM, DIM),
}


@pytest.mark.gate("cumprod", "gather", "index_select", "max", "norm", "repeat", "roll")
@pytest.mark.parametrize("name", CASES)
def test_ops_between_picks_are_divided_and_equal(name: str) -> None:
    torch.manual_seed(1)
    call, first, last = CASES[name]
    captured = capture(Between(call, first, last), {"x": torch.randn(ROWS, LENGTH, DIM)})
    every = priced_axes(captured.graph, axes(captured.graph))
    both = [a for a in every if {"first.weight", "last.weight"} <= {p.name for p in a.params}]
    for shares in ((2.0, 1.0), (2.0, 1.0, 1.0)):
        chosen, whole = tried_axes(captured.graph, chosen_axes(both, len(shares)), shares)
        assert chosen, "what stands between has no axis of its own"
        assert not whole
        found = agree(captured, chosen, shares, rows=ROWS, exact=True)
        assert max(found.loss, found.gradients, found.buffers) < 1e-12


# ------------------------------------------------------------ layers divided by themselves


COUNT, CHANNELS, HIDDEN = 3, 8, 48
PIECE_SHARES = ((2.0, 1.0), (2.0, 1.0, 1.0))


class Block(nn.Module):
    """Mix along a line by channel, then by position, as ConvNeXt does."""

    def __init__(self, *, tied: nn.Conv1d | None) -> None:
        super().__init__()
        self.mix = tied or nn.Conv1d(CHANNELS, CHANNELS, 41, padding=20, groups=CHANNELS)
        self.norm = nn.LayerNorm(CHANNELS)
        self.up, self.down = nn.Linear(CHANNELS, HIDDEN), nn.Linear(HIDDEN, CHANNELS)

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
    return capture(Net(is_tied=is_tied), {"x": torch.randn(COUNT, CHANNELS, 6)})


@pytest.mark.nightly
@pytest.mark.parametrize("shares", PIECE_SHARES)
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
    found = agree(captured, chosen, shares, rows=COUNT, exact=True)
    assert max(found.loss, found.gradients, found.buffers) < 1e-12


@pytest.mark.nightly
def test_a_layer_that_is_called_twice_stays_as_it_was() -> None:
    """What another reads of a divided weight is gathered: that would be sent at every call."""
    captured = captured_of(is_tied=True)
    chosen = chosen_axes(priced_axes(captured.graph, axes(captured.graph)), 2)
    assert not [axis for axis in chosen if "mix" in axis.name]
    found = agree(captured, chosen, PIECE_SHARES[0], rows=COUNT, exact=True)
    assert max(found.loss, found.gradients) < 1e-12


class Normed(nn.Module):
    """A norm of channels over rows reads what a divided layer adds up, and adds a bias to."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        self.norm, self.head = nn.BatchNorm1d(CHANNELS), nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.norm(self.down(torch.relu(self.up(x))))
        return self.head(torch.relu(made)).pow(2).mean()


@pytest.mark.gate("shares1")
@pytest.mark.parametrize("shares", PIECE_SHARES)
def test_a_bias_is_added_to_the_whole_sum_of_which_a_piece_reads_parts(
    shares: tuple[float, ...],
) -> None:
    torch.manual_seed(1)
    captured = capture(Normed(), {"x": torch.randn(4, CHANNELS)})
    every = priced_axes(captured.graph, axes(captured.graph))
    of_norm = next(a for a in every if a.along == ("batch_norm",))
    hidden = next(a for a in every if {*a.along} >= {"linear", "relu"})
    chosen, whole = tried_axes(captured.graph, (hidden, of_norm), shares)
    assert len(chosen) == 2
    assert not whole
    found = agree(captured, chosen, shares, rows=4, exact=True)
    assert max(found.loss, found.gradients, found.buffers) < 1e-12
