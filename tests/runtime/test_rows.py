"""Batches of a run: rows for inference, cuts by rows, and data that differ between processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bigbrain_fx.bundles.launch import RunOptions, run
from bigbrain_fx.errors import InputError
from bigbrain_fx.runtime import Device
from bigbrain_fx.runtime.compared_stream import Subject
from bigbrain_fx.runtime.data import Stream
from bigbrain_fx.runtime.local import Hub, LocalTransport
from bigbrain_fx.runtime.rows import RowStream, batches_of_file, batches_of_tensors, count_rows
from bigbrain_fx.runtime.splitting import Splitting
from bigbrain_fx.runtime.stream import BatchError
from bigbrain_fx.runtime.whole_batches import WholeBatches, repeated
from bigbrain_fx.supervisor import FailedError
from tests.support.bundles import copied, edit
from tests.support.replayed import Fault, supervised

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


# --------------------------------------------------------------------------- cuts by rows


INPUTS: Mapping[str, tuple[str | int, ...]] = {"x": ("x",), "w": ("w",), "late": ("late",)}


def lengths(_seed: int) -> Iterator[dict[str, Any]]:
    for rows, length in ((4, 3), (5, 2), (1, 7)):
        x = torch.arange(float(rows * length)).reshape(rows, length)
        yield {"x": x, "w": torch.ones(4), "name": "n", "late": x[:, 0]}


def whole_stream(micro_batches: int, splitting: Splitting | None = None) -> WholeBatches:
    how = INPUTS, ("w",), micro_batches, torch.device("cpu")
    return WholeBatches(lengths, 0, *how, splitting=splitting)


def test_one_micro_batch_is_the_batch_itself() -> None:
    made = whole_stream(1)
    for step in range(3):
        made.advance(step)
        assert made.micro_batch(0) is made.batch


def test_several_have_the_rows() -> None:
    made = whole_stream(2)
    made.advance(0)
    made.advance(1)
    parts = [made.micro_batch(0), made.micro_batch(1)]
    assert torch.equal(torch.cat([part["x"] for part in parts]), made.batch["x"])
    assert [len(part["late"]) for part in parts] == [3, 2]
    assert [part["w"].tolist() for part in parts] == [[1.0] * 4] * 2
    assert {part["name"] for part in parts} == {"n"}
    assert made.weights == (3, 2)


def test_a_batch_of_fewer_rows_than_micro_batches_leaves_some_without() -> None:
    made = whole_stream(2)
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
    made = whole_stream(1)
    made.read_up_to(2)
    made.advance(2)
    assert made.batch["x"].shape == (1, 7)


def test_an_example_comes_again_and_again() -> None:
    assert [next(repeated({"x": 1})(0)), next(repeated(lambda: [2])(0))] == [{"x": 1}, [2]]


# --------------------------------------------------------------------------- data that differ


NAMES = ("d0", "d1")
REMEDY = "every process must get the same from batches(seed)"


def differing(bundle: Path, folder: Path, change: str) -> Path:
    """Return a bundle whose `rows` are changed before they are given out."""
    copy = copied(bundle, folder)
    edit(copy / "training.py", "        yield {", f"        {change}\n        yield {{")
    edit(copy / "training.py", "import itertools", "import itertools\nimport os")
    return copy


OF_PROCESS = "rows = rows if step < 2 else (rows + os.getpid()) % 27"


def test_in_processes_without_a_supervisor(trained_bundle: Path, tmp_path: Path) -> None:
    copy = differing(trained_bundle, tmp_path, OF_PROCESS)
    with pytest.raises(
        InputError, match="the batch of step 2 differs between devices: d"
    ) as failed:
        run(copy, RunOptions(4, deadline_s=60.0, logs=tmp_path / "logs"))
    assert REMEDY in str(failed.value)


@pytest.mark.nightly
def test_under_a_supervisor(trained_bundle: Path, tmp_path: Path) -> None:
    copy = differing(trained_bundle, tmp_path, OF_PROCESS)
    assert "the batch of step 2 differs between devices" in refusal(copy, tmp_path, 6)


@pytest.mark.nightly
@pytest.mark.parametrize("device", NAMES)
def test_in_a_replacement_only(trained_bundle: Path, tmp_path: Path, device: str) -> None:
    """Those who live have read what it now reads otherwise, in steps that are long over."""
    first = "'faults/struck-0'"  # is there once the first process has died
    change = f"rows = rows if step != 3 or not os.path.exists({first}) else (rows + 1) % 27"
    copy = differing(trained_bundle, tmp_path, change)
    text = refusal(copy, tmp_path, 8, [Fault(device, 5, 0)], every=100)
    assert "the batch of step 3 differs" in text
    assert REMEDY in text


def refusal(
    bundle: Path, folder: Path, steps: int, faults: Sequence[Fault] = (), **options: Any
) -> str:
    """Return what a device says of a run that is not worth another try."""
    with pytest.raises(FailedError, match="its input cannot be used") as failed:
        supervised(bundle, folder / "run", NAMES, steps, faults, **options)
    assert failed.value.death.code == 2
    return str(failed.value.death.text)


def test_one_device_is_compared_with_the_process_before_it(tmp_path: Path) -> None:
    hub = Hub()
    before, after = LocalTransport(hub), LocalTransport(hub)
    before.agree(Subject(7), "1234", "d0")
    with pytest.raises(BatchError, match="differs before d0 was replaced: d0 has 1234, d0 has 56"):
        after.agree(Subject(7), "56", "d0")


class Reader(Device):
    """Reads the batch, or does not."""

    names = ("d0",)
    reads = True

    def step_once(self) -> None:
        for _ in range(3 if self.reads else 0):
            self.batch("x", 0)


def reader(reads: bool, said: list[Subject], fill: Callable[[int], float]) -> Reader:
    class Listening(LocalTransport):
        def agree(self, what: Subject, digest: str, device: str) -> None:
            said.append(what)
            super().agree(what, digest, device)

    stream = Stream(
        lambda _: ({"x": torch.full((2,), fill(step))} for step in range(9)),
        0, {"x": ("x",)}, (), 1, torch.device("cpu"),
    )  # fmt: skip
    device = Reader(Listening(Hub()), stream, 0, torch.device("cpu"))
    device.reads = reads
    return device


def test_readers_of_a_batch_report_once_a_step() -> None:
    said: list[Subject] = []
    for reads in (True, False):
        device = reader(reads, said, float)
        device.run_step(0)
        device.run_step(1)
    assert said == [Subject(step) for step in (0, 1)]


def test_old_comparisons_are_forgotten() -> None:
    transport = LocalTransport(Hub())
    for step in range(1000):
        transport.agree(Subject(step), str(step), "d0")
    assert len(transport.hub.digests) < 100
