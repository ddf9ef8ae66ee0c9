"""Numbers of a batch that change from batch to batch: inputs of the graph, or an opaque step."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigbrain_fx.errors import BigBrainError
from bigbrain_fx.frontend import capture_file

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
