"""`--partitioner auto` on the command line: the table, the bounds, JSON, and the bundle's plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bigbrain_fx.plan import read_plan
from tests.support.command_line import call, write_cluster, write_model

AUTO = ("--partitioner", "auto", "--effort", "fast")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("auto")
    cluster, model = write_cluster(folder), write_model(folder)
    made = call("split", model, "--devices", cluster, *AUTO, "--out", folder / "bundle", "-v")
    assert made.code == 0, made.err
    assert "auto (throughput, effort fast) compared" in made.out
    return folder / "bundle"


def test_split_writes_a_plan_with_its_search(bundle: Path) -> None:
    plan = read_plan(bundle)
    assert plan.partitioner == "auto"
    assert plan.search is not None
    assert plan.search.winner.step_s == plan.forecast.step_s
    assert json.loads((bundle / "plan.json").read_bytes())["search"]["effort"] == "fast"


def test_explain_shows_the_runners_up_and_the_gap(bundle: Path) -> None:
    text, (found,) = call("explain", bundle).out, call("explain", bundle, "--json").objects
    search = found["search"]
    for each in search["others"]:
        assert each["why"] in text
    for bound in search["bounds"]:
        assert f"no {bound['covers']} is faster than {bound['step_s']:.4g} s" in text
        assert f"within {bound['gap']:.1%}" in text


@pytest.mark.nightly
def test_estimate_takes_an_objective(bundle: Path) -> None:
    folder = bundle.parent
    words = (folder / "model.py", "--devices", folder / "cluster.json", *AUTO, "--json")
    (found,) = call("estimate", *words, "--objective", "latency").objects
    assert found["search"]["objective"] == "latency"
    assert found["micro_batches"] <= 2


def test_an_unknown_effort_is_bad_input(bundle: Path) -> None:
    folder = bundle.parent
    words = (folder / "model.py", "--devices", folder / "cluster.json", "--effort", "heroic")
    assert call("estimate", *words).code == 2
