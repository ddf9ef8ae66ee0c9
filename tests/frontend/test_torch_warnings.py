"""What torch and the user's code say while a command works stays out of what it prints."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from bigbrain_fx.frontend import child_environment
from bigbrain_fx.frontend.tracing.export import quiet

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


@pytest.mark.nightly
def test_a_level_of_the_user_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "WARNING")
    assert "degrees of freedom" in stderr_of_a_trial()


class Quiet(logging.Handler):
    """Counts."""

    calls = 0

    def emit(self, record: logging.LogRecord) -> None:
        type(self).calls += 1


def test_handlers_of_the_users_hear_what_others_do_not_show(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = logging.getLogger("tests.of.handlers")
    log.setLevel(logging.INFO)
    log.handlers, log.propagate = [Quiet(), logging.StreamHandler()], False
    before = Quiet.calls
    with quiet():
        assert log.isEnabledFor(logging.INFO)
        log.info("said once")
    assert Quiet.calls == before + 1
    assert "said once" not in capsys.readouterr().err
