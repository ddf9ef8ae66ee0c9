"""Each model file keeps the contract that capture relies on, and learns."""

from __future__ import annotations

import importlib
import inspect
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import digits, gpt, llama, moe
from tests.support import samples

NAMES = ("gpt", "llama", "resnet", "unet", "encdec", "moe", "digits")


@pytest.fixture(params=samples.cases(NAMES))
def file(request: pytest.FixtureRequest) -> ModuleType:
    """One model file, with the global dice at a known place."""
    torch.manual_seed(0)
    return importlib.import_module(f"models.{request.param}")


class WithLoss(nn.Module):
    """What capture traces: the batch's tensors in, the loss out."""

    def __init__(self, file: ModuleType, batch: Any) -> None:
        super().__init__()
        self.net = file.model()
        self.file = file
        self.keys = list(batch) if isinstance(batch, dict) else None

    def forward(self, *tensors: Tensor) -> Tensor:
        batch = dict(zip(self.keys, tensors, strict=True)) if self.keys else tensors
        return loss_of(self.file, self.net, batch)


def loss_of(file: ModuleType, net: nn.Module, batch: Any) -> Tensor:
    """Call the model as docs/reference/model-file.md says."""
    if isinstance(batch, dict):
        wanted = inspect.signature(net.forward).parameters
        output = net(**{key: value for key, value in batch.items() if key in wanted})
    else:
        output = net(batch[0])
    if hasattr(file, "loss"):
        return file.loss(output, batch)
    return getattr(output, "loss", output)


def tensors_of(batch: Any) -> tuple[Tensor, ...]:
    return tuple(batch.values()) if isinstance(batch, dict) else batch


def train(file: ModuleType, net: nn.Module, steps: int) -> list[float]:
    named = net.named_parameters()
    optimizer = file.optimizer(named) if hasattr(file, "optimizer") else torch.optim.AdamW(named)
    full = [group["lr"] for group in optimizer.param_groups]
    losses = []
    for step, batch in enumerate(islice(file.batches(0), steps)):
        scale = file.lr_scale(step) if hasattr(file, "lr_scale") else 1.0
        for group, rate in zip(optimizer.param_groups, full, strict=True):
            group["lr"] = rate * scale
        optimizer.zero_grad()
        loss = loss_of(file, net, batch)
        loss.backward()
        if hasattr(file, "clip_norm"):
            nn.utils.clip_grad_norm_(net.parameters(), file.clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.gate("llama", "resnet", "unet", "encdec", "moe", "digits")
def test_the_loss_falls(file: ModuleType) -> None:
    losses = train(file, file.model(), steps=24)
    assert all(0 < loss < 10 for loss in losses)
    assert sum(losses[-4:]) < 0.93 * sum(losses[:4])


@pytest.mark.gate("digits")
def test_export_follows_any_batch_size(file: ModuleType) -> None:
    batch = file.example_batch()
    tensors = tensors_of(batch)
    rows = torch.export.Dim("rows", min=2, max=1024)
    program = torch.export.export(
        WithLoss(file, batch),
        tensors,
        dynamic_shapes=[tuple({0: rows} for _ in tensors)],
        strict=False,
    )
    fewer = tuple(tensor[:3] for tensor in tensors)
    assert program.module()(*fewer).isfinite()


def test_batches_depend_on_seed_and_step_alone_and_look_like_the_example(file: ModuleType) -> None:
    dice = torch.get_rng_state()
    first, again, other = (stacked(file.batches(seed)) for seed in (7, 7, 8))
    assert torch.equal(dice, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    for example, three in zip(tensors_of(file.example_batch()), first, strict=True):
        assert (three[0].shape, three.dtype) == (example.shape, example.dtype)
        assert not torch.equal(three[0], three[1])


def stacked(batches: Iterator[Any]) -> list[Tensor]:
    """Stack the first three batches, tensor by tensor."""
    three = [tensors_of(batch) for batch in islice(batches, 3)]
    return [torch.stack(steps) for steps in zip(*three, strict=True)]


def test_digits_names_95_percent_of_unseen_images() -> None:
    torch.manual_seed(0)
    net = digits.model()
    assert digits.accuracy(net) < 0.3
    train(digits, net, steps=200)
    assert digits.accuracy(net) > 0.95
    assert net.training


def test_gpt_ties_its_head_to_its_embedding() -> None:
    net = gpt.GPT(blocks=1)
    assert net.head.weight is net.embed.weight
    assert "head.weight" not in dict(net.named_parameters())


def test_gpt_decays_matrices_only() -> None:
    net = gpt.GPT(blocks=1)
    names = {id(param): name for name, param in net.named_parameters()}
    decayed, plain = gpt.optimizer(net.named_parameters()).param_groups
    assert sorted(names[id(param)] for param in decayed["params"]) == [
        "blocks.0.attention.out.weight",
        "blocks.0.attention.qkv.weight",
        "blocks.0.down.weight",
        "blocks.0.up.weight",
    ]
    assert len(decayed["params"]) + len(plain["params"]) == len(names)


def test_gpt_optimizer_takes_a_device_without_matrices() -> None:
    norm = nn.LayerNorm(4)
    decayed, plain = gpt.optimizer(norm.named_parameters(prefix="norm")).param_groups
    assert (len(decayed["params"]), len(plain["params"])) == (0, 2)


def test_gpt_text_is_python_and_skips_what_it_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert b"\nimport " in gpt.text()
    (tmp_path / "a.py").mkdir()  # reading it raises IsADirectoryError
    (tmp_path / "b.py").write_bytes(b"x = 1\n" * 100)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert gpt.text() == b"x = 1\n" * 100
    (tmp_path / "b.py").unlink()
    with pytest.raises(FileNotFoundError, match="expected Python source files"):
        gpt.text()


def test_llama_of_7_b_parameters_takes_no_memory_on_meta() -> None:
    with torch.device("meta"):
        net = llama.Llama(32, 4096, 32, 32, 11008, 32000)
    assert sum(param.numel() for param in net.parameters()) == 6_738_415_616


def test_llama_positions_matter_only_relatively() -> None:
    cos, sin = llama.Rotary(head_dim=8)(6)
    query, key = torch.randn(2, 1, 1, 1, 8).expand(2, 1, 1, 6, 8)
    scores = llama.rotate(query, cos, sin) @ llama.rotate(key, cos, sin).mT
    torch.testing.assert_close(scores[..., 1, 0], scores[..., 5, 4])
    torch.testing.assert_close(scores[..., 3, 0], scores[..., 5, 2])


def test_moe_gives_each_position_its_two_experts_while_places_last() -> None:
    mixture = moe.Mixture(dim=8, hidden=4, experts=4, choices=2)
    even = torch.tensor([[0.6, 0.3, 0.1, 0.0], [0.0, 0.1, 0.3, 0.6]])
    weights = mixture._combine(even[None]).sum(dim=-1)[0]  # places summed
    torch.testing.assert_close(weights, torch.tensor([[2 / 3, 1 / 3, 0, 0], [0, 0, 1 / 3, 2 / 3]]))


def test_moe_drops_choices_beyond_an_experts_places() -> None:
    mixture = moe.Mixture(dim=8, hidden=4, experts=4, choices=2)
    crowd = torch.tensor([0.6, 0.3, 0.1, 0.0]).expand(1, 4, 4)  # 3 places for 4 positions
    weights = mixture._combine(crowd).sum(dim=-1)[0]
    kept, dropped = [2 / 3, 1 / 3, 0, 0], [0, 0, 0, 0]
    torch.testing.assert_close(weights, torch.tensor([kept, kept, kept, dropped]))


@pytest.mark.parametrize(
    ("likes", "expected"),
    [(torch.eye(4), 1.0), (torch.eye(4)[[0, 0, 0, 0]], 4.0)],
    ids=["each its own expert", "all the same expert"],
)
def test_moe_imbalance_runs_from_1_to_the_number_of_experts(likes: Tensor, expected: float) -> None:
    mixture = moe.Mixture(dim=8, hidden=4, experts=4, choices=2)
    assert mixture._imbalance(likes[None]).item() == expected
