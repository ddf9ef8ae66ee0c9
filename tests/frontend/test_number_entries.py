"""What a batch has beside equal tensors: numbers, fixed values, unequal rows and lengths."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.errors import BigBrainError, InputError
from bigbrain_fx.frontend import Captured, capture, capture_file
from bigbrain_fx.frontend.later_batches import require_steady
from bigbrain_fx.frontend.plain_entries import fixed_entries
from bigbrain_fx.frontend.tracing.batches.uneven import pads, require_padding, require_rows
from bigbrain_fx.frontend.translation.batch import fill, take_apart

FILE = """
import torch
from torch import nn

def model():
    return nn.Linear(6, 4)

def batches(seed):
    generator = torch.Generator().manual_seed(seed)
    for n in (5, 7, 4, 6):
        x = torch.randn(8, 6, generator=generator)
        yield {{"input": x, "n": {value}, "same": 3, "unread": n}}

def example_batch():
    return next(batches(0))

def loss(output, batch):
    return {loss}
"""


def write(folder: Path, loss: str, value: str = "n") -> Path:
    """Write a model file whose loss reads a number."""
    path = folder / "model.py"
    path.write_text(FILE.format(loss=loss, value=value))
    return path


@pytest.mark.gate(
    "output.square().sum() / batch['n']-n-float32",
    "(output * (batch['n'] * 0.7)).square().mean()-0.1 * n-float64",
    "output.square().mean() * (torch.zeros(9).bool() | (batch['n'] & 1)).sum()-n-int64",
)
@pytest.mark.parametrize(
    ("loss", "value", "dtype"),
    [
        ("output.square().sum() / batch['n']", "n", "float32"),
        ("output.square().sum() / batch['n'] * batch['same']", "n", "float32"),
        ("output.square().mean() * batch['n']", "0.3 * n", "float32"),
        ("output.square().mean() * batch['n']", "n if n < 7 else 0.5", "float32"),
        ("(output * (batch['n'] // 2)).square().mean()", "n", "float32"),
        ("(output * (batch['n'] * 0.7)).square().mean()", "0.1 * n", "float64"),
        ("output.square().mean() * (torch.arange(9) < batch['n']).sum()", "n", "float32"),
        ("output.square().mean() * (torch.zeros(9).bool() | (batch['n'] & 1)).sum()", "n", "int64"),
    ],
)
def test_a_number_that_changes_is_an_input(
    tmp_path: Path, loss: str, value: str, dtype: str
) -> None:
    with capture_file(write(tmp_path, loss, value)) as session:
        found = {e.name: (e.spec.dtype, e.spec.shape) for e in session.graph.inputs}
    assert found["n"] == (dtype, ())
    assert found.keys() == {"input", "n"}


NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, input, n):
        h = self.layer(input)
        return {result}

model = Net
"""


def test_a_branch_on_a_number_makes_the_step_opaque(tmp_path: Path) -> None:
    path = write(tmp_path, "output.square().mean()")
    path.write_text(path.read_text() + NET.format(result="h * 2 if n > 4 else h"))
    with pytest.raises(BigBrainError) as caught, capture_file(path):
        pass
    assert (caught.value.of_code, caught.value.code) == (True, "BX2198")


@pytest.mark.gate("h * sum(1 for _ in range(n))")
@pytest.mark.parametrize("result", ["h[:, : n - 3]", "h * sum(1 for _ in range(n))"])
def test_lines_that_ask_for_it_are_kept_whole(tmp_path: Path, result: str) -> None:
    path = write(tmp_path, "output.square().mean()")
    path.write_text(path.read_text() + NET.format(result=result))
    with capture_file(path) as session:
        kept = [op for op in session.graph.ops if "n" in op.refs]
    assert [op.target.partition("_")[0] for op in kept] == ["leaf.forward"]


def test_micro_batches_divide_a_count(tmp_path: Path) -> None:
    path = write(tmp_path, "output.square().sum() / batch['n']")
    with capture_file(path) as session:
        effect = session.micro_batch_effect(4)
    assert (effect.is_equal, effect.divided) == (True, ("n",))


def test_a_weight_is_whole_in_each_micro_batch(tmp_path: Path) -> None:
    with capture_file(write(tmp_path, "output.square().mean() * batch['n']")) as session:
        effect = session.micro_batch_effect(4)
    assert (effect.is_equal, effect.divided) == (True, ())


def test_a_count_of_whole_numbers_is_named_with_what_to_give(tmp_path: Path) -> None:
    loss = "output.square().sum() / batch['n']"
    with capture_file(write(tmp_path, loss, "torch.tensor(n)")) as session:
        effect = session.micro_batch_effect(4)
    assert (effect.differs, effect.divided) == (True, ())
    assert "Python number" in effect.remedy


# --------------------------------------------------------------------------- fixed values


class Net(nn.Module):
    """Goes by phase, mask, epoch, flag and the number of views; not by a name."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(3, 2)

    def forward(
        self, views: list[Tensor], phase: str, mask: Tensor | None, epoch: int, flag: bool
    ) -> Tensor:
        found = torch.stack([self.lift(view) for view in views]).sum(0)
        found = found if mask is None else found * mask
        scale = (0.5 if phase == "warm" else 1.0) * (2.0 if epoch >= 100 else 1.0)
        return found.square().mean() * (scale if flag else -scale)


def batch(**more: object) -> dict[str, Any]:
    made = {"views": [torch.ones(4, 3), torch.ones(4, 3)], "phase": "warm", "mask": None}
    return {**made, "epoch": 0, "flag": True, **more}


def energy(output: Tensor, given: Any) -> Tensor:
    assert f"{given['name']}".isascii()  # shown to someone
    return output


@pytest.fixture(params=["small", "large"])
def of_any_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model is not run: its calls without numbers are compared."""
    if request.param == "large":
        monkeypatch.setattr("bigbrain_fx.frontend.entry_trial.is_costly", lambda *_: True)


@pytest.mark.usefixtures("of_any_size")
def test_entries_that_decide_a_branch_are_found() -> None:
    found = fixed_entries(Net(), batch(name="a.png", step=3), energy, None)
    wanted = {"views": 2, "phase": "warm", "mask": None, "epoch": 0, "flag": True}
    assert dict(found) == {(key,): value for key, value in wanted.items()}


class Pair(nn.Module):
    """Unpacks a pair: three would fail in plain PyTorch, too."""

    def forward(self, x: Tensor, pair: tuple[Tensor, Tensor]) -> Tensor:
        one, other = pair
        return (x * one * other).mean()


@pytest.mark.usefixtures("of_any_size")
def test_of_tensors_in_their_places_nothing_is_fixed() -> None:
    example = {"x": torch.ones(4), "pair": (torch.ones(4), torch.ones(4))}
    assert not fixed_entries(Pair(), example, None, None)


class Phase(enum.Enum):
    """Of training."""

    WARM = 1
    MAIN = 2


@pytest.mark.usefixtures("of_any_size")
@pytest.mark.parametrize(
    ("given", "other"), [(Phase.WARM, Phase.MAIN), (slice(0, 1), slice(0, 2)), (torch.float32, 3)]
)
def test_of_an_object_it_is_what_repr_says(given: object, other: object) -> None:
    def by(output: Tensor, batch: Any) -> Tensor:
        return output.mean() * (1.0 if batch["odd"] == given else 2.0)

    example = {"x": torch.ones(4, 3), "odd": given}
    found = fixed_entries(nn.Linear(3, 2), _as_input(example), by, None)
    assert found == ((("odd",), repr(given)),)
    with pytest.raises(InputError, match="changes odd"):
        require_steady(
            nn.Linear(3, 2),
            _as_input(example),
            by,
            lambda: iter([{**_as_input(example), "odd": other}]),
        )


def _as_input(example: dict[str, Any]) -> dict[str, Any]:
    return {"input": example["x"], "odd": example["odd"]}


@pytest.mark.usefixtures("of_any_size")
def test_numbers_in_a_tuple_are_counted() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor, scales: tuple[float, ...]) -> Tensor:  # type: ignore[override]
            return super().forward(x).mean() * math.prod(scales)

    example = {"x": torch.ones(4, 3), "scales": (1.0, 2.0)}
    assert (("scales",), 2) in fixed_entries(Scaled(3, 2), example, None, None)


class Walks(nn.Module):
    """Takes the entries of a dict one after another, or by name."""

    def __init__(self, by_name: bool) -> None:
        super().__init__()
        self.a, self.by_name = nn.Linear(2, 2), by_name

    def forward(self, t: dict[str, Tensor]) -> Tensor:
        one, two = (t["u"], t["v"]) if self.by_name else t.values()
        return (self.a(one) * 2 + self.a(two)).mean()


@pytest.mark.usefixtures("of_any_size")
@pytest.mark.parametrize(("by_name", "kept"), [(False, ((("t",), "u, v"),)), (True, ())])
def test_the_order_of_a_dict_counts_where_the_model_goes_by_it(by_name: bool, kept: object) -> None:
    example = {"t": {"u": torch.ones(4, 2), "v": torch.zeros(4, 2)}}
    assert fixed_entries(Walks(by_name), example, None, None) == kept


def test_a_large_model_that_reads_tensors_goes_by_all_but_names_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bigbrain_fx.frontend.entry_trial.is_costly", lambda *_: True)

    def by(output: Tensor, batch: Any) -> Tensor:
        return output.mean() * (2.0 if float(output.sum()) > 0 else 1.0)

    example = {"input": torch.ones(2, 3), "phase": "warm", "names": ["a.png", "b.png"]}
    found = dict(fixed_entries(nn.Linear(3, 2), example, by, None))
    assert found == {("phase",): "warm", (): "input, phase, names"}


# --------------------------------------------------------------------------- unequal rows


ROWS = 6


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


def mean(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output, batch["y"])


def captured(
    model: nn.Module, x: Tensor, y: Tensor, loss: Callable[..., Tensor] = mean, **options: Any
) -> Captured:
    torch.manual_seed(0)
    return capture(model, {"x": x, "y": y}, loss, **options)


def by_len(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (output - batch["y"]).square().sum() / len(batch["y"])


def by_shape(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (output - batch["y"]).square().sum() / batch["y"].shape[0]


def test_rows_counted_by_len_are_a_number_and_by_shape_are_not() -> None:
    x, y = torch.randn(ROWS, 4), torch.randn(ROWS, 2)
    found = captured(Plain(), x, y, by_len)
    assert any("or len(x)" in said for said in found.warnings)
    with pytest.raises(InputError, match=r"drop_last = False, and the trace holds") as error:
        require_rows(False, found, True)
    assert "x.shape[0], not a number nor len(x)" in (error.value.help or "")
    require_rows(False, captured(Plain(), x, y, by_shape), True)


def test_an_entry_may_be_whole_whatever_its_length() -> None:
    batch = {"x": torch.zeros(ROWS, 4), "table": torch.zeros(ROWS, 2)}
    found = take_apart(batch, dims={"table": None})
    assert [entry.batched for entry in found.entries] == [True, False]
    assert found.sized(3)["table"].shape == (ROWS, 2)


@pytest.mark.parametrize(
    ("dims", "match"),
    [
        ({"z": 0}, "batch_dims names 'z', and example_batch() has no such tensor"),
        ({"x": 2}, "batch_dims says dimension 2 of 'x', which has the shape"),
        ({"x": 1, "y": 0}, "batch_dims gives the example batch 4, 6 rows"),
    ],
)
def test_batch_dims_that_do_not_fit_are_refused(
    dims: dict[str | int, int | None], match: str
) -> None:
    with pytest.raises(InputError) as error:
        take_apart({"x": torch.zeros(ROWS, 4), "y": torch.zeros(ROWS)}, dims=dims)
    assert match in str(error.value)
    assert error.value.help


class Pooled(nn.Module):
    """A mean over positions; where there is a mask, over those that it leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Embedding(5, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        found = self.a(x)
        return found.mean(1) if mask is None else (found * mask[..., None]).sum(1)


def test_padding_must_not_count() -> None:
    x, y, mask = torch.randint(1, 5, (ROWS, 8)), torch.randn(ROWS, 2), torch.ones(ROWS, 8)
    model = Pooled()
    found = capture(model, {"x": x, "y": y}, mean)
    with pytest.raises(InputError, match=r"pad fills up what counts") as error:
        require_padding(model, mean, {"x": 0}, found, None)
    assert "mask" in (error.value.help or "")
    found = capture(model, {"x": x, "mask": mask, "y": y}, mean)
    pad: dict[str | int, int | float] = {"x": 0, "mask": 0}
    assert require_padding(model, mean, pad, found, None) == ""
    assert pads(found.batch, pad) == pad


def test_tensors_of_other_layouts_are_refused_by_name() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(3, 4)], layout=torch.jagged)
    for entry, kind in ((torch.eye(4).to_sparse(), "sparse_coo"), (nested, "nested")):
        with pytest.raises(InputError, match=f"batch entry 'x' is a {kind} tensor") as caught:
            take_apart({"x": entry, "y": torch.zeros(ROWS)})
        assert "in forward" in (caught.value.help or "")


class ByLengths(Pooled):
    """A mean over as many positions as a row has; one that forgets to look at them."""

    def __init__(self, forgets: bool = False) -> None:
        super().__init__()
        self.forgets = forgets

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        there = torch.arange(x.shape[1])[None] < lengths[:, None]
        found = self.a(x) if self.forgets else self.a(x) * there[..., None]
        return found.sum(1) / lengths[:, None]


def test_a_mask_that_is_made_of_lengths_is_one() -> None:
    """The example's lengths are those of whole rows; the trial cuts them with the rows."""
    x, y = torch.randint(1, 5, (ROWS, 8)), torch.randn(ROWS, 2)
    batch = {"x": x, "lengths": torch.tensor([8, 3, *([7] * (ROWS - 2))]), "y": y}
    pad: dict[str | int, int | float] = {"x": 0}
    for model in (ByLengths(), ByLengths(forgets=True)):
        found = capture(model, batch, mean)
        if model.forgets:
            with pytest.raises(InputError, match="pad fills up what counts"):
                require_padding(model, mean, pad, found, None)
        else:
            assert require_padding(model, mean, pad, found, None) == ""


def test_rows_in_another_dimension_come_back_where_the_user_has_them() -> None:
    x = torch.randn(4, ROWS, 4)
    found = take_apart({"x": x, "y": torch.zeros(ROWS)}, dims={"x": 1})
    assert (found.entries[0].dim, found.entries[0].tensor.shape[0], found.rows) == (1, ROWS, ROWS)
    again = fill(found.template, found.sized(ROWS))
    assert isinstance(again, dict)
    assert torch.equal(again["x"], x)
