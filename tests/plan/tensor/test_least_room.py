"""Tensor groups whose weights fit nowhere are refused before a search, and by it alike."""

from __future__ import annotations

import pytest
import torch

from bigbrain_fx.core import Cluster, Link, TensorParallel
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.frontend import capture
from bigbrain_fx.plan import Options, axes, chosen_axes, priced_axes
from bigbrain_fx.plan.judge import by_partitioner
from bigbrain_fx.plan.nouns import Source
from bigbrain_fx.plan.tensor import GroupMaker
from bigbrain_fx.plan.tensor.least_room import require_room
from tests.support.synthetic import device


class Up(torch.nn.Module):
    """8 MiB of weights, of which all but the biases are divided."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(512, 2048), torch.nn.Linear(2048, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).pow(2).mean()


GRAPH = capture(Up(), {"x": torch.randn(4, 512)}).graph
SOURCE = Source("model.py", optimizer_state=2.0)
AXES = tuple(a for a in priced_axes(GRAPH, axes(GRAPH)) if a.size == 2048)
OPTIONS = Options("auto", tensor=2)


def grouped(mib: float) -> tuple[Cluster, TensorParallel]:
    memory = int(mib * 2**20)
    devices = tuple(device(f"d{i}", memory_bytes=memory) for i in range(2))
    tensor = TensorParallel((("d0", "d1"),), (1, 1), chosen_axes(AXES, 2), scatters=True)
    return Cluster(devices, Link(1e-5, 1e9)), tensor


def plans(mib: float) -> bool:
    cluster, tensor = grouped(mib)
    try:
        by_partitioner(GroupMaker(GRAPH, cluster, SOURCE, OPTIONS, tensor))
    except NoPlanError:
        return False
    return True


def is_refused(mib: float) -> bool:
    cluster, tensor = grouped(mib)
    try:
        require_room(GRAPH, cluster, SOURCE, tensor)
    except NoPlanError:
        return True
    return False


def test_what_is_refused_has_no_plan_and_the_bound_is_near() -> None:
    sizes = [56 + n / 2 for n in range(20)]  # half of 8 MiB, four times, is 16: times 1.2, with 40
    refused = [mib for mib in sizes if is_refused(mib)]
    assert refused
    assert not any(map(plans, refused))
    assert not is_refused(40 + 1.2 * 17)


def test_the_refusal_says_what_does_not_fit() -> None:
    cluster, tensor = grouped(50)
    with pytest.raises(NoPlanError, match="optimizer's state do not fit"):
        require_room(GRAPH, cluster, SOURCE, tensor)
