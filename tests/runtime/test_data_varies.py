"""Batches that are not as the first one was: rows, lengths, kinds of entries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bigbrain_fx.runtime.data import Stream
from bigbrain_fx.runtime.feeding import FedBatches
from bigbrain_fx.runtime.planned_sums import mean_loss, share_of
from bigbrain_fx.runtime.splitting import Splitting
from bigbrain_fx.runtime.stream import BatchError
from tests.runtime.test_data import counted, stream
from tests.support.messages import refused


def uneven(splitting: Splitting, sizes: list[int], shape: tuple[int, ...] = (8, 3)) -> Stream:
    """Read batches of these sizes, in 4 micro-batches; the first column says which row it is."""

    def batches(seed: int) -> Iterator[Any]:
        for rows in sizes:
            x = torch.arange(8.0)[:, None].expand(8, 3)[:rows]
            yield {"x": x.t() if splitting.dims else x[:, : shape[1] - 1] if splitting.pad else x}

    specs = {"x": ("float32", shape)}
    inputs = {"x": ("x",)}
    return stream(
        batches, inputs=inputs, whole=(), specs=specs, splitting=splitting, micro_batches=4
    )


def rows_of(data: Stream) -> list[list[float]]:
    return [data.get("x", micro)[:, 0].tolist() for micro in range(4)]


def test_a_smaller_batch_is_split_as_evenly_as_it_goes() -> None:
    data = uneven(Splitting(drop_last=False), [8, 7, 3])
    data.advance(1)
    assert (rows_of(data), data.sizes) == ([[0, 1], [2, 3], [4, 5], [6]], (2, 2, 2, 1))
    data.advance(
        2
    )  # a micro-batch without rows of its own runs the first one's, and counts nothing
    assert (rows_of(data), data.sizes) == ([[0], [1], [2], [0]], (1, 1, 1, 0))


def test_a_larger_batch_is_told_what_makes_it_fit() -> None:
    data = uneven(Splitting(drop_last=False), [8], shape=(7, 3))
    with pytest.raises(BatchError, match="7 rows at most, or split again") as error:
        data.advance(0)
    assert "drop_last = True" not in str(error.value)  # it leaves out smaller ones alone


def test_a_smaller_batch_is_left_out_and_the_next_one_is_the_steps() -> None:
    data = uneven(Splitting(drop_last=True), [8, 5, 8, 7, 7])
    data.advance(1)
    assert data.sizes == (2, 2, 2, 2)
    data.rewind(0)
    data.advance(0)
    assert data.sizes == (2, 2, 2, 2)
    with pytest.raises(BatchError, match="two batches in a row have too few rows"):
        data.advance(2)


def test_rows_may_stand_in_another_dimension() -> None:
    data = uneven(Splitting(dims={"x": 1}), [8])
    data.advance(0)
    assert rows_of(data) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert data.get("x", 0).movedim(0, 1).is_contiguous()  # as the user's own slice would be


def test_shorter_entries_are_padded() -> None:
    data = uneven(Splitting(pad={"x": -1.0}), [8])
    data.advance(0)
    assert data.get("x", 3).tolist() == [[6, 6, -1], [7, 7, -1]]


def test_each_micro_batch_weighs_its_rows() -> None:
    losses = [torch.tensor(4.0), torch.tensor(1.0), torch.tensor(9.0)]
    assert mean_loss(losses, (2, 1, 0)) == 3.0
    assert mean_loss(losses, ()) == mean_loss(losses, (2, 2, 2))
    assert [float(share_of(torch.tensor(3.0), (2, 1, 0), m)) for m in range(3)] == [2.0, 1.0, 0.0]


def test_an_error_of_batches_that_would_come_again_is_said_with_its_line() -> None:
    def reads(seed: int) -> Iterator[dict[str, Any]]:
        yield from counted(seed)
        open("/nowhere/at all")  # noqa: SIM115

    data = stream(reads)
    data.advance(2)
    with pytest.raises(BatchError, match=r"fails at the batch of step 3: FileNotFoundError"):
        data.advance(3)


@pytest.mark.parametrize(
    "error", [ConnectionError("lost"), RuntimeError("DataLoader worker (pid 7) is killed")]
)
def test_a_passing_failure_is_left_to_a_new_process(error: Exception) -> None:
    def lost(seed: int) -> Iterator[dict[str, Any]]:
        raise error
        yield {}

    with pytest.raises(type(error), match=str(error)[:4]):
        stream(lost).advance(0)


def test_numpy_draws_apart_too() -> None:
    def drawn(seed: int) -> Iterator[dict[str, Any]]:
        while True:
            yield {"x": torch.tensor(np.random.rand(4))}  # as users do

    one, other = (stream(drawn, inputs={"x": ("x",)}, whole=()) for _ in range(2))
    np.random.seed(1)
    before = np.random.get_state(legacy=False)["state"]["key"].tolist()
    for data in (one, other):
        data.advance(0)
    one.advance(1)
    other.advance(1)
    assert one.digest() == other.digest()
    assert np.random.get_state(legacy=False)["state"]["key"].tolist() == before


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"mask": torch.zeros(4, 2)}, r"'mask' is float32\[4, 2\], and .* split for None"),
        ({"views": [torch.ones(4)] * 3}, "'views' is 3, and the model was split for 2"),
        ({"phase": "main"}, "'phase' is 'main', and the model was split for 'warm'"),
    ],
)
def test_values_beside_tensors_that_the_model_reads_must_stay(
    more: dict[str, Any], said: str
) -> None:
    first = {"views": [torch.ones(4), torch.ones(4)], "phase": "warm", "mask": None}
    fixed = ((("phase",), "warm"), (("mask",), None), (("views",), 2))
    read = stream(
        lambda seed: iter([first, first, {**first, **more}]),
        inputs={"view": ("views", 0)},
        whole=(),
        splitting=Splitting(fixed=fixed),
    )
    read.advance(1)
    with pytest.raises(BatchError, match=f"step 2: batch entry {said}"):
        read.advance(2)


@pytest.mark.parametrize("later", [{"x": torch.ones(2), "z": torch.ones(2)}, (torch.ones(2),) * 2])
def test_an_entry_that_comes_later_is_refused(later: Any) -> None:
    first = {"x": torch.ones(2), "note": 3} if isinstance(later, dict) else (torch.ones(2),)
    place = ("x",) if isinstance(later, dict) else (0,)
    data = stream(lambda _: iter([first, first, later]), inputs={"x": place}, whole=())
    data.advance(1)
    with pytest.raises(BatchError, match="which the first batch has not"):
        data.advance(2)


@pytest.mark.parametrize(
    ("first", "later", "named"),
    [
        ({"t": {"y": 1}}, {"t": {"y": 1, "w": 2}}, "'t.w'"),
        ({"v": [{"y": 1}, {}]}, {"v": [{"y": 1}, {"w": 2}]}, "'v.1.w'"),
        ({"v": ({"y": 1},)}, {"v": ({"y": {"a": 1}, "b": 2},)}, "'v.0.b'"),
    ],
)
def test_an_entry_that_comes_later_within_another_is_refused(
    first: dict[str, Any], later: dict[str, Any], named: str
) -> None:
    found = [{"x": torch.ones(2), **each} for each in (first, first, later)]
    data = stream(lambda _: iter(found), inputs={"x": ("x",)}, whole=())
    data.advance(1)
    with pytest.raises(BatchError, match=f"has the entry {named}, which the first batch has not"):
        data.advance(2)


def test_a_list_that_nobody_reads_may_have_more_in_it() -> None:
    found = [{"x": torch.ones(2), "names": ["a"] * n} for n in (1, 3)]
    data = stream(lambda _: iter(found), inputs={"x": ("x",)}, whole=())
    data.advance(1)


def test_a_run_that_goes_on_knows_what_the_first_batch_had() -> None:
    """Else the first that its process reads would be taken for it."""
    more = {"w": torch.ones(2)}

    def batches(seed: int, start: int = 0) -> Iterator[object]:
        for step in range(start, 9):
            yield {"x": torch.ones(2), "t": {"y": 1, **(more if step > 2 else {})}}

    data = stream(batches, inputs={"x": ("x",)}, whole=())  # of a new process
    data.rewind(3)
    with pytest.raises(BatchError, match=r"step 3: .*'t\.w'"):
        data.advance(3)


def test_the_callers_batch_is_not_waited_for_before_its_step() -> None:
    """A device that takes over another's place waited for ever for a first batch."""
    asked: list[int] = []
    fed = FedBatches(SimpleNamespace(take_batch=asked.append))  # type: ignore[arg-type]
    data = stream(fed, inputs={"x": ("x",)}, whole=())
    data.rewind(3)
    assert not asked


def test_an_order_that_the_model_goes_by_must_stay() -> None:
    found = [{"x": torch.ones(2), "t": t} for t in ({"a": 1, "b": 2}, {"b": 2, "a": 1})]
    held = Splitting(fixed=[(("t",), "a, b")])
    data = stream(lambda _: iter(found), inputs={"x": ("x",)}, whole=(), splitting=held)
    data.advance(0)
    with pytest.raises(BatchError, match="the entries of 't' come in the order b, a, and"):
        data.advance(1)


def test_an_object_that_the_model_goes_by_must_stay() -> None:
    batches = [{"x": torch.ones(2), "s": slice(0, n)} for n in (4, 4, 8)]
    held = Splitting(fixed=[(("s",), "slice(0, 4, None)")])
    data = stream(lambda _: iter(batches), inputs={"x": ("x",)}, whole=(), splitting=held)
    data.advance(1)
    with pytest.raises(BatchError, match=r"batch entry 's' is 'slice\(0, 8, None\)'"):
        data.advance(2)


@pytest.mark.filterwarnings("ignore:.*tensor")
@pytest.mark.parametrize(
    ("turned", "said"),
    [
        (lambda x: x.to_sparse(), r"'x' is sparse_coo float32\[4, 2\]"),
        (lambda x: x.to_sparse_csr(), r"'x' is sparse_csr float32\[4, 2\]"),
        (lambda x: torch.nested.nested_tensor([*x]), "'x' is a nested tensor"),
        (lambda x: x.to("meta"), r"'x' is float32\[4, 2\] without numbers \(meta\)"),
        (lambda x: x.numpy(), "'x' is an array, and was a tensor in the first batch"),
        (lambda x: x.tolist(), r"'x' is of type list, .*torch.as_tensor"),
    ],
)
def test_a_tensor_that_becomes_something_else_later(
    turned: Callable[[torch.Tensor], object], said: str
) -> None:
    """Sparse, nested and meta tensors ended in a traceback of torch's."""
    x = torch.ones(4, 2)
    data = stream(
        lambda _: iter([{"x": x}, {"x": turned(x)}]),
        inputs={"x": ("x",)},
        whole=(),
        specs={"x": ("float32", (4, 2))},
    )
    data.advance(0)
    with pytest.raises(BatchError, match=f"step 1: batch entry {said}"):
        data.advance(1)


def test_entries_that_no_stage_reads_may_not_become_arrays() -> None:
    """A forward that asks `isinstance(w, np.ndarray)` went on without being asked again."""
    x = torch.ones(4, 2)
    given = [{"x": x, "of": [x, None]}, {"x": x, "of": [x, "a"]}, {"x": x, "of": [x.numpy(), None]}]
    data = stream(lambda _: iter(given), inputs={"x": ("x",)}, whole=())
    data.advance(1)
    with pytest.raises(BatchError, match=r"step 2: .* 'of\.0' is an array, and was a tensor"):
        data.advance(2)


def test_none_is_no_end() -> None:
    """`if x is None: return` in a dataset: it was told that batches(seed) had ended."""
    data = stream(lambda _: iter([None]), inputs={"x": ("x",)}, whole=())
    with pytest.raises(BatchError, match=r"step 0: batches\(seed\) gave None: yield a batch"):
        data.advance(0)


# --------------------------------------------------------------------------- counts of a batch


def test_a_number_is_a_tensor_of_the_traced_type_and_a_count_is_divided_by_rows() -> None:
    def batches(seed: int) -> Iterator[Any]:
        yield {"x": torch.zeros(6, 1), "n": 66, "weight": 1}
        yield {"x": torch.zeros(5, 1), "n": 10, "weight": 0.5}
        yield {"x": torch.zeros(1, 1), "n": 10, "weight": True}

    specs = {"x": ("float32", (6, 1)), "n": ("float32", ()), "weight": ("float32", ())}
    inputs = {name: (name,) for name in specs}
    how = Splitting(drop_last=False, divided=("n",))
    stream = how.stream(Stream, batches, 0, inputs, ("n", "weight"), 2, torch.device("cpu"), specs)
    stream.advance(0)
    assert [float(stream.get("n", micro)) for micro in (0, 1)] == [33.0, 33.0]
    assert stream.get("weight", 1).dtype == torch.float32
    stream.advance(1)
    assert [float(stream.get("n", micro)) for micro in (0, 1)] == [6.0, 4.0]
    with refused("BX5029", BatchError, words=False):
        stream.advance(2)


def lengthy(sizes: list[tuple[int, int]], **how: Any) -> Stream:
    """Read batches whose `x` and `y` have these lengths; planned for 8."""

    def batches(seed: int) -> Iterator[Any]:
        for x, y in sizes:
            yield {"x": torch.ones(4, x, 3), "y": torch.ones(4, y)}

    free = {"x": ((1, "L8"),), "y": ((1, "L8"),)}
    specs = {"x": ("float32", (4, 8, 3)), "y": ("float32", (4, 8))}
    splitting = Splitting(lengths=free, **how)
    inputs = {"x": ("x",), "y": ("y",)}
    return stream(
        batches, inputs=inputs, whole=(), specs=specs, splitting=splitting, micro_batches=2
    )


def test_a_batch_keeps_its_length_or_is_filled_up_to_the_next() -> None:
    data = lengthy([(8, 8), (3, 3)])
    data.advance(1)
    assert data.get("x", 1).shape == (2, 3, 3)
    data = lengthy([(3, 4), (5, 6)], buckets=(4, 8), pad={"x": 0, "y": -1})
    data.advance(0)
    assert (data.get("x", 0).shape, data.get("y", 0).shape) == ((2, 4, 3), (2, 4))
    data.advance(1)
    assert data.get("x", 0)[0, :, 0].tolist() == [1] * 5 + [0] * 3
    assert data.get("y", 1)[0].tolist() == [1] * 6 + [-1] * 2


@pytest.mark.parametrize(
    ("sizes", "how", "code"),
    [
        ((3, 4), {}, "BX5208"),
        ((9, 9), {}, "BX5209"),
        ((9, 9), {"buckets": (4, 8)}, "BX5209"),
        ((1, 1), {}, "BX5210"),
        ((3, 3), {"buckets": (4, 8)}, "BX5211"),
    ],
    ids=["unequal", "longer", "longer than buckets", "one", "no bucket"],
)
def test_a_length_that_was_not_planned_for_is_refused(
    sizes: tuple[int, int], how: dict[str, Any], code: str
) -> None:
    with refused(code, BatchError, words=False):
        lengthy([sizes], **how).advance(0)
