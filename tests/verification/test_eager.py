"""Files of the plain loop: tensors come back as they lay in memory, for kernels round by it."""

from __future__ import annotations

from pathlib import Path

import torch

from bigbrain_fx.verification.bundle import eager


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
    eager.save(tensors, tmp_path / "file")
    found = eager.read(tmp_path / "file")
    assert {n: t.stride() for n, t in found.items()} == {n: t.stride() for n, t in tensors.items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_tensor_that_repeats_itself_is_written_out(tmp_path: Path) -> None:
    eager.save({"x": torch.randn(1, 3).expand(4, 3)}, tmp_path / "file")
    found = eager.read(tmp_path / "file")["x"]
    assert found.is_contiguous()
    assert torch.equal(found, found[:1].expand(4, 3))
