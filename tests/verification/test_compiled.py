"""A bundle of compiled stages is the model to rounding, and a death in its run leaves no trace."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import bigbrain_fx
from bigbrain_fx.bundles import RunOptions, StepLine, run
from bigbrain_fx.bundles.verifying import verify
from bigbrain_fx.plan import Options
from tests.support.bundles import MODEL, cluster

pytestmark = pytest.mark.nightly


LIMIT_S = 300.0


def test_a_compiled_bundle_is_the_model_to_rounding(tmp_path: Path) -> None:
    path, bundle = tmp_path / "net.py", tmp_path / "bundle"
    path.write_text(MODEL.replace("Dropout(0.1)", "Dropout(0.0)"))
    options = Options("naive", micro_batches=2, compiled=True)
    bigbrain_fx.split(path, cluster(), bundle, options)
    assert "    compiled = True\n" in (bundle / "device_d0.py").read_text()
    found = verify(bundle, steps=3, time_limit_s=LIMIT_S)
    words = {check.name: check.word for check in found.checks}
    assert set(words.values()) == {"equal", "to rounding"}
    bundles = [f"reference = bundle, {what}" for what in ("losses", "gradients", "weights")]
    rounded = [name for name, word in words.items() if word == "to rounding"]
    assert sorted(rounded) == sorted([*bundles, "whole batch = micro-batches"])
    pids: dict[str, int] = {}
    died: list[str] = []

    def hear(event: Mapping[str, Any]) -> None:
        if event["event"] == "started":
            pids[event["device"]] = event["pid"]
        died.extend([event["device"]] if event["event"] == "died" else [])

    def kill(line: StepLine) -> None:
        if line.step == 3 and not died:
            os.kill(pids["d1"], signal.SIGKILL)

    how = RunOptions(6, threads=1, hang_s=8.0, spares=1, snapshot_every=2)  # compiling takes longer
    plain = run(bundle, replace(how, logs=tmp_path / "plain"))
    struck = run(bundle, replace(how, logs=tmp_path / "struck"), on_step=kill, on_event=hear)
    assert died == ["d1"]
    assert [line.loss for line in struck.steps] == [line.loss for line in plain.steps]
