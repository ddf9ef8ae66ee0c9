"""A refused line of an installed library: the remedy can be done in a model file, and was tried."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend import Captured, capture
from bigbrain_fx.frontend.translation.library import library_line
from tests.support.captured import assert_same

LIBRARY = """
import torch
from torch import nn
from torch.nn import functional as F


def limited(weight):
    weight.data.clamp_(-1.0, 1.0)
    return weight


class ByMethod(nn.Linear):
    def forward(self, x):
        self.weight.data.clamp_(-1.0, 1.0)
        return super().forward(x)


class ByFunction(nn.Linear):
    def forward(self, x):
        return F.linear(x, limited(self.weight), self.bias)
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """An installed package `clamping`, as pip would put it there."""
    folder = tmp_path / "site-packages" / "clamping"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "layers.py").write_text(LIBRARY, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder.parent))
    yield importlib.import_module("clamping.layers")
    for name in ("clamping", "clamping.layers"):
        del sys.modules[name]


class Net(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.first = kind(6, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)).mean()


class Own(nn.Linear):
    """Clamps where a user can write it."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-1.0, 1.0)
        return super().forward(x)


def captured(model: nn.Module) -> Captured:
    return capture(model, (torch.randn(4, 6),))


def refused(model: nn.Module) -> CaptureError:
    with pytest.raises(CaptureError) as caught:
        captured(model)
    assert caught.value.code == "BX0180"
    return caught.value


def test_a_method_is_overridden_in_the_model_file(library: ModuleType) -> None:
    model = Net(library.ByMethod)
    error = refused(model)
    assert str(error.at).startswith("layers.py:")
    assert "class Own(ByMethod)" in str(error.help)

    class Computing(library.ByMethod):  # type: ignore[misc, name-defined]  # loaded by the test
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight.clamp(-1.0, 1.0), self.bias)

    model.first.__class__ = Computing
    assert_same(model, captured(model), model)


def test_a_function_is_replaced_at_the_top_of_the_model_file(library: ModuleType) -> None:
    model = Net(library.ByFunction)
    assert "`clamping.layers.limited = own`" in str(refused(model).help)
    library.limited = lambda weight: weight.clamp(-1.0, 1.0)  # type: ignore[attr-defined]
    assert_same(model, captured(model), model)


def test_a_line_of_the_user_is_left_to_the_user() -> None:
    error = refused(Net(Own))
    assert str(error.at).startswith(Path(__file__).name)
    assert "not in your file" not in str(error.help)


def test_a_place_is_the_file_whose_line_was_shown(library: ModuleType) -> None:
    line = 1 + LIBRARY.splitlines().index("    weight.data.clamp_(-1.0, 1.0)")
    found = library_line(f"layers.py:{line}", ("weight.data.clamp_(-1.0, 1.0)",))
    assert found is not None
    assert (found.module, found.owner, found.function) == ("clamping.layers", None, "limited")
    assert library_line(f"layers.py:{line}", ("another line",)) is None
    assert library_line("layers.py", ()) is None
    assert library_line(None, ()) is None
