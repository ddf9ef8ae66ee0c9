"""Warnings that torch writes past Python's filters stay out of what a command prints."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bigbrain_fx.frontend import child_environment

OF_ONE_ROW = "import torch; torch.ops.aten.var.correction(torch.ones(1, 4), [0])"


def stderr_of_a_trial() -> str:
    """Return what torch writes where a child computes a variance of one row."""
    done = subprocess.run(
        [sys.executable, "-c", OF_ONE_ROW],
        env=child_environment(threads=1),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stderr


def test_a_trial_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    assert stderr_of_a_trial() == ""


def test_a_level_of_the_user_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "WARNING")
    assert "degrees of freedom" in stderr_of_a_trial()
