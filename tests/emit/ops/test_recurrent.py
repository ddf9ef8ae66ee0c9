"""Recurrent ops become the nn.LSTM, nn.GRU or nn.RNN that runs them, whatever its depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.emitted_stages import emitted_stage, stage_text

WORDS = torch.randn(4, 5, 8)
STATE = torch.randn(2, 4, 6)


class Reader(nn.Module):
    """Read something off recurrent layers."""

    def __init__(self, cells: nn.Module, read: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.cells = cells
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.cells, x)


def output(cells: Any, x: Tensor) -> Tensor:  # any module's call
    made, _ = cells(x)
    return made


def last_state(cells: Any, x: Tensor) -> Tensor:
    _, (_, cell) = cells(x)
    return cell


def both(cells: Any, x: Tensor) -> Tensor:
    made, (hidden, _) = cells(x)
    return made[-1] + hidden[0]


def started(cells: Any, x: Tensor) -> Tensor:
    _, hidden = cells(x, STATE.to(x))
    return hidden


def one_by_one(cells: Any, x: Tensor) -> Tensor:
    for cell in cells:
        x, _ = cell(x)
    return x


def handed_on(cells: Any, x: Tensor) -> Tensor:
    state = None
    for cell in cells:
        x, state = cell(x, state)
    return x


def by_hand(cells: Any, x: Tensor) -> Tensor:
    start = x.new_zeros(1, x.shape[1], 6)
    made, _ = torch.gru(x, start, [*cells.parameters()], True, 1, 0.0, True, False, False)
    return made


STANDARD: list[tuple[nn.Module, Callable[[Any, Tensor], Tensor], str, str]] = [
    (nn.LSTM(8, 6, batch_first=True), output, "LSTM(8, 6, batch_first=True)", "made, _ ="),
    (nn.LSTM(8, 6, 3, bias=False), output, "LSTM(8, 6, num_layers=3, bias=False)", "made, _ ="),
    (nn.LSTM(8, 6, proj_size=2), last_state, "LSTM(8, 6, proj_size=2)", "_, (_, cell) ="),
    (nn.LSTM(8, 6, bidirectional=True), last_state, "bidirectional=True)", "_, (_, cell) ="),
    (nn.LSTM(8, 6), both, "LSTM(8, 6)", "made, (hidden, _) ="),
    (nn.GRU(8, 6, 2, batch_first=True), started, "num_layers=2, batch_first=True)", "cells(x, "),
    (nn.RNN(8, 6, nonlinearity="relu"), output, "RNN(8, 6, nonlinearity='relu')", "made, _ ="),
    (nn.RNN(8, 6, dtype=torch.float32), output, "RNN(8, 6)", "made, _ ="),
    (nn.GRU(8, 6).requires_grad_(False), output, "GRU(8, 6).requires_grad_(False)", "made, _ ="),
]


@pytest.mark.gate("cells0-output-LSTM(8, 6, batch_first=True)-made, _ =")
@pytest.mark.parametrize(("cells", "read", "made", "called"), STANDARD)
def test_a_layer_is_made_and_called_as_its_author_did(
    cells: nn.Module, read: Callable[[Any, Tensor], Tensor], made: str, called: str
) -> None:
    text = stage_text(Reader(cells, read), WORDS)
    assert f"nn.{made}" in text or made in text
    assert called in text
    assert "torch.zeros" not in text


def half_frozen(cells: nn.GRU) -> nn.GRU:
    cells.weight_ih_l0.requires_grad_(False)
    return cells


NUMBERS = [
    *((cells, read) for cells, read, *_ in STANDARD[:6]),
    (nn.ModuleList(nn.LSTM(8, 8) for _ in range(4)), one_by_one),
    (nn.ModuleList(nn.GRU(8, 8) for _ in range(4)), handed_on),
    (nn.ModuleList(nn.LSTM(8, 8) for _ in range(3)), handed_on),
    (nn.GRU(8, 6), by_hand),
    (half_frozen(nn.GRU(8, 6, 2)), output),
]


@pytest.mark.gate("cells10-output")
@pytest.mark.parametrize(("cells", "read"), NUMBERS)
def test_the_emitted_stage_computes_what_the_module_computes(
    cells: nn.Module, read: Callable[[Any, Tensor], Tensor]
) -> None:
    module = Reader(cells, read)
    stage = emitted_stage(module, WORDS)
    made, wanted = stage(WORDS), module.train()(WORDS).square().mean()
    assert torch.equal(made, wanted)
    made.backward()
    wanted.backward()
    gradients = {name: p.grad for name, p in stage.named_parameters()}
    for name, parameter in module.named_parameters():
        found_grad = gradients[name]
        assert (found_grad is None) == (parameter.grad is None)
        if found_grad is not None and parameter.grad is not None:
            assert torch.equal(found_grad, parameter.grad)


@pytest.mark.nightly
def test_layers_in_a_row_are_a_loop() -> None:
    text = stage_text(Reader(nn.ModuleList(nn.LSTM(8, 8) for _ in range(5)), one_by_one), WORDS)
    assert "nn.ModuleList(nn.LSTM(8, 8) for _ in range(5))" in text
    assert text.count("cell(") == 1


@pytest.mark.nightly
def test_text_does_not_grow_with_levels() -> None:
    texts = [stage_text(Reader(nn.LSTM(8, 6, n, dropout=0.1), output), WORDS) for n in (2, 9)]
    assert len(texts[0].splitlines()) == len(texts[1].splitlines())
    assert "with self.seeded('cells'):" in texts[0]


@pytest.mark.nightly
def test_dropout_of_one_level_is_not_written() -> None:
    """It would do nothing, and torch warns of it whenever the layer is made."""
    with pytest.warns(UserWarning, match="num_layers greater than 1"):
        cells = nn.GRU(8, 6, dropout=0.5)
    assert "nn.GRU(8, 6)" in stage_text(Reader(cells, output), WORDS)


def test_a_layer_in_another_mode_than_the_model_stays_a_function() -> None:
    class Frozen(Reader):
        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            self.cells.eval()
            return self

    text = stage_text(Frozen(nn.GRU(8, 6, 2, dropout=0.5), output), WORDS)
    assert "nn.GRU(" not in text
