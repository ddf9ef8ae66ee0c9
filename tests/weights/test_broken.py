"""Checkpoints and indexes that a stranger left: one line each, and nothing is waited for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bigbrain_fx.weights import read_checkpoint, read_header, rewrite_index, stored_tensors
from tests.support.messages import refused


def pipe(path: Path) -> None:
    os.mkfifo(path)


def header(text: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))


def entry(**changes: object) -> Callable[[Path], object]:
    whole = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}
    return header(json.dumps({"w": whole}).encode())


BROKEN: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a pipe": ("BX3739", pipe),
    "a folder": ("BX3739", Path.mkdir),
    "nested": ("BX3740", header(b"[" * 50_000)),
    "a header of 2^62": ("BX3738", lambda path: path.write_bytes((1 << 62).to_bytes(8, "little"))),
    "a zip, as of torch.save": ("BX3738", lambda path: path.write_bytes(b"PK\x03\x04" + b" " * 44)),
    "negative": ("BX3743", entry(shape=[-2, -2])),
    "below nothing": ("BX3743", entry(shape=[-4], data_offsets=[16, 0])),
    "text for numbers": ("BX3742", entry(data_offsets=["0", "16"])),
    "after the end": ("BX3743", entry(data_offsets=[80, 96])),
}


@pytest.mark.parametrize(("code", "write"), BROKEN.values(), ids=BROKEN)
def test_a_header_is_read_or_refused(
    tmp_path: Path, code: str, write: Callable[[Path], object]
) -> None:
    write(tmp_path / "model.safetensors")
    with refused(code):
        read_header(tmp_path / "model.safetensors")


@pytest.mark.parametrize("how", ["a pipe", "nested", "a folder"])
def test_an_index_is_read_or_refused(tmp_path: Path, how: str) -> None:
    BROKEN[how][1](tmp_path / "model.safetensors.index.json")
    with refused("BX3709"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["[" * 50_000, "[]", '{"w": 3}', '{"w": {"key": "w"}}', "{"])
def test_references_lead_somewhere_or_are_refused(tmp_path: Path, text: str) -> None:
    save_file({"v": torch.ones(1)}, tmp_path / "d0.safetensors")
    (tmp_path / "d0.references.json").write_text(text)
    with refused("BX3726"):
        stored_tensors(tmp_path)


def test_an_index_keeps_its_kind(tmp_path: Path) -> None:
    """The runtime of a bundle of 0.1.0 knows no checksums: it takes every entry for a parameter."""
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
        save_file({"w": torch.ones(4)}, folder / "d0.safetensors")
    rewrite_index(new, old, {"w": "d0"})
    assert not (new / "index.json").exists()  # as in one for inference
    (old / "index.json").write_text('{"w": "d0"}')
    rewrite_index(new, old, {"w": "d0"})
    assert json.loads((new / "index.json").read_text()) == {"w": "d0"}
    for text in ('{"owner": {"w": "d0"}, "checksums": {}}', '{"owner": {"w":', "[1]", "[" * 50_000):
        (old / "index.json").write_text(text)
        rewrite_index(new, old, {"w": "d0"})
        found = json.loads((new / "index.json").read_text())
        assert found["owner"] == {"w": "d0"}
        assert set(found["checksums"]) == {"w"}
