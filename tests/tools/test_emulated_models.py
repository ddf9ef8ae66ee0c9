"""Models and clusters to emulate: files that are Python, speeds and links as described."""

from __future__ import annotations

import ast

import pytest

from tools.emulation.models import MICRO_BATCHES, MODELS, SITES


def test_model_files_are_python() -> None:
    for model in MODELS.values():
        assert model.rows % MICRO_BATCHES == 0
        names = {node.name for node in ast.parse(model.text("/r")).body if hasattr(node, "name")}
        assert {"model", "example_batch"} <= names


@pytest.mark.parametrize("model", ["llama", "encdec", "unet", "mixer"])
def test_a_batch_has_as_many_rows_as_asked(model: str) -> None:
    example: dict[str, object] = {}
    exec(f"import torch\nbatch = {MODELS[model].sized(48).batch}", example)
    batch = example["batch"]
    entries = batch.values() if isinstance(batch, dict) else batch
    assert {len(entry) for entry in entries} == {48}  # type: ignore[attr-defined]


def test_clusters_are_as_described() -> None:
    found = SITES["uneven4-1000"].cluster
    fastest = found.devices[0].flops_per_s
    assert [fastest / device.flops_per_s for device in found.devices] == [1, 2, 4, 4]
    assert found.link("d0", "d3").transfer_s(125_000_000) == pytest.approx(1.001)
