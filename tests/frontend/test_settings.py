"""Settings of torch and of the process are seen where they change, and can be put back."""

from __future__ import annotations

import os

import pytest
import torch

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.settings import Settings, require_unset


def test_what_was_changed_is_named_and_put_back() -> None:
    before = Settings.now()
    clamp = torch.Tensor.clamp
    torch.Tensor.clamp = lambda self, *a: clamp(self, *a)  # type: ignore[method-assign]
    torch.set_flush_denormal(True)
    os.environ["OF_A_TEST_OF_SETTINGS"] = "1"
    found = before.changed(Settings.now())
    before.put_back()
    assert set(found) == {
        "torch.Tensor.clamp = ...",
        "torch.set_flush_denormal(...)",
        "os.environ['OF_A_TEST_OF_SETTINGS'] = ...",
    }
    assert before.changed(Settings.now()) == {}
    assert torch.Tensor.clamp is clamp


def test_what_torch_wraps_itself_is_no_change() -> None:
    before = Settings.now()
    for kind in (torch.optim.Rprop, torch.optim.ASGD):
        kind([torch.nn.Parameter(torch.zeros(1))])
    assert before.changed(Settings.now()) == {}


def test_a_model_that_sets_them_is_refused() -> None:
    before, step = Settings.now(), torch.optim.Adadelta.step
    torch.optim.Adadelta.step = lambda self, closure=None: None  # type: ignore[method-assign]
    try:
        with pytest.raises(InputError, match=r"changes a setting of torch, torch\.optim\.Adadelta"):
            require_unset(before, Settings.now(), "model.py:3", "model")
    finally:
        torch.optim.Adadelta.step = step  # type: ignore[method-assign]


def test_a_model_that_leaves_gradients_off_is_told_how_it_ends() -> None:
    before = Settings.now()
    torch.set_grad_enabled(False)
    try:
        with pytest.raises(InputError, match=r"torch\.set_grad_enabled, from True") as caught:
            require_unset(before, Settings.now(), "model.py:3", "model")
    finally:
        torch.set_grad_enabled(True)
    assert caught.value.help == "let it end within model(): with torch.no_grad(): ..."
