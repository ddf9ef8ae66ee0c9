"""A supervisor of devices whose states come from peers: who may update, and who begins where."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.puppets import Puppet, Stage, stage

PEERS = ("peers",)


def voted(puppets: list[Puppet]) -> bool:
    return all("voted" in puppet.hear() for puppet in puppets)


def end_step(on: Stage, step: int) -> list[Puppet]:
    """Let all devices vote; d0 has the loss. Return the living."""
    living = [p for p in on.puppets if p.process.poll() is None]
    for puppet in living:
        loss = 0.5 * step if puppet.name.startswith("d0") else None
        puppet.say("vote", step=step, yes=True, loss=loss, step_s=0.25)
    on.turn_until(lambda: on.supervisor.snapshots.epoch == step + 1)
    return living


def replaced(on: Stage, puppet: Puppet) -> Puppet:
    """Kill a device's process; return the one that takes its place."""
    count = len(on.puppets)
    puppet.end(-9)
    on.turn_until(lambda: len(on.puppets) > count and "generation" in on.puppets[-1].hear())
    return on.puppets[-1]


@pytest.mark.parametrize(
    ("knows", "every", "found"), [(PEERS, None, True), (PEERS, 2, False), ((), None, False)]
)
def test_snapshots_are_kept_where_they_are_wanted_or_the_program_is_older(
    tmp_path: Path, knows: tuple[str, ...], every: int | None, found: bool
) -> None:
    with stage(tmp_path, knows=knows, every=every) as on:
        on.begin()
        assert [puppet.order("go").get("peers", False) for puppet in on.puppets] == [found] * 2


def test_nobody_updates_before_the_replacement_of_one_that_voted(tmp_path: Path) -> None:
    with stage(tmp_path, knows=PEERS) as on:
        on.begin()
        d0, d1 = end_step(on, 0)
        d0.say("vote", step=1, yes=True, loss=0.5, step_s=0.25)
        on.turn_until(lambda: "d0" in on.supervisor.votes.votes.get(1, {}))
        new = replaced(on, d0)
        assert new.order("be")["epoch"] == 1  # where all began the step that d0 voted on
        assert new.order("be")["peers"]
        heard = len([order for order in d1.hear() if order == "voted"])
        d1.say("vote", step=1, yes=True)
        on.turn_until(lambda: "d1" in on.supervisor.votes.votes[1])
        assert len([order for order in d1.hear() if order == "voted"]) == heard
        end_step(on, 1)
        assert d1.order("voted") == {"do": "voted", "step": 1, "yes": True}


def test_a_loss_is_told_though_its_device_died_after_the_vote(tmp_path: Path) -> None:
    with stage(tmp_path, knows=PEERS) as on:
        on.begin()
        d0, _ = end_step(on, 0)
        d0.say("step", step=0, loss=0.0, step_s=0.3)
        on.turn_until(lambda: on.steps == [0])
        end_step(on, 1)
        new = replaced(on, d0)
        assert on.steps == [0, 1]
        assert new.order("be")["epoch"] == 2
        end_step(on, 2)
        new.say("step", step=2, loss=1.0, step_s=0.3)
        on.turn_until(lambda: on.steps == [0, 1, 2])


def test_a_device_without_state_is_named(tmp_path: Path) -> None:
    with stage(tmp_path, knows=PEERS) as on:
        on.begin()
        d0, d1 = end_step(on, 0)
        new = replaced(on, d0)
        generation = on.supervisor.crew.generation
        new.say("hello", pid=1, plan="a", knows=on.knows)
        new.say("ready", generation=generation, expected={}, layouts={}, lacks=1)
        d1.say("ready", generation=generation, expected={}, layouts={})
        on.turn_until(lambda: "go" in new.hear())
        assert d1.order("go")["lacking"] == {"d0": 1}


def test_all_begin_again_where_nobody_has_a_state(tmp_path: Path) -> None:
    with stage(tmp_path, knows=PEERS) as on:
        on.begin()
        d0, d1 = end_step(on, 0)
        d1.say("post", key="shard/1/d1", text="written")
        on.turn_until(lambda: "shard/1/d1" in on.supervisor.votes.board.notes)
        new = replaced(on, d0)
        new.say("orphaned", text="parameter:a")
        on.turn_until(lambda: len(on.puppets) == 5)
        fresh = on.puppets[-2:]
        on.turn_until(lambda: all("generation" in puppet.hear() for puppet in fresh))
        fresh.sort(key=lambda puppet: str(puppet.order("be")["device"]))
        orders = [puppet.order("be") for puppet in fresh]
        assert [(order["epoch"], order["again"]) for order in orders] == [(-1, True)] * 2
        assert not on.supervisor.votes.board.notes  # what was committed is on the disk
        (lost,) = on.of("state_lost")
        assert "parameter:a of d0" in lost["text"]
        fresh[0].say("begins", step=0)
        on.turn_until(lambda: bool(on.of("rolled_back")))
        on.connect()
        end_step(on, 0)
        assert "again" not in replaced(on, fresh[0]).order("be")


def test_a_death_in_a_resumed_run_is_counted_from_its_commit(tmp_path: Path) -> None:
    """Before the first snapshot a replacement begins with the commit, and not with step 0."""
    with stage(tmp_path) as on:
        on.begin()
        for puppet in on.puppets:
            puppet.say("begins", step=30)
            puppet.say("step", step=33, loss=None, step_s=0.1)
        on.turn_until(lambda: on.supervisor.snapshots.start == 30)
        new = replaced(on, on.puppets[1])
        assert new.order("be")["epoch"] == -1
        assert [event["step"] for event in on.of("assigned")] == [30]
        on.connect()
        new.say("step", step=33, loss=None, step_s=0.1)
        on.turn_until(lambda: bool(on.of("caught_up")))
        assert [(e["step"], e["steps"]) for e in on.of("caught_up")] == [(34, 4)]
        assert not on.of("rolled_back")
