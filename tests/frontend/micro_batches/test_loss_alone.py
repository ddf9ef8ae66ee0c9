"""Of a model too large to be run, micro-batches are compared by the loss alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.frontend import (
    Captured,
    MicroBatchEffect,
    Training,
    capture,
    later_effect,
    micro_batch_effect,
)
from bigbrain_fx.frontend.tracing.blank import reserve

ROWS, LENGTH, CLASSES, WIDTH = 8, 6, 5, 256
HERE = "bigbrain_fx.frontend.micro_batches"
Batch = dict[str, Tensor]


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


class TimeOuter(Tokens):
    """Its logits have positions outside, rows inside, in one dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x).transpose(0, 1).flatten(0, 1))


class Normed(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(x)))


class OwnLoss(Tokens):
    """A loss inside, as nanoGPT has it."""

    def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        logits = super().forward(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1)


class Weighted(nn.Module):
    """Its loss has a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.dot(x.mean(0), self.weight)


def tokens(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["y"].flatten())


def of_rows(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output, batch["y"].t().flatten())


def masked(output: Tensor, batch: Batch) -> Tensor:
    held = batch["y"] >= 0
    found = F.cross_entropy(output.transpose(1, 2), batch["y"].clamp(min=0), reduction="none")
    return (found * held).sum() / held.sum()


def of_pairs(output: Tensor, batch: Batch) -> Tensor:
    z = F.normalize(output.flatten(1), dim=1)
    return F.cross_entropy(z @ z.t(), torch.arange(z.shape[0]))


def is_valid(batch: Batch) -> Tensor:
    return (batch["y"] >= 0).sum()


def data(padding: int | None = None) -> Batch:
    """Return a batch; in its first half, labels are this number from the third on."""
    x = torch.randint(CLASSES, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    y = x.roll(-1, 1).clone()
    if padding is not None:
        y[: ROWS // 2, 2:] = padding
    return {"x": x, "y": y}


def captured(model: nn.Module, loss: Any, batch: Batch, **how: Any) -> tuple[Training, Captured]:
    training = Training(model.train(), loss, None, **how)
    return training, capture(model, batch, loss)


def later(model: nn.Module, loss: Any, padding: int, **how: Any) -> MicroBatchEffect | None:
    """Return the effect of a padded batch, where the example has no padding."""
    training, found = captured(model, loss, data(), **how)
    return later_effect(training, found, 2, data(padding))


@pytest.fixture
def too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of these models are too many to be run for a comparison; their losses are not."""
    monkeypatch.setattr(f"{HERE}.measure._LOOP_FLOPS", 0)
    monkeypatch.setattr(f"{HERE}.measure.LATER_S", 60.0)
    monkeypatch.setattr(f"{HERE}.comparison._FLOPS", 4e5)


@pytest.mark.usefixtures("too_large")
@pytest.mark.parametrize(
    ("model", "loss", "padding"),
    [(Tokens, tokens, -100), (Tokens, masked, -1), (OwnLoss, None, -1)],
    ids=["ignored", "masked", "own-loss"],
)
def test_a_later_batch_with_padding_differs(model: Any, loss: Any, padding: int) -> None:
    effect = later(model(), loss, padding)
    assert effect is not None
    assert effect.differs
    assert effect.loss_count is not None


@pytest.mark.usefixtures("too_large")
@pytest.mark.parametrize(
    ("model", "loss", "how"),
    [
        (Tokens, masked, {"loss_weight": is_valid}),
        (Tokens, lambda output, _: output.square().mean(), {}),
        (TimeOuter, lambda output, _: output.square().mean(), {}),
    ],
    ids=["counted", "no-labels", "time-outer"],
)
def test_a_later_batch_whose_parts_add_up_is_right(model: Any, loss: Any, how: Any) -> None:
    assert later(model(), loss, -1, **how) is None


@pytest.mark.usefixtures("too_large")
def test_rows_inside_a_dimension_are_found_by_trying_both_orders() -> None:
    assert later(TimeOuter(), of_rows, 0) is None


@pytest.mark.usefixtures("too_large")
def test_the_first_batch_of_a_large_model_is_compared_by_its_loss() -> None:
    effect = micro_batch_effect(*captured(Tokens(), tokens, data(-100)), 2)
    assert effect.differs
    assert "loss_weight" in effect.remedy


@pytest.mark.usefixtures("too_large")
def test_pairs_of_rows_differ() -> None:
    effect = micro_batch_effect(*captured(Tokens(), of_pairs, data()), 2)
    assert effect.differs


@pytest.mark.usefixtures("too_large")
def test_a_later_batch_of_the_data_is_compared_before_the_loop() -> None:
    training, found = captured(Tokens(), tokens, data(), later=lambda: [data(), data(-100)])
    assert micro_batch_effect(training, found, 2).differs


@pytest.mark.usefixtures("too_large")
def test_an_equal_loss_leaves_the_model_unknown() -> None:
    effect = micro_batch_effect(*captured(Tokens(), tokens, data()), 2)
    assert not effect.differs
    assert effect.unknown


@pytest.mark.usefixtures("too_large")
def test_two_rows_of_too_many_logits_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{HERE}.loss_alone._MANY", 1)
    monkeypatch.setattr(f"{HERE}.loss_alone._MOST", 2 * LENGTH * CLASSES)
    assert micro_batch_effect(*captured(Tokens(), tokens, data(-100)), 2).loss_count is not None
    monkeypatch.setattr(f"{HERE}.loss_alone._MOST", 2 * LENGTH * CLASSES - 1)
    assert micro_batch_effect(*captured(Tokens(), tokens, data(-100)), 2).loss_count is None


@pytest.mark.parametrize("from_shapes", [True, False])
def test_an_estimate_draws_no_results(from_shapes: bool) -> None:
    with torch.device("meta"):
        model = Tokens()
    reserve(model)
    about = captured(model, tokens, data(-100), from_shapes=from_shapes)
    assert (micro_batch_effect(*about, 2).loss_count is None) == from_shapes


@pytest.mark.usefixtures("too_large")
def test_rules_know_of_the_model_itself() -> None:
    effect = micro_batch_effect(*captured(Normed(), tokens, data()), 2)
    assert effect.differs
    assert effect.not_compared


@pytest.mark.usefixtures("too_large")
def test_a_loss_with_a_parameter_cannot_be_alone() -> None:
    training, found = captured(Weighted(), None, {"x": torch.rand(ROWS, 4)})
    effect = later_effect(training, found, 2, {"x": torch.rand(ROWS, 4)})
    assert effect is not None
    assert effect.unknown


@pytest.mark.usefixtures("too_large")
def test_nothing_is_left_changed() -> None:
    training, found = captured(Tokens(), tokens, data())
    before, dice = data(-100), torch.get_rng_state()
    batch = {name: tensor.clone() for name, tensor in before.items()}
    later_effect(training, found, 2, batch)
    assert all(torch.equal(batch[name], before[name]) for name in batch)
    assert torch.equal(dice, torch.get_rng_state())
    assert all(p.grad is None for p in training.module.parameters())


def test_a_model_that_can_be_run_finds_a_batch_beyond_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"{HERE}.measure._LOOP_FLOPS", 0)
    monkeypatch.setattr(f"{HERE}.measure.LATER_S", 60.0)
    monkeypatch.setattr(f"{HERE}.comparison.LATER_S", 0.0)
    batches = [data(), data(), data(-100)]
    training, found = captured(Tokens(), tokens, data(), later=lambda: batches)
    effect = micro_batch_effect(training, found, 2)
    assert effect.differs
    assert not effect.not_compared
