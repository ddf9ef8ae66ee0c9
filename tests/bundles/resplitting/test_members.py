"""Runs of tensor groups are moved, and their commits exported: parts are put together and cut."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import bigbrain_fx
from bigbrain_fx.bundles import export_training, export_weights
from bigbrain_fx.bundles.going_on import export_commit
from bigbrain_fx.bundles.resplitting import Named, newest_state, resplit
from bigbrain_fx.core import Cluster
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import read_plan
from bigbrain_fx.runtime.checkpoint_store import CheckpointStore
from bigbrain_fx.runtime.state import State
from tests.bundles.resplitting.test_resplit import train
from tests.support.bundles import MODEL, cluster

STEPS = 2


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, nursery: object) -> Path:
    """A run of two replicas, each a group of two with unequal shares, after two steps."""
    folder = tmp_path_factory.mktemp("begun")
    (folder / "letters.py").write_text(MODEL)
    options = bigbrain_fx.Options(
        "naive", micro_batches=4, tensor=2, tensor_shares=(3, 1), replicas=2, zero_stage=1
    )
    bundle = bigbrain_fx.split(folder / "letters.py", cluster(4), folder / "b", options).bundle
    train(bundle, STEPS, "--checkpoint-dir", "commits")
    return bundle


def contents(named: Named) -> dict[str, tuple[object, ...]]:
    """Return what each tensor of a state is, byte for byte."""
    return {
        name: (place.entry.dtype, tuple(place.entry.shape), bytes(place.data))
        for name, place in named.tensors.items()
    }


def whole(bundle: Path) -> tuple[dict[str, tuple[object, ...]], object]:
    with newest_state(read_plan(bundle), bundle, bundle / "commits", bundle) as (named, _):
        return contents(named), json.loads(json.dumps(named.optimizer))


@pytest.mark.gate("no groups")
@pytest.mark.parametrize(
    ("where", "members", "replicas"),
    [(cluster(4), 2, 2), (cluster(2), 2, 1), (cluster(3), 1, 2)],
    ids=["the same", "one replica of two members", "no groups"],
)
def test_a_moved_state_is_the_same_byte_for_byte(
    begun: Path, tmp_path: Path, where: Cluster, members: int, replicas: int
) -> None:
    """Moments of an optimizer that is divided in other places, parts of unequal shares."""
    moved = resplit(begun, where, tmp_path / "moved")
    assert (moved.plan.stages.members, moved.plan.stages.replicas) == (members, replicas)
    before, after = whole(begun), whole(moved.bundle)
    assert before == after
    assert "optimizer:exp_avg:blocks.0.up.weight" in before[0]
    assert before[0]["parameter:blocks.0.up.weight"][1] == (32, 16)


def test_members_hold_their_parts_of_what_was_whole(begun: Path, tmp_path: Path) -> None:
    moved = resplit(begun, cluster(2), tmp_path / "moved")
    (record, *_) = CheckpointStore(moved.commits).records(print)
    shapes = [
        State.from_buffer(
            CheckpointStore(moved.commits).load(record, name, {}, print).image
        ).tensors
        for name in ("d0", "d1")
    ]
    names = "parameter:blocks.0.up.weight", "optimizer:exp_avg:blocks.0.up.weight"
    assert [[tuple(each[name].shape) for name in names] for each in shapes] == [
        [(24, 16), (24, 16)],
        [(8, 16), (8, 16)],
    ]


def test_groups_may_be_left_out(begun: Path, tmp_path: Path) -> None:
    moved = resplit(begun, cluster(4), tmp_path / "moved", tensor=1)
    assert moved.plan.placement.tensor is None
    assert whole(begun) == whole(moved.bundle)


@pytest.mark.nightly
def test_there_may_be_other_groups_and_back(begun: Path, tmp_path: Path) -> None:
    """Rules and the optimizer are tried first, in a process with torch."""
    none = resplit(begun, cluster(2), tmp_path / "none", tensor=1)
    groups = resplit(none.bundle, cluster(3), tmp_path / "groups", tensor=3)
    assert groups.plan.stages.members == 3
    assert groups.plan.sharded.shards
    assert whole(begun) == whole(none.bundle) == whole(groups.bundle)
    later = train(groups.bundle, STEPS + 1, "--checkpoint-dir", "commits", "--resume")
    assert later == pytest.approx(train(begun, STEPS + 1)[STEPS:], rel=1e-5)


def test_plans_that_groups_cannot_have_are_refused_before_writing(
    begun: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="groups of 2 devices"):
        resplit(begun, cluster(3), tmp_path / "moved", tensor=2)
    none = resplit(begun, cluster(2), tmp_path / "none", tensor=1).bundle
    looks_further = "OPTIMIZER = lambda named: torch.optim.Adafactor([p for _, p in named])"
    (none / "training.py").write_text((none / "training.py").read_text() + f"\n\n{looks_further}\n")
    with pytest.raises(InputError, match="more than one number at a time"):
        resplit(none, cluster(2), tmp_path / "moved", tensor=2)
    assert not (tmp_path / "moved").exists()


def test_commits_are_exported(begun: Path, tmp_path: Path) -> None:
    state, _ = whole(begun)
    file, optimizer = tmp_path / "model.safetensors", tmp_path / "optimizer.safetensors"
    assert export_training(begun, file, optimizer, begun / "commits").step == STEPS
    found = load_file(file)
    moments = load_file(optimizer)
    for name, tensors in (("parameter:", found), ("optimizer:", moments)):
        own = {full: value for full, value in state.items() if full.startswith(name)}
        assert own
        plain = {full.removeprefix("parameter:"): value for full, value in own.items()}
        assert all(as_stored(tensors[full]) == value[1:] for full, value in plain.items())
    assert export_commit(begun, tmp_path / "again.safetensors", begun / "commits")[1] == STEPS
    assert equal(load_file(tmp_path / "again.safetensors"), found)
    export_weights(begun, tmp_path / "first.safetensors")
    assert not equal(load_file(tmp_path / "first.safetensors"), found)


def as_stored(tensor: Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.contiguous().numpy().tobytes()


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
