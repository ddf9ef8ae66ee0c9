"""Ordinary model files that plain PyTorch trains: losses, first batches, entries, schedulers."""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bigbrain_fx.errors import BigBrainError, CaptureError, InputError
from bigbrain_fx.frontend import BatchReading, capture, capture_file, seeded
from bigbrain_fx.frontend.tracing.optimizers.per_device import require_scheduler
from bigbrain_fx.frontend.translation.batch import take_apart
from bigbrain_fx.runtime import APART, loss_in, marking
from bigbrain_fx.runtime.fixed_entries import require_fixed
from bigbrain_fx.runtime.stream import BatchError
from tests.support.captured import assert_same
from tests.support.messages import refused

FILE = """
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = {layer}
        self.b = nn.BatchNorm1d(4)
        self.a.weight._no_weight_decay = True

    def forward(self, x, y=None):
        h = self.b(self.a(x))
        return {output}

def model():
    return Net()

def example_batch():
    return {{"x": torch.randn(8, 6), "y": torch.randn(8, 4)}}

def batches(seed):
    {batches}
"""


def write(
    folder: Path,
    output: str = "F.mse_loss(h, y)",
    loss: str = "",
    layer: str = "nn.Linear(6, 4)",
    batches: str = "while True: yield example_batch()",
) -> Path:
    """Write a model file."""
    path = folder / "model.py"
    text = FILE.format(layer=layer, output=output, batches=batches)
    path.write_text(text + (f"\ndef loss(output, batch):\n    return {loss}\n" if loss else ""))
    return path


@pytest.mark.gate("loss and metric", "loss and dict")
@pytest.mark.parametrize(
    ("output", "loss"),
    [
        ("(h, F.mse_loss(h, y))", ""),
        ("(F.mse_loss(h, y), h, h.detach().mean())", ""),
        ("h", "(F.mse_loss(output, batch['y']), {'mean': output.mean()})"),
        ("h", "{'loss': F.mse_loss(output, batch['y']), 'mean': output.mean()}"),
    ],
    ids=["logits and loss", "loss and metric", "loss and dict", "dict"],
)
def test_the_one_loss_of_an_output_is_trained(tmp_path: Path, output: str, loss: str) -> None:
    with capture_file(write(tmp_path, output, loss)) as session:
        graph = session.graph
        assert graph.loss is not None
        assert graph.op[graph.loss].outputs[0].requires_grad


def test_two_losses_are_refused(tmp_path: Path) -> None:
    both = "(F.mse_loss(h, y), F.l1_loss(h, y))"
    with refused("BX2120", BigBrainError, words=False), capture_file(write(tmp_path, both)):
        pass


def test_the_only_number_with_a_gradient_is_the_loss() -> None:
    loss, metric = torch.zeros((), requires_grad=True), torch.zeros(())
    assert loss_in((metric, loss)) is loss
    assert loss_in([loss, torch.zeros(3)]) is loss
    assert loss_in({"loss": loss}) is loss
    assert loss_in((loss, loss.square())) is None
    assert loss_in("text") is None


def test_lazy_modules_get_their_sizes_and_norms_stay_as_made(tmp_path: Path) -> None:
    path = write(tmp_path, layer="nn.LazyLinear(4)")
    path.write_text(path.read_text().replace("self.a.weight._no_weight_decay = True", "pass"))
    with capture_file(path) as session:
        shapes = {param.name: param.spec.shape for param in session.graph.params}
        session.write_weights(tmp_path, {"own.safetensors": ["b.running_mean"]})
    assert shapes["a.weight"] == (4, 6)
    from safetensors.torch import load_file

    assert not load_file(tmp_path / "own.safetensors")["b.running_mean"].any()


def test_attributes_of_parameters_are_given_to_the_optimizer(tmp_path: Path) -> None:
    with capture_file(write(tmp_path)) as session:
        assert session.facts.marks == {"a.weight": {"_no_weight_decay": True}}
    seen: list[str] = []

    def make(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        seen.extend(name for name, p in named if getattr(p, "_no_weight_decay", False))
        return torch.optim.SGD([p for _, p in named])

    named = [("a.weight", nn.Parameter(torch.ones(2))), ("a.bias", nn.Parameter(torch.ones(2)))]
    marking(session.facts.marks, make)(named)
    assert seen == ["a.weight"]


@pytest.mark.gate("smaller", "larger")
@pytest.mark.parametrize(
    ("rows", "kept"),
    [("(8, 8, 5)", False), ("(8, 8, 8)", None), ("(8, 9, 8)", None)],
    ids=["smaller", "equal", "larger"],
)
def test_a_smaller_batch_of_the_first_ones_is_kept(
    tmp_path: Path, rows: str, kept: bool | None
) -> None:
    lines = f"for n in {rows}: yield {{'x': torch.randn(n, 6), 'y': torch.randn(n, 4)}}"
    with capture_file(write(tmp_path, batches=lines)) as session:
        assert session.facts.drop_last is kept


def test_batches_may_take_no_seed(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_text(path.read_text().replace("def batches(seed):", "def batches():"))
    with capture_file(path) as session:
        assert session.facts.has_batches
    assert [*seeded(lambda: iter("ab"))(5)] == ["a", "b"]
    assert [*seeded(lambda seed, start=0: [seed, start])(5, start=2)] == [5, 2]


# --------------------------------------------------------------------------- first batches


HEAD = """
import torch
from torch import nn

def model():
    return nn.Linear(6, 4)

def example_batch():
    return (torch.randn(8, 6), torch.randn(8, 4))

def loss(output, batch):
    return (output - batch[1]).square().mean()

def batches(seed):
"""
READING = BatchReading(
    {"input": (0,), "y": (1,)},
    (),
    2,
    {"input": ("float32", (8, 6)), "y": ("float32", (8, 4))},
)


def read(folder: Path, lines: str) -> None:
    """Read the first batches that a file yields."""
    path = folder / "model.py"
    path.write_text(HEAD + "".join(f"    {line}\n" for line in lines.splitlines()))
    with capture_file(path) as session:
        session.require_first_batches(READING)


@pytest.mark.gate("ends", "later")
@pytest.mark.parametrize(
    "lines",
    [
        "while True: yield example_batch()",
        "yield example_batch()",  # data that end are no fault: a run may be as short
        "for n in [8] * 70 + [5]: yield torch.randn(n, 6), torch.randn(n, 5)[:, :4 + n % 2]",
    ],
    ids=["plain", "ends", "later"],
)
def test_batches_that_fit_the_trace_pass(tmp_path: Path, lines: str) -> None:
    read(tmp_path, lines)


def test_one_that_does_not_fit_is_refused_before_a_run(tmp_path: Path) -> None:
    lines = "yield example_batch()\nyield torch.randn(8, 5), torch.randn(8, 4)"
    with pytest.raises(CaptureError, match="batch 2 ") as caught:
        read(tmp_path, lines)
    assert caught.value.code == "BX0135"
    assert caught.value.of_code
    assert caught.value.at == "model.py:14"


RAISES = "yield example_batch()\nraise {}"


@pytest.mark.parametrize(
    ("lines", "code", "at"),
    [
        (RAISES.format("KeyError('y')"), "BX2189", "model.py:16"),
        pytest.param(
            *(RAISES.format("OSError(5, 'the disk')"), "BX2189", "model.py:16"),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            *(RAISES.format("SystemExit(1)"), "BX2187", "model.py:16"), marks=pytest.mark.nightly
        ),
        pytest.param(
            *(RAISES.format("ImportError('no such module')"), "BX2188", "model.py:16"),
            marks=pytest.mark.nightly,
        ),
        ("return 5", "BX2189", "model.py"),
        ("yield example_batch()\nyield None", "BX2197", "model.py:14"),
    ],
)
def test_an_exception_of_batches_is_an_error_of_the_file(
    tmp_path: Path, lines: str, code: str, at: str
) -> None:
    with refused(code, InputError, words=False) as caught:
        read(tmp_path, lines)
    assert (caught.value.of_code, caught.value.at) == (False, at)


def test_an_exception_of_batches_comes_before_a_refused_trace(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    head = HEAD.replace("(output - batch[1]).square().mean()", "output.no_such_method()")
    path.write_text(head + "    yield example_batch()\n    raise KeyError(seed)\n")
    with refused("BX2189", InputError, words=False) as caught, capture_file(path):
        pass
    assert (caught.value.of_code, caught.value.at) == (False, "model.py:16")


# ------------------------------------------------------------ batches that are written


class Kind(enum.Enum):
    ONE = 1


@pytest.mark.parametrize("key", [(1, 2), Kind.ONE, 0.5, True, None])
def test_keys_that_no_plan_writes_are_refused(key: object) -> None:
    batch = {"x": torch.randn(4, 4), "y": {key: torch.randn(4, 4)}}
    with pytest.raises(InputError, match=r"the batch has the key") as caught:
        take_apart(batch)
    assert "by a text" in (caught.value.help or "")


def test_texts_and_numbers_are_keys() -> None:
    batch = {"x": torch.randn(4, 4), 0: {"a b": torch.randn(4, 4), 7: torch.randn(4)}}
    assert [entry.key for entry in take_apart(batch).entries] == [("x",), (0, "a b"), (0, 7)]


def test_written_entries_must_have_memory_of_their_own() -> None:
    fixed = [(("x",), APART)]
    whole = torch.ones(4, 6)
    require_fixed(fixed, {"x": whole[:, :3], "y": whole[:, 3:]}, 2)
    for other in (whole, whole[1:2], [whole[:, 2:]]):
        with pytest.raises(BatchError, match=r"step 2.*writes into x.*y.* the same memory"):
            require_fixed(fixed, {"x": whole[:, :3], "y": other}, 2)


# --------------------------------------------------------------------------- schedulers


S = torch.optim.lr_scheduler
TRAINED = dict(nn.Linear(3, 4).named_parameters())


def failing(optimizer: torch.optim.Optimizer) -> Any:
    return S.LambdaLR(optimizer, [lambda t: 1.0] * 2)


def test_schedulers_of_the_number_of_steps_pass() -> None:
    for make in (lambda o: S.CosineAnnealingLR(o, 5), lambda o: S.OneCycleLR(o, 0.1, 9)):
        require_scheduler(TRAINED, None, make)


@pytest.mark.parametrize(
    ("scheduler", "code"),
    [(S.ReduceLROnPlateau, "BX2148"), (lambda _: None, "BX2147"), (failing, "BX2146")],
)
def test_one_that_cannot_be_stepped_is_refused(scheduler: Callable[..., Any], code: str) -> None:
    with pytest.raises(InputError) as error:
        require_scheduler(TRAINED, torch.optim.SGD, scheduler)
    assert error.value.code == code
    assert error.value.help


# --------------------------------------------------------------------------- entries without rows


CLASSES = 8


class Prototypes(nn.Module):
    """Compares each row with every class; there happen to be as many classes as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor, classes: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.up(x) @ classes.T, labels)


class Paired(nn.Module):
    """Takes all eight rows or none: no entry alone is the cause."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return (self.up(x).view(8, 4) - labels.view(8, 1)).square().mean()


def batch() -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(0)
    x, classes = (torch.randn(CLASSES, 4, generator=dice) for _ in range(2))
    return {"x": x, "classes": classes, "labels": torch.arange(CLASSES)}


def said(model: nn.Module, example: dict[str, Tensor], rows: int | None = None) -> str:
    """Return all that a capture says: its warnings, or its error with notes and help."""
    try:
        return " ".join(capture(model, example, micro_batch=rows).warnings)
    except InputError as error:
        return " ".join((error.what, *error.notes, error.help or ""))


@pytest.mark.parametrize("rows", [None, 4])
def test_the_entry_that_helps_when_it_is_whole_is_named(rows: int | None) -> None:
    text = said(Prototypes(), batch(), rows)
    assert "batch_dims = {'classes': None}" in text
    assert "{'labels': None}" not in text


def test_the_line_that_is_named_works() -> None:
    model = Prototypes()
    found = capture(model, batch(), batch_dims={"classes": None})
    assert found.graph.static_batch is None
    assert_same(model, found, model)


def test_no_entry_is_named_where_none_helps() -> None:
    example = {name: tensor for name, tensor in batch().items() if name != "classes"}
    text = said(Paired(), example, 4)
    assert "is taken for the batch" in text
    assert "batch_dims" not in text


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


def to_boxes(output: Tensor, batch: dict[str, list[dict[str, Tensor]]]) -> Tensor:
    pairs = zip(output, batch["targets"], strict=True)
    return torch.stack([(row - one["boxes"]).abs().mean() for row, one in pairs]).mean()


def test_a_list_with_an_item_for_each_row_has_no_rows_itself() -> None:
    """Three of four images have three boxes, which are not the rows; one has as many as rows."""
    targets = [{"boxes": torch.randn(boxes, 4)} for boxes in (3, 4, 3, 3)]
    found = capture(Detector(), {"x": torch.randn(4, 4), "targets": targets}, to_boxes)
    assert found.batch.rows == 4
    assert [e.key for e in found.batch.entries if e.batched] == [("x",)]
