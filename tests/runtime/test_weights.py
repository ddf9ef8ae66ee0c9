"""A bundle's own weights and JSON files are checked as they are read; int8 ones become floats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from bigbrain_fx.core import once as once_of_core
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import read_plan
from bigbrain_fx.runtime import again, widened, widening
from bigbrain_fx.runtime.buckets import read_buckets
from bigbrain_fx.runtime.checkpoint_format import BrokenError, sealed, unsealed
from bigbrain_fx.runtime.checksum import checksum
from bigbrain_fx.runtime.json_once import once
from bigbrain_fx.runtime.modules import WeightsError
from bigbrain_fx.runtime.promises import making_again
from bigbrain_fx.runtime.weights import (
    Index,
    OwnWeights,
    checked_weights,
    read_index,
)
from bigbrain_fx.weights import read_header, write_index
from bigbrain_fx.weights.checksum import checksum_of
from tests.support import warm
from tests.support.bundles import copied

TENSORS = {
    "w": torch.randn(300, 70, generator=torch.Generator().manual_seed(0)),
    "b": torch.arange(5, dtype=torch.uint8),
    "half": torch.ones(3, 3, dtype=torch.bfloat16),
    "none": torch.zeros(0, 4),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Weights of two devices, with their index; d1 refers to a checkpoint for one tensor."""
    made = tmp_path / "weights"
    made.mkdir()
    save_file(TENSORS, made / "d0.safetensors")
    save_file({"v": torch.ones(4)}, made / "d1.safetensors")
    save_file({"left": torch.ones(2)}, tmp_path / "checkpoint.safetensors")
    refer(made, tmp_path / "checkpoint.safetensors")
    write_index(made, {"w": "d0", "v": "d1"})
    return made


def refer(folder: Path, file: Path) -> None:
    listing = {"left": {"file": str(file), "key": "left"}}
    (folder / "d1.references.json").write_text(json.dumps(listing))


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for device in ("d0", "d1"):
        with checked_weights(folder, device) as weights:
            found.update(weights)
        assert set(OwnWeights(folder, device)) <= set(found)
    return found


def test_written_weights_are_read(folder: Path) -> None:
    found = read_all(folder)
    assert set(found) == {*TENSORS, "v", "left"}
    assert torch.equal(found["w"], TENSORS["w"])
    assert set(read_index(folder).checksums or ()) == {*TENSORS, "v"}  # `left` was never read


def test_missing_weights_can_be_asked_for(folder: Path) -> None:
    own = OwnWeights(folder, "d0")
    assert "w" in own
    assert "num_batches_tracked" not in own


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 4100, 70_000, 300_001, (1 << 21) + 13])
def test_with_torch_and_without_it_a_checksum_is_the_same(tmp_path: Path, count: int) -> None:
    numbers = torch.arange(count).mul_(2654435761).to(torch.uint8)
    save_file({"t": numbers}, tmp_path / "t.safetensors")
    assert checksum_of(read_header(tmp_path / "t.safetensors")["t"]) == checksum(numbers)


def test_any_flipped_bit_of_a_weight_is_found(folder: Path) -> None:
    file = folder / "d0.safetensors"
    whole = file.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    for place in [*range(start, start + 60), *range(start, len(whole), 997), len(whole) - 1]:
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        file.write_bytes(data)
        with pytest.raises(WeightsError, match=r"d0.safetensors: tensor '\w+' is not as it was"):
            read_all(folder)
    file.write_bytes(whole)
    read_all(folder)


def test_files_that_changed_places_are_found(folder: Path) -> None:
    (folder / "d0.safetensors").rename(folder / "old")
    (folder / "d1.safetensors").rename(folder / "d0.safetensors")
    (folder / "old").rename(folder / "d1.safetensors")
    with pytest.raises(WeightsError, match=r"d0.safetensors has no tensor 'w': copy the bundle"):
        OwnWeights(folder, "d0")["w"]


def test_a_bundle_older_than_checksums_is_read(folder: Path) -> None:
    owner = {"w": "d0", "v": "d1"}
    (folder / "index.json").write_text(json.dumps(owner))
    assert read_index(folder) == Index(owner, None)
    assert torch.equal(read_all(folder)["w"], TENSORS["w"])
    (folder / "index.json").unlink()  # one for inference had none
    assert read_index(folder) == Index({}, None)


def test_no_tensor_is_read_unchecked(folder: Path) -> None:
    """An index that lists none, or is not there, is not that of an older bundle."""
    index = folder / "index.json"
    found = json.loads(index.read_text())
    index.write_text(json.dumps({**found, "checksums": {}}))
    with pytest.raises(WeightsError, match=r"its checksum in .*index.json is missing\): copy the"):
        read_all(folder)
    index.unlink()
    with pytest.raises(WeightsError, match=r"index.json is missing: copy the bundle again"):
        read_all(folder)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def huge(path: Path) -> None:
    path.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def nested(path: Path) -> None:
    path.write_text("[" * 50_000)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_list(path: Path) -> None:
    path.write_text("[1]")


def a_number(path: Path) -> None:
    path.write_text('{"left": 3}')


BROKEN: list[Callable[[Path], None]] = [cut, huge, pipe, nested, a_folder, Path.unlink]
IN_JSON: list[Callable[[Path], None]] = [cut, pipe, nested, a_folder, a_list, a_number]


def cases() -> Iterator[tuple[str, Callable[[Path], None]]]:
    for breaks in BROKEN:
        yield "d0.safetensors", breaks
        yield "../checkpoint.safetensors", breaks
    for breaks in IN_JSON:
        yield "index.json", breaks
        yield "d1.references.json", breaks


@pytest.mark.parametrize(("name", "breaks"), list(cases()))
def test_a_broken_file_is_named_with_what_to_do(
    folder: Path, name: str, breaks: Callable[[Path], None]
) -> None:
    breaks(folder / name)
    remedy = "copy the bundle again" if name == "d0.safetensors" else "`bigbrain-fx load`"
    with pytest.raises(WeightsError, match=remedy) as error:
        read_all(folder)
    assert Path(name).name in str(error.value)
    assert "\n" not in str(error.value)


def test_a_reference_to_something_else_is_refused(folder: Path) -> None:
    refer(folder, Path("../../../../../../etc/passwd"))
    with pytest.raises(WeightsError, match="etc/passwd cannot be read"):
        read_all(folder)


@pytest.mark.nightly
def test_an_owner_that_is_no_device_is_refused(trained_bundle: Path, tmp_path: Path) -> None:
    copy = copied(trained_bundle, tmp_path)
    index = copy / "weights" / "index.json"
    index.write_text(index.read_text().replace('"embed.weight": "d', '"embed.weight": "x', 1))
    done = train(copy)
    assert done.returncode == 2
    assert "it names 'x0' as an owner, which is none of the devices d0, d1" in done.stderr
    assert done.stderr.count("\n") == 1


def test_reading_never_writes(folder: Path) -> None:
    before = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    read_all(folder)
    assert {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == before


def train(bundle: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "train.py", "--in-process", "--steps", "1"]
    return warm.run(words, cwd=bundle, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.nightly
def test_a_run_ends_with_one_line(trained_bundle: Path) -> None:
    file = trained_bundle / "weights" / "d1.safetensors"
    whole = file.read_bytes()
    try:
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        done = train(trained_bundle)
    finally:
        file.write_bytes(whole)
    assert done.returncode == 2
    assert done.stderr.startswith("error[BX5180]: ")
    assert done.stderr.count("\n") == 1
    assert "is not as it was written" in done.stderr


# --------------------------------------------------------------------------- int8


DICE = torch.Generator().manual_seed(2)
WEIGHTS = torch.randint(-127, 128, (3, 24, 16), generator=DICE, dtype=torch.int8)
SCALES = torch.rand(3, 24, 1, generator=DICE)
PAIRS = tuple(zip(WEIGHTS, SCALES, strict=True))


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widening, "_free_or_read", {})


def storages() -> int:
    return sum(map(len, widening._free_or_read.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_widened_product_is_bitwise_equal(dtype: torch.dtype) -> None:
    for weight, scale in zip(WEIGHTS, SCALES.to(dtype), strict=True):
        assert torch.equal(widened(weight, scale), weight * scale)


def test_memory_is_used_again_only_when_nothing_has_it() -> None:
    first = widened(WEIGHTS[0], SCALES[0])
    view = first.t()[3:]
    kept = first.clone()
    del first
    second = widened(WEIGHTS[1], SCALES[1])
    assert torch.equal(view, kept.t()[3:])
    assert storages() == 2
    del view
    third = widened(WEIGHTS[2], SCALES[2])
    assert storages() == 2
    assert torch.equal(second, WEIGHTS[1] * SCALES[1])
    assert torch.equal(third, WEIGHTS[2] * SCALES[2])


@pytest.mark.parametrize(("promising", "count"), [(True, 1), (False, 3)])
def test_saved_tensors_are_not_written_over(promising: bool, count: int) -> None:
    """In a device nothing keeps it; in anybody's own loop autograd does, and has it to itself."""
    x = torch.randn(4, 16, generator=DICE, requires_grad=True)
    if promising:
        with making_again():
            results = [F.linear(x, again(widened, *pair)) for pair in PAIRS]
    else:
        results = [F.linear(x, again(widened, *pair)) for pair in PAIRS]
    assert storages() == count
    plain = [F.linear(x, weight * scale) for weight, scale in PAIRS]
    for mine, theirs in zip(results, plain, strict=True):
        ours, want = (torch.autograd.grad(y.square().sum(), x)[0] for y in (mine, theirs))
        assert torch.equal(ours, want)


# --------------------------------------------------------------------------- files of JSON


TWICE = '{"d0": "a.safetensors", "d1": "b", "d0": "c.safetensors"}'


def test_an_entry_that_is_there_twice_is_named() -> None:
    for hook in (once, once_of_core):
        with pytest.raises(ValueError, match="'d0' is there twice"):
            json.loads(TWICE, object_pairs_hook=hook)
        assert json.loads('{"a": {"b": 1}}', object_pairs_hook=hook) == {"a": {"b": 1}}


def test_files_of_a_bundle_are_refused(tmp_path: Path) -> None:
    for name, read in (("index.json", read_index), ("buckets.json", read_buckets)):
        (tmp_path / name).write_text(TWICE)
        with pytest.raises(WeightsError, match="'d0' is there twice"):
            read(tmp_path)


def test_a_plan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"format": 1, "mode": "train", "mode": "eval"}')
    with pytest.raises(InputError, match="'mode' is there twice"):
        read_plan(tmp_path / "plan.json")


def test_a_record_is_refused_whose_checksum_is_of_the_last_of_two() -> None:
    text = sealed({"step": 3}).decode()
    assert unsealed(text.encode(), "here") == {"step": 3}
    twice = text.replace('"step": 3', '"step": 2,\n "step": 3')
    with pytest.raises(BrokenError, match="here: it is not whole"):
        unsealed(twice.encode(), "here")
