"""Micro-batches train what the whole batch trains, or the effect names what they train instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.core import LossCount
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import (
    Captured,
    MicroBatchEffect,
    Training,
    capture,
    micro_batch_effect,
)

ROWS = 8


class Rows(nn.Module):
    """Its rows stand alone; what else is in the batch is for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


class Normed(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x))


class NormedAndDropped(Normed):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), training=self.training)


class Dropped(Rows):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), training=self.training)


class Noisy(Rows):
    """Draws in eval mode, too, as a VAE or a diffusion model does; one draw is for all rows."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        noise = torch.randn_like(h).mul(torch.rand(x.shape[0], 1))
        gumbel = F.gumbel_softmax(h)
        return torch.distributions.Normal(h, h.exp()).rsample() + noise + gumbel


class NoisyMeeting(Noisy):
    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        return h - h.mean(0)


class DroppedMeeting(Dropped):
    """Rows meet in training alone, as in a norm of one's own or an expert's balance."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        return h + h.mean(0) if self.training else h


class TimeOuter(Rows):
    """Drops positions of a dimension that is time first, rows second."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x).unflatten(1, (2, 2)).transpose(0, 1).reshape(-1, 2)
        h = F.dropout(h, training=self.training)
        return h.view(2, -1, 2).transpose(0, 1).flatten(1)


class Leaky(Rows):
    """Keeps its draw where parts cannot be given it, and is compared without."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rrelu(super().forward(x), training=self.training)


class Counted(Rows):
    """Writes a buffer that nothing reads."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x)


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.walk = nn.GRU(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.walk(x)[0]


class Compares(Rows):
    """Rows beside prototypes, of which there happen to be as many."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return torch.cdist(self.up(x), self.up(y)).min(1).values


Loss = Callable[[Tensor, dict[str, Tensor]], Tensor]


def mean(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output, batch["y"])


def square(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return output.square().mean()


def total(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output, batch["y"], reduction="sum")


def spread(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return output.std() + batch["y"].std()


def contrast(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    z = F.normalize(output, dim=1)
    return F.cross_entropy(z @ F.normalize(batch["x"], dim=1).T, torch.arange(z.shape[0]))


def masked(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    mask = batch["mask"].float()
    return ((output - batch["y"]).square() * mask).sum() / mask.sum().clamp(min=1)


def ignoring(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output, batch["label"], ignore_index=0)


def with_penalty(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """A mean over what is valid, found by indices, which no trace holds; and a term of no row."""
    valid = torch.where(batch["label"] != 0)
    return output[valid].square().mean() + 1e-3 * output.detach().new_tensor(1.0)


def batch_of(seed: int = 0) -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    mask = torch.ones(ROWS, 4, dtype=torch.bool)
    mask[:2, 1:] = False  # the first rows count for little
    return {
        "x": torch.randn(ROWS, 4, generator=dice),
        "y": torch.randn(ROWS, 4, generator=dice),
        "mask": mask,
        "label": torch.tensor([0, 0, 0, 1, 2, 3, 1, 2]),
    }


def effect(
    model: nn.Module,
    loss: Loss,
    count: int = 4,
    batch: dict[str, Tensor] | None = None,
    loss_weight: Callable[[Any], object] | None = None,
    **options: Any,
) -> MicroBatchEffect:
    found: Captured = capture(model, batch or batch_of(), loss, **options)
    return micro_batch_effect(Training(model, loss, None, loss_weight), found, count)


class Frozen(Normed):
    """Leaves its batch norm in eval mode, as fine-tuning does."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        return self


class FrozenAndDropped(Frozen):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), training=self.training)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.gate("Noisy", "Counted", "FrozenAndDropped", "Leaky", "TimeOuter")
@pytest.mark.parametrize(
    "model", [Rows, Dropped, Noisy, Counted, Frozen, FrozenAndDropped, Leaky, TimeOuter]
)
def test_rows_that_stand_alone_are_the_same_step(model: type[nn.Module]) -> None:
    found = effect(model(), mean)
    assert found.is_equal
    assert not found.differs
    assert found.gradient_error < 1e-5


def test_a_float64_step_decides_where_rounding_is_large() -> None:
    """Numbers that cancel: the float32 gradients differ by more than the tolerance."""

    def cancelling(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return ((output + 1e4) - 1e4 - batch["y"]).square().mean()

    assert effect(Rows(), cancelling).is_equal


@pytest.mark.gate(
    "Normed-square-batch norm takes its statistics over a micro-batch",
    "Rows-contrast-rows of the batch are compared with each other",
    "TimeFirst-square-dimension 0 is taken for the batch",
    "Rows-spread-Rows do not stand alone: test_effect.py:",
)
@pytest.mark.parametrize(
    ("model", "loss", "cause"),
    [
        (Normed, square, "batch norm takes its statistics over a micro-batch"),
        (NormedAndDropped, square, "batch norm takes its statistics over a micro-batch"),
        (NoisyMeeting, square, "Rows do not stand alone"),
        (DroppedMeeting, square, "Rows do not stand alone"),
        (Rows, contrast, "rows of the batch are compared with each other"),
        (TimeFirst, square, "dimension 0 is taken for the batch"),
        (Rows, spread, "Rows do not stand alone: test_effect.py:"),
    ],
)
def test_rows_that_meet_each_other_differ_with_the_line(
    model: type[nn.Module], loss: Loss, cause: str
) -> None:
    batch = {**batch_of(), "x": torch.randn(ROWS, 3, 4)} if model is TimeFirst else None
    found = effect(model(), loss, batch=batch)
    assert found.differs
    assert found.gradient_error > 1e-3
    assert cause in found.cause
    assert "--micro-batches 1 trains the whole batch" in found.warning


def test_a_sum_over_rows_is_named() -> None:
    found = effect(Rows(), total)
    assert found.is_sum
    assert found.differs
    assert ".mean()" in found.remedy


@pytest.mark.gate("masked-count0", "with_penalty-count2")
@pytest.mark.parametrize(
    ("loss", "count"),
    [
        (masked, LossCount(("mask",))),
        (ignoring, LossCount(("label",), 0, 0)),
        (with_penalty, LossCount(("label",), 0, 0)),
    ],
)
def test_a_mean_over_what_data_choose_names_the_count_and_is_right_with_it(
    loss: Loss, count: LossCount
) -> None:
    """Every micro-batch has a valid element: the third has few, the others many."""
    batch = batch_of()
    batch["label"][0] = 3
    found = effect(Rows(), loss, 4, batch)
    assert found.differs
    assert found.loss_count == count
    assert f"def loss_weight(batch): return {count.expression}" in found.remedy
    again = effect(Rows(), loss, 4, batch, loss_weight=count.of)
    assert again.is_equal


def test_a_count_that_fits_by_chance_is_no_remedy() -> None:
    """Rows meet a little; both halves have as many labels, which the loss does not read."""

    def coupled(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return mean(output, batch) + 0.01 * output.std()

    batch = {**batch_of(), "label": torch.tensor([0, 1, 2, 1, 0, 3, 1, 1])}
    found = effect(Rows(), coupled, 2, batch)
    assert found.differs
    assert found.loss_count is None
    assert found.remedy == ""


@pytest.mark.nightly
def test_halves_that_balance_do_not_hide_quarters() -> None:
    """Both halves have as many valid elements; the quarters do not."""
    batch = batch_of()
    batch["label"] = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
    assert effect(Rows(), ignoring, 2, batch).seen_in == 4
    assert effect(Rows(), ignoring, 4, batch).differs


class Uniform(Rows):
    """Logits of zero, as a head that begins as zeros has: any mean over any rows has one loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def test_weights_that_training_has_moved_are_compared_too() -> None:
    """A term that is zero at the beginning weighs rows against each other later."""

    def later(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        apart = F.relu(output.std(0, unbiased=False).sum() - 1e-3)
        return F.mse_loss(output, batch["y"][:, :3]) + apart

    found = effect(Uniform(), later)
    assert found.differs
    assert found.after_steps


def test_the_entry_is_named_with_which_parts_add_up() -> None:
    batch = {"x": torch.randn(ROWS, 4), "y": torch.randn(ROWS, 4)}
    found = effect(Compares(), square, batch=batch)
    assert found.differs
    assert found.cause.startswith("Rows do not stand alone: 'y'")
    assert "batch_dims = {'y': None}" in found.remedy
    assert effect(Compares(), square, batch=batch, batch_dims={"y": None}).is_equal


class Latest(nn.Module):
    """The largest over dimension 0, which is time."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).amax(0)


def test_a_guess_of_the_batch_that_matters_is_refused_and_a_declaration_helps() -> None:
    batch = {"x": torch.randn(4, ROWS, 4), "y": torch.randn(ROWS, 2)}
    with pytest.raises(InputError) as caught:
        effect(Latest(), mean, 2, batch)
    assert caught.value.at == "example_batch"
    assert "batch_dims = {'x': 0, 'y': None}" in (caught.value.help or "")
    assert effect(Latest(), mean, 2, batch, batch_dims={"x": 1}).is_equal


class Packed(nn.Module):
    """Documents laid end to end: offsets into all positions say who is beside whom."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(20, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        place = torch.arange(x.numel())
        doc = torch.searchsorted(offsets, place, right=True).view(x.shape)
        same = (doc[:, :, None] == doc[:, None, :]).float()
        return self.up(same @ self.table(x))


OFFSETS = torch.tensor([0, 3, 9, 14, 20, 27, 33, 40])  # as many as there are rows


@pytest.mark.parametrize("dims", [{}, {"offsets": "ragged:x"}])
def test_offsets_go_with_their_rows(dims: dict[str | int, int | str | None]) -> None:
    batch = {"x": torch.randint(20, (ROWS, 5)), "offsets": OFFSETS}
    assert effect(Packed(), square, 4, batch, batch_dims=dims).is_equal


def test_offsets_that_are_cut_like_rows_train_something_else() -> None:
    batch = {"x": torch.randint(20, (ROWS, 5)), "offsets": OFFSETS}
    assert effect(Packed(), square, 4, batch, batch_dims={"x": 0, "offsets": 0}).differs


def test_declared_offsets_end_at_the_length_of_their_entry() -> None:
    batch = {"x": torch.randint(20, (ROWS, 5)), "offsets": OFFSETS.clamp(max=39)}
    with pytest.raises(InputError) as caught:
        effect(Packed(), square, 4, batch, batch_dims={"offsets": "ragged:x"})
    assert caught.value.at == "example_batch"
    assert "cu_seqlens" in (caught.value.help or "")


@pytest.mark.gate("<lambda>-shape", "<lambda>-negative", "<lambda>-must add up")
@pytest.mark.parametrize(
    ("loss_weight", "said"),
    [
        (lambda batch: batch["mask"].sum(1), "shape"),
        (lambda batch: "many", "str"),
        (lambda batch: float("nan"), "nan"),
        (lambda batch: -batch["mask"].sum(), "negative"),
        (lambda batch: 0, "is 0"),
        (lambda batch: batch["mask"].float().mean(), "must add up"),
    ],
)
def test_a_loss_weight_that_is_no_count_is_refused(
    loss_weight: Callable[[Any], object], said: str
) -> None:
    with pytest.raises(InputError) as caught:
        effect(Rows(), masked, loss_weight=loss_weight)
    assert said in caught.value.what
    assert "def loss_weight(batch)" in (caught.value.help or "")


def test_nothing_is_run_without_numbers_and_rules_on_the_graph_stand_in() -> None:
    with torch.device("meta"):
        model = Normed()
    found = effect(model, square)
    assert found.not_compared
    assert found.differs
    assert "batch norm" in found.cause


def test_micro_batches_on_which_a_model_fails_may_train_something_else() -> None:
    class Whole(Rows):
        def forward(self, x: Tensor) -> Tensor:
            return self.up(x).view(ROWS, 4)

    found = effect(Whole(), mean, 4)
    assert found.not_compared
    assert found.differs
    assert "4 micro-batches may train something else" in found.warning


def test_a_model_that_fails_on_two_rows_is_compared_on_the_rows_of_a_micro_batch() -> None:
    """Scores fold into as many groups as the whole batch has, as a reranker's do."""

    class Folded(Rows):
        def forward(self, x: Tensor) -> Tensor:
            return F.cross_entropy(self.up(x)[:, 0].view(4, -1), torch.zeros(4).long())

    found = effect(Folded(), lambda output, batch: output, 2)
    assert not found.not_compared
    assert found.differs


def test_the_model_is_as_it_was() -> None:
    model = NormedAndDropped().eval()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    effect(model, square)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert not model.training
    assert all(p.grad is None for p in model.parameters())


def test_later_data_are_compared_at_the_moved_weights() -> None:
    """The example has as many valid elements in each part; the next batch has not."""
    example, later = batch_of(), batch_of(1)
    example["label"] = torch.tensor([0, 1, 0, 2, 0, 3, 0, 1])
    later["label"] = torch.tensor([0, 0, 0, 1, 2, 3, 1, 2])
    model = Rows()
    found = capture(model, example, ignoring)
    training = Training(model, ignoring, None, later=lambda: [later])
    assert micro_batch_effect(replace(training, later=tuple), found, 4).is_equal
    effect = micro_batch_effect(training, found, 2)
    assert effect.differs
    assert effect.after_steps
    assert effect.loss_count == LossCount(("label",), 0, 0)


def test_padding_that_comes_late_is_compared_too() -> None:
    """All elements of the first batches are valid; of some later ones they are not."""
    full, padded = batch_of(), batch_of(1)
    full["label"] = torch.tensor([1, 1, 1, 2, 2, 3, 1, 2])
    model = Rows()
    found = capture(model, full, ignoring)
    data = [*[full] * 9, padded, *[full] * 20]
    training = Training(model, ignoring, None, later=lambda: data)
    effect = micro_batch_effect(training, found, 2)
    assert effect.differs
    assert effect.loss_count == LossCount(("label",), 0, 0)
    weighed = replace(training, loss_weight=effect.loss_count.of)
    assert micro_batch_effect(weighed, found, 2).is_equal


def test_a_weight_that_begins_at_zero_is_compared_as_it_grows() -> None:
    """A term over the whole batch has the weight zero in the first two batches."""

    def annealed(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return mean(output, batch) + batch["beta"] * output.std()

    data = [{**batch_of(n), "beta": torch.tensor(max(0.0, n - 1.0))} for n in range(9)]
    model = Rows()
    found = capture(model, data[0], annealed)
    training = Training(model, annealed, None, later=lambda: data[1:])
    assert micro_batch_effect(replace(training, later=lambda: data[1:2]), found, 4).is_equal
    effect = micro_batch_effect(training, found, 4)
    assert effect.differs
    assert effect.after_steps
    assert "output.std()" in effect.cause


def test_halves_that_agree_by_chance_are_told_from_equal_ones() -> None:
    """Both halves have three valid elements; their own halves have one or two."""
    example = batch_of()
    example["label"] = torch.tensor([0, 1, 2, 1, 3, 1, 0, 1])
    model = Rows()
    found = capture(model, example, ignoring)
    effect = micro_batch_effect(Training(model, ignoring, None), found, 2)
    assert effect.differs
    assert (effect.micro_batches, effect.seen_in) == (2, 4)
    assert effect.loss_count == LossCount(("label",), 0, 0)
