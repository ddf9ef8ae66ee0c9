"""Ordinary model files that plain PyTorch trains: the loss in a tuple, lazy modules, marks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from bigbrain_fx.errors import BigBrainError
from bigbrain_fx.frontend import capture_file, seeded
from bigbrain_fx.runtime import loss_in, marking
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
