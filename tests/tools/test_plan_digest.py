"""The net under planners: no plan changes but on purpose, and the tool tells what changed."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from bigbrain_fx.plan import Options, Plan, Source, make_plan
from bigbrain_fx.plan.search import Compared
from tests.support.synthetic import chain_graph, cluster_of, device
from tools.plan_digest import (
    Digest,
    cases,
    changes,
    digests,
    gate_cases,
    read_table,
    revision as revision_module,
)
from tools.plan_digest.__main__ import main
from tools.plan_digest.case_list import ALL_MODELS, MODELS, SCHEDULES
from tools.plan_digest.hashing import digest_of
from tools.plan_digest.revision import RevisionError, digests_of
from tools.plan_digest.tables import listed

A, B = Digest("a", 1.0, "g"), Digest("b", 1.1, "g")


def made() -> Plan:
    graph = chain_graph(3, 6)
    cluster = cluster_of(device("a"), device("b", 0.5))
    return make_plan(graph, cluster, Source("m.py"), Options(micro_batches=2))


def test_no_plan_is_other_than_the_table_has_it() -> None:
    found = digests(gate_cases())
    known = read_table()
    before = {key: known[key] for key in found}
    told = "\n".join(listed(changes(before, found), len(found)))
    advice = "python -m tools.plan_digest --against main, then --write where it is on purpose"
    assert before == found, f"{told}\n{advice}"


def test_the_table_has_every_case_once() -> None:
    keys = [case.key for case in cases()]
    assert len(set(keys)) == len(keys)
    assert list(read_table()) == keys
    models = {case.model for case in cases()}
    planned = {case.options.schedule for case in cases()}
    assert models == set(ALL_MODELS)
    assert set(MODELS) < models
    assert planned >= {*SCHEDULES, "gems"}


def test_decisions_and_forecasts_count_and_texts_do_not() -> None:
    plan = made()
    known = digest_of(plan)
    reason = replace(plan.placement, reason="another text")
    compared = (Compared("2 replicas", 1.0, "+3 %"),)
    assert digest_of(replace(plan, placement=reason, compared=compared)) == known
    near = replace(plan.forecast, step_s=plan.forecast.step_s * (1 + 1e-13))
    assert digest_of(replace(plan, forecast=near)) == known
    far = replace(plan.forecast, step_s=plan.forecast.step_s * 1.001)
    assert digest_of(replace(plan, forecast=far)) != known
    homes = {op: "b" for op in plan.placement.device_of}
    assert digest_of(replace(plan, placement=replace(plan.placement, device_of=homes))) != known
    turned = tuple(reversed(plan.programs))
    assert digest_of(replace(plan, programs=turned)) != known


def test_plans_that_differ_end_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.plan_digest.__main__.digests", lambda _cases, _n: {"digits | x": B})
    monkeypatch.setattr("tools.plan_digest.__main__.digests_of", lambda *_about: {"digits | x": A})
    ran = CliRunner().invoke(main, ["--models", "digits", "--against", "REV"])
    assert ran.exit_code == 1
    assert "digits | x: 1 s -> 1.1 s" in ran.output


def test_a_revision_that_is_not_there_ends_with_2() -> None:
    ran = CliRunner().invoke(main, ["--models", "digits", "--against", "no-such-revision"])
    assert ran.exit_code == 2
    assert ran.stderr.strip() == "git has no revision no-such-revision"


@pytest.mark.parametrize(
    ("packages", "why"),
    [
        (("bigbrain_fx", "tools"), "it is broken"),
        (("tools",), "it has no package bigbrain_fx"),
        (("bigbrain_fx",), "it has no package tools"),
    ],
)
def test_a_revision_that_does_not_run_is_told_and_its_tree_is_removed(
    packages: tuple[str, ...], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "repository"
    for package in packages:
        (root / package).mkdir(parents=True)
        (root / package / "__init__.py").write_text("")
    if "tools" in packages:
        tool = root / "tools" / "plan_digest"
        tool.mkdir()
        (tool / "__init__.py").write_text("")
        (tool / "__main__.py").write_text("raise SystemExit('it is broken')\n")
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "broken")
    monkeypatch.setattr(revision_module, "ROOT", root)
    with pytest.raises(RevisionError) as caught:
        digests_of("HEAD", ["digits"], 1)
    assert str(caught.value) == f"revision HEAD does not run: {why}"
    assert len(git(root, "worktree", "list").splitlines()) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("seed", ["0", "1"])  # a minute each
def test_hashes_are_the_same_under_any_hash_seed(seed: str, tmp_path: Path) -> None:
    out = tmp_path / "digests.json"
    words = [sys.executable, "-m", "tools.plan_digest", "--models", "digits", "--json", str(out)]
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    subprocess.run(words, cwd=root, env=environment, check=True, timeout=600)
    known = read_table()
    assert read_table(out) == {key: known[key] for key in read_table(out)}


def git(where: Path, *words: str) -> str:
    about = ["-c", "user.name=a", "-c", "user.email=a@b"]
    ran = subprocess.run(
        ["git", *about, *words], cwd=where, check=True, capture_output=True, text=True, timeout=60
    )
    return ran.stdout
