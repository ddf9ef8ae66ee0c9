"""A fused matrix of unequal pieces through a bundle's life: trained, committed, moved, exported."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import bigbrain_fx
from bigbrain_fx.bundles import export_weights
from bigbrain_fx.bundles.going_on import export_commit
from bigbrain_fx.frontend import load_model_file
from tests.bundles.resplitting.test_resplit import train
from tests.support.bundles import cluster

STEPS = 2
MODEL = '''"""Six heads that read two groups of keys and values, all from one matrix."""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(24, 24 + 8 + 8)
        self.out = nn.Linear(24, 24)

    def forward(self, x):
        made = self.qkv(x)
        q, k, v = made[..., :24], made[..., 24:32], made[..., 32:]
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def model():
    return Net().double()


def example_batch():
    dice = torch.Generator().manual_seed(1)
    return {name: torch.randn(8, 5, 24, generator=dice).double() for name in ("x", "wanted")}


def batches(seed):
    while True:
        yield example_batch()


def loss(output, batch):
    return F.mse_loss(output, batch["wanted"])


def optimizer(named):
    return torch.optim.SGD([p for _, p in named], lr=0.5, momentum=0.9)
'''


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, nursery: object) -> Path:
    folder = tmp_path_factory.mktemp("begun")
    (folder / "fused.py").write_text(MODEL)
    options = bigbrain_fx.Options("naive", micro_batches=2, tensor=2)
    bundle = bigbrain_fx.split(folder / "fused.py", cluster(2), folder / "b", options).bundle
    train(bundle, STEPS, "--checkpoint-dir", "commits")
    return bundle


@pytest.mark.nightly
def test_attention_is_divided_by_heads_and_the_page_says_so(begun: Path) -> None:
    assert "heads (2 as 1+1)" in (begun / "README.md").read_text()


def test_unequal_pieces_train_as_a_plain_loop(begun: Path, tmp_path: Path) -> None:
    file = load_model_file(begun.parent / "fused.py", seed=0)
    export_weights(begun, tmp_path / "first.safetensors")
    model, batch = file.model, cast("dict[str, Tensor]", file.example_batch)
    model.load_state_dict(load_file(tmp_path / "first.safetensors"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for rows in (slice(4), slice(4, 8)):
            error = torch.nn.functional.mse_loss(model(batch["x"][rows]), batch["wanted"][rows])
            (error / 2).backward()
        optimizer.step()
    export_commit(begun, tmp_path / "last.safetensors", begun / "commits")
    for name, tensor in load_file(tmp_path / "last.safetensors").items():
        assert torch.allclose(tensor, model.state_dict()[name], rtol=0, atol=1e-13)
