"""Replicas that are lost for good: the others go on in their processes, with undisturbed bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bigbrain_fx.bundles.resplitting import resplit
from bigbrain_fx.supervisor import FailedError, Rescue, Supervisor
from bigbrain_fx.supervisor.judging import Death
from bigbrain_fx.supervisor.peering import Losing
from tests.supervisor.test_peer_states import (
    STEPS,
    UNLIKE,
    named,
    plain,
    require_same,
    split,
)
from tests.supervisor.test_replay_bundle import python
from tests.support.bundles import MODEL, cluster
from tests.support.puppets import Stage
from tests.support.replayed import Fault, Seen, supervised

NORMS = MODEL.replace("nn.LayerNorm(16)", "nn.BatchNorm1d(5)")  # over letters


def lost(
    folder: Path,
    bundle: Path,
    devices: int,
    faults: list[Fault],
    *words: str,
    rescue: Rescue = lambda *_: None,
    restarts: int = 0,
) -> Seen:
    """Run where no death is worth a restart, until replicas are lost; the bits are plain PyTorch's.

    Args:
        folder: for the run.
        bundle: what is run.
        devices: how many it has.
        faults: what happens.
        words: more for train.py.
        rescue: as the supervisor's.
        restarts: allowed after the first loss.
    """

    def allow(supervisor: Supervisor) -> None:
        losing = next(p for p in supervisor.policies.parts if isinstance(p, Losing))
        leave_out = losing.leave_out

        def leave_out_and_allow(death: Death, reason: str) -> None:
            leave_out(death, reason)
            supervisor.judge.restarts = restarts

        losing.leave_out = leave_out_and_allow  # type: ignore[method-assign]

    seen = supervised(
        bundle,
        folder,
        named(devices),
        STEPS,
        faults,
        more_words=words,
        on_supervisor=allow,
        rescue=rescue,
        every=None,
        restarts=0,
    )
    assert len(seen.struck) == len(faults)
    require_same(seen, folder, bundle)
    return seen


REPLICAS = [["d0", "d1"], ["d2", "d3"]]


def standing(folder: Path, replicas: list[list[str]], restarts: int = 0) -> Stage:
    """Connect puppets of which so many are replaced."""
    made = Stage(folder, ("peers",), lambda *_: None, devices=named(4), restarts=restarts)
    made.replicas = replicas
    made.begin()
    return made


def close(on: Stage) -> None:
    for puppet in on.puppets:
        puppet.end(-9)
    on.supervisor.crew.close()
    on.supervisor.snapshots.close()
    for puppet in on.puppets:
        puppet.process.dispose()


def test_reports_of_the_step_before_a_loss_do_not_count(tmp_path: Path) -> None:
    on = standing(tmp_path, REPLICAS)
    d0, d1, d2, d3 = on.puppets
    for puppet in (d0, d2, d3):
        puppet.say("vote", step=0, yes=True)
    on.turn_until(lambda: len(on.supervisor.votes.votes.get(0, {})) == 3)
    d2.end(-9)
    on.turn_until(lambda: d3.process.poll() is not None and not on.supervisor.crew.ending)
    assert d0.order("generation") == {"do": "generation", "number": 1, "lost": ["d2", "d3"]}
    d1.say("vote", step=0, yes=True)  # before it has heard of it
    for puppet in (d0, d1):
        puppet.say("ready", generation=1, expected={}, layouts={})
    on.turn_until(lambda: d0.order("go")["generation"] == 1)
    assert on.supervisor.votes.votes == {}
    assert "voted" not in d0.hear()
    for puppet in (d0, d1):
        puppet.say("vote", step=0, yes=True)
    on.turn_until(lambda: "voted" in d0.hear())
    d1.end(-9)
    with pytest.raises(FailedError, match="d1"):  # nobody has what it has
        on.turn_until(lambda: False)
    close(on)


def test_a_replica_that_waits_for_its_state_is_not_left_alone(tmp_path: Path) -> None:
    """It would go on with the weights that it has begun with."""
    on = standing(tmp_path, REPLICAS, restarts=1)
    d0, *_, d3 = on.puppets
    for puppet in on.puppets:
        puppet.say("vote", step=0, yes=True)
    on.turn_until(lambda: on.supervisor.snapshots.epoch == 1)
    d3.end(-9)
    on.turn_until(lambda: len(on.puppets) == 5 and "be" in on.puppets[-1].hear())
    d0.end(-9)
    with pytest.raises(FailedError, match="d0"):
        on.turn_until(lambda: False)
    close(on)


def test_nothing_is_left_out_where_the_program_cannot(tmp_path: Path) -> None:
    """Then snapshots are kept, for `--elastic` to go on from."""
    on = standing(tmp_path, [])
    assert "peers" not in on.puppets[0].order("go")
    on.puppets[3].end(-9)
    with pytest.raises(FailedError, match="d3") as caught:
        on.turn_until(lambda: False)
    assert caught.value.moves
    close(on)


@pytest.mark.nightly
def test_the_other_goes_on_in_its_process(tmp_path: Path) -> None:
    bundle = split(tmp_path / "made", (("d0",), ("d1",)))
    seen = lost(tmp_path / "run", bundle, 2, [Fault("d0", 2, 5)])
    (gone,) = seen.of("replica_lost")
    assert (gone["replica"], gone["devices"], gone["step"]) == (0, "d0", 2)
    (end,) = seen.of("standing")
    assert (end["replicas"], end["devices"], end["lost"]) == ("1 of 2", "d1", "d0")
    (survivor,) = seen.processes["d1"]
    assert survivor["steps"] == list(range(STEPS))


@pytest.mark.nightly
def test_three_of_unlike_cuts_lose_two(tmp_path: Path) -> None:
    bundle = split(tmp_path / "made", (*UNLIKE, ("d5",)), NORMS, (2, 1, 1))
    faults = [Fault("d4", 1, "updated"), Fault("d1", 3, 9)]
    seen = lost(tmp_path / "run", bundle, 6, faults)
    assert [event["left"] for event in seen.of("replica_lost")] == ["2 of 3", "1 of 3"]
    assert [event["step"] for event in seen.of("replica_lost")] == [2, 3]


@pytest.mark.nightly
@pytest.mark.parametrize("at", [0, 4, 8, 9, 10, 12, "updated", "end"])
def test_no_place_is_a_bad_one(tmp_path: Path, at: int | str) -> None:
    bundle = split(tmp_path / "made", (("d0", "d1"), ("d2", "d3")), NORMS)
    for name in ("d0", "d3"):
        lost(tmp_path / name, bundle, 4, [Fault(name, 2, at)])


@pytest.mark.nightly
def test_commits_afterwards_are_read_by_resume_and_resplit(tmp_path: Path) -> None:
    """The one that is under way when the replica is lost is missed, and said.

    What comes back is taken in there: by `--resume` all that were, by `resplit` others, too.
    """
    bundle, run = split(tmp_path / "made", (("d0", "d1"), ("d2", "d3"))), tmp_path / "run"
    commits = ("--checkpoint-dir", str(tmp_path / "commits"))
    seen = lost(run, bundle, 4, [Fault("d0", 3, "updated")], *commits, "--checkpoint-every", "2")
    assert {event["step"] for event in seen.of("missed")} <= {4}
    assert {path.stem for path in (run / "bundle" / "out").iterdir()} == set(named(4))
    _, expected = plain(bundle, STEPS + 2)
    resplit(bundle, cluster(1), tmp_path / "one", tmp_path / "commits")
    three = replace(cluster(6), replicas=tuple((f"d{i}", f"d{i + 1}") for i in (0, 2, 4)))
    resplit(bundle, three, tmp_path / "three", tmp_path / "commits")
    own = ("--checkpoint-dir", "commits")
    for where, words in ((bundle, commits), (tmp_path / "one", own), (tmp_path / "three", own)):
        out = str(tmp_path / "out" / where.name)
        given = (*words, "--resume", "--steps", str(STEPS + 2), "--save", out)
        done = python(where, "train.py", "--in-process", *given)
        assert done.returncode == 0, done.stderr
        assert "step     6" in done.stdout
        assert "step     5" not in done.stdout
        for path in Path(out).iterdir():
            assert all(torch.equal(t, expected[n]) for n, t in load_file(path).items())


@pytest.mark.nightly
def test_the_last_ones_devices_are_replaced_from_snapshots(tmp_path: Path) -> None:
    bundle = split(tmp_path / "made", (("d0", "d1"), ("d2", "d3")), NORMS)
    faults = [Fault("d0", 1, 5), Fault("d3", 3, 7), Fault("d2", 5, "updated")]
    seen = lost(tmp_path / "run", bundle, 4, faults, restarts=5)
    assert [event["device"] for event in seen.of("assigned")] == ["d3", "d2"]
    assert seen.of("snapshot")[0]["step"] == 1
    assert not seen.of("took_state")


@pytest.mark.nightly
def test_the_last_one_ends_the_run_and_what_it_had_is_kept(tmp_path: Path) -> None:
    bundle = split(tmp_path / "made", (("d0",), ("d1",)))
    kept: dict[int, list[str]] = {}

    def keep(step: int, files: Mapping[str, int]) -> None:
        kept[step] = list(files)

    faults = [Fault("d0", 2, 5), Fault("d1", 3, 5)]
    with pytest.raises(FailedError, match="d1 was killed") as caught:
        lost(tmp_path / "run", bundle, 2, faults, rescue=keep)
    assert caught.value.left_out == ("d0",)
    assert kept == {2: ["d1"]}
