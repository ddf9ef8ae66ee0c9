"""Batches that `machine.train` reads before it plans are those that a plain loop would read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bigbrain_fx as bb
from bigbrain_fx.bundles.callers.reading_ahead import FEW, first_batches
from tests.support.command_line import write_cluster
from tests.support.messages import refused

Batch = dict[str, Tensor]


def drawn(count: int) -> list[Batch]:
    dice = torch.Generator().manual_seed(3)
    made = [torch.randn(8, 4, generator=dice) for _ in range(count)]
    return [{"x": x, "y": x.sum(1, keepdim=True)} for x in made]


def loss(output: Tensor, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(output, batch["y"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(torch.tanh(self.a(x)))
        return found


class Curriculum:
    """Data that become harder when somebody says so."""

    level = 1.0

    def __iter__(self) -> Iterator[Batch]:
        for batch in drawn(5):
            yield {"x": self.level * batch["x"], "y": batch["y"]}


def hard_rows(model: nn.Module, start: int = 0) -> Iterator[Batch]:
    """Yield the rows that the model does worst; from a batch on, all before that."""
    for number, batch in enumerate(drawn(5)):
        if number >= start:
            with torch.no_grad():
                worst = (model(batch["x"]) - batch["y"]).abs().flatten().topk(4).indices
            yield {name: tensor[worst] for name, tensor in batch.items()}
        else:
            yield {name: tensor[:4] for name, tensor in batch.items()}


def refilled() -> Iterator[Batch]:
    """Yield two batches in turn, whose memory is filled again."""
    kept = [{"x": torch.empty(8, 4), "y": torch.empty(8, 1)} for _ in range(2)]
    for number, batch in enumerate(drawn(5)):
        for name, tensor in batch.items():
            kept[number % 2][name].copy_(tensor)
        yield kept[number % 2]


def read(
    data: Iterable[object], model: nn.Module | None = None, on_step: object = None
) -> list[object]:
    about = data, model or nn.Linear(4, 1), on_step
    return first_batches(iter(data), *about)  # type: ignore[arg-type]  # an `on_step` of any kind


def test_data_that_ask_the_model_are_read_one_by_one() -> None:
    model = nn.Linear(4, 1)
    assert len(read(hard_rows(model), model)) == 1
    assert len(read(hard_rows(nn.Linear(4, 1)), model)) == FEW  # that is another one
    assert type(model.weight) is nn.Parameter
    assert not model._forward_pre_hooks


def test_data_that_ask_the_model_later_are_refused() -> None:
    model = nn.Linear(4, 1)
    with refused("BX3084a", bb.InputError):
        read(hard_rows(model, 2), model)
    assert len(read(hard_rows(model, FEW), model)) == FEW  # the steps of those are done then


def test_a_batch_whose_memory_is_filled_again_is_kept_as_it_came() -> None:
    found = read(refilled())
    assert len(found) == FEW
    for batch, want in zip(found, drawn(FEW), strict=True):
        assert isinstance(batch, dict)
        assert torch.equal(batch["x"], want["x"])
    listed = drawn(4)
    assert all(one is other for one, other in zip(read(listed), listed, strict=True))  # no copies


class Trainer:
    """A caller whose method hears of steps."""

    def __init__(self, data: Curriculum) -> None:
        self.data = data

    def heard(self, _step: int, _loss: float) -> None:
        self.data.level += 1


def test_data_that_on_step_knows_are_read_one_by_one() -> None:
    data, told = Curriculum(), list[float]()
    rows = torch.utils.data.DataLoader(range(4), batch_size=1)  # type: ignore[var-annotated,arg-type]

    def harder(step: int, _loss: float) -> None:
        data.level = step

    def seeds(step: int, _loss: float) -> None:
        rows.sampler.generator = step  # type: ignore[attr-defined]  # a `RandomSampler` has one

    assert len(read(data, on_step=harder)) == 1
    assert len(read(data, on_step=Trainer(data).heard)) == 1
    assert len(read(rows, on_step=seeds)) == 1
    assert len(read(data, on_step=lambda _, value: told.append(value))) == 5
    assert len(read(data, on_step=print)) == 5


@pytest.mark.parametrize("kind", ["asks", "on_step"])
def test_a_run_is_equal_to_a_plain_loop(kind: str, tmp_path: Path) -> None:
    """By the weights that the model has when a batch is read."""

    def trained(by_devices: bool) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(0)
        model = Net()
        optimizer, losses, harder = torch.optim.SGD(model.parameters(), 0.1), [], Curriculum()

        def on_step(step: int, value: float) -> None:
            losses.append(value)
            harder.level = 1 + step

        data = hard_rows(model) if kind == "asks" else harder
        if by_devices:
            options = bb.Options("naive", micro_batches=1)
            how: dict[str, Any] = {"loss": loss, "optimizer": optimizer, "options": options}
            bb.machine(write_cluster(tmp_path)).train(model, data, on_step=on_step, **how)
            return losses, model.state_dict()
        for step, batch in enumerate(data):
            optimizer.zero_grad()
            value = loss(model(batch["x"]), batch)
            value.backward()
            optimizer.step()
            on_step(step, value.item())
        return losses, model.state_dict()

    (losses, weights), (want, wanted) = trained(True), trained(False)
    assert losses == want
    assert all(torch.equal(weights[name], tensor) for name, tensor in wanted.items())
