"""Rows for inference: short batches are filled up, files are read a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bigbrain_fx.runtime.rows import RowStream, batches_of_file, batches_of_tensors, count_rows
from bigbrain_fx.runtime.stream import BatchError

SPECS = {"x": ("int64", (4, 2)), "y": ("int64", (4,)), "table": ("int64", (3,))}
TABLE = torch.arange(3)


def batch(rows: int) -> dict[str, Tensor]:
    return {"x": torch.arange(2 * rows).view(rows, 2), "y": torch.arange(rows), "table": TABLE}


def stream(*batches: object) -> RowStream:
    def give(seed: int) -> Iterator[object]:
        yield from batches

    places: dict[str, tuple[str | int, ...]] = {name: (name,) for name in SPECS}
    return RowStream(give, 0, places, ("table",), 2, torch.device("cpu"), SPECS)


def test_a_short_batch_is_filled_up_with_its_last_row() -> None:
    made = stream(batch(4), batch(3), batch(1))
    made.advance(0)
    assert made.rows == made.room == 4
    made.advance(1)
    assert made.rows == 3
    assert made.get("x", 1).tolist() == [[4, 5], [4, 5]]
    assert made.get("table", 1).tolist() == [0, 1, 2]
    made.advance(2)
    assert made.rows == 1
    assert made.get("y", 0).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({**batch(3), "y": torch.arange(2)}, "'y' has 2 rows, expected 3"),
        ({**batch(0)}, "'x' has 0 rows, expected at least 1"),
        ({**batch(5)}, r"'x' is int64\[5, 2\]"),
        ({**batch(2), "x": torch.zeros(2, 2)}, r"'x' is float32\[4, 2\]"),
    ],
)
def test_a_batch_that_cannot_be_used(wrong: object, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        stream(wrong).advance(0)


def test_rows_that_do_not_stand_alone_come_in_whole_batches() -> None:
    made = stream(batch(4), batch(3))
    made.apart = False
    made.advance(0)
    with pytest.raises(BatchError, match="whole batches of 4 rows, found 3 rows"):
        made.advance(1)


def test_a_file_is_read_a_batch_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "rows.safetensors"
    save_file(batch(7), path)
    assert count_rows(path, tuple(SPECS), ("table",)) == 7
    parts = list(batches_of_file(path, tuple(SPECS), ("table",), 4))
    assert [part["x"].shape[0] for part in parts] == [4, 3]
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch(7)["x"])
    assert all(torch.equal(part["table"], TABLE) for part in parts)


def test_a_file_that_lacks_a_tensor_or_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.safetensors"
    save_file({"x": torch.zeros(3, 2)}, path)
    with pytest.raises(BatchError, match="has no tensor 'y'"):
        count_rows(path, ("x", "y"), ())
    save_file({"x": torch.zeros(3, 2), "y": torch.zeros(2)}, path)
    with pytest.raises(BatchError, match="one number of rows, found x 3, y 2"):
        count_rows(path, ("x", "y"), ())
    path.write_text("not tensors")
    with pytest.raises(BatchError, match="no safetensors file"):
        count_rows(path, ("x",), ())
    with pytest.raises(BatchError, match="cannot read"):
        count_rows(tmp_path / "none", ("x",), ())


def test_tensors_in_batches() -> None:
    parts = batches_of_tensors(batch(9), tuple(SPECS), ("table",), 4)
    assert [part["y"].shape[0] for part in parts] == [4, 4, 1]
    with pytest.raises(BatchError, match="expected a tensor for 'y'"):
        batches_of_tensors({"x": torch.zeros(2)}, ("x", "y"), (), 4)
