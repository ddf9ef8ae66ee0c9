"""Freezing at a step has the bits of one process that does so; schedules that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigbrain_fx.errors import InputError
from bigbrain_fx.weights import read_header
from tools.freezing import plain, same
from tools.freezing_run import Size, read_schedule, run_schedule, written

SMALL = Size(width=16, blocks=2, rows=16)


@pytest.mark.nightly
def test_what_goes_on_is_what_one_process_computes(tmp_path: Path) -> None:
    schedule = read_schedule(("2:embed,places,blocks.0",), 4)
    bundle = written(tmp_path, "AdamW", SMALL)
    phases, last = run_schedule(bundle, schedule, 4)
    assert same(phases, last, *plain(bundle, schedule, 4))
    images = (last / "commits").glob("commit-4-g*/*.safetensors")
    kept = {name for image in images for name in read_header(image)}
    assert "optimizer:exp_avg:head.weight" in kept
    assert not [name for name in kept if name.startswith("optimizer:") and "embed" in name]
    assert not same(phases, last, *plain(bundle, (), 4))


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (("embed",), r"expected STEP:MODULES, found 'embed'"),
        (("2:",), r"expected STEP:MODULES"),
        (("4:embed", "2:blocks"), r"do not rise"),
        (("9:embed",), r"do not rise to the run's 8"),
    ],
)
def test_a_schedule_that_is_none_is_refused(texts: tuple[str, ...], said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_schedule(texts, 8)
