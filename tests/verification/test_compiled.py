"""Bundles of compiled stages, and of an int8 base under LoRA."""

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
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Options, read_plan
from bigbrain_fx.weights import stored_tensors
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


# --------------------------------------------------------------------------- int8


LORA = (
    MODEL.replace("Dropout(0.1)", "Dropout(0.0)")
    .replace("        self.head.weight = self.embed.weight\n", "")
    .replace(
        "class Block(",
        """class Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class Block(""",
    )
    .replace(
        "    return Net()\n",
        """    net = Net().requires_grad_(False)
    for block in net.blocks:
        block.up, block.down = Lora(block.up), Lora(block.down)
    return net
""",
    )
)


def test_an_int8_base_under_lora_has_the_bits_of_the_rounded_model(tmp_path: Path) -> None:
    path, bundle = tmp_path / "lora.py", tmp_path / "bundle"
    path.write_text(LORA)
    options = Options("naive", micro_batches=2, quantize="int8")
    bigbrain_fx.split(path, cluster(), bundle, options)
    assert read_plan(bundle).source.quantize == "int8"
    found = verify(bundle, steps=2, time_limit_s=LIMIT_S)
    *links, _ = found.checks  # the last one: whole batch = micro-batches
    assert {check.word for check in links} == {"equal"}
    assert "rounded to int8 by verify's own formula" in found.checks[0].detail
    out = tmp_path / "out.safetensors"
    bigbrain_fx.export_weights(bundle, out)
    names = set(stored_tensors(bundle / "weights"))
    rounded = {name for n in names if n.endswith("_scale") for name in (n, n[: -len("_scale")])}
    assert len(rounded) == 2 * 10
    assert set(bigbrain_fx.weights.read_checkpoint(out).tensors) == names - rounded
    with pytest.raises(InputError, match="load: frozen weights of this bundle are int8"):
        bigbrain_fx.load_weights(bundle, out)
