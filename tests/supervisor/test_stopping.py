"""A run that is asked to stop: after its step, whoever dies meanwhile, however long it takes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bigbrain_fx.runtime.checkpoint_store import CheckpointStore
from bigbrain_fx.supervisor import FailedError, Supervisor, stopped_by_sigterm
from bigbrain_fx.supervisor.grace import Grace
from bigbrain_fx.supervisor.stopping import Stopping
from tests.support.bundles import split_small
from tests.support.puppets import Stage, stage
from tests.support.replayed import supervised

BOTH = ("a", "b")


def test_all_stop_before_the_step_that_nobody_has_begun() -> None:
    stopping = Stopping()
    assert not stopping.begin(())
    stopping.hear("a", 3)  # nobody was asked
    stopping.ask(1.0)
    stopping.ask(9.0)
    assert [stopping.begin(()), stopping.begin(())] == [True, False]
    stopping.hear("a", 3)
    assert not stopping.decide(BOTH, 0)
    stopping.hear("b", 4)
    assert [stopping.decide(BOTH, 0), stopping.decide(BOTH, 0)] == [True, False]
    assert stopping.at == 5


def test_a_replacement_is_where_it_starts_and_nobody_stops_before_what_was_told() -> None:
    stopping = Stopping()
    stopping.ask(1.0)
    stopping.begin(["a"])
    stopping.hear("b", 2)
    stopping.hear("b", -1)  # it has died since
    assert stopping.decide(BOTH, least=0)
    assert stopping.at == 3
    stopping = Stopping()
    stopping.ask(1.0)
    stopping.begin(BOTH)
    assert stopping.decide(BOTH, least=7)
    assert stopping.at == 7


# ----------------------------------------------------- a death at the same time, move by move


def ask(seen: Stage) -> None:
    """SIGTERM; the one that lives says where it is."""
    seen.supervisor.ask_to_stop()
    seen.turn_until(lambda: "pause" in seen.puppets[0].hear())
    seen.puppets[0].say("at", step=3)
    seen.turn_until(lambda: "d0" in (seen.supervisor.stopping.positions or ()))


def die(seen: Stage) -> None:
    count = len(seen.puppets)
    seen.puppets[1].end(-9)
    seen.turn_until(lambda: len(seen.puppets) > count)


def die_connect(seen: Stage) -> None:
    """The replacement is connected, and in a step, before anybody asks."""
    die(seen)
    seen.connect()


ORDERS: dict[str, list[Callable[[Stage], None]]] = {
    "asked-then-dead": [ask, die],
    "dead-then-asked": [die, ask],
    "replaced-then-asked": [die_connect, ask],
}


@pytest.mark.parametrize("moves", ORDERS.values(), ids=ORDERS)
def test_a_death_does_not_keep_the_others_from_stopping(
    tmp_path: Path, moves: list[Callable[[Stage], None]]
) -> None:
    with stage(tmp_path) as seen:
        seen.begin()
        for move in moves:
            move(seen)
        new = seen.puppets[2]
        if die_connect in moves:
            new.say("at", step=2)
        seen.turn_until(lambda: "stop_at" in new.hear())
        assert seen.puppets[0].order("stop_at")["step"] == new.order("stop_at")["step"] == 4
        paused, became = new.hear().index("pause"), new.hear().index("be")
        assert (paused < became) == (moves == ORDERS["asked-then-dead"])
        assert [event["step"] for event in seen.of("stopping")] == [4]


def test_all_may_die_and_what_was_told_is_not_undone(tmp_path: Path) -> None:
    with stage(tmp_path) as seen:
        seen.begin()
        seen.puppets[0].say("step", step=5, loss=1.0, step_s=0.1)
        seen.turn_until(lambda: seen.steps == [5])
        seen.supervisor.ask_to_stop()
        seen.turn_until(lambda: "pause" in seen.puppets[1].hear())
        for puppet in seen.puppets[:2]:
            puppet.end(-9)
        seen.turn_until(lambda: len(seen.puppets) == 4)
        seen.turn_until(lambda: all("stop_at" in p.hear() for p in seen.puppets[2:]))
        assert seen.puppets[2].order("stop_at")["step"] == 6


def test_a_late_device_is_named(tmp_path: Path) -> None:
    with stage(tmp_path, grace_s=0.2) as seen:
        seen.begin()
        seen.supervisor.ask_to_stop()
        with pytest.raises(FailedError, match=r"did not stop within 0\.2 s \(see --grace\)"):
            seen.turn_until(lambda: False)


class Asked:
    """Counts requests."""

    count = 0

    def ask_to_stop(self) -> None:
        self.count += 1


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals come elsewhere"
)
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGHUP])
def test_signals_ask_to_stop_and_who_ignores_the_terminals_end_goes_on(kind: int) -> None:
    asked = Asked()
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with stopped_by_sigterm(asked):
            os.kill(os.getpid(), kind)
        assert asked.count == 1
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with stopped_by_sigterm(asked):
            os.kill(os.getpid(), signal.SIGHUP)
        assert asked.count == 1
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# --------------------------------------------------------------------------- with real processes


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split_small(tmp_path_factory.mktemp("stopping"))


@pytest.mark.nightly
@pytest.mark.parametrize("pause_s", [0.0, 0.005, 0.02])
@pytest.mark.parametrize("kill_first", [True, False], ids=["killed", "asked"])
def test_a_death_and_a_request_together(
    bundle: Path, tmp_path: Path, pause_s: float, kill_first: bool
) -> None:
    threads: list[threading.Thread] = []

    def together(supervisor: Supervisor) -> None:
        [d1] = [m for m in supervisor.crew.members if m.device == "d1"]
        blows = [lambda: os.kill(d1.process.pid, signal.SIGKILL), supervisor.ask_to_stop]
        for number, blow in enumerate(blows if kill_first else reversed(blows)):
            time.sleep(pause_s * number)
            blow()

    def watch(supervisor: Supervisor) -> None:
        def hear(step: int, loss: float, step_s: float) -> None:
            if step == 2:
                threads.append(threading.Thread(target=together, args=(supervisor,)))
                threads[0].start()

        supervisor.told.on_step = hear

    commits = tmp_path / "commits"
    words = ("--checkpoint-dir", str(commits), "--checkpoint-every", "100000")
    seen = supervised(
        bundle,
        tmp_path,
        ("d0", "d1"),
        100_000,
        more_words=words,
        on_supervisor=watch,
        grace_s=200.0,  # a busy machine may be slow
    )
    threads[0].join()
    at = seen.outcome.stopped_at
    assert at is not None
    died = [event["device"] for event in seen.of("died")]
    assert died == ["d1"] or (died == [] and not kill_first)  # who was asked may be gone by then
    assert {found[-1]["steps"][-1] for found in seen.processes.values()} >= {at - 1}
    newest = max(record.step for record in CheckpointStore(commits).records())
    assert newest == at >= 3


# --------------------------------------------------------------------------- how long it may take


def asked_at(time: float | None) -> Grace:
    crew: Any = SimpleNamespace(job=SimpleNamespace(grace_s=None))
    return Grace(cast("Any", crew), Stopping(time), cast("Any", None))


def test_the_grace_covers_the_steps_of_the_run() -> None:
    grace = asked_at(None)
    assert grace.of_step(untimed_s=300.0, hang_s=5.0) == 300.0
    grace.step_took(2.0, now=1.0)
    assert grace.of_step(300.0, 5.0) == 30.0
    grace.step_took(45.0, now=2.0)
    assert grace.of_step(300.0, 5.0) == 135.0


def test_the_grace_covers_a_step_longer_than_all_before() -> None:
    grace = asked_at(None)
    grace.step_took(0.1, now=1.0)
    assert grace.of_step(300.0, hang_s=60.0) == 60.0  # it may have begun just now
    grace.stopping.ask(now=101.0)
    grace.stopping.ask(now=201.0)  # a second request changes nothing
    grace.move(301.0)
    assert grace.of_step(300.0, hang_s=60.0) == 300.0


def test_the_grace_begins_anew_with_progress() -> None:
    grace = asked_at(None)
    grace.move(5.0)
    assert not grace.is_late(100.0, 2.0)  # nobody has asked
    grace.stopping.ask(10.0)
    assert [grace.is_late(now, grace_s=2.0) for now in (12.0, 12.5)] == [False, True]
    grace.move(12.0)
    assert [grace.is_late(now, grace_s=2.0) for now in (12.5, 14.5)] == [False, True]


def test_the_grace_is_longer_for_starved_processes() -> None:
    grace = asked_at(None)
    grace.wait_longer(5.0, 100.0)
    grace.stopping.ask(100.0)
    assert grace.is_late(131.0, 30.0)
    grace.wait_longer(20.0, 131.0)
    assert not grace.is_late(149.0, 30.0)
    assert grace.is_late(151.0, 30.0)
