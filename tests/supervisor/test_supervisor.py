"""What a supervisor decides: whom to replace, whom to end, when to stop, how often to copy."""

from __future__ import annotations

import json
import signal
import socket
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from bigbrain_fx.supervisor import Death, FailedError, status
from bigbrain_fx.supervisor.judging import Judge, Stop
from bigbrain_fx.supervisor.pipe import Orders, hear, line_pair
from bigbrain_fx.supervisor.protocol import Wait
from bigbrain_fx.supervisor.snapshots import (
    SnapshotCost,
    SnapshotMemory,
    Snapshots,
    common,
    interval,
)
from bigbrain_fx.supervisor.watch import Pulse, Watch, hung, locked, slow

GIB = 2**30


def death(step: int = 3, code: int = -9, text: str | None = None, *, born: bool = True) -> Death:
    return Death("d1", step, code, text, "d1.log", born)


# --------------------------------------------------------------------------- judging


def test_a_killed_process_is_replaced_until_the_budget_is_spent() -> None:
    judge = Judge(restarts=2, window_s=10.0)
    assert [judge.stop_for(death(), now) for now in (0.0, 1.0)] == [None, None]
    assert judge.stop_for(death(), 2.0) == Stop("2 restarts within 10 s are allowed", moves=True)
    assert judge.stop_for(death(), 10.5) is None  # the first one is out of the window


def test_the_same_error_at_the_same_step_is_not_tried_a_third_time() -> None:
    judge = Judge(10, 10.0)
    assert judge.stop_for(death(3, 1, "ValueError: no"), 0.0) is None
    assert judge.stop_for(death(4, 1, "ValueError: no"), 1.0) is None
    assert "same error" in str(judge.stop_for(death(3, 1, "ValueError: no"), 2.0))


def test_input_that_was_good_before_is_tried_once_more() -> None:
    """A replacement cannot read its weights: the disk, or a kernel without files to give."""
    judge = Judge(10, 10.0)
    judge.born("d1")
    unread = death(-1, 2, "WeightsError: d1.safetensors cannot be read", born=False)
    assert judge.stop_for(unread, 0.0) is None
    assert "same error" in str(judge.stop_for(unread, 1.0))
    later = death(3, 2, "BatchError: the batch of step 3 differs")
    assert judge.stop_for(later, 2.0) == Stop("its input cannot be used")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (2, "its input cannot be used"),
        (65, "the same numbers would come again"),
        (73, "the files of --save cannot be written"),
        (77, "another run or a rollback has taken over its checkpoints"),
    ],
)
def test_a_failure_that_would_repeat_is_not_retried(code: int, why: str) -> None:
    assert Judge(10, 10.0).stop_for(death(code=code, text="Error: no"), 0.0) == Stop(why)


def test_other_devices_cannot_mend_an_error_that_was_reported() -> None:
    judge = Judge(0, 10.0)
    assert judge.stop_for(death(3, 1, "ValueError: no"), 0.0) == Stop(
        "0 restarts within 10 s are allowed", moves=False
    )


def test_two_ends_before_a_first_step_are_enough() -> None:
    judge = Judge(10, 10.0)
    assert judge.stop_for(death(-1, -11, born=False), 0.0) is None
    assert "twice" in str(judge.stop_for(death(-1, -11, born=False), 1.0))
    judge.born("d1")
    for second in (2.0, 3.0, 4.0):  # replacements that are killed while they replay
        assert judge.stop_for(death(-1, -11, born=False), second) is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_signals_from_outside_are_no_errors_that_come_again(number: int) -> None:
    judge = Judge(1000, 10.0)
    for second in range(9):
        assert judge.stop_for(death(-1, -number, born=False), float(second)) is None


def test_a_hung_process_ended_here_was_not_struck_from_outside() -> None:
    judge = Judge(1000, 10.0)
    hung = replace(death(-1, born=False), was_hung=True)
    assert judge.stop_for(hung, 0.0) is None
    assert "twice" in str(judge.stop_for(hung, 1.0))


# --------------------------------------------------------------------------- hanging


def at_work(heard: float, moved: float, waits_for: str | None = None) -> Pulse:
    return Pulse(heard, moved, 5, Wait(waits_for, "x") if waits_for else None, is_at_work=True)


def test_of_a_chain_of_waiting_devices_the_last_one_hangs() -> None:
    pulses = {
        "d0": at_work(100.0, 10.0, "d1"),
        "d1": at_work(100.0, 10.0, "d2"),
        "d2": at_work(100.0, 10.0),
    }
    assert hung(pulses, 100.0, 60.0) == ["d2"]
    assert slow(pulses, 100.0, 60.0) == ["d2"]
    assert not locked(pulses, 100.0, 60.0)


def test_a_process_that_says_nothing_hangs_whatever_it_said_last() -> None:
    assert hung({"d0": at_work(10.0, 10.0, "d1")}, 100.0, 60.0) == ["d0"]


def test_a_slow_device_is_not_ended() -> None:
    pulses = {"d0": at_work(100.0, 60.0), "d1": at_work(100.0, 60.0, "d0")}
    assert hung(pulses, 100.0, 60.0) == []
    assert slow(pulses, 100.0, 60.0) == ["d0"]


def test_all_wait_for_each_other() -> None:
    pulses = {"d0": at_work(100.0, 10.0, "d1"), "d1": at_work(100.0, 10.0, "d0")}
    assert hung(pulses, 100.0, 60.0) == []
    assert locked(pulses, 100.0, 60.0)


def test_progress_is_a_new_instruction_or_a_new_wait() -> None:
    pulse = at_work(0.0, 0.0)
    pulse.beat(1.0, 5, None)
    assert (pulse.heard, pulse.moved) == (1.0, 0.0)
    pulse.beat(2.0, 5, Wait("d1", "x"))
    assert pulse.moved == 2.0
    pulse.beat(3.0, 6, Wait("d1", "x"))
    assert pulse.moved == 3.0


# --------------------------------------------------------------------------- snapshots


def test_copies_take_a_hundredth_of_the_time_on_the_slowest_device() -> None:
    assert (
        interval([SnapshotCost(100, 1000, 0.01, 0.1), SnapshotCost(100, 1000, 0.001, 0.1)], GIB)
        == 10
    )


def test_snapshots_that_would_take_what_is_left_are_told_of() -> None:
    found = Snapshots(["d0", "d1"], None)
    try:
        for device in ("d0", "d1"):
            found.measure(device, SnapshotCost(GIB, 1000, 1.0, 1.0), 3 * GIB)
        reported: list[dict[str, object]] = []
        crew = SimpleNamespace(
            job=SimpleNamespace(host_of=lambda _name: ""),
            report=lambda event, **facts: reported.append({"event": event, **facts}),
        )
        watch: Any = SimpleNamespace(crew=crew)
        for left in (3 * GIB, 4 * GIB):
            Watch.mind(watch, found, left)
    finally:
        found.close()
    assert reported == [{"event": "snapshots_large", "bytes": 4 * GIB, "left": 3 * GIB}]
    told = status({"event": "snapshots_large", "generation": 0, "bytes": 4 * GIB, "left": 3 * GIB})
    assert told is not None
    assert "--no-replay" in told


def test_the_newest_step_that_all_devices_have() -> None:
    one, two = SnapshotMemory([], [2, 4]), SnapshotMemory([], [4, 6])
    assert common([one, two]) == 4
    two.steps[:] = [8, 6]
    assert common([one, two]) == -1


# --------------------------------------------------------------------------- lines and events


def test_an_order_arrives_whole_and_with_its_files() -> None:
    ours, theirs = line_pair()
    slots = SnapshotMemory()
    with ours, theirs:
        Orders(ours).give("be", slots.files, device="d0")
        packet, files, _, _ = socket.recv_fds(theirs, 1000, 4)
        assert json.loads(packet) == {"do": "be", "device": "d0"}
        assert len(files) == 2
        theirs.send(b'{"say": "hello", "pid": 7}')
        assert hear(ours) == {"say": "hello", "pid": 7}
        theirs.send(b"[]")
        with pytest.raises(ValueError, match="not a message"):
            hear(ours)
        theirs.close()
        assert hear(ours) is None
        for file in files:
            socket.close(file)
    slots.close()


def test_orders_to_a_process_that_does_not_read_wait_for_it() -> None:
    ours, theirs = line_pair()
    with ours, theirs:
        orders = Orders(ours)
        for number in range(2000):
            orders.give("value", text="x" * 1000, number=number)
        assert orders.waiting
        seen: list[int] = []
        while len(seen) < 2000:
            seen.append(json.loads(theirs.recv(2000))["number"])
            orders.pass_on()
        assert seen == list(range(2000))
        assert not orders.waiting


def test_a_failure_says_whose_and_why() -> None:
    assert str(FailedError(death(code=1), "it is over", code="BX6005")) == (
        "the process of device d1 ended with exit code 1: it is over"
    )
