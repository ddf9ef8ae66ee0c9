"""Data by step number: which rows each step and micro-batch gets, and what is refused."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from bigbrain_fx.runtime.data import Stream
from bigbrain_fx.runtime.stream import BatchError

CPU = torch.device("cpu")


def counted(seed: int) -> Iterator[dict[str, Any]]:
    """Yield batches that say which they are: rows 100, 101, ... for step 1."""
    for step in range(3):
        rows = torch.arange(4) + 100 * step + 1000 * seed
        yield {"x": rows, "more": [rows + 0.5, {"mask": torch.ones(2, 2)}]}


def stream(batches: Callable[[int], Iterator[Any]] = counted, **changes: Any) -> Stream:
    inputs = {"x": ("x",), "half": ("more", 0), "mask": ("more", 1, "mask")}
    options: dict[str, Any] = {"seed": 0, "whole": ("mask",), "micro_batches": 2, **changes}
    about = (
        batches,
        options["seed"],
        options.get("inputs", inputs),
        options["whole"],
        options["micro_batches"],
        CPU,
        options.get("specs"),
    )
    splitting = options.get("splitting")
    return Stream(*about) if splitting is None else splitting.stream(Stream, *about)


def test_a_batch_is_split_into_equal_micro_batches() -> None:
    data = stream()
    data.advance(0)
    assert data.get("x", 0).tolist() == [0, 1]
    assert data.get("x", 1).tolist() == [2, 3]
    assert data.get("half", 1).tolist() == [2.5, 3.5]


def test_whole_inputs_go_to_every_micro_batch() -> None:
    data = stream()
    data.advance(0)
    assert data.get("mask", 0) is data.get("mask", 1)
    assert data.get("mask", 0).shape == (2, 2)


def test_steps_are_counted_and_may_be_skipped() -> None:
    data = stream(seed=7)
    data.advance(2)
    assert data.get("x", 0).tolist() == [7200, 7201]
    data.advance(2)  # where it is already
    assert data.get("x", 1).tolist() == [7202, 7203]


def test_the_position_in_data_never_goes_back() -> None:
    data = stream()
    data.advance(1)
    with pytest.raises(ValueError, match="at step 1 and cannot go back to 0"):
        data.advance(0)


def test_an_iterator_that_ends_is_named() -> None:
    data = stream()
    with pytest.raises(ValueError, match=r"batches\(seed\) ended before step 3"):
        data.advance(3)


def test_a_batch_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(ValueError, match="'x' has 4 rows, not a multiple of 3 micro-batches"):
        stream(micro_batches=3).advance(0)


@pytest.mark.parametrize("key", [("y",), ("more", 5), ("x", "deeper")])
def test_a_missing_entry_is_named(key: tuple[str | int, ...]) -> None:
    with pytest.raises(ValueError, match=f"no entry '{'.'.join(map(str, key))}'"):
        stream(inputs={"y": key}).advance(0)


SPECS = {"x": ("int64", (4,)), "half": ("float32", (4,)), "mask": ("float32", (2, 2))}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1, 2, 3, 4], "of type list"),
        (torch.zeros(4), r"float32\[4\]"),
        (torch.zeros(4, 2, dtype=torch.int64), r"int64\[4, 2\]"),
        (torch.zeros(8, dtype=torch.int64), r"int64\[8\]"),
    ],
)
def test_an_entry_unlike_the_traced_one_is_refused(value: object, said: str) -> None:
    def changed(seed: int) -> Iterator[Any]:
        yield {"x": value}

    with pytest.raises(BatchError, match=rf"step 0: batch entry 'x' is {said}, but .* int64\[4\]"):
        stream(changed, inputs={"x": ("x",)}, specs=SPECS).advance(0)


def test_without_specs_an_entry_must_be_a_tensor() -> None:
    def changed(seed: int) -> Iterator[Any]:
        yield {"x": [1, 2, 3, 4]}

    with pytest.raises(BatchError, match="'x' is of type list"):
        stream(changed, inputs={"x": ("x",)}).advance(0)


def rolled(seed: int) -> Iterator[Any]:
    """Draw from both default generators, as user's loaders do."""
    while True:
        yield {"x": torch.rand(4) + random.random()}


def test_drawing_data_moves_no_generator_of_the_model() -> None:
    torch.manual_seed(3)
    random.seed(3)
    expected = torch.rand(2), random.random()
    torch.manual_seed(3)
    random.seed(3)
    data = stream(rolled, inputs={"x": ("x",)})
    data.advance(5)
    assert torch.equal(torch.rand(2), expected[0])
    assert random.random() == expected[1]


def test_the_model_moves_no_generator_of_the_data() -> None:
    quiet, loud = (stream(rolled, inputs={"x": ("x",)}) for _ in range(2))
    for step in range(4):
        torch.manual_seed(step)
        torch.rand(step)
        loud.advance(step)
    quiet.advance(3)
    assert torch.equal(quiet.get("x", 0), loud.get("x", 0))
    other = stream(rolled, inputs={"x": ("x",)}, seed=1)
    other.advance(3)
    assert not torch.equal(other.get("x", 0), loud.get("x", 0))


def test_a_digest_is_of_every_byte() -> None:
    def flipped(seed: int) -> Iterator[Any]:
        for batch in counted(seed):
            batch["x"][3] += 1
            yield batch

    one, same, other = stream(), stream(), stream(flipped)
    for data in (one, same, other):
        data.advance(0)
    assert one.digest() == same.digest()
    assert one.digest() != other.digest()
    one.advance(1)
    assert one.digest() != same.digest()


@pytest.mark.gate("dtype0", "dtype1", "dtype3")
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int64, torch.complex64])
def test_a_digest_takes_any_type(dtype: torch.dtype) -> None:
    def typed(seed: int) -> Iterator[Any]:
        yield {"x": torch.ones(4, 2).to(dtype), "scalar": torch.ones((), dtype=dtype)}

    data = stream(typed, inputs={"x": ("x",), "s": ("scalar",)}, whole=("s",))
    data.advance(0)
    assert len(data.digest()) == 24


def test_batches_that_take_a_start_are_not_read_up_to_it() -> None:
    asked: list[int] = []

    def batches(seed: int, start: int = 0) -> Iterator[object]:
        asked.append(start)
        return ({"x": torch.full((2, 1), float(step))} for step in itertools.count(start))

    stream = Stream(batches, 0, {"x": ("x",)}, (), 2, torch.device("cpu"))
    stream.rewind(5)
    stream.advance(5)
    assert asked == [0, 5]
    assert stream.get("x", 0).item() == 5


# --------------------------------------------------------------------------- the remedies, tried


def lengths(seed: int) -> Iterator[Any]:
    """Pad each batch to its own longest row only, and end with a smaller one."""
    for rows, length in ((4, 6), (4, 5), (2, 6)):
        yield {"x": torch.ones(rows, length, 3)}


def read_all(batches: Callable[[int], Iterator[Any]], spec: tuple[str, tuple[int, ...]]) -> None:
    data = stream(batches, inputs={"x": ("x",)}, specs={"x": spec}, whole=())
    for step in range(3):
        data.advance(step)


def test_a_length_of_its_own_is_padded_as_the_error_says() -> None:
    with pytest.raises(BatchError, match=r"step 1: .* pad dimension 1 to 6 in batches") as error:
        read_all(lengths, ("float32", (4, 6, 3)))
    line = str(error.value).split("batches(), x = ")[1].split(", with a value")[0]
    assert line == "torch.nn.functional.pad(x, (0, 0, 0, 6 - x.shape[1]))"

    def padded(seed: int) -> Iterator[Any]:
        for batch in lengths(seed):
            x = batch["x"]
            yield {"x": torch.nn.functional.pad(x, (0, 0, 0, 6 - x.shape[1]))}

    with pytest.raises(BatchError, match=r"step 2: .* leave a smaller last one out") as error:
        read_all(padded, ("float32", (4, 6, 3)))
    assert "DataLoader(..., drop_last=True)" in str(error.value)


def test_a_smaller_last_batch_is_left_out_as_the_error_says() -> None:
    def loaded(drop_last: bool) -> Callable[[int], Iterator[Any]]:
        def batches(seed: int) -> Iterator[Any]:
            rows = [{"x": torch.ones(3)}] * 10
            while True:
                yield from torch.utils.data.DataLoader(rows, 4, drop_last=drop_last)  # type: ignore[arg-type]

        return batches

    with pytest.raises(BatchError, match="drop_last=True"):
        read_all(loaded(False), ("float32", (4, 3)))
    read_all(loaded(True), ("float32", (4, 3)))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.ones(4, 7), "cut dimension 1 to 6 in batches"),
        (torch.ones(4, 6, dtype=torch.float64), r"with .to\(torch.float32\)"),
        (torch.ones(24), "reshape it in batches"),
        ([1.0] * 6, "make it a tensor in batches"),
    ],
)
def test_each_other_batch_has_its_remedy(value: object, said: str) -> None:
    with pytest.raises(BatchError, match=said):
        read_all(lambda _: iter([{"x": value}]), ("float32", (4, 6)))


def test_an_iterator_that_ends_is_begun_anew_as_the_error_says() -> None:
    with pytest.raises(BatchError, match="`while True:` around the loop"):
        read_all(lambda seed: itertools.islice(counted(seed), 2), ("int64", (4,)))
