"""What is written is as open as the umask says, though libraries write it for the owner alone."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bigbrain_fx.weights import as_umask_says, new_folder


@pytest.fixture(params=[0o022, 0o027, 0o002])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_and_folders_are_as_open_as_the_umask_says(umask: int, tmp_path: Path) -> None:
    first, second = new_folder(tmp_path / "bundle"), new_folder(tmp_path / "bundle")
    assert first != second
    assert mode(first) == 0o777 & ~umask
    file = first / "d0.safetensors"
    save_file({"x": torch.ones(2)}, file)
    as_umask_says(file)
    assert mode(file) == 0o666 & ~umask
    assert [path.name for path in first.iterdir()] == ["d0.safetensors"]
