"""Ops that are a torch.nn layer's own call become the layer; anything else stays a function."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.emitted_stages import emitted_stage, stage_text


class Holder(nn.Module):
    """Run one layer on an input, as its author does."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self.call_it = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call_it(self.layer, x)


def plainly(layer: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = layer(x)
    return result


ROWS, IMAGE, WORDS = torch.randn(4, 8), torch.randn(4, 8, 6, 6), torch.randint(5, (4, 3))


AS_WRITTEN = {
    "nn.Linear(8, 3)": ROWS,
    "nn.Linear(8, 3, bias=False)": ROWS,
    "nn.Linear(8, 3).requires_grad_(False)": ROWS,
    "nn.Linear(8, 2, dtype=torch.float64)": ROWS.double(),
    "nn.Embedding(5, 2)": WORDS,
    "nn.Embedding(5, 2, padding_idx=0)": WORDS,
    "nn.LayerNorm(8)": ROWS,
    "nn.LayerNorm(8, eps=1e-06, bias=False)": ROWS,
    "nn.LayerNorm((6, 6), elementwise_affine=False)": IMAGE,
    "nn.RMSNorm(8, eps=1e-05)": ROWS,
    "nn.GroupNorm(2, 8)": IMAGE,
    "nn.GroupNorm(2, 8, affine=False)": IMAGE,
    "nn.BatchNorm2d(8, momentum=0.2)": IMAGE,
    "nn.Conv2d(8, 4, 3, padding=1, groups=2)": IMAGE,
    "nn.Conv2d(8, 4, (3, 1), stride=2, bias=False)": IMAGE,
    "nn.ConvTranspose2d(8, 4, 2, stride=2)": IMAGE,
    "nn.Dropout(0.3)": ROWS,
    "nn.GELU(approximate='tanh')": ROWS,
    "nn.ReLU(inplace=True)": ROWS,
    "nn.LeakyReLU(negative_slope=0.2)": ROWS,
    "nn.PReLU(num_parameters=8)": IMAGE,
    "nn.Softmax(dim=-1)": ROWS,
    "nn.MaxPool2d(2)": IMAGE,
    "nn.MaxPool2d(3, stride=2, padding=1)": IMAGE,
    "nn.AvgPool2d(2)": IMAGE,
    "nn.AdaptiveAvgPool2d(1)": IMAGE,
    "nn.Flatten()": IMAGE,
    "nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 8))": ROWS,
}


@pytest.mark.parametrize("written", AS_WRITTEN)
def test_a_layer_is_made_and_called_as_its_author_did(written: str) -> None:
    layer: nn.Module = eval(written)
    text = stage_text(Holder(layer, plainly), AS_WRITTEN[written])
    init, _, forward = text.partition("def forward")
    assert f"self.layer = {written.replace('inplace=True', '')}" in init
    assert "self.layer(x)" in forward


def half_frozen() -> nn.Linear:
    layer = nn.Linear(8, 8)
    layer.bias.requires_grad_(False)
    return layer


@pytest.mark.parametrize(
    ("layer", "call", "x"),
    [
        (nn.Linear(8, 8), lambda layer, x: F.linear(x, layer.weight, layer.bias), ROWS),
        (nn.Linear(8, 8), lambda layer, x: layer(x) @ layer.weight, ROWS),
        (half_frozen(), plainly, ROWS),
        (nn.Conv2d(8, 4, 3, padding=1, padding_mode="circular"), plainly, IMAGE),
        (nn.BatchNorm2d(8, track_running_stats=False), plainly, IMAGE),
    ],
)
def test_another_use_of_its_tensors_gives_the_same_numbers(
    layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor], x: Tensor
) -> None:
    """Whatever is written for it, the emitted stage computes what the module computes."""
    module = Holder(layer, call)
    assert torch.equal(emitted_stage(module, x)(x), module.train()(x).square().mean())


def test_dropout_and_batch_norm_follow_the_mode() -> None:
    layers = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8))
    text = stage_text(Holder(layers, lambda m, x: F.dropout(m(x), 0.1, m.training)), ROWS)
    assert "self.layer[0](x)" in text
    assert "F.dropout(" in text
    assert "training=self.training)" in text
    assert "eval()" not in text


def test_a_stage_of_an_evaluated_model_is_in_eval_mode() -> None:
    text = stage_text(Holder(nn.BatchNorm2d(8), plainly), IMAGE, training=False)
    assert "self.layer = nn.BatchNorm2d(8)" in text
    assert "self.eval()" in text
