"""The promise of readable files: short, and no longer for more micro-batches or more layers."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bigbrain_fx.emit.texts import bundle_texts
from models.gpt import GPT
from tests import samples
from tests.samples import Sample

LINES = 250  # of a device file, at most
MICRO = (8, 64)
COLUMNS = 100


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten())


@lru_cache(maxsize=2)
def gpt(blocks: int) -> Sample:
    """Capture a narrow GPT; 64 rows, so that 64 micro-batches divide them."""
    module = GPT(blocks=blocks, dim=8, heads=2, sequence=8, vocabulary=16)
    tokens = torch.zeros(64, 8, dtype=torch.long)
    return samples.of_module(module, {"tokens": tokens, "targets": tokens}, loss)


@lru_cache(maxsize=16)
def device_lines(blocks: int, partitioner: str, schedule: str, micro_batches: int) -> list[int]:
    plan = samples.planned(gpt(blocks), partitioner, 4, schedule, micro_batches)
    texts = bundle_texts(plan)
    return [texts[f"device_{i}.py"].count("\n") for i in range(4)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("partitioner", ["naive", "chain-dp"])
def test_24_blocks_on_4_devices(partitioner: str, schedule: str) -> None:
    few, many = (device_lines(24, partitioner, schedule, count) for count in MICRO)
    assert max(few) < LINES
    assert few == many
    twice = device_lines(48, partitioner, schedule, MICRO[0])
    assert all(abs(a - b) <= 10 for a, b in zip(few, twice, strict=True)), (few, twice)


@pytest.mark.parametrize("model", ["gpt", "unet", "encdec", "resnet", "llama", "moe"])
def test_few_lines_are_too_long(model: str) -> None:
    """Only what has no bracket to break at, or a trailing comment, may go past the edge."""
    for name, text in samples.texts(model).items():
        if name.startswith("device_"):
            code = [line.partition("  # ")[0] for line in text.splitlines()]
            long = [line for line in code if len(line) > COLUMNS]
            assert len(long) <= 2, (name, long)


def test_layers_are_one_class_in_a_loop() -> None:
    texts = bundle_texts(samples.planned(gpt(24), "naive", 4, "1f1b", 8))
    for number in (1, 2):
        text = texts[f"device_{number}.py"]
        assert text.count("class Block(Region):") == 1
        assert text.count("        for i in range(") + text.count("        for block in ") == 1
    assert "# gpt.py:" in texts["device_0.py"]
