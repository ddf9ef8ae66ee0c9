"""What a person would not write is taken out; a size plus a size is a number, and stays."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from bigbrain_fx.core import Graph, Op
from bigbrain_fx.emit.modules.tidy import tidied
from bigbrain_fx.frontend import capture
from tests.support.captured import assert_same


class Pairs(nn.Module):
    """Both entries of a batch as one, whose rows are counted and halved again."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(6, 1)

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        both = torch.cat((chosen, rejected))
        place = torch.arange(both.shape[0], device=both.device).view(2, -1)
        return (self.score(both).view(both.shape[0])[place[0]] - place[1]).mean()


def test_the_sum_of_two_sizes_is_no_op_on_tensors() -> None:
    model = Pairs()
    found = capture(model, (torch.randn(4, 6), torch.randn(4, 6)))
    sums = [op for op in found.graph.ops if op.target == "operator.add" and not op.outputs]
    assert sums
    assert tidied(found.graph).ops == found.graph.ops
    assert_same(model, found, model)


class Shifted(nn.Module):
    """A vocabulary of which this member has the first rows: nothing is taken off a token."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 4))

    def forward(self, tokens: Tensor) -> Tensor:
        own = tokens - 0
        return (self.table[own] * self.table[tokens + 1]).mean()


def subtractions(graph: Graph) -> list[Op]:
    return [op for op in graph.ops if op.target == "aten.sub.Tensor"]


def test_an_entry_of_the_batch_less_nothing_is_that_entry() -> None:
    model = Shifted()
    found = capture(model, (torch.randint(7, (4, 3)),))
    assert len(subtractions(found.graph)) == 1
    assert not subtractions(tidied(found.graph))


def test_an_entry_that_an_op_writes_in_place_is_copied() -> None:
    graph = capture(Shifted(), (torch.randint(7, (4, 3)),)).graph
    ops = tuple(
        replace(op, target="aten.add_.Tensor", mutates=("tokens",))
        if op.target == "aten.add.Tensor"
        else op
        for op in graph.ops
    )
    written = replace(graph, ops=ops)
    assert subtractions(tidied(written)) == subtractions(graph) != []
