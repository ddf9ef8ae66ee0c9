"""Connections that fail though no process has ended: the event and the error name a real device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bigbrain_fx.supervisor import FailedError
from bigbrain_fx.supervisor.events import status
from tests.support.puppets import Stage, stage

TEXT = "PeerLostError: the connection to d0: reset by peer"


def lose(on: Stage) -> None:
    """Let d1 report a lost connection, with a text that has a colon in it."""
    on.puppets[1].say("lost", generation=0, text=TEXT, alive=True)


def lock(on: Stage) -> None:
    """Let all devices wait for each other, as the watch finds it."""
    on.supervisor.rendezvous.lock(on.supervisor.crew.clock.now())


def test_the_event_names_the_device_that_reported_it(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        on.begin()
        lose(on)
        on.turn_until(lambda: bool(on.of("links_lost")))
    (entry,) = on.of("links_lost")
    assert (entry["device"], entry["text"]) == ("d1", TEXT)
    assert f"d1: {TEXT}" in str(status(entry))


def test_devices_that_wait_for_each_other_are_no_device(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        on.begin()
        lock(on)
        on.turn_until(lambda: bool(on.of("links_lost")))
    (entry,) = on.of("links_lost")
    assert "device" not in entry
    assert str(status(entry)).endswith(entry["text"])


@pytest.mark.parametrize(("how", "device"), [(lose, "d1"), (lock, None)])
def test_the_error_after_the_last_try_has_that_device(
    tmp_path: Path, how: Callable[[Stage], None], device: str | None
) -> None:
    with stage(tmp_path, restarts=0) as on:
        on.begin()
        how(on)
        with pytest.raises(FailedError) as failed:
            on.turn_until(lambda: False)
    assert failed.value.death.device == device
    assert not failed.value.moves
