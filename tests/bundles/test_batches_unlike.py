"""Sessions whose batches change: in rows, in length, in a number that the loss reads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

import bigbrain_fx as bb
from bigbrain_fx.bundles.device_steps import DeviceSteps
from bigbrain_fx.bundles.own_steps import OwnSteps
from tests.support.command_line import write_cluster
from tests.support.messages import refused

Batch = dict[str, Tensor | int]
WORDS, WIDTH = 11, 8


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.read = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.read(self.words(x))[0])
        return found


def loss(output: Tensor, batch: Batch) -> Tensor:
    words = torch.as_tensor(batch["x"]).flatten()
    total = nn.functional.cross_entropy(output.flatten(0, 1), words, reduction="sum")
    return total / batch["n"]


def batch_of(rows: int, length: int, count: int = 30) -> Batch:
    return {"x": torch.randint(0, WORDS, (rows, length)), "n": count}


def trained(
    model: nn.Module, batches: Iterable[Batch], loss: Callable[..., Tensor]
) -> tuple[list[float], dict[str, Tensor]]:
    """Train in plain PyTorch."""
    optimizer, losses = Adam(model.parameters(), lr=0.01), []
    for batch in batches:
        optimizer.zero_grad()
        value = loss(model(batch["x"]), batch)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, model.state_dict()


ROWS_AND_NUMBERS = (4, 6), (4, 6, 31), (3, 6, 18), (6, 6, 36)
LENGTHS = (4, 6), (4, 5), (4, 9), (2, 7)


@pytest.mark.parametrize(
    "sizes",
    [pytest.param(ROWS_AND_NUMBERS, id="rows"), pytest.param(LENGTHS, id="lengths")],
)
@pytest.mark.nightly
def test_devices_take_batches_of_other_sizes(
    sizes: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, batches = Reader(), [batch_of(*size) for size in sizes]
    losses, weights = trained(copy.deepcopy(model), batches, loss)
    own = Adam(model.parameters(), lr=0.01)
    how: Any = {"loss": loss, "optimizer": own, "options": bb.Options("naive")}
    with bb.machine(write_cluster(tmp_path))(model, example_batch=batches[0], **how) as session:
        assert [session.step(batch) for batch in batches] == losses
        assert isinstance(session._steps, DeviceSteps)
    assert all(torch.equal(tensor, weights[n]) for n, tensor in model.state_dict().items())


def test_a_batch_that_the_model_does_not_take_changes_nothing(tmp_path: Path) -> None:
    """Not even where its steps run."""
    model, batch = Reader(), batch_of(4, 6)
    strange = {**batch, "x": torch.zeros(4, 6)}
    how: Any = {"loss": loss, "options": bb.Options("naive")}
    with bb.machine(write_cluster(tmp_path))(model, example_batch=batch, **how) as session:
        with refused("BX3031a"):
            session.step(strange)
        assert isinstance(session._steps, DeviceSteps)
        session.step(batch)


@pytest.mark.nightly
@pytest.mark.usefixtures("rehearsals")
def test_a_patched_optimizer_trains_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = torch.optim.SGD.step

    def clipped(self: torch.optim.SGD, closure: None = None) -> None:
        for group in self.param_groups:
            nn.utils.clip_grad_value_(group["params"], 1e-3)
        plain(self, closure)

    monkeypatch.setattr(torch.optim.SGD, "step", clipped)
    model, batch = Reader(), batch_of(4, 6)
    how: Any = {"loss": loss, "optimizer": lambda named: torch.optim.SGD(named, lr=1.0)}
    machine = bb.machine(write_cluster(tmp_path))
    with (
        pytest.warns(bb.SplitWarning, match="BX3169"),
        machine(model, example_batch=batch, options=bb.Options("naive"), **how) as session,
    ):
        assert isinstance(session._steps, OwnSteps)


def of_known(output: Tensor, batch: Batch) -> Tensor:
    labels = torch.as_tensor(batch["y"]).flatten()
    return nn.functional.cross_entropy(output.flatten(0, 1), labels)


class Texts(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x)
        return found


LONG = 256


def padded(*lengths: int) -> Batch:
    x = torch.randint(0, WORDS, (len(lengths), LONG))
    is_known = torch.arange(LONG) < torch.tensor(lengths)[:, None]
    return {"x": x, "y": x.masked_fill(~is_known, -100)}


def test_padding_that_comes_later_leaves_one_micro_batch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, WORDS))
    model = Texts(nn.Sequential(nn.Embedding(WORDS, 64), *body))
    batches = [padded(*[LONG] * 8), padded(LONG, *range(7)), padded(*range(1, 8), LONG)]
    losses, weights = trained(copy.deepcopy(model), batches, of_known)
    rule: Any = {"optimizer": lambda parameters: Adam(parameters, lr=0.01)}
    how: Any = {"loss": of_known, "options": bb.Options("naive"), **rule}
    with bb.machine(write_cluster(tmp_path))(model, example_batch=batches[0], **how) as session:
        counts = []
        for batch, want in zip(batches, losses, strict=True):
            assert session.step(batch) == pytest.approx(want, rel=1e-6)
            counts.append(session.plan.micro_batches)
    assert counts[0] > 1
    assert counts[1:] == [1, 1]
    for name, tensor in model.state_dict().items():
        assert torch.allclose(tensor, weights[name], atol=1e-6)
