"""Killing device processes: what comes out is what would have come out, and nobody else notices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bigbrain_fx.bundles.launch import RunOptions, run
from bigbrain_fx.plan import Options
from bigbrain_fx.supervisor import FailedError, Supervisor
from tests.support.bundles import cluster, split_small
from tests.support.replayed import Fault, Seen, supervised

NAMES = ("d0", "d1", "d2")
STEPS = 6
HANG_S = 6.0  # a host that is busy may keep a healthy process from its work for seconds


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three stages; the last holds the first one's weight too; gradients are clipped by norm."""
    options = Options("naive", schedule="1f1b", micro_batches=4)
    return split_small(tmp_path_factory.mktemp("replay"), cluster(3), options)


@pytest.fixture(scope="module")
def undisturbed(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return supervised(bundle, tmp_path_factory.mktemp("undisturbed"), NAMES, STEPS)


def require_same(seen: Seen, undisturbed: Seen, died: Sequence[str]) -> None:
    """The same losses, parameters, buffers and optimizer state; survivors did everything once."""
    assert seen.losses == undisturbed.losses
    assert seen.hashes == undisturbed.hashes
    for name in set(NAMES) - set(died):
        ours, theirs = seen.processes[name], undisturbed.processes[name]
        assert [(p["forwards"], p["steps"]) for p in ours] == [
            (p["forwards"], p["steps"]) for p in theirs
        ]
    assert [event["device"] for event in seen.of("died")] == list(died)


@dataclass(frozen=True)
class Scene:
    """Faults, and what is seen of them.

    Attributes:
        died: the devices whose processes end, in order; by default those of the faults.
        event: one that tells of d1.
        hang_s: how long a process may make no progress.
    """

    faults: tuple[Fault, ...]
    died: tuple[str, ...] | None = None
    event: str = ""
    hang_s: float | None = None


SCENES = {
    "before-anything": Scene((Fault("d1", 0, 0),)),
    "first-forward": Scene((Fault("d0", 2, 1),)),
    "last-forward": Scene((Fault("d2", 3, 2),)),
    "backward": Scene((Fault("d1", 3, 14),)),
    "before-the-update": Scene((Fault("d1", 3, "updated"),)),
    "end-of-a-step": Scene((Fault("d2", 3, "end"),)),
    "last-step": Scene((Fault("d0", STEPS - 1, "end"),)),
    "replacements-in-a-replay": Scene((Fault("d1", 3, 12), Fault("d1", 2, 5), Fault("d1", 2, 9))),
    "before-all-connect": Scene((Fault("d1", 3, 6), Fault("d2", 1, "ready"))),
    "while-all-connect": Scene((Fault("d1", 3, 6), Fault("d2", 1, "addressed"))),
    "stopped": Scene((Fault("d1", 3, 6, "stop"),), event="hang", hang_s=HANG_S),
    # The thread that tells of progress goes on; the one that computes does not.
    "asleep": Scene((Fault("d1", 3, 6, "sleep", 60.0),), event="hang", hang_s=HANG_S),
    "slow": Scene((Fault("d1", 3, 6, "sleep", 3.0),), died=(), event="slow", hang_s=8.0),
    "error-once": Scene((Fault("d1", 3, 6, "raise"),), event="died"),
}


@pytest.mark.gate("backward", "before-the-update")
@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_a_device_is_replayed_where_its_process_ends_and_only_there(
    bundle: Path, undisturbed: Seen, tmp_path: Path, scene: Scene
) -> None:
    options: dict[str, Any] = {} if scene.hang_s is None else {"hang_s": scene.hang_s}
    seen = supervised(bundle, tmp_path, NAMES, STEPS, scene.faults, **options)
    expected = [fault.device for fault in scene.faults] if scene.died is None else scene.died
    require_same(seen, undisturbed, expected)
    told = {event["device"] for event in seen.of(scene.event)}
    assert not scene.event or "d1" in told
    assert scene.event == "slow" or told <= {"d1"}  # on a busy host others may be slow, too


@pytest.mark.nightly
def test_connections_that_are_lost_are_made_again(
    bundle: Path, undisturbed: Seen, tmp_path: Path
) -> None:
    seen = supervised(bundle, tmp_path, NAMES, STEPS, [Fault("d1", 3, 6, "links")])
    require_same(seen, undisturbed, [])
    assert seen.of("links_lost")
    assert [e["generation"] for e in seen.of("formed")] == [0, 1]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("faults", "spares"),
    [
        pytest.param((Fault("d1", 3, 7), Fault("d1", 4, 3)), 1, id="a-spare-that-took-over"),
        pytest.param((Fault("d0", 3, 5), Fault("d1", 3, 6)), 1, id="neighbours"),
        pytest.param(tuple(Fault(name, 4, 3) for name in NAMES), 0, id="all"),
    ],
)
def test_several_die(
    bundle: Path, undisturbed: Seen, tmp_path: Path, faults: tuple[Fault, ...], spares: int
) -> None:
    seen = supervised(bundle, tmp_path, NAMES, STEPS, faults, spares=spares)
    died = [event["device"] for event in seen.of("died")]
    assert sorted(died) == sorted(fault.device for fault in faults)
    require_same(seen, undisturbed, died)
    used = {e["pid"] for e in seen.of("started") if e["device"] == "spare"}
    assert not spares or seen.of("assigned")[0]["pid"] in used


@pytest.mark.nightly
def test_a_replayed_run_is_the_run_without_a_supervisor(bundle: Path, tmp_path: Path) -> None:
    plain = run(bundle, RunOptions(STEPS, save=tmp_path / "plain"))
    kept = run(bundle, RunOptions(STEPS, save=tmp_path / "kept", spares=0, snapshot_every=2))
    assert [line.loss for line in kept.steps] == [line.loss for line in plain.steps]
    assert kept.max_rss_bytes.keys() == set(NAMES)
    for name in NAMES:
        ours = load_file(tmp_path / "kept" / f"{name}.safetensors")
        theirs = load_file(tmp_path / "plain" / f"{name}.safetensors")
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_messages_are_kept_until_all_devices_have_a_later_snapshot(undisturbed: Seen) -> None:
    """With a snapshot every second step: of those since the last one, and of the step at work."""
    [process] = undisturbed.processes["d0"]
    per_step = process["logged"][0]
    assert process["logged"][1] == 2 * per_step
    assert max(process["logged"]) <= 4 * per_step
    assert undisturbed.of("snapshot")[-1]["step"] == STEPS


@pytest.mark.nightly
def test_an_error_that_comes_again_stops_the_run(bundle: Path, tmp_path: Path) -> None:
    faults = [Fault("d1", 3, 6, "raise")] * 2
    with pytest.raises(FailedError, match="device d1 ended with exit code 1: the same error") as no:
        supervised(bundle, tmp_path, NAMES, STEPS, faults)
    assert no.value.death.step == 3
    assert "ZeroDivisionError: on purpose" in Path(no.value.death.log).read_text()


@pytest.mark.nightly
def test_too_many_deaths_stop_the_run(bundle: Path, tmp_path: Path) -> None:
    faults = [Fault("d1", 2, 6), Fault("d0", 3, 6)]
    with pytest.raises(FailedError, match="1 restarts within") as no:
        supervised(bundle, tmp_path, NAMES, STEPS, faults, restarts=1)
    assert (no.value.death.device, no.value.death.step) == ("d0", 3)


def test_a_stop_is_at_one_step_for_all(bundle: Path, undisturbed: Seen, tmp_path: Path) -> None:
    def stop_early(supervisor: Supervisor) -> None:
        tell = supervisor.told.on_step
        assert tell is not None

        def hear(step: int, loss: float, step_s: float) -> None:
            tell(step, loss, step_s)
            if step == 2:
                supervisor.ask_to_stop()

        supervisor.told.on_step = hear

    seen = supervised(bundle, tmp_path, NAMES, 10_000, on_supervisor=stop_early)
    assert seen.outcome.stopped_at is not None
    last = {process["steps"][-1] for found in seen.processes.values() for process in found}
    assert last == {seen.outcome.stopped_at - 1}
    assert seen.losses[:3] == undisturbed.losses[:3]


# --------------------------------------------------------------------------- commits to a disk


@pytest.mark.nightly
def test_deaths_and_commits(bundle: Path, undisturbed: Seen, tmp_path: Path) -> None:
    """The first device writes the records; it dies too, between commits and while one is due."""
    commits = tmp_path / "commits"
    words = ("--checkpoint-dir", str(commits), "--checkpoint-every", "2")
    faults = [Fault("d1", 1, 5), Fault("d0", 3, "end"), Fault("d2", STEPS - 1, "end")]
    seen = supervised(bundle, tmp_path, NAMES, STEPS, faults, more_words=words)
    require_same(seen, undisturbed, ["d1", "d0", "d2"])
    more = supervised(
        bundle,
        tmp_path / "more",
        NAMES,
        STEPS + 2,
        [Fault("d0", STEPS + 1, 4)],
        more_words=(*words, "--resume"),
    )
    whole = supervised(bundle, tmp_path / "whole", NAMES, STEPS + 2)
    assert more.losses == whole.losses[STEPS:]
    assert more.hashes == whole.hashes


@pytest.mark.nightly
def test_a_resumed_checkpoint_stays_until_a_snapshot(
    bundle: Path, undisturbed: Seen, tmp_path: Path
) -> None:
    """A replacement begins with it, however many commits were written since."""
    words = ("--checkpoint-dir", str(tmp_path / "commits"), "--checkpoint-every", "1")
    supervised(bundle, tmp_path / "first", NAMES, 2, more_words=words)
    written = str(tmp_path / "commits" / f"commit-{STEPS - 1}.json")
    seen = supervised(
        bundle,
        tmp_path / "second",
        NAMES,
        STEPS,
        [Fault("d1", STEPS - 1, 3, awaits=written)],
        more_words=(*words, "--resume"),
        every=1000,
        start_s=60.0,
    )
    assert [event["device"] for event in seen.of("died")] == ["d1"]
    assert [event["step"] for event in seen.of("assigned")] == [2]
    assert seen.losses == undisturbed.losses[2:]
    assert seen.hashes == undisturbed.hashes
