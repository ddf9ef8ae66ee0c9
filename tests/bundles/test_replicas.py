"""Bundles with replicas, as a user has them: moved to more or fewer, and killed."""

from __future__ import annotations

import itertools
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import bigbrain_fx
from bigbrain_fx.bundles import resplit, verify
from bigbrain_fx.bundles.launch import RunOptions, run
from bigbrain_fx.cli.option_values import read_axes, read_number, read_ratio
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Options, fold, read_plan
from bigbrain_fx.supervisor import Event
from tests.bundles.resplitting.test_resplit import train
from tests.support.bundles import MODEL, cluster, split_small, uneven
from tests.support.command_line import call

TREE = Options("naive", micro_batches=8, replicas=2, zero_stage=2, sum_order="tree")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split_small(tmp_path_factory.mktemp("replicas"), cluster(4), TREE)


@pytest.mark.nightly
def test_a_run_goes_on_with_more_or_fewer_replicas(bundle: Path, tmp_path: Path) -> None:
    """The binary tree has the same bits for all of them."""
    whole = train(bundle, 6)
    found = train(
        bundle, 2, "--checkpoint-dir", str(tmp_path / "commits"), "--checkpoint-every", "1"
    )
    at, commits = bundle, tmp_path / "commits"
    for devices, until in ((3, 4), (1, 6)):
        moved = resplit(at, cluster(devices), tmp_path / f"on-{devices}", commits)
        at, commits = moved.bundle, moved.commits
        go_on = ("--checkpoint-dir", str(commits), "--checkpoint-every", "1", "--resume")
        found += train(at, until, *go_on)
    assert read_plan(at).stages.sum_order == "tree"
    assert found == whole


@pytest.fixture
def unsharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle whose replicas divide the weights, too."""
    monkeypatch.setattr(fold, "LEAST_PART", 1024)
    options = replace(TREE, zero_stage=3, replica_shares=(5, 3))
    return split_small(tmp_path, cluster(2), options)


@pytest.mark.nightly
def test_weights_that_are_divided_are_saved_and_moved(unsharded: Path, tmp_path: Path) -> None:
    """Each device's part of a commit has what it keeps; others divide it otherwise."""
    end = ("--save", str(tmp_path / "whole"))
    whole = train(unsharded, 4, *end)
    found = train(
        unsharded, 2, "--checkpoint-dir", str(tmp_path / "commits"), "--checkpoint-every", "1"
    )
    moved = resplit(unsharded, cluster(3), tmp_path / "on-3", tmp_path / "commits")
    assert read_plan(moved.bundle).stages.gathers
    found += train(moved.bundle, 4, "--checkpoint-dir", str(moved.commits), "--resume")
    assert found == whole
    saved = [load_file(path) for path in sorted((tmp_path / "whole").glob("*.safetensors"))]
    assert not set(saved[0]) & set(saved[1])
    to = tmp_path / "model.safetensors"
    bigbrain_fx.export_weights(unsharded, to, weights=tmp_path / "whole")
    exported = load_file(to)
    joined = {**saved[0], **saved[1]}
    assert all(torch.equal(tensor, joined[name]) for name, tensor in exported.items())


@pytest.mark.nightly
def test_a_device_that_writes_statistics_is_replaced_and_moved(tmp_path: Path) -> None:
    norm = "nn.BatchNorm1d(5)"  # over letters: it reads [rows, letters, features]
    (tmp_path / "letters.py").write_text(MODEL.replace("nn.LayerNorm(16)", norm))
    options = replace(TREE, replicas=3, replica_shares=(4, 3, 1))
    split = bigbrain_fx.split(tmp_path / "letters.py", cluster(3), tmp_path / "bundle", options)
    require_replaced(split.bundle, tmp_path, 1)
    moved = resplit(split.bundle, cluster(2), tmp_path / "on-2", tmp_path / "commits")
    go_on = ("--checkpoint-dir", str(moved.commits), "--resume", "--save", str(tmp_path / "end"))
    train(moved.bundle, 12, *go_on)
    train(split.bundle, 12, "--save", str(tmp_path / "whole"))
    whole = load_file(tmp_path / "whole" / "d0.safetensors")
    end = load_file(tmp_path / "end" / "d0.safetensors")
    assert any(name.endswith("running_var") for name in end)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in end.items())


def require_replaced(bundle: Path, tmp_path: Path, victim: int) -> None:
    """Kill a device and train on: the bits are those of a run where nothing happened."""
    folder = tmp_path / "saved"
    pids: dict[str, int] = {}

    def hear(event: Event) -> None:
        if event["event"] == "started":
            pids.setdefault(event["device"], event["pid"])

    killed = itertools.count()

    def blow(line: object) -> None:
        if next(killed) == 2:
            os.kill(pids[f"d{victim}"], signal.SIGKILL)

    options = RunOptions(
        steps=8,
        save=folder,
        threads=1,
        logs=tmp_path / "logs",
        spares=1,
        commits=tmp_path / "commits",
        commit_every=4,
    )
    done = run(bundle, options, blow, on_event=hear)
    assert done.restarts == 1
    assert [line.loss for line in done.steps] == train(bundle, 8, "--save", str(tmp_path / "plain"))
    for path in sorted(folder.glob("*.safetensors")):
        expected = load_file(tmp_path / "plain" / path.name)
        assert all(torch.equal(t, expected[name]) for name, t in load_file(path).items())


@pytest.mark.parametrize(("text", "found"), [(None, None), ("auto", 0), ("3", 3)])
def test_replicas_are_a_number_or_auto(text: str | None, found: int | None) -> None:
    assert read_number(text, "--replicas") == found


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", ""])
def test_other_replicas_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="expected a number or auto"):
        read_number(text, "--replicas")


def test_shares_are_numbers_with_colons() -> None:
    assert read_ratio("3:1") == (3, 1)
    assert read_ratio(None) == ()
    for text in ("3,1", "3:0", ":", "a:b"):
        with pytest.raises(InputError, match="expected positive numbers with colons"):
            read_ratio(text)


def test_axes_are_names_with_commas() -> None:
    assert read_axes("heads, hidden") == ("heads", "hidden")
    assert read_axes(None) == ()
    for text in ("", "heads,", ","):
        with pytest.raises(InputError, match="expected names with commas"):
            read_axes(text)


@pytest.mark.nightly
def test_a_device_of_a_shard_group_is_replaced_and_its_run_moves(tmp_path: Path) -> None:
    options = replace(TREE, replicas=4, shard_group=2)
    found = split_small(tmp_path, cluster(4), options)
    verify(found, steps=3, processes=True).require_passed()
    require_replaced(found, tmp_path, 2)
    moved = resplit(found, cluster(3), tmp_path / "on-3", tmp_path / "commits")
    assert read_plan(moved.bundle).stages.shard_group == 0
    whole = train(found, 10)
    assert train(moved.bundle, 10, "--checkpoint-dir", str(moved.commits), "--resume") == whole[8:]


@pytest.mark.nightly
def test_shard_groups_sum_by_collectives_to_rounding(tmp_path: Path) -> None:
    """Each group scatters and gathers; the same shards of all are summed."""
    options = replace(TREE, sum_order="backend", replicas=4, shard_group=2)
    found = split_small(tmp_path, cluster(4), options)
    assert verify(found, steps=3, processes=True).passed


@pytest.fixture(scope="module")
def collective(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose gradients torch's collectives sum."""
    options = replace(TREE, sum_order="backend", zero_stage=1)
    return split_small(
        tmp_path_factory.mktemp("collective"), cluster(3), replace(options, replicas=3)
    )


@pytest.mark.nightly
def test_sums_by_collectives_replace_no_process_and_say_so(collective: Path) -> None:
    assert not {"launch.py", "supervisor"} & {path.name for path in collective.iterdir()}
    assert (collective / "runtime" / "collectives.py").is_file()
    assert "no process is replaced" in (collective / "README.md").read_text()
    assert 'sum_order = "backend"' in (collective / "device_d0.py").read_text()
    done = call("run", collective, "--steps", "2", "--standby", "1")
    assert done.code == 2
    assert "or with --all-reduce-order backend, whose sums are no messages" in done.err


@pytest.mark.nightly
def test_three_processes_sum_by_collectives_to_rounding(collective: Path, tmp_path: Path) -> None:
    """They go on from a commit; the plain way to run is the only one."""
    found = verify(collective, steps=3, processes=True)
    assert found.passed
    bundle = [check for check in found.checks if check.name.startswith("reference = bundle")]
    assert ["to rounding" in check.detail for check in bundle] == [True] * 3
    whole = train(collective, 3)
    parts = train(collective, 2, "--checkpoint-dir", str(tmp_path), "--checkpoint-every", "1")
    parts += train(collective, 3, "--checkpoint-dir", str(tmp_path), "--resume")
    assert parts == pytest.approx(whole, rel=1e-6)


@pytest.mark.nightly
def test_a_member_of_a_group_whose_batches_are_unequal_is_replaced(tmp_path: Path) -> None:
    """Messages of fewer rows are logged and sent again as they left."""
    (tmp_path / "letters.py").write_text(uneven(MODEL))
    options = Options("naive", micro_batches=4, tensor=2, tensor_shares=(3, 1))
    split = bigbrain_fx.split(tmp_path / "letters.py", cluster(4), tmp_path / "bundle", options)
    require_replaced(split.bundle, tmp_path, 3)
    verify(split.bundle, steps=4).require_passed()
    moved = resplit(split.bundle, cluster(2), tmp_path / "on-2", tmp_path / "commits")
    assert read_plan(moved.bundle).stages.members == 2
    whole = train(split.bundle, 10)
    later = train(moved.bundle, 10, "--checkpoint-dir", str(moved.commits), "--resume")
    assert later == pytest.approx(whole[8:], rel=1e-5)
