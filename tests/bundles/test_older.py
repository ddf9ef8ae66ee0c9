"""Bundles, checkpoints, profiles and costs of earlier versions are read, resumed and moved.

`tests/fixtures/v0_1_0.tar.xz` and `v0_2_0.tar.xz` are what those versions made of the `model.py`
and `cluster.json` in them: bundle/, commits/ at steps 2 and 4 of a run, saved8/ (its weights after
eight steps). That of 0.1.0 has ops.sqlite and costs.json as well.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bigbrain_fx import InputError, Options, RunOptions, estimate, read_plan, resplit, run
from bigbrain_fx.costs import ProfileStore, fit_file, read_model
from tests.support.command_line import write_cluster

pytestmark = pytest.mark.filterwarnings("ignore::bigbrain_fx.errors.FormatWarning")
FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
VERSIONS = ("v0_1_0", "v0_2_0")
OTHER_PROCESSOR = 1e-3  # eight steps of AdamW, if kernels round differently there


@pytest.fixture(params=VERSIONS)
def old(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The folder that an earlier version left behind."""
    with tarfile.open(FIXTURES / f"{request.param}.tar.xz") as packed:
        packed.extractall(tmp_path, filter="data")
    return tmp_path


first = pytest.mark.parametrize("old", VERSIONS[:1], indirect=True)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(load_file(path))
    return found


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(actual[name], tensor, atol=OTHER_PROCESSOR), name


@pytest.mark.gate("v0_1_0")
def test_a_bundle_resumes_from_its_checkpoint(old: Path, tmp_path: Path) -> None:
    saved = tmp_path / "now8"
    options = RunOptions(
        steps=8, spares=1, commits=old / "commits", resume=True, save=saved, threads=1
    )
    done = run(old / "bundle", options)
    assert [line.step for line in done.steps] == [4, 5, 6, 7]
    assert_close(weights(saved), weights(old / "saved8"))


@pytest.mark.nightly
def test_a_bundle_moves_to_other_devices(old: Path, tmp_path: Path) -> None:
    cluster = write_cluster(tmp_path, 3, name="three.json")
    moved = resplit(old / "bundle", cluster, tmp_path / "moved", commits=old / "commits")
    saved = tmp_path / "now8"
    commits = tmp_path / "moved" / "commits"
    run(moved.bundle, RunOptions(steps=8, commits=commits, resume=True, save=saved, threads=1))
    assert_close(weights(saved), weights(old / "saved8"))


@pytest.mark.nightly
@first
def test_profiles_and_costs_are_read(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_plan(old / "bundle").stages.devices
    assert ProfileStore(old / "ops.sqlite").machines()
    monkeypatch.setenv("BIGBRAIN_PROFILES", str(old / "ops.sqlite"))
    with pytest.raises(InputError, match="expected version 3, found 2") as caught:
        read_model(old / "costs.json")  # of seconds, which forecast new devices worse
    assert (caught.value.code, "fit again" in str(caught.value.help)) == ("BX1458", True)
    fit_file(old / "ops.sqlite", old / "again.json")  # the remedy
    monkeypatch.setenv("BIGBRAIN_LEARNED_COSTS", str(old / "again.json"))
    for name in ("measured", "learned"):
        plan = estimate(old / "model.py", old / "cluster.json", Options(name, micro_batches=2))
        assert plan.forecast.step_s > 0


def test_a_plan_of_another_format_is_refused_in_one_sentence(old: Path) -> None:
    path = old / "bundle" / "plan.json"
    plan = json.loads(path.read_text())
    path.write_text(json.dumps({**plan, "format": 99}))
    with pytest.raises(InputError, match=r"plan format 99 is not 2"):
        read_plan(old / "bundle")
