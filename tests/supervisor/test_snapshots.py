"""Which snapshots count, where a device died between two of them."""

from __future__ import annotations

from pathlib import Path

from tests.support.puppets import Stage


def test_a_snapshot_of_a_dead_process_is_not_one_of_its_replacement(tmp_path: Path) -> None:
    """The others would drop messages that the replacement, which begins before it, wants again."""
    on = Stage(tmp_path, every=1, restarts=1)
    on.begin()
    d0, d1 = on.puppets
    epoch = on.supervisor.snapshots
    for puppet in (d0, d1):
        puppet.say("snapshot", step=1, slot=0, bytes=1)
    on.turn_until(lambda: epoch.epoch == 1)
    d1.say("snapshot", step=2, slot=1, bytes=1)
    d1.end(-9)
    on.turn_until(lambda: len(on.puppets) == 3)
    assert on.puppets[2].order("be")["slots"] == [1, -1]
    d0.say("snapshot", step=2, slot=1, bytes=1)
    on.connect()
    assert epoch.epoch == 1
    on.puppets[2].say("snapshot", step=2, slot=1, bytes=1)
    on.turn_until(lambda: epoch.epoch == 2)
    for puppet in on.puppets:
        puppet.end(-9)
    on.supervisor.crew.close()
    epoch.close()
    for puppet in on.puppets:
        puppet.process.dispose()
