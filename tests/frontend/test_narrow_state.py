"""Optimizers that keep their state in sixteen bits, since the weights are: split says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bigbrain_fx.bundles import Recipe, split
from bigbrain_fx.frontend import optimizer_facts
from bigbrain_fx.plan import Options
from tests.support import samples

Named = Iterable[tuple[str, nn.Parameter]]


class InFloat32(torch.optim.Optimizer):
    """Keeps a moment in float32, whatever the weights are."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["moment"] = torch.zeros_like(p, dtype=torch.float32)


def sgd(momentum: float) -> Callable[[Named], torch.optim.Optimizer]:
    return lambda named: torch.optim.SGD([p for _, p in named], lr=0.1, momentum=momentum)


@pytest.mark.parametrize(
    ("dtype", "optimizer", "expected"),
    [
        (torch.bfloat16, None, ("bfloat16",)),
        (torch.float16, None, ("float16",)),
        (torch.float32, None, ()),
        (torch.bfloat16, sgd(0.9), ("bfloat16",)),
        (torch.bfloat16, sgd(0.0), ()),
        (torch.bfloat16, lambda named: InFloat32([p for _, p in named]), ()),
    ],
)
def test_the_type_of_state_is_measured(
    dtype: torch.dtype, optimizer: Any, expected: tuple[str, ...]
) -> None:
    facts = optimizer_facts(nn.Linear(4, 4).to(dtype), optimizer)
    assert facts.measured
    assert facts.narrow == expected
    assert (facts.note is None) == (not expected)


def test_frozen_weights_have_no_state() -> None:
    model = nn.Sequential(nn.Linear(4, 4).to(torch.bfloat16).requires_grad_(False), nn.Linear(4, 4))
    assert optimizer_facts(model, None).narrow == ()


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, dtype=dtype), nn.Linear(8, 1, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x.to(self.up.weight.dtype))).float().square().mean()


@pytest.mark.parametrize(
    ("dtype", "autocast", "noted"),
    [(torch.bfloat16, None, True), (torch.float32, "bfloat16", False)],
)
def test_split_notes_it_and_its_remedy_is_quiet(
    tmp_path: Path, dtype: torch.dtype, autocast: str | None, noted: bool
) -> None:
    made = split(
        Net(dtype),
        samples.cluster(2),
        tmp_path / "bundle",
        Options("naive", micro_batches=1),
        example_batch=(torch.randn(4, 4),),
        recipe=Recipe(autocast=autocast),
    )
    assert any('autocast = "bfloat16"' in note for note in made.warnings) == noted
