"""`pack`: a bundle and a model file on one cluster, its files, its refusals."""

from __future__ import annotations

import shlex
from pathlib import Path

from bigbrain_fx.cli.packing import split_command
from bigbrain_fx.cluster import read_cluster
from bigbrain_fx.plan import read_plan
from tests.support.command_line import call, write_cluster, write_model


def test_a_bundle_and_a_model_share_a_cluster(bundle: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path)
    words = ("pack", bundle, model, "-d", write_cluster(tmp_path), "--steps", "10", "--steps", "20")
    done = call(*words, "--json", "--out", tmp_path / "parts")
    assert done.code == 0, done.err
    (found,) = done.objects
    assert [job["name"] for job in found["jobs"]] == ["bundle", "model"]
    assert {name for job in found["jobs"] for name in job["devices"]} == {"d0", "d1"}
    assert found["is_exact"]
    assert found["jobs"][1]["ends_s"] == 20 * found["jobs"][1]["step_s"]
    parts = [read_cluster(tmp_path / "parts" / f"{name}.json") for name in ("bundle", "model")]
    assert [len(part.devices) for part in parts] == [1, 1]
    again = call(*words, "--out", tmp_path / "parts")
    assert again.code == 2
    assert "exists already" in again.err


def test_the_printed_command_splits_the_model_of_a_bundle(bundle: Path) -> None:
    said = split_command(str(bundle), "a b", Path("parts/a b.json"))
    model = read_plan(bundle).source.path
    assert shlex.split(said)[:5] == ["bigbrain-fx", "split", model, "--devices", "parts/a b.json"]
    assert split_command("m.py:model", "m", Path("m.json")).startswith("bigbrain-fx split m.py:mod")


def test_bad_input(tmp_path: Path) -> None:
    model, cluster = write_model(tmp_path), write_cluster(tmp_path)
    one = call("pack", model, "-d", cluster)
    assert one.code == 2
    assert "expected several jobs, found 1" in one.err
    steps = call("pack", model, model, "-d", cluster, *["--steps", "1"] * 3)
    assert steps.code == 2
    assert "found 3 numbers" in steps.err
