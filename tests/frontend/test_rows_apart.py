"""Whether rows stand alone in inference: found by running the model, said, and kept to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.core import Graph
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import Captured, capture
from bigbrain_fx.frontend.tracing.batches.row_independence import are_near
from bigbrain_fx.plan import Options
from bigbrain_fx.plan.one import counts
from tests.support import samples

ROWS = 4
Make = Callable[[Tensor], object]


class Body(nn.Module):
    """A layer, and what is made of its rows."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)
        self.make = make

    def forward(self, x: Tensor) -> object:
        return self.make(self.layer(x))


def of(make: Make, shape: tuple[int, ...] = (ROWS, 3)) -> Captured:
    torch.manual_seed(1)
    return capture(Body(make), torch.randn(shape), None, training=False)


def graph_of(make: Make, shape: tuple[int, ...] = (ROWS, 3)) -> Graph:
    return of(make, shape).graph


MIXED: dict[str, Make] = {
    "mean": lambda h: h - h.mean(0),
    "norm": lambda h: torch.nn.functional.batch_norm(h, None, None, training=True),
    "softmax": lambda h: h.softmax(0),
    "order": lambda h: h.flip(0),
    "next": lambda h: h.roll(1, 0),
    "first": lambda h: h - h[:1],
    "last": lambda h: h - h[-1:],
    "sums": lambda h: h.cumsum(0),
    "sorted": lambda h: h.sort(0).values,
    "position": lambda h: h + torch.arange(h.shape[0])[:, None],
    "size": lambda h: h / h.shape[0],
    "whole numbers": lambda h: h.argsort(0),
    "pairs": lambda h: h.view(-1, 2, 3).sum(1),
    "all to all": lambda h: h @ h.T,
    "one after the other": lambda h: torch.cat([h, -h]),
}

APART: dict[str, Make] = {
    "rows": lambda h: h,
    "states": lambda h: (h, {"more": [h + 1, h > 0, h.argmax(-1)]}),
    "another dimension": lambda h: h.T,
    "neighbours": lambda h: h.repeat_interleave(2, 0),
    "flat": lambda h: h.flatten(),
    "there and back": lambda h: torch.cat([h, -h]).relu().chunk(2)[0],
    "a constant": lambda h: (h, torch.ones(2)),
    "not a number": lambda h: h / (h - h),
}


@pytest.mark.gate("mean", "order", "sums", "position", "size", "pairs")
@pytest.mark.parametrize("name", MIXED)
def test_rows_that_go_by_each_other_are_found_and_said(name: str) -> None:
    found = of(MIXED[name])
    assert not found.graph.rows_apart
    assert any(f"whole batches of {ROWS} rows" in said for said in found.warnings)


@pytest.mark.gate("rows", "states", "neighbours", "not a number")
@pytest.mark.parametrize("name", APART)
def test_rows_that_stand_alone(name: str) -> None:
    found = of(APART[name])
    assert found.graph.rows_apart
    assert not found.warnings


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.embed(x).mean(1)
        return h - h.mean(0)


@pytest.mark.parametrize("value", [-1.0, 0.0, 1.0])
def test_an_example_of_equal_rows_hides_nothing(value: float) -> None:
    batch = torch.full((ROWS, 3), value)
    assert not capture(Body(MIXED["mean"]), batch, None, training=False).graph.rows_apart


def test_equal_rows_of_tokens_do_not_hide_a_mixture() -> None:
    batch = torch.zeros(ROWS, 5, dtype=torch.int64)
    assert not capture(Words(), batch, None, training=False).graph.rows_apart


def test_a_value_of_all_rows_is_said_and_hinders_nothing() -> None:
    found = of(lambda h: (h, h.square().mean()))
    assert found.graph.rows_apart
    assert [said for said in found.warnings if "'1' is one value a micro-batch" in said]


def test_a_tie_that_rounding_decides_is_no_difference() -> None:
    one = torch.arange(100)
    other = one.clone()
    other[3] += 1
    assert are_near(one, other)
    other[:50] += 1
    assert not are_near(one, other)


def test_rows_of_a_drawing_model_cannot_be_told_apart() -> None:
    assert graph_of(lambda h: h + torch.randn_like(h)).rows_apart


def test_one_row_is_never_beside_others() -> None:
    assert graph_of(MIXED["mean"], (1, 3)).rows_apart


def test_training_is_not_asked() -> None:
    """Its loss is the mean of its micro-batches', and what differs there is said by `shares`."""
    x = torch.randn(ROWS, 3)
    found = capture(Body(MIXED["mean"]), x, lambda output, _: output.square().mean())
    assert found.graph.rows_apart


def test_a_batch_whose_rows_go_by_each_other_is_one_micro_batch() -> None:
    graph = graph_of(MIXED["mean"])
    assert counts(graph, samples.cluster(2), Options()) == [1]
    assert counts(graph, samples.cluster(2), Options(micro_batches=1)) == [1]
    with pytest.raises(InputError, match="do not stand alone") as caught:
        counts(graph, samples.cluster(2), Options(micro_batches=2))
    assert caught.value.help is not None
    assert "--micro-batches 1" in caught.value.help


class Padded(nn.Module):
    """An encoder, whose fused path leaves zeros where rows are padded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1)

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        output: Tensor = self.body(x, src_key_padding_mask=pad)
        return output


@pytest.mark.gate("lengths1")
@pytest.mark.parametrize("lengths", [(5, 3, 4, 2), (5, 5, 5, 5)])
def test_a_fused_path_with_other_numbers_is_said(lengths: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    pad = torch.arange(5)[None] >= torch.tensor(lengths)[:, None]
    batch = {"x": torch.randn(ROWS, 5, 8), "pad": pad}
    found = capture(Padded(), batch, None, training=False)
    assert any("fused path" in said for said in found.warnings) == (min(lengths) < 5)
    assert found.graph.rows_apart
