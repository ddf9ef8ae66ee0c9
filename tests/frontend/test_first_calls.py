"""What model() and example_batch() set on the side is refused where training goes by it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.first_calls import FirstCalls, require_nothing_left
from bigbrain_fx.frontend.settings import Settings
from bigbrain_fx.frontend.tracing.trial import Shape

TOP = """import os
import torch

RATE, SEEN, NAMES = 1, {}, set()


class Config:
    lr, depth = 0.1, 1


"""
FUNCTIONS = {
    "lr_scale": "def lr_scale(step):\n    return step * RATE\n",
    "optimizer": "def optimizer(named):\n    return torch.optim.SGD(named, lr=Config.lr)\n",
    "by name": "def optimizer(named):\n    named = [{'params': [p], 'weight_decay': n in NAMES} "
    "for n, p in named]\n    return torch.optim.SGD(named, lr=0.1)\n",
    "environ": "def optimizer(named):\n    rate = float(os.environ.get('OUR_RATE', 1))\n"
    "    return torch.optim.SGD(named, lr=rate)\n",
    "batches": "def batches(seed):\n    while True:\n        yield (torch.rand(2) + len(SEEN),)\n",
    "late": "def lr_scale(step):\n    return 1 if step < 3 * 10**8 else RATE\n",
    "scheduler": "def scheduler(made):\n"
    "    return torch.optim.lr_scheduler.LambdaLR(made, lambda step: RATE)\n",
}


def calls(folder: Path, *, model: str = "pass", example: str = "pass", what: str) -> FirstCalls:
    path = folder / "model_of_calls.py"
    made = f"def model():\n    {model}\n\n\ndef example_batch():\n    {example}\n\n\n"
    path.write_text(TOP + made + FUNCTIONS.get(what, what))
    shapes = {"a.weight": Shape((2, 2), torch.float32), "a.bias": Shape((2,), torch.float32)}
    return FirstCalls(path, "model", 3, shapes, 24, Settings.now(), frozenset({"Config"}))


@pytest.mark.parametrize(
    ("model", "what", "line"),
    [
        ("global RATE; RATE = 2", "lr_scale", "model() sets RATE, which lr_scale() goes by"),
        ("global RATE; RATE = 2", "late", "model() sets RATE, which lr_scale() goes by"),
        ("global RATE; RATE = 2", "scheduler", "model() sets RATE, which scheduler() goes by"),
        ("NAMES.add('a.bias')", "by name", "model() sets NAMES, which optimizer() goes by"),
        ("os.environ['OUR_RATE'] = '2'", "environ", "model() sets os.environ, which optimizer()"),
        ("SEEN['x'] = 1", "batches", "model() sets SEEN, which batches() goes by"),
        ("Config.lr = 0.2", "optimizer", "model() sets Config, which code that is called as it is"),
    ],
)
def test_what_model_sets_is_refused_with_its_line(
    model: str, what: str, line: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        require_nothing_left(calls(tmp_path, model=model, what=what))
    assert caught.value.what.startswith(line)
    assert caught.value.at == "model_of_calls.py:12"
    assert "at the top of the file" in (caught.value.help or "")


def test_what_the_example_sets_is_told_from_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"example_batch\(\) sets SEEN, which batches\(\) goes"):
        require_nothing_left(calls(tmp_path, example="SEEN['x'] = 1", what="batches"))


@pytest.mark.parametrize(
    ("model", "what"),
    [
        ("SEEN['x'] = 1", "lr_scale"),
        ("torch.rand(3)", "batches"),
        ("global MADE; MADE = 1", "optimizer"),
        ("import time; SEEN['at'] = time.time()", "optimizer"),
        ("pass", "def lr_scale(step):\n    raise ValueError\n"),
    ],
)
def test_what_nobody_goes_by_is_let_be(model: str, what: str, tmp_path: Path) -> None:
    assert require_nothing_left(calls(tmp_path, model=model, what=what)) is None


def test_a_model_that_cannot_be_made_again_is_said(tmp_path: Path) -> None:
    said = require_nothing_left(calls(tmp_path, model="raise OSError", what="lr_scale"))
    assert "cannot be run a second time" in str(said)
