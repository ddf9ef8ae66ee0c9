"""Folders of torch.distributed.checkpoint: read bit for bit, and nothing of a pickle is run."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save

from bigbrain_fx.bundles.dcp_import.reading import SpreadTensor, read_distributed
from tests.support.messages import refused

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
QUARTERS: tuple[Box, ...] = (
    ((0, 0, 0), (2, 1, 2)),
    ((0, 1, 0), (2, 2, 2)),
    ((2, 0, 0), (1, 3, 1)),
    ((2, 0, 1), (1, 3, 1)),
)


def spread(folder: Path, whole: Tensor, boxes: tuple[Box, ...], name: str = "__0_0.distcp") -> Path:
    """Write a tensor as processes do that have these boxes of it."""
    folder.mkdir()
    file, places, chunks = io.BytesIO(b"earlier"), {}, []
    file.seek(0, 2)
    for offsets, sizes in boxes:
        part = whole
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        start, index = file.tell(), MetadataIndex("w", offsets)
        torch.save(part.clone(memory_format=torch.preserve_format), file)
        places[index] = _StorageInfo(name, start, file.tell() - start)
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
    entry = TensorStorageMetadata(TensorProperties(dtype=whole.dtype), whole.shape, chunks)
    (folder / Path(name).name).write_bytes(file.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({"w": entry}, None, places)))
    return folder


def bits(found: SpreadTensor) -> bytes:
    return raw(found.whole())


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint16]
)
def test_boxes_are_put_together(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = torch.arange(18).reshape(3, 3, 2).to(dtype)
    rows: tuple[Box, ...] = (((0, 0, 0), (2, 3, 2)), ((2, 0, 0), (1, 3, 2)))
    for number, boxes in enumerate((QUARTERS, rows, (((0, 0, 0), (3, 3, 2)),))):
        found = read_distributed(spread(tmp_path / str(number), whole, boxes)).tensors["w"]
        assert (found.shape, found.dtype) == ((3, 3, 2), dtype)
        assert bits(found) == raw(whole)


def test_checkpoints_of_torch_are_read(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "model": {"a": torch.randn(2, 3), "none": torch.zeros(0, 4), "one": torch.tensor(2.5)},
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
        "rates": {"lr": 0.1, "betas": (0.9, float("inf")), "names": ["a"], "fused": None},
    }
    save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    found = read_distributed(tmp_path / "saved")
    for name, tensor in state["model"].items():
        assert bits(found.tensors[f"model.{name}"]) == raw(tensor)
    assert bits(found.tensors["float8"]) == raw(state["float8"])
    assert float(found.tensors["model.one"].whole()) == 2.5
    assert {name: found.value(f"rates.{name}") for name in state["rates"]} == state["rates"]
    assert found.paths["model.a"] == ("model", "a")


class _Calls:
    """Makes a folder when its pickle is run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.folder),)


def test_no_pickle_runs(tmp_path: Path) -> None:
    trap = _Calls(tmp_path / "made")
    folder = spread(tmp_path / "a", torch.ones(2), (((0,), (2,)),))
    (folder / ".metadata").write_bytes(pickle.dumps(trap))
    with refused("BX3717"):
        read_distributed(folder)
    state = {"words": [trap]}
    save(state, checkpoint_id=tmp_path / "b", no_dist=True)
    with refused("BX3701"):
        read_distributed(tmp_path / "b").value("words")
    assert not trap.folder.exists()


def test_a_partial_checkpoint_is_refused(tmp_path: Path) -> None:
    whole = torch.arange(4.0).reshape(2, 2)
    top, low = ((0, 0), (1, 2)), ((1, 0), (1, 2))
    wrong: dict[str, tuple[Box, ...]] = {
        "twice": (top, low, ((0, 1), (1, 1))),
        "a part": (low,),
        "crossed": (top, ((0, 1), (2, 1)), ((1, 0), (1, 1))),
    }
    for name, boxes in wrong.items():
        found = read_distributed(spread(tmp_path / name, whole, boxes))
        with refused("BX3711"):
            bits(found.tensors["w"])
    cut = spread(tmp_path / "cut", whole, (top, low))
    data = (cut / "__0_0.distcp").read_bytes()
    (cut / "__0_0.distcp").write_bytes(data[: len(data) // 2])
    with refused("BX3702"):
        bits(read_distributed(cut).tensors["w"])
    with refused("BX3714"):
        read_distributed(spread(tmp_path / "up", whole, (top, low), "../out.distcp"))
    turned = read_distributed(spread(tmp_path / "t", whole.t(), (((0, 0), (2, 2)),)))
    assert bits(turned.tensors["w"]) == raw(whole.t())
    with refused("BX3716"):
        read_distributed(tmp_path)
    for text in (b"\x80\x04no", pickle.dumps([])):
        (tmp_path / ".metadata").write_bytes(text)
        with refused("BX3718"):
            read_distributed(tmp_path)
