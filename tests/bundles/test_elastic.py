"""A run whose device keeps dying goes on without it, from what the others have."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file

import bigbrain_fx as bb
from bigbrain_fx.bundles.elastic import _options, run_elastic, without
from bigbrain_fx.bundles.launch import DeviceLostError, RunOptions, run
from bigbrain_fx.bundles.resplitting import Resplit, resplit
from bigbrain_fx.core import Host, Link
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Options, Source, make_plan, read_plan, replan
from bigbrain_fx.supervisor import Event
from tests.supervisor.test_replay_bundle import python
from tests.support import samples
from tests.support.bundles import cluster, copied, edit, edit_last, split_small
from tests.support.command_line import call

STEPS, EVERY, DIES_IN = 7, 2, 5
KILL_ALWAYS = f'''
def kill_always(device, step):
    """End the middle device's process whenever it comes to step {DIES_IN}."""
    if device.name == "d1" and step == {DIES_IN}:
        os.kill(os.getpid(), 9)


HOOKS.on_step_begin.append(kill_always)

if __name__'''


ONCE_COMMITTED = """record = Path(__file__).resolve().parents[1] / "commits" / "commit-3.json"
        until = time.monotonic() + 60.0
        while not record.exists() and time.monotonic() < until:
            time.sleep(0.01)
        os.kill("""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dying(split_small(tmp_path_factory.mktemp("elastic"), cluster(3)))


def dying(made: Path) -> Path:
    """Let a bundle's d1 die whenever it comes to a step."""
    edit_last(made / "train.py", "if __name__", KILL_ALWAYS.lstrip("\n"))
    edit(made / "train.py", "from pathlib", "import os\nfrom pathlib")
    return made


def trained(folder: Path) -> Mapping[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(load_file(path))
    return found


@pytest.mark.nightly
def test_a_run_goes_on_without_a_device(bundle: Path, tmp_path: Path) -> None:
    goes_on_without_a_device(bundle, tmp_path, "d0, d2")


def goes_on_without_a_device(bundle: Path, tmp_path: Path, rest: str) -> None:
    """The same bits as a run in one process that is moved at the same step."""
    copy, events = copied(bundle, tmp_path), list[Event]()
    options = RunOptions(
        STEPS, spares=0, restarts=1, snapshot_every=EVERY, save=tmp_path / "trained"
    )
    done = run_elastic(copy, options, on_event=events.append)
    (moved,) = [event for event in events if event["event"] == "moved"]
    assert moved["step"] == 4  # the last snapshot before the step in which it dies
    assert moved["devices"] == rest
    assert [line.step for line in done.steps] == list(range(STEPS))
    assert len([event for event in events if event["event"] == "died"]) == 2
    assert Path(moved["bundle"]) == copy.with_name(f"{copy.name}-elastic-1")
    assert not list(copy.parent.glob("*rescued*"))

    reference = tmp_path / "reference"
    shutil.copytree(bundle, reference, ignore=shutil.ignore_patterns("__pycache__"))
    words = ("train.py", "--in-process", "--checkpoint-dir", "commits")
    first = python(reference, *words, "--steps", "4", "--checkpoint-every", "0")
    assert first.returncode == 0, first.stderr
    left = without(read_plan(bundle).cluster, "d1")
    assert left is not None
    resplit(reference, left, tmp_path / "on-two")
    more = ("--resume", "--steps", str(STEPS), "--save", str(tmp_path / "wanted"))
    second = python(tmp_path / "on-two", *words, *more)
    assert second.returncode == 0, second.stderr
    want, found = trained(tmp_path / "wanted"), trained(tmp_path / "trained")
    assert want.keys() == found.keys()
    assert want
    assert all(torch.equal(tensor, found[name]) for name, tensor in want.items())


@pytest.mark.nightly
def test_the_newer_one_of_commit_and_snapshot_is_taken(bundle: Path, tmp_path: Path) -> None:
    copy, events = copied(bundle, tmp_path), list[Event]()
    edit(copy / "train.py", "os.kill(", ONCE_COMMITTED)
    edit(copy / "train.py", "import os", "import os\nimport time")
    options = RunOptions(
        STEPS,
        spares=0,
        restarts=0,
        snapshot_every=100,
        commits=tmp_path / "commits",
        commit_every=3,
    )
    run_elastic(copy, options, on_event=events.append)
    assert [event["step"] for event in events if event["event"] == "moved"] == [3]


@pytest.mark.nightly
def test_without_it_the_device_is_named(bundle: Path, tmp_path: Path) -> None:
    options = RunOptions(STEPS, spares=0, restarts=0, snapshot_every=EVERY)
    with pytest.raises(DeviceLostError, match="device d1 was killed by signal 9") as caught:
        run(copied(bundle, tmp_path), options)
    assert caught.value.device == "d1"


def test_nothing_to_go_on_from_is_the_first_error(bundle: Path, tmp_path: Path) -> None:
    """No snapshot was taken, and no commit."""
    options = RunOptions(STEPS, spares=0, restarts=0, snapshot_every=100)
    with pytest.raises(DeviceLostError, match="d1"):
        run_elastic(copied(bundle, tmp_path), options)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_a_cluster_with_one_device_less() -> None:
    whole = replace(
        cluster(3, ("a", "b")),
        links=(("d0", "d1", Link(1.0, 1.0)), ("d0", "d2", Link(2.0, 2.0))),
        hosts=(Host("a", 1e9), Host("b", 1e9)),
    )
    left = without(whole, "d1")
    assert left is not None
    assert [device.name for device in left.devices] == ["d0", "d2"]
    assert left.links == (("d0", "d2", Link(2.0, 2.0)),)
    assert [host.name for host in left.hosts] == ["a"]
    assert without(cluster(1), "d0") is None


def test_replicas_that_are_named_stay_without_the_device_and_one_alone_has_no_name() -> None:
    """One named replica would leave the others idle, and ZeRO with nothing to share."""
    whole = replace(cluster(3), replicas=(("d0", "d1"), ("d2",)))
    left = {name: without(whole, name) for name in ("d1", "d2")}
    assert [each.replicas for each in left.values() if each] == [(("d0",), ("d2",)), ()]
    graph = samples.sample("digits").graph
    options = Options("naive", micro_batches=4, replicas=2, zero_stage=1, sum_order="micro")
    plan = make_plan(graph, whole, Source("digits.py", True, True, True, False, None, ""), options)
    assert [replan(plan, each).stages.replicas for each in left.values() if each] == [2, 2]
    one = replan(plan, replace(cluster(2), replicas=(("d0",),)))
    assert (one.stages.replicas, one.stages.zero_stage, one.stages.devices) == (1, 0, ("d0",))


@pytest.mark.parametrize(("kind", "spares"), [("cpu", 1), ("cuda", None)])
def test_gpus_alone_replace_no_process(
    bundle: Path, kind: Literal["cpu", "cuda"], spares: int | None
) -> None:
    """They go on over nccl, where no process can be replaced."""
    plan = read_plan(bundle)
    devices = tuple(replace(device, kind=kind) for device in plan.cluster.devices)
    left = replace(plan, cluster=replace(plan.cluster, devices=devices))
    moved, options = Resplit(left, bundle, bundle / "commits", 3, ()), RunOptions(STEPS, spares=1)
    found = _options(options, moved, options)
    assert found == replace(
        options, commits=bundle / "commits", commit_every=0, resume=True, spares=spares
    )


def test_a_run_without_replacement_leaves_no_device_behind(bundle: Path) -> None:
    with pytest.raises(InputError, match="cannot go on without a device"):
        run_elastic(bundle, RunOptions(2))
    done = call("run", str(bundle), "--elastic", "--no-replay")
    assert done.code == 2
    assert bb.run_elastic is run_elastic
