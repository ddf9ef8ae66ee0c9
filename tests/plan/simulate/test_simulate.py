from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import accumulate

import pytest

from bigbrain_fx.core import (
    Backward,
    Cluster,
    Device,
    Edge,
    Forecast,
    Forward,
    Link,
    OptimizerStep,
    Overheads,
    Program,
    Recv,
    Send,
    Slice,
    Stage,
    Stages,
)
from bigbrain_fx.errors import ScheduleError
from bigbrain_fx.plan.schedule import SCHEDULES, StageCosts, build
from bigbrain_fx.plan.simulate import chrome_trace, simulate
from tests.support.pipelines import FREE, all_of, chain, even_costs, stepped

SLOW = Link(1.0, float("inf"))  # one unit of latency, any number of bytes


def forecast(
    name: str,
    count: int,
    micro_batches: int,
    link: Link = FREE,
    in_flight: tuple[int, ...] | None = None,
    *,
    f: float = 1.0,
    b: float = 2.0,
) -> Forecast:
    stages, costs = chain(count), even_costs(count, link, f=f, b=b)
    programs = build(name, stages, micro_batches, costs, all_of(stages), in_flight)
    return simulate(programs, stages, costs)


def drawn(done: Forecast) -> list[str]:
    """Draw one row per device, one column per unit of time: 0 1 2 forward, a b c backward."""
    rows = {entry.device: ["."] * round(done.step_s) for entry in done.devices}
    for bar in done.timeline:
        if bar.device in rows and bar.end_s > bar.start_s:
            micro = int(bar.what.split("#")[1])
            mark = str(micro) if bar.what.startswith("forward") else "abcdefgh"[micro]
            for column in range(round(bar.start_s), round(bar.end_s)):
                rows[bar.device][column] = mark
    return ["".join(row) for row in rows.values()]


# ------------------------------------------------------------------------------- closed forms


FOLDED = ("forward", "auto", "interleaved", "zb-v", "dualpipe-v", "gems")  # no chain
TRAINING = [name for name in SCHEDULES if name not in FOLDED]


@pytest.mark.parametrize("p", range(1, 6))
def test_a_forward_only_batch_takes_m_plus_p_minus_1_forwards(p: int) -> None:
    stages, costs = chain(p), even_costs(p, f=3.0)
    for m in range(1, 10):
        programs = build("forward", stages, m, costs, frozenset())
        done = simulate(programs, stages, costs)
        assert done.step_s == (m + p - 1) * 3.0
        for entry in done.devices:
            assert entry.busy_s == m * 3.0
            assert (entry.gradients_bytes, entry.optimizer_bytes) == (0, 0)


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("p", range(1, 6))
def test_a_step_takes_m_plus_p_minus_1_rounds(name: str, p: int) -> None:
    for m in range(1, 10):
        done = forecast(name, p, m, f=3.0, b=5.0)
        assert done.step_s == (m + p - 1) * (3.0 + 5.0)
        for entry in done.devices:
            assert entry.busy_s == m * 8.0
            assert entry.idle_s == (p - 1) * 8.0


@pytest.mark.parametrize("p", range(1, 6))
@pytest.mark.parametrize("m", range(1, 10))
def test_micro_batches_in_flight(p: int, m: int) -> None:
    """Each saves one byte, so the bytes of activations count micro-batches."""
    assert [e.activations_bytes for e in forecast("gpipe", p, m).devices] == [m] * p
    expected = [min(m, p - s) for s in range(p)]
    assert [e.activations_bytes for e in forecast("1f1b", p, m).devices] == expected
    assert [e.activations_bytes for e in forecast("list", p, m).devices] == expected


@pytest.mark.parametrize(
    ("name", "link", "in_flight", "units"),
    [
        ("1f1b", FREE, None, 105),
        ("1f1b", SLOW, None, 157),
        ("1f1b", SLOW, (8, 6, 4, 2), 111),
        ("1f1b", SLOW, (7, 5, 3, 1), 111),  # in_flight_to_fill: the same with fewer
        ("gpipe", SLOW, None, 111),
        ("list", SLOW, None, 111),
    ],
)
def test_more_warm_up_hides_slow_links(
    name: str, link: Link, in_flight: tuple[int, ...] | None, units: int
) -> None:
    assert forecast(name, 4, 32, link, in_flight).step_s == units


# ------------------------------------------------------------------------------- pictures


def test_1f1b_drawn() -> None:
    assert drawn(forecast("1f1b", 3, 4, b=1.0)) == [
        "012..a3b.c.d",
        ".01.a2b3c.d.",
        "..0a1b2c3d..",
    ]


def test_gpipe_drawn() -> None:
    assert drawn(forecast("gpipe", 3, 3)) == [
        "012......aabbcc",
        ".012...aabbcc..",
        "..012aabbcc....",
    ]


def test_latency_drawn() -> None:
    assert drawn(forecast("1f1b", 2, 2, SLOW, b=1.0)) == [
        "01...a.b",
        "..0a1b..",
    ]


def test_two_stages_of_one_device_drawn() -> None:
    """d0 has stages 0 and 2, d1 has stage 1: y is handed over, x and z cross."""
    stages = Stages(
        (Stage(0, "d0", ()), Stage(1, "d1", ()), Stage(2, "d0", ())),
        (
            Edge("x", 0, 1, "activation"),
            Edge("y", 0, 2, "activation"),
            Edge("z", 1, 2, "activation"),
            Edge("z", 2, 1, "gradient"),
            Edge("y", 2, 0, "gradient"),
            Edge("x", 1, 0, "gradient"),
        ),
    )
    costs = even_costs(3, b=1.0)
    programs = build("list", stages, 2, costs, all_of(stages))
    assert drawn(simulate(programs, stages, costs)) == [
        "010a1ab.b",
        ".01.a..b.",
    ]


# ------------------------------------------------------------------------------- links


def two_messages(link: Link) -> tuple[tuple[Program, ...], Stages, StageCosts]:
    """Send 3 bytes after 1 s and again after 2 s."""
    edge = Edge("x", 0, 1, "activation", 3)
    stages = Stages((Stage(0, "d0", ()), Stage(1, "d1", ())), (edge,))
    costs = even_costs(2, link)
    return build("gpipe", stages, 2, costs, frozenset()), stages, costs


def test_a_link_carries_one_message_at_a_time_and_latency_does_not_occupy_it() -> None:
    done = simulate(*two_messages(Link(0.5, 1.0)))
    assert [bar for bar in done.timeline if bar.device == "d0->d1"] == [
        Slice("d0->d1", "activation x 0->1 #0", 1.0, 4.0),
        Slice("d0->d1", "activation x 0->1 #1", 4.0, 7.0),
    ]
    assert [bar for bar in done.timeline if bar.device == "d1"] == [
        Slice("d1", "forward 1 #0", 4.5, 5.5),
        Slice("d1", "forward 1 #1", 7.5, 8.5),
    ]
    assert done.step_s == 8.5


def test_the_two_directions_of_a_link_do_not_disturb_each_other() -> None:
    """Both devices send 3 bytes to each other at once, at 1 byte a second."""
    there, back = Edge("x", 0, 2, "activation", 3), Edge("y", 1, 3, "activation", 3)
    stages = Stages(
        tuple(Stage(i, device, ()) for i, device in enumerate(("d0", "d1", "d1", "d0"))),
        (there, back),
    )
    costs = even_costs(4, Link(0.0, 1.0))
    programs = build("list", stages, 1, costs, frozenset())
    assert simulate(programs, stages, costs).step_s == 1 + 3 + 1


def test_a_send_does_not_hold_the_device_up() -> None:
    done = simulate(*two_messages(Link(100.0, 1.0)))
    assert [bar.end_s for bar in done.timeline if bar.device == "d0"] == [1.0, 2.0]


def test_the_optimizer_step_and_once_a_step_messages_take_time() -> None:
    tie = Edge("w", 0, 1, "tied", 8)
    stages = Stages((Stage(0, "d0", ()), Stage(1, "d1", ())), (tie,))
    devices = tuple(Device(f"d{i}", "h", "cpu", 1 << 30, 1.0, 1.0) for i in range(2))
    costs = StageCosts(
        (1.0, 1.0),
        (2.0, 2.0),
        (1, 1),
        Cluster(devices, Link(0.5, 4.0)),
        optimizer_s={"d0": 10.0, "d1": 20.0},
    )
    programs = build("gpipe", stages, 1, costs, all_of(stages))
    done = simulate(programs, stages, costs)
    assert done.step_s == 3.0 + (8 / 4.0 + 0.5) + 20.0
    assert done.of("d0").busy_s == 13.0
    assert done.of("d1").busy_s == 23.0
    assert done.of("d1").idle_s == 2.5


# ------------------------------------------------------------------------------- memory


def test_peak_is_the_sum_of_its_parts() -> None:
    """Weights 1000, gradients 1000, Adam 2000; 2 in flight of 10; messages of 3 bytes."""
    stages = chain(2, nbytes=3)
    devices = tuple(Device(f"d{i}", "h", "cpu", 1 << 30, 1.0, 1.0) for i in range(2))
    costs = StageCosts(
        (1.0, 1.0),
        (2.0, 2.0),
        saved_bytes=(10, 10),
        cluster=Cluster(devices, FREE),
        workspace_bytes=(5, 5),
        gradient_bytes=(1000, 1000),
        weights_bytes={"d0": 1000, "d1": 1000},
        optimizer_bytes={"d0": 2000, "d1": 2000},
    )
    programs = build("1f1b", stages, 4, costs, all_of(stages))
    entry = simulate(programs, stages, costs).of("d0")
    assert entry.weights_bytes == 1000
    assert entry.optimizer_bytes == 2000
    assert entry.gradients_bytes == 1000  # those summed so far
    assert entry.activations_bytes == 2 * 10 + 5 + 1000  # and those that this backward makes
    assert entry.messages_bytes == 2 * 3 + 3 + 2 * 3  # sent, received, posted ahead
    assert entry.peak_bytes == 1000 + 2000 + 2000 + 25 + 15

    assert max(nbytes for _, nbytes in entry.held) == entry.peak_bytes
    starts_s = [start_s for start_s, _ in entry.held]
    assert starts_s == list(accumulate(starts_s, max))
    assert entry.held[0] == (0.0, 1000 + 2000 + 10 + 5 + 3 + 2 * 3)


def test_inference_has_no_gradients_and_no_optimizer_state() -> None:
    stages = chain(2)
    costs = StageCosts(
        (1.0, 1.0),
        (2.0, 2.0),
        (10, 10),
        even_costs(2).cluster,
        gradient_bytes=(1000, 1000),
        weights_bytes={"d0": 1000, "d1": 1000},
        optimizer_bytes={"d0": 2000, "d1": 2000},
    )
    done = simulate(build("1f1b", stages, 4, costs, frozenset()), stages, costs)
    assert [entry.peak_bytes for entry in done.devices] == [1000, 1000]
    assert done.step_s == 5.0


# ------------------------------------------------------------------------------- trace and limits


def test_chrome_trace_has_bars_and_arrows() -> None:
    events = json.loads(json.dumps(chrome_trace(forecast("1f1b", 2, 2, SLOW))))
    names = [e["args"]["name"] for e in events if e["ph"] == "M"]
    assert names == ["devices", "links", "d0", "d1", "d0->d1", "d1->d0"]
    bars = [e for e in events if e["ph"] == "X"]
    assert len(bars) == 2 * (2 + 2 + 1) + 2 + 2
    first = next(e for e in bars if e["name"] == "forward 1 #0")
    assert (first["ts"], first["dur"]) == (2e6, 1e6)
    arrows = {phase: [e for e in events if e["ph"] == phase] for phase in "stf"}
    assert [len(found) for found in arrows.values()] == [4, 4, 4]
    tail, head = arrows["s"][0], arrows["f"][0]
    assert tail["id"] == head["id"]
    assert tail["ts"] == pytest.approx(0.99e6)  # inside forward 0 #0, which made the message
    assert head["ts"] == first["ts"]
    assert head["tid"] == first["tid"]


def test_without_a_timeline_the_figures_are_the_same() -> None:
    stages, costs = chain(3), even_costs(3, SLOW)
    programs = build("1f1b", stages, 4, costs, all_of(stages))
    brief = simulate(programs, stages, costs, timeline=False)
    full = simulate(programs, stages, costs)
    assert brief.timeline == ()
    assert brief.step_s == full.step_s
    assert brief.devices == tuple(replace(entry, held=()) for entry in full.devices)


def test_a_deadlock_is_an_error_that_shows_the_programs() -> None:
    stages = chain(2)
    x, dx = stages.edges
    programs = (
        Program("d0", (Forward(0, 0), Recv(dx, 0), Send(x, 0), Backward(0, 0), OptimizerStep())),
        Program("d1", (Recv(x, 0), Forward(1, 0), Backward(1, 0), Send(dx, 0), OptimizerStep())),
    )
    with pytest.raises(ScheduleError, match="deadlock") as caught:
        simulate(programs, stages, even_costs(2))
    assert any("[r1>0.0]" in note for note in caught.value.notes)


@pytest.mark.nightly
@pytest.mark.parametrize("name", TRAINING)
def test_64_stages_and_64_micro_batches_take_about_a_second(name: str) -> None:
    stages, costs = chain(64, nbytes=1), even_costs(64, Link(0.1, 1.0))
    start_s = time.process_time()
    programs = build(name, stages, 64, costs, all_of(stages))
    done = simulate(programs, stages, costs)
    assert time.process_time() - start_s < 3.0  # 0.3 s on a quiet machine
    assert len(done.timeline) == 64 * (2 * 64 + 1) + 63 * 2 * 64


# ------------------------------------------------------------------------------- overheads


def with_overheads(costs: StageCosts, own: Overheads) -> StageCosts:
    devices = tuple(replace(device, overheads=own) for device in costs.cluster.devices)
    return replace(costs, cluster=replace(costs.cluster, devices=devices))


def test_each_instruction_and_each_step_has_its_overhead() -> None:
    own = Overheads(instruction_s=0.25, step_s=3.0)
    for p, m in [(1, 1), (3, 4), (4, 2)]:
        done = stepped(chain(p), with_overheads(even_costs(p, f=3.0, b=5.0), own), m=m)
        assert done.step_s == 3.0 + (m + p - 1) * (3.25 + 5.25)
        assert all(entry.busy_s == m * 8.5 for entry in done.devices)


def test_a_message_takes_both_its_ends() -> None:
    """Out: 1 + 8/4 at the sender, as much at the receiver; back the same."""
    own = Overheads(message_s=1.0, message_bytes_per_s=4.0)
    stages, costs = chain(2, nbytes=8), even_costs(2)
    free = stepped(stages, costs).step_s
    assert stepped(stages, with_overheads(costs, own)).step_s == free + 2 * (3.0 + 3.0)


def test_a_blocking_device_begins_nothing_while_what_it_sent_flies() -> None:
    """Out in 1 + 1 and back in 1 + 1: the second forward of d0 begins at 2 in place of 1."""
    stages, costs = chain(2, nbytes=8), even_costs(2, SLOW, b=1.0)
    blocking = with_overheads(costs, Overheads(blocking=True))
    for given, begun_s in ((costs, 1.0), (blocking, 2.0)):
        bars = {(b.device, b.what): b for b in stepped(stages, given, m=2).timeline}
        assert bars["d0", "forward 0 #1"].start_s == begun_s
    assert stepped(stages, blocking).step_s == stepped(stages, costs).step_s


def test_handling_a_message_keeps_a_device_from_computing() -> None:
    """Two micro-batches: the second forward waits until the first one's result is handed over."""
    costs = with_overheads(even_costs(2, b=1.0), Overheads(message_s=0.5))
    done = stepped(chain(2, nbytes=8), costs, m=2)
    bars = {(b.device, b.what): b.start_s for b in done.timeline if b.device in ("d0", "d1")}
    assert bars["d0", "forward 0 #1"] == 1.5
    assert bars["d1", "forward 1 #0"] == 2.0
    assert bars["d1", "forward 1 #1"] == 3.5  # its message is there at 3.0, and takes 0.5
