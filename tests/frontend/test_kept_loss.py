"""A loss that torch.export cannot follow is opaque, and the model is trained on it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.core import Graph, Op
from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend import capture
from tests.support.captured import run


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor
    cache: object = None


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 8, 3)
        self.head = nn.Linear(8, 6)

    def forward(self, sound: Tensor) -> Output:
        hidden = self.conv(sound).relu().transpose(1, 2)
        return Output(self.head(hidden), hidden, cache=object())


def ctc(output: Output, batch: dict[str, Tensor]) -> Tensor:
    log = output.logits.log_softmax(-1).transpose(0, 1)
    steps = torch.full((log.size(1),), log.size(0), dtype=torch.long)
    mask = torch.arange(5)[None] < batch["lengths"][:, None]
    return F.ctc_loss(log, batch["letters"].masked_select(mask), steps, batch["lengths"])


def speech_batch() -> dict[str, Tensor]:
    return {
        "sound": torch.randn(4, 4, 20),
        "letters": torch.randint(1, 6, (4, 5)),
        "lengths": torch.tensor([5, 3, 4, 2]),
    }


def loss_op(graph: Graph) -> Op:
    return next(op for op in graph.ops if op.target == "user.loss")


def matcher(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Match rows to targets as DETR does: numbers leave torch, indices come back."""
    cost = torch.cdist(output, batch[1]).detach().numpy()
    order = torch.as_tensor(cost.argmin(-1))
    return (output - batch[1][order]).square().mean()


def test_a_loss_that_can_be_traced_is_not_kept() -> None:
    found = capture(nn.Linear(4, 4), (torch.randn(6, 4), torch.randn(6, 4)), F.mse_loss_of)  # type: ignore[attr-defined]
    assert not any(op.target == "user.loss" for op in found.graph.ops)


F.mse_loss_of = lambda output, batch: F.mse_loss(output, batch[1])  # type: ignore[attr-defined]


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        if torch.isfinite(x).all():  # a trace fails here first, and then takes the answer
            x = x * 2
        return self.head(x)


def rows_that_count(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output[batch["counts"]], batch["y"][batch["counts"]])


def test_the_line_of_the_loss_is_named_and_not_an_earlier_one() -> None:
    batch = {
        "x": torch.randn(4, 4),
        "y": torch.randn(4, 6),
        "counts": torch.tensor([True, False, True, True]),
    }
    found = capture(Asks(), batch, loss=rows_that_count)
    (said,) = [w for w in found.warnings if w.startswith("BX0150")]
    assert 'batch["y"][batch["counts"]]' in said
    assert "isfinite" not in said


def test_a_model_at_fault_is_told_as_before() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x[x.sum(1) > 0].sum()

    with pytest.raises(CaptureError) as caught:
        capture(Model(), (torch.randn(6, 4), torch.randn(6, 4)), matcher)
    assert (caught.value.at or "").startswith("test_kept_loss.py:")
    assert "loss" not in caught.value.what


def test_without_weights_the_loss_gets_everything() -> None:
    with torch.device("meta"):
        model = Speech()
    op = loss_op(capture(model, speech_batch(), ctc).graph)
    assert len(op.refs) == 5


def guarded(output: Output, batch: dict[str, Tensor]) -> Tensor:
    """Return another loss where no row has letters; the example's all have."""
    assert torch.isfinite(output.logits).all()
    if not batch["lengths"].any():
        return output.hidden.square().mean()
    return output.logits.square().mean()


def checked(output: Output, batch: dict[str, Tensor]) -> Tensor:
    if batch["lengths"].min() < 0:
        raise ValueError("lengths below 0")
    return output.logits.square().mean()


def test_a_loss_that_asks_data_is_asked_for_each_batch() -> None:
    model, batch = Speech(), speech_batch()
    found = capture(model, batch, guarded)
    assert not any("assumed" in said for said in found.warnings)
    assert "lengths" in loss_op(found.graph).refs
    batch["lengths"] *= 0
    loss = run(found, batch)[found.graph.loss or ""]
    assert torch.equal(loss, guarded(model(batch["sound"]), batch))


@pytest.mark.nightly
def test_an_assertion_of_a_loss_is_assumed_and_checked() -> None:
    found = capture(Speech(), speech_batch(), checked)
    assert not [op for op in found.graph.ops if op.target == "user.loss"]
    assert any("assumed False at test_kept_loss.py:" in said for said in found.warnings)


class Density(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> torch.distributions.Distribution:
        mean: Tensor = self.head(x)
        return torch.distributions.Normal(mean, torch.ones_like(mean))


def unlikely(output: torch.distributions.Distribution, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = output.log_prob(batch["y"])
    return -found.mean()


def clipped(output: torch.distributions.Distribution, batch: dict[str, Tensor]) -> Tensor:
    if batch["y"].max() > 1e9:
        return unlikely(output, {"y": batch["y"].clamp(max=1e9)})
    return unlikely(output, batch)


def test_a_check_of_a_library_is_an_assertion_of_the_loss() -> None:
    found = capture(Density(), {"x": torch.randn(4, 6), "y": torch.randn(4, 4)}, unlikely)
    assert not [op for op in found.graph.ops if op.target == "user.loss"]


def test_a_loss_of_no_nest_of_tensors_is_not_kept() -> None:
    """The device that calls it would lack the distribution; so the example's answer is assumed."""
    found = capture(Density(), {"x": torch.randn(4, 6), "y": torch.randn(4, 4)}, clipped)
    assert not [op for op in found.graph.ops if op.target == "user.loss"]
    assert any("assumed False at test_kept_loss.py:" in said for said in found.warnings)
