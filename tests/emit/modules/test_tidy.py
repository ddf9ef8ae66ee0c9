"""What a person would not write is taken out; a size plus a size is a number, and stays."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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
