"""The first batches of a model file, read as its bundle would read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigbrain_fx.errors import CaptureError, InputError
from bigbrain_fx.frontend import BatchReading, capture_file
from tests.support.messages import refused

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
