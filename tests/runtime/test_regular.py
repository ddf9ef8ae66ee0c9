"""Files as they were written: an entry that a JSON file has twice is refused with its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bigbrain_fx.core import once as once_of_core
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import read_plan
from bigbrain_fx.runtime.buckets import read_buckets
from bigbrain_fx.runtime.checkpoint_format import BrokenError, sealed, unsealed
from bigbrain_fx.runtime.json_once import once
from bigbrain_fx.runtime.modules import WeightsError
from bigbrain_fx.runtime.weights import read_index

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
