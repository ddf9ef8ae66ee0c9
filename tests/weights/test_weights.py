"""Checkpoints on disk: headers, names, types; what is streamed is checked with safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bigbrain_fx.core import Param, TensorSpec
from bigbrain_fx.weights import (
    Copy,
    FromCheckpoint,
    match,
    read_checkpoint,
    read_header,
    state,
    stored_tensors,
    unused_file,
    write_file,
    write_joined,
)
from bigbrain_fx.weights.write import FLOATS, cast
from tests.support.messages import refused


def param(name: str, *shape: int, dtype: str = "float32", canonical: str = "") -> Param:
    return Param(name, TensorSpec(shape, dtype, (1,) * len(shape)), canonical or name)


def constant(name: str, *shape: int) -> Param:
    return Param(name, TensorSpec(shape, "float32", (1,) * len(shape)), name, "constant")


def raw(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy()) if tensor.numel() else b""


def shards(folder: Path, files: dict[str, dict[str, Tensor]]) -> Path:
    """Write a checkpoint in shards with an index."""
    folder.mkdir()
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    where = {key: name for name, tensors in files.items() for key in tensors}
    text = json.dumps({"metadata": {}, "weight_map": where})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


# --------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_numbers_are_cast_as_torch_casts_them(source: str, target: str) -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(4096, dtype=torch.float64, generator=generator)
    numbers = torch.cat([numbers, numbers * 1e-6, numbers * 1e5, torch.tensor([0.0, -0.0])])
    numbers = torch.cat([numbers, torch.tensor([float("inf"), -float("inf"), 1e300, 2.0**-149])])
    given = numbers.to(getattr(torch, source))
    wanted = given.to(getattr(torch, target))
    assert cast(raw(given), source, target) == raw(wanted)
    nan = cast(raw(torch.tensor([float("nan")])), "float32", "bfloat16")
    assert torch.frombuffer(bytearray(nan), dtype=torch.bfloat16).isnan().all()


def test_a_streamed_file_is_what_safetensors_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bigbrain_fx.weights.write.PIECE", 64)
    tensors = {
        "a": torch.randn(7, 33),
        "half": torch.randn(100).half(),
        "count": torch.tensor(3),
        "mask": torch.tensor([True, False, True]),
        "none": torch.zeros(0, 4),
        "b": torch.randn(5).to(torch.bfloat16),
    }
    save_file(tensors, tmp_path / "in.safetensors")
    stored = read_header(tmp_path / "in.safetensors")
    write_file(tmp_path / "out.safetensors", [Copy(n, s.dtype, s) for n, s in stored.items()])
    found = load_file(tmp_path / "out.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


# --------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_may_be_a_file_a_folder_an_index_or_several_files(tmp_path: Path) -> None:
    a, b = {"a": torch.ones(2)}, {"b": torch.zeros(3)}
    folder = shards(tmp_path / "s", {"m-1.safetensors": a, "m-2.safetensors": b})
    (tmp_path / "one").mkdir()
    save_file(a, tmp_path / "one" / "model.safetensors")
    save_file(b, tmp_path / "one" / "other.safetensors")
    (tmp_path / "saved").mkdir()
    save_file(a, tmp_path / "saved" / "d0.safetensors")
    save_file({**a, **b}, tmp_path / "saved" / "d1.safetensors")
    for path, names in (
        (folder, {"a", "b"}),
        (folder / "model.safetensors.index.json", {"a", "b"}),
        (folder / "m-1.safetensors", {"a"}),
        (tmp_path / "one", {"a"}),
        (tmp_path / "saved", {"a", "b"}),
    ):
        assert set(read_checkpoint(path).tensors) == names


def test_files_that_are_no_checkpoint_are_refused(tmp_path: Path) -> None:
    with refused("BX3703"):
        read_checkpoint(tmp_path / "gone")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with refused("BX3710"):
        read_checkpoint(tmp_path)
    tensors = {"a": torch.ones(2)}
    folder = shards(tmp_path / "s", {"m-1.safetensors": tensors, "m-2.safetensors": {}})
    (folder / "m-1.safetensors").unlink()
    with refused("BX3708"):
        read_checkpoint(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x"}}')
    with refused("BX3707"):
        read_checkpoint(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    with refused("BX3709"):
        read_checkpoint(folder)


# --------------------------------------------------------------------------- names


def checkpoint_of(folder: Path, tensors: dict[str, Tensor]) -> Path:
    path = folder / "given.safetensors"
    save_file(tensors, path)
    return path


@pytest.mark.parametrize(
    ("model", "there"),
    [
        ("model.layers.0.w", "layers.0.w"),  # the checkpoint of a base model
        ("layers.0.w", "model.layers.0.w"),  # a base model, the checkpoint of one with a head
        ("layers.0.w", "module._orig_mod.layers.0.w"),  # saved out of wrappers
    ],
)
def test_a_prefix_is_found(tmp_path: Path, model: str, there: str) -> None:
    path = checkpoint_of(tmp_path, {there: torch.ones(2), there + "2": torch.zeros(2)})
    found = match([param(model, 2), param(model + "2", 2)], read_checkpoint(path))
    assert [found.sources[name].key for name in (model, model + "2")] == [there, there + "2"]


def test_tied_names_share_one_source(tmp_path: Path) -> None:
    params = [param("embed", 2), param("head", 2, canonical="embed")]
    path = checkpoint_of(tmp_path, {"head": torch.ones(2)})
    found = match(params, read_checkpoint(path))
    assert found.sources["embed"].key == found.sources["head"].key == "head"
    path = checkpoint_of(tmp_path, {"head": torch.ones(2), "embed": torch.ones(2)})
    assert len({s.key for s in match(params, read_checkpoint(path)).sources.values()}) == 1
    path = checkpoint_of(tmp_path, {"head": torch.ones(2), "embed": torch.zeros(2)})
    with refused("BX3730"):
        match(params, read_checkpoint(path))


def test_tensors_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    path = checkpoint_of(tmp_path, {f"x{i}": torch.ones(2) for i in range(9)})
    with refused("BX3731"):
        match([param("w", 2)], read_checkpoint(path))
    path = checkpoint_of(tmp_path, {"w": torch.ones(3)})
    with refused("BX3732"):
        match([param("w", 2)], read_checkpoint(path))
    path = checkpoint_of(tmp_path, {"w": torch.ones(2).long()})
    with refused("BX3732"):
        match([param("w", 2)], read_checkpoint(path))


def test_tables_that_the_model_computes_may_be_there(tmp_path: Path) -> None:
    path = checkpoint_of(tmp_path, {"w": torch.ones(2), "inv_freq": torch.ones(4)})
    found = match([param("w", 2), constant("inv_freq", 4)], read_checkpoint(path))
    assert list(found.sources) == ["w"]


def test_another_float_type_is_said(tmp_path: Path) -> None:
    path = checkpoint_of(tmp_path, {"w": torch.ones(2).bfloat16()})
    found = match([param("w", 2)], read_checkpoint(path))
    assert found.notes == (
        "1 tensors are bfloat16 in the checkpoint and are cast to the model's float32",
    )


# --------------------------------------------------------------------------- a bundle's folder


class Tables:
    """What the model computes itself."""

    def write_weights(self, folder: Path, files: dict[str, list[str]]) -> None:
        for file, names in files.items():
            save_file({name: torch.full((3,), 7.0) for name in names}, folder / file)

    def write_batch(self, path: Path) -> None:
        path.write_text("batch")


@pytest.mark.parametrize("by_reference", [False, True])
def test_a_folder_is_written_from_a_checkpoint(tmp_path: Path, by_reference: bool) -> None:
    params = [param("embed", 4), param("w", 2), param("head", 4, canonical="embed")]
    params.append(constant("table", 3))
    numbers = {"embed": torch.randn(4).bfloat16(), "w": torch.randn(2)}
    checkpoint = read_checkpoint(checkpoint_of(tmp_path, numbers))
    sources = match(params, checkpoint).sources
    folder = tmp_path / "weights"
    folder.mkdir()
    writer = FromCheckpoint(params, sources, checkpoint, Tables(), by_reference)  # type: ignore[arg-type]  # lists will do
    writer.write_weights(
        folder, {"d0.safetensors": ["embed", "table"], "d1.safetensors": ["w", "head"]}
    )
    assert sorted(p.name for p in folder.iterdir() if p.suffix == ".safetensors") == [
        "d0.safetensors",
        "d1.safetensors",
    ]
    held = load_file(folder / "d0.safetensors")
    assert torch.equal(held["table"], torch.full((3,), 7.0))
    assert ("embed" in held) is not by_reference
    if not by_reference:
        assert torch.equal(held["embed"], numbers["embed"].float())
    copies = state(params, stored_tensors(folder))
    assert [copy.name for copy in copies] == ["embed", "w", "head"]
    write_joined(copies, tmp_path / "all.safetensors")
    found = load_file(tmp_path / "all.safetensors")
    assert torch.equal(found["embed"], numbers["embed"].float())
    assert torch.equal(found["head"], found["embed"])
    assert torch.equal(found["w"], numbers["w"])


def test_shards_are_read_back(tmp_path: Path) -> None:
    numbers = {f"t{i}": torch.randn(10) for i in range(5)}
    stored = read_checkpoint(checkpoint_of(tmp_path, numbers)).tensors
    copies = state([param(name, 10) for name in numbers], stored)
    done = write_joined(copies, tmp_path / "out" / "model.safetensors", shard_bytes=90)
    assert [path.name for path in done.files] == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    found = read_checkpoint(tmp_path / "out").tensors
    assert list(found) == list(numbers)
    assert done.bytes == 200
    with refused("BX3728"):
        write_joined(copies, tmp_path / "out" / "model.safetensors", shard_bytes=90)


def test_a_tensor_that_is_nowhere_is_named(tmp_path: Path) -> None:
    with refused("BX3727"):
        state([param("w", 2)], {})


def test_the_file_of_unused_state_is_no_devices() -> None:
    assert unused_file(["d0", "d1"]) == "unused.safetensors"
    assert unused_file(["unused", "d1"]) == "unused_.safetensors"
