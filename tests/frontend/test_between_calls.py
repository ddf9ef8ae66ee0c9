"""What one of batches, rates, optimizer and scheduler leaves, and another goes by, is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.between_calls import (
    answered,
    require_constants_kept,
    require_nothing_between,
)
from bigbrain_fx.frontend.early import Early
from bigbrain_fx.frontend.first_calls import FirstCalls
from bigbrain_fx.frontend.modelfile import ModelFile, load_model_file

TOP = """
import sys
import torch
from torch import nn

def model():
    return nn.Linear(4, 4)

def example_batch():
    return (torch.zeros(2, 4), torch.zeros(2, 4))

def loss(output, batch):
    return (output - batch[1]).pow(2).mean()

def steady(seed):
    while True:
        yield example_batch()

class Counting(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        STEPS[0] += 1

STEPS, MADE = [0], []
"""

EPOCHS = """
EPOCH = 0
def batches(seed):
    global EPOCH
    while True:
        for _ in range({steps}):
            yield example_batch()
        EPOCH += 1
"""

REFUSED = {
    "lr_scale() goes by what batches()": EPOCHS.format(steps=2)
    + "def lr_scale(step): return 0.5 ** EPOCH",
    "scheduler() goes by what batches()": EPOCHS.format(steps=1000)
    + "def scheduler(o): return torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5 ** EPOCH)",
    "batches() goes by what lr_scale()": """
NOW = 0
def lr_scale(step):
    global NOW
    NOW = step
    return 1.0
def batches(seed):
    for x, y in steady(seed):
        yield x + NOW, y
""",
    "batches() goes by what optimizer(), or a step of it,": """
def optimizer(named): return Counting([p for _, p in named], lr=0.1)
def batches(seed):
    for x, y in steady(seed):
        yield x + STEPS[0], y
""",
    "batches() goes by what optimizer()": """
def optimizer(named):
    MADE.append(torch.optim.SGD([p for _, p in named], lr=0.1))
    return MADE[-1]
def batches(seed):
    for x, y in steady(seed):
        yield x + (MADE[-1].param_groups[0]["lr"] if MADE else 0.1), y
""",
    "lr_scale() changes clip_norm": """
clip_norm = 0.5
def lr_scale(step):
    sys.modules[__name__].clip_norm = 0.5 / (1 + step)
    return 1.0
batches = steady
""",
}

LET_BE = {
    "a number of steps that batches() sets once": """
TOTAL = 0
def batches(seed):
    global TOTAL
    TOTAL = 10
    yield from steady(seed)
def lr_scale(step): return 1.0 - step / TOTAL
""",
    "a count that nothing goes by": EPOCHS.format(steps=1)
    + """
def lr_scale(step):
    if EPOCH > 10**9:
        print(EPOCH)
    return 0.9 ** step
""",
    "an optimizer that goes by what lr_scale() says of the step": """
NOW = 0
def lr_scale(step):
    global NOW
    NOW = step
    return 1.0
class Damped(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = 0.1 / (1 + NOW)
        super().step()
def optimizer(named): return Damped([p for _, p in named], lr=0.1)
batches = steady
""",
    "nothing": "clip_norm = 0.5",
}


def _tried(folder: Path, text: str) -> None:
    path = folder / "model.py"
    path.write_text(TOP + text)
    found: list[Early] = []

    def stay(module: object) -> None:
        found.append(Early(lambda question: answered(module, question)))  # type: ignore[arg-type]  # a module

    file = load_model_file(path, once_run=stay)
    try:
        about = FirstCalls.of(file, 0, frozenset(), trains=True)
        require_nothing_between(about, file, found[0])
    finally:
        found[0].close()


@pytest.mark.gate("lr_scale() changes clip_norm", "lr_scale() goes by what batches()")
@pytest.mark.parametrize("said", REFUSED)
def test_what_goes_by_another_is_refused(said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        _tried(tmp_path, REFUSED[said])
    assert caught.value.what.startswith(said)
    assert (caught.value.at or "").startswith("model.py:")
    assert caught.value.help


@pytest.mark.gate("nothing")
@pytest.mark.parametrize("text", LET_BE.values(), ids=LET_BE)
def test_what_is_the_same_everywhere_is_let_be(text: str, tmp_path: Path) -> None:
    _tried(tmp_path, text)


CHANGES = """
clip_norm = 0.5
def {function}:
    global clip_norm
    clip_norm = 0.1
    return 1.0
{more}
"""


def _loaded(folder: Path, text: str) -> ModelFile:
    path = folder / "model.py"
    path.write_text(TOP + text)
    return load_model_file(path)


@pytest.mark.parametrize("function", ["lr_scale(step)", "loss(output, batch)"])
def test_what_sets_clip_norm_as_training_goes_on_is_refused(function: str, tmp_path: Path) -> None:
    file = _loaded(tmp_path, CHANGES.format(function=function, more=""))
    with pytest.raises(InputError, match=f"{function.partition('(')[0]} changes clip_norm") as seen:
        require_constants_kept(file)
    line = (TOP + CHANGES).splitlines().index("    clip_norm = 0.1") + 1
    assert seen.value.at == f"model.py:{line}"
    assert "clip_grad_norm_([p]" in (seen.value.help or "")


def test_a_function_called_at_the_top_may_set_it(tmp_path: Path) -> None:
    file = _loaded(tmp_path, CHANGES.format(function="configure()", more="configure()"))
    require_constants_kept(file)
    assert file.clip_norm == 0.1
