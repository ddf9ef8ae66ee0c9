"""What model() and example_batch() set on the side is refused where training goes by it."""

from __future__ import annotations

import decimal
import os
import string
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.early import Early
from bigbrain_fx.frontend.first_calls import (
    FirstCalls,
    doing_otherwise,
    found,
    found_in_copy,
    require_nothing_left,
)
from bigbrain_fx.frontend.tracing.trial import Shape
from bigbrain_fx.frontend.users_code import run_file

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
    return FirstCalls(path, "model", 3, shapes, 24, frozenset({"Config"}))


@contextmanager
def early_of(path: Path) -> Iterator[Early]:
    """Let a fork wait that has run the file, as a capture does; here it is as if it had not."""
    module = run_file(path, 3)
    early = Early(partial(found, module))
    del sys.modules[module.__name__]
    try:
        yield early
    finally:
        early.close()


def left(calls: FirstCalls) -> str | None:
    with early_of(calls.path) as early:
        return require_nothing_left(calls, early)


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
        left(calls(tmp_path, model=model, what=what))
    assert caught.value.what.startswith(line)
    assert caught.value.at == "model_of_calls.py:12"
    assert "at the top of the file" in (caught.value.help or "")


def test_what_the_example_sets_is_told_from_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"example_batch\(\) sets SEEN, which batches\(\) goes"):
        left(calls(tmp_path, example="SEEN['x'] = 1", what="batches"))


@pytest.mark.gate("torch.rand(3)-batches")
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
    assert left(calls(tmp_path, model=model, what=what)) is None


def test_a_model_that_cannot_be_made_again_is_said(tmp_path: Path) -> None:
    said = left(calls(tmp_path, model="raise OSError", what="lr_scale"))
    assert "cannot be called a second time" in str(said)


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    """Undo what these files set in the process that calls their model()."""
    folder, spaces, context = Path.cwd(), string.whitespace, decimal.getcontext().copy()
    with warnings.catch_warnings():
        yield
    os.chdir(folder)
    vars(string)["whitespace"] = spaces
    decimal.setcontext(context)


NOWHERE = {
    "a context": ("import decimal; decimal.getcontext().prec = 2", "third"),
    "warnings": ("import warnings; warnings.simplefilter('ignore')", "warned"),
    "the folder": ("import os; os.chdir('/')", "folder"),
    "a library": ("import string; string.whitespace = ''", "library"),
}
READERS = {
    "third": "import decimal\n\n\ndef lr_scale(step):\n"
    "    return float(decimal.Decimal(1) / 3) ** step\n",
    "warned": "import warnings\n\n\ndef lr_scale(step):\n    try:\n        warnings.warn('odd')\n"
    "    except UserWarning:\n        return 2\n    return 1\n",
    "folder": "def lr_scale(step):\n    return len(os.getcwd())\n",
    "library": "import string\n\n\ndef lr_scale(step):\n    return len(string.whitespace)\n",
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", NOWHERE)
def test_what_is_set_where_nobody_looks_is_refused(name: str, tmp_path: Path) -> None:
    line, reader = NOWHERE[name]
    with pytest.raises(InputError, match=r"model\(\) sets .*, which lr_scale\(\) goes by"):
        left(calls(tmp_path, model=line, what=READERS[reader]))


def test_a_generator_that_the_example_draws_from_is_as_no_bundle_has_drawn(tmp_path: Path) -> None:
    drawn = "GEN = torch.Generator().manual_seed(1)\n\n\ndef batches(seed):\n"
    drawn += "    while True:\n        yield (torch.rand(2, generator=GEN),)\n"
    assert left(calls(tmp_path, example="next(batches(0))", what=drawn)) is None
    with pytest.raises(InputError, match=r"model\(\) sets GEN, which batches\(\) goes by"):
        left(calls(tmp_path, model="next(batches(0))", what=drawn))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["a context", "a library"])
def test_a_copy_without_what_a_call_at_the_top_sets_does_otherwise(
    name: str, tmp_path: Path
) -> None:
    line, reader = NOWHERE[name]
    fresh_path = tmp_path / "model_of_calls.py"
    fresh = Early(partial(found_in_copy, fresh_path, 3))
    about = calls(tmp_path, what=f"def _set():\n    {line}\n\n\n{READERS[reader]}")
    about.path.write_text(f"{about.path.read_text()}\n\n_set()\n")
    with early_of(about.path) as early:
        copy = f"import os\n{READERS[reader]}"
        assert doing_otherwise(about, copy, early, fresh) == ("would have another lr_scale()",)
        whole = about.path.read_text()
        assert doing_otherwise(about, whole, early, fresh) == ()
    fresh.close()
