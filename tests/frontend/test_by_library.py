"""Errors of a library's own code are told in words of what the user wrote."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend import capture


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.head(x)
        return h


class Within(Kept):
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.head(x)
        return h


class Copies(Kept):
    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = copy.deepcopy(self.head)(x)
        return h


def square(output: Tensor, batch: object) -> Tensor:
    return output.square().mean()


def test_a_function_kept_from_compilers_is_named_by_its_decorator() -> None:
    with pytest.raises(CaptureError, match=r"disable\(recursive=False\)") as caught:
        capture(Kept(), torch.randn(6, 8), square, strict=True)
    assert "write @torch.compiler.disable, or leave it out" in (caught.value.help or "")


def test_with_all_that_it_calls_it_is_traced() -> None:
    assert capture(Within(), torch.randn(6, 8), square).graph.ops


def test_a_copied_module_is_told_with_what_to_write() -> None:
    with pytest.raises(CaptureError, match="with the module copy") as caught:
        capture(Copies(), torch.randn(6, 8), square, strict=True)
    assert "functional_call" in (caught.value.help or "")
