"""The plain loop is the user's own: attributes stay, and tensors lie as they lay in memory."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from bigbrain_fx.verification import eager, laid_tensors


def test_tensors_come_back_with_their_strides(tmp_path: Path) -> None:
    last = torch.channels_last
    tensors = {
        "one channel": torch.randn(1, 1, 3, 4).to(memory_format=last),
        "depthwise": torch.randn(6, 1, 3, 3).to(memory_format=last),
        "plain": torch.randn(6, 1, 3, 3),
        "gaps": torch.randn(4, 6)[:, ::2],
        "turned": torch.randn(4, 6).t(),
        "none": torch.randn(0, 3),
        "number": torch.tensor(2.0, dtype=torch.bfloat16),
    }
    assert tensors["one channel"].stride() != (12, 12, 4, 1)
    laid_tensors.save(tensors, tmp_path / "file")
    found = laid_tensors.read(tmp_path / "file")
    assert list(found) == list(tensors)  # optimizers are given parameters in the model's order
    assert {n: t.stride() for n, t in found.items()} == {n: t.stride() for n, t in tensors.items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_tensor_that_repeats_itself_is_written_out(tmp_path: Path) -> None:
    laid_tensors.save({"x": torch.randn(1, 3).expand(4, 3)}, tmp_path / "file")
    found = laid_tensors.read(tmp_path / "file")["x"]
    assert found.is_contiguous()
    assert torch.equal(found, found[:1].expand(4, 3))


CACHED = """
import functools
import torch
from torch import nn


@functools.lru_cache
def first(layer):
    return layer.weight.detach().clone()


class Net(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x @ first(self).t()  * self.weight.sum()


def model():
    return Net(6, 2)


def example_batch():
    return torch.ones(4, 6)


def loss(output, batch):
    return output.square().mean()
"""


def test_state_left_by_a_call_is_there_for_the_next(tmp_path: Path) -> None:
    path = tmp_path / "cached_first.py"
    path.write_text(CACHED)
    loop = eager.TrainingLoop(eager.Wanted(str(path), 0, 2))
    for step in ("0", "1"):
        (tmp_path / step).mkdir()
        loop.run_step(tmp_path / step)
    assert vars(loop.model)["calls"] == 4
    first = sys.modules[type(loop.model).__module__].first
    assert first.cache_info().misses == 1
    assert not torch.equal(first(loop.model), loop.model.get_parameter("weight"))


def test_gradients_of_earlier_steps_count_in_none(tmp_path: Path) -> None:
    """A module in memory may come from a loop that clears them before each step."""
    path = tmp_path / "trained_before.py"
    path.write_text(CACHED.replace("return Net(6, 2)", "return after_a_step(Net(6, 2))") + BEFORE)
    loop = eager.TrainingLoop(eager.Wanted(str(path), 0, 2))
    assert loop.gradients() == {}


BEFORE = """

def after_a_step(net):
    loss(nn.functional.linear(example_batch(), net.weight), None).backward()
    return net
"""
