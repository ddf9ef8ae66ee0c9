"""Micro-batches of an opaque step: allowed where they train the same as the whole batch."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend import capture_file

HEAD = """
import copy, itertools, random
import torch
import torch.nn.functional as F
from torch import nn

CALLS = [0]

def example_batch():
    return {"x": torch.randn(8, 6), "y": torch.randn(8, 4)}

def loss(output, batch):
    return F.mse_loss(output, batch["y"])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))

def model():
    return Net()
"""
MASK = """
def model():
    net = Net()
    net.a.weight.register_hook(lambda gradient: gradient * 0.5)
    return net
"""
BOUND = """
def bound(parameter):
    parameter.grad.clamp_(-100.0, 100.0)

def model():
    net = Net()
    net.a.weight.register_post_accumulate_grad_hook(bound)
    return net
"""
STEPS_IN_BACKWARD = """
def step(parameter):
    with torch.no_grad():
        parameter.sub_(0.1 * parameter.grad)

def model():
    net = Net()
    net.a.weight.register_post_accumulate_grad_hook(step)
    return net
"""
TEACHER = """
class Net(Net):
    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.a).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.a.parameters()):
                own.lerp_(other, 0.1)
        return self.b(torch.tanh(self.a(x) + 0.0 * self.teacher(x)))
"""
COUNTER = """
class Net(Net):
    def forward(self, x):
        CALLS[0] += 1
        return super().forward(x) * (1.0 if CALLS[0] < 1000 else 0.5)
"""
IN_CLOSURE = """
def counted():
    calls = itertools.count()
    return lambda: next(calls)

class Net(Net):
    def __init__(self):
        super().__init__()
        self.count = counted()

    def forward(self, x):
        return super().forward(x) / (1 + self.count())
"""
LATE_COUNT = """
class Net(Net):
    def __init__(self):
        super().__init__()
        self.ids = itertools.count()

    def forward(self, x):
        return super().forward(x) * (1.0 if next(self.ids) < 60 else 0.5)
"""
SLOTS = """
class Progress:
    __slots__ = ("calls",)

class Net(Net):
    def __init__(self):
        super().__init__()
        self.progress = Progress()
        self.progress.calls = 0

    def forward(self, x):
        self.progress.calls += 1
        return super().forward(x) * min(1.0, self.progress.calls / 3)
"""
DRAWN = """
class Net(Net):
    def __init__(self):
        super().__init__()
        self.scale = random.random()

    def forward(self, x):
        return super().forward(x) * self.scale
"""
CONTRASTIVE = """
def loss(output, batch):
    return F.cross_entropy(output @ output.t(), torch.arange(len(output)))
"""
LATER = """
def batches(seed):
    yield example_batch()
    yield {**example_batch(), "late": torch.ones(8)}
"""


def cause(folder: Path, code: str, micro_batches: int = 2) -> str:
    """Return why micro-batches of an opaque step are refused; empty where they are not."""
    path = folder / "model.py"
    path.write_text(textwrap.dedent(HEAD) + code)
    with capture_file(path, refusal=CaptureError("hooks", code="BX0170")) as session:
        effect = session.micro_batch_effect(micro_batches)
    return "" if effect.is_equal and not effect.not_compared else effect.cause + effect.difference


@pytest.mark.gate("code1")
@pytest.mark.parametrize("code", ["", MASK])
def test_plain_gradients_add_up(tmp_path: Path, code: str) -> None:
    assert cause(tmp_path, code) == ""


@pytest.mark.gate("bound", "teacher", "counter", "drawn", "contrastive", "later")
@pytest.mark.parametrize(
    ("code", "name"),
    [
        pytest.param(BOUND, "a.weight", id="bound"),
        pytest.param(STEPS_IN_BACKWARD, "", id="steps-in-backward"),
        pytest.param(TEACHER, "teacher", id="teacher"),
        pytest.param(COUNTER, "CALLS", id="counter"),
        pytest.param(IN_CLOSURE, "", id="closure"),
        pytest.param(LATE_COUNT, "ids", id="late-count"),
        pytest.param(SLOTS, "", id="slots"),
        pytest.param(DRAWN, "scale", id="drawn"),
        pytest.param(CONTRASTIVE, "", id="contrastive"),
        pytest.param(LATER, "late", id="later"),
    ],
)
def test_parts_that_reach_beyond_their_rows_are_not_cut(
    tmp_path: Path, code: str, name: str
) -> None:
    found = cause(tmp_path, code)
    assert found
    assert name in found
