"""Misspelt names of a model file are remarked on; names that are read are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigbrain_fx.frontend.spelling import misspelt_names


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("clip_nrom = 1.0", "clip_norm"),
        ("def optim(named_params): ...", "optimizer"),
        ("optimiser: object = None", "optimizer"),
        ("def loss_fn(output, batch): ...", "loss"),
        ("def make_model(): ...", "model"),
    ],
)
def test_a_name_near_a_missing_one_is_remarked_on(tmp_path: Path, line: str, meant: str) -> None:
    path = tmp_path / "model.py"
    path.write_text(f"import torch.optim\n{line}\ntorch.optim.AdamW\n")
    name = line.replace("def ", "").partition("(")[0].split(" ")[0].rstrip(":")
    assert misspelt_names(path) == (f"model.py:2: nothing reads `{name}`; was `{meant}` meant?",)


@pytest.mark.parametrize(
    "text",
    [
        "clip_norm = 1.0\nclip_nrom = 2.0\n",  # the right name is there
        "def loss_fn(a): ...\ndef step(a): return loss_fn(a)\n",  # it is read
        "from mine import *\ndef optim(): ...\n",  # which may have the right name
        "def tokens(): ...\nWIDTH = 8\n",
        "this is no Python",
    ],
)
def test_other_names_are_not(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.py"
    path.write_text(text)
    assert misspelt_names(path) == ()
    assert misspelt_names(tmp_path / "none.py") == ()
