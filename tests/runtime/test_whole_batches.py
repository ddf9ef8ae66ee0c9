"""Batches of any shape, cut by rows alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from bigbrain_fx.runtime.splitting import Splitting
from bigbrain_fx.runtime.stream import BatchError
from bigbrain_fx.runtime.whole_batches import WholeBatches, repeated

INPUTS: Mapping[str, tuple[str | int, ...]] = {"x": ("x",), "w": ("w",), "late": ("late",)}


def lengths(_seed: int) -> Iterator[dict[str, Any]]:
    for rows, length in ((4, 3), (5, 2), (1, 7)):
        x = torch.arange(float(rows * length)).reshape(rows, length)
        yield {"x": x, "w": torch.ones(4), "name": "n", "late": x[:, 0]}


def stream(micro_batches: int, splitting: Splitting | None = None) -> WholeBatches:
    how = INPUTS, ("w",), micro_batches, torch.device("cpu")
    return WholeBatches(lengths, 0, *how, splitting=splitting)


def test_one_micro_batch_is_the_batch_itself() -> None:
    made = stream(1)
    for step in range(3):
        made.advance(step)
        assert made.micro_batch(0) is made.batch


def test_several_have_the_rows() -> None:
    made = stream(2)
    made.advance(0)
    made.advance(1)
    parts = [made.micro_batch(0), made.micro_batch(1)]
    assert torch.equal(torch.cat([part["x"] for part in parts]), made.batch["x"])
    assert [len(part["late"]) for part in parts] == [3, 2]
    assert [part["w"].tolist() for part in parts] == [[1.0] * 4] * 2
    assert {part["name"] for part in parts} == {"n"}
    assert made.weights == (3, 2)


def test_a_batch_of_fewer_rows_than_micro_batches_leaves_some_without() -> None:
    made = stream(2)
    made.advance(2)
    assert made.weights == (1, 0)
    assert torch.equal(made.micro_batch(0)["x"], made.batch["x"])


def test_an_indivisible_batch_stops_the_run() -> None:
    def ragged(_seed: int) -> Iterator[dict[str, Any]]:
        yield {"x": torch.ones(4, 2), "w": torch.ones(3), "late": torch.ones(4)}

    how = INPUTS, (), 2, torch.device("cpu")
    with pytest.raises(BatchError, match="--micro-batches 1"):
        WholeBatches(ragged, 0, *how).advance(0)


@pytest.mark.parametrize("later", [torch.ones(4), torch.ones(4, 2).to_sparse()])
def test_an_entry_that_the_example_lacks_is_not_cut(later: torch.Tensor) -> None:
    def batches(_seed: int) -> Iterator[dict[str, Any]]:
        yield {"x": torch.ones(4, 2), "late": later}

    how = {"x": ("x",)}, (), 2, torch.device("cpu")
    with pytest.raises(BatchError, match=r"'late'.*--micro-batches 1"):
        WholeBatches(batches, 0, *how).advance(0)


def test_a_stream_reads_on_without_taking_a_step() -> None:
    made = stream(1)
    made.read_up_to(2)
    made.advance(2)
    assert made.batch["x"].shape == (1, 7)


def test_an_example_comes_again_and_again() -> None:
    assert [next(repeated({"x": 1})(0)), next(repeated(lambda: [2])(0))] == [{"x": 1}, [2]]
