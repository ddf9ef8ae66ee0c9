"""Orders that are found: the closed forms, every order there is, tight memory, odd numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations, product

import pytest

from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.planning.clock import (
    JobOf,
    Kind,
    OrderClock,
    OrdersOf,
    VirtualStages,
    played_s,
    v_line,
)
from bigbrain_fx.planning.listing import Taste, list_orders, tastes
from bigbrain_fx.planning.synthesis import Synthesis, bound_s, synthesise
from tests.support.virtual_line import virtual_line

WORK = 60_000


def equal(device_of: Sequence[int], micro: int, room: float = 1e9) -> VirtualStages:
    share = len(set(device_of)) / len(device_of)
    each = (share,) * len(device_of)
    return virtual_line(
        device_of, each, each, each, micro, saved_bytes=each, waiting_bytes=each, memory_bytes=room
    )


def unlike(seed: int, device_of: Sequence[int], micro: int, room: float = 1e9) -> VirtualStages:
    """Draw a pipeline: seconds, links, handling, instructions, bytes."""
    dice = random.Random(seed)
    count = len(device_of)

    def draw(*among: float) -> list[float]:
        return [dice.choice(among) for _ in range(count)]

    return virtual_line(
        device_of,
        draw(0.5, 1, 3),
        draw(0.5, 1, 3),
        draw(0.5, 1, 2),
        micro,
        wire_s=dice.choice((0.0, 0.1, 2.0)),
        latency_s=dice.choice((0.0, 0.3)),
        handling_s=dice.choice((0.0, 0.05)),
        instruction_s=dice.choice((0.0, 0.02)),
        saved_bytes=draw(1, 2, 4),
        waiting_bytes=draw(1, 3),
        memory_bytes=room,
    )


def require_legal(stages: VirtualStages, orders: OrdersOf) -> None:
    """Every job once, on its device, micro-batches ascending, with room, and not blocking."""
    wanted = {
        (int(kind), stage, micro)
        for stage in range(stages.count)
        for kind in stages.kinds(stage)
        for micro in range(stages.micro_batches)
    }
    every = [job for jobs in orders.values() for job in jobs]
    assert sorted(every) == sorted(wanted)
    for device, jobs in orders.items():
        assert {stages.timed.device_of[stage] for _, stage, _ in jobs} <= {device}
        for kind, stage in {(kind, stage) for kind, stage, _ in jobs}:
            micros = [m for k, s, m in jobs if (k, s) == (kind, stage)]
            assert micros == sorted(micros)
        at = {job: place for place, job in enumerate(jobs)}
        for kind, stage, micro in jobs:
            if kind == Kind.BACKWARD_WEIGHT:
                assert at[Kind.BACKWARD, stage, micro] < at[kind, stage, micro]
            if kind == Kind.BACKWARD:
                assert at[Kind.FORWARD, stage, micro] < at[kind, stage, micro]
        for kind, source, target in stages.local:
            if stages.timed.device_of[source] == device:
                for micro in range(stages.micro_batches):
                    assert at[int(kind), source, micro] < at[int(kind), target, micro]
    for device, most in stages.peaks(orders).items():
        assert most <= stages.memory_bytes.get(device, float("inf")) * (1 + 1e-9)
    clock = OrderClock(stages)
    assert clock.step_s(orders) < float("inf")


@pytest.mark.parametrize("in_row", [False, True])
@pytest.mark.parametrize(("devices", "micro"), [(2, 8), (4, 8), (4, 16)])
def test_equal_stages_come_to_the_bound_with_the_memory_of_1f1b(
    devices: int, micro: int, in_row: bool
) -> None:
    work = 3 * micro
    chain = synthesise(equal(range(devices), micro, devices), in_row=in_row, work=WORK)
    folded = synthesise(equal(v_line(devices), micro, devices), in_row=in_row, work=WORK)
    assert chain.step_s == work + devices - 1  # ZB-H1
    assert folded.step_s == work + (devices - 1) / 2  # ZB-V
    if in_row:
        assert folded.row_s == work  # no bubble at all
    assert max(folded.peak_bytes.values()) <= devices


def test_a_chain_needs_twice_the_memory_for_steps_in_a_row_without_a_bubble() -> None:
    tight = synthesise(equal(range(4), 8, 4), in_row=True, work=WORK)
    assert tight.row_s > 24
    assert synthesise(equal(range(4), 8, 8), in_row=True, work=WORK).row_s == 24


def test_the_order_clock_is_the_clock() -> None:
    for seed in range(40):
        dice = random.Random(seed)
        line = tuple(range(3)) + tuple(dice.randrange(3) for _ in range(3))
        stages = unlike(seed, line, 5).whole()
        orders = list_orders(stages, Taste())
        assert orders is not None
        clock = OrderClock(stages)
        found = played_s(stages.timed, orders, trains=True)  # type: ignore[arg-type]  # 0 is False
        assert clock.step_s(orders) == pytest.approx(found, rel=1e-12)


def test_devices_that_wait_for_each_other_take_for_ever() -> None:
    stages = equal((0, 1), 2).whole()
    clock = OrderClock(stages)
    first: list[JobOf] = [(Kind.FORWARD, 0, 0), (Kind.BACKWARD, 0, 0)]
    first += [(Kind.FORWARD, 0, 1), (Kind.BACKWARD, 0, 1)]
    second: list[JobOf] = [(Kind.FORWARD, 1, 0), (Kind.FORWARD, 1, 1)]
    second += [(Kind.BACKWARD, 1, 0), (Kind.BACKWARD, 1, 1)]
    orders = {0: tuple(first), 1: tuple(second)}
    assert clock.step_s(orders) == float("inf")
    assert clock.row_s(orders)[0] == float("inf")


def every_order(stages: VirtualStages, device: int) -> Iterator[tuple[JobOf, ...]]:
    """Yield every legal order of one device with one stage, or a few micro-batches of two."""
    own = stages.on[device]
    kinds = {stage: stages.kinds(stage) for stage in own}

    def go(
        done: tuple[JobOf, ...], counts: dict[tuple[int, int], int]
    ) -> Iterator[tuple[JobOf, ...]]:
        if len(done) == stages.micro_batches * sum(map(len, kinds.values())):
            yield done
            return
        for stage in own:
            for i, kind in enumerate(kinds[stage]):
                micro = counts.get((kind, stage), 0)
                before = counts.get((kinds[stage][i - 1], stage), 0) if i else stages.micro_batches
                handed = [
                    counts.get((kind, source), 0)
                    for way, source, target in stages.local
                    if way == kind and target == stage
                ]
                if micro < min([before, *handed]):
                    more = {**counts, (kind, stage): micro + 1}
                    yield from go((*done, (int(kind), stage, micro)), more)

    yield from go((), {})


def least_of_all_s(stages: VirtualStages) -> float:
    clock = OrderClock(stages)
    devices = stages.timed.devices
    each = [[jobs for jobs in every_order(stages, d) if clock.fits({d: jobs})] for d in devices]
    every = (dict(zip(devices, orders, strict=True)) for orders in product(*each))
    return min(map(clock.step_s, every))


@pytest.mark.parametrize("seed", range(5))
def test_no_order_of_two_devices_and_three_micro_batches_is_one_percent_faster(seed: int) -> None:
    stages = unlike(seed, (0, 1), 3, room=random.Random(seed).choice((8.0, 1e9)))
    found = synthesise(stages, in_row=False, work=50_000)
    least_s = least_of_all_s(stages)
    require_legal(stages, found.orders)
    assert least_s <= found.step_s * (1 + 1e-9) <= 1.01 * least_s
    assert found.bound_s <= least_s * (1 + 1e-9)


@pytest.mark.gate("1")
@pytest.mark.parametrize("seed", range(3))
def test_no_order_of_a_v_of_two_devices_is_one_percent_faster(seed: int) -> None:
    stages = unlike(seed, v_line(2), 2).whole()
    found = synthesise(stages, in_row=False, work=100_000)
    require_legal(stages, found.orders)
    least_s = least_of_all_s(stages)
    assert least_s <= found.step_s * (1 + 1e-9) <= 1.01 * least_s


@pytest.mark.parametrize("line", [(0, 1, 2), (0, 1, 2, 2, 1, 0), (0, 1, 2) * 2])
def test_room_for_one_micro_batch_gives_one_after_another(line: tuple[int, ...]) -> None:
    for seed in range(3):
        stages = unlike(seed, line, 3)
        claims = [max(pair) for pair in zip(stages.saved_bytes, stages.waiting_bytes, strict=True)]
        room = {d: sum(claims[s] for s in own) for d, own in stages.on.items()}
        tight = replace(stages, memory_bytes=room)
        for taste in list(tastes(splits=True))[::7]:
            orders = list_orders(tight, taste)
            assert orders is not None  # it is serial, and no deadlock
            require_legal(tight, orders)
        require_legal(tight, synthesise(tight, in_row=False, work=5_000).orders)


def test_less_room_than_one_micro_batch_is_refused_with_the_device() -> None:
    stages = replace(equal((0, 1), 4), memory_bytes={0: 5.0, 1: 0.0})
    with pytest.raises(NoPlanError, match="no order has memory") as caught:
        synthesise(stages, in_row=False)
    assert caught.value.notes == ("device 1: one micro-batch saves 1 bytes, 0 are free",)


def test_nothing_known_makes_it_illegal() -> None:
    """Stages of 0 s, W of 0 s, what waits larger than what was saved, a link 1000 times slower."""
    for seed in range(8):
        dice = random.Random(seed)
        line = v_line(3) if seed % 2 else (0, 1, 2, 0, 1)
        stages = unlike(seed, line, 4, room=dice.choice((18.0, 30.0)))
        nothing = tuple(dice.choice((0.0, seconds)) for seconds in stages.timed.forward_s)
        later = tuple(dice.choice((0.0, None, 1.0)) for _ in line)
        slow = tuple(
            replace(m, wire_s=1000 * m.wire_s + 1) if i == 1 else m
            for i, m in enumerate(stages.timed.values)
        )
        odd = replace(
            stages,
            timed=replace(stages.timed, forward_s=nothing, values=slow),
            backward_weight_s=later,
        )
        for in_row in (False, True):
            found = synthesise(odd, in_row=in_row, work=8_000)
            require_legal(odd, found.orders)
            objective_s = found.row_s if in_row else found.step_s
            assert found.bound_s <= objective_s * (1 + 1e-9)


def test_untrained_stages_have_forwards_only() -> None:
    stages = unlike(1, (0, 1, 2, 0), 3)
    frozen = replace(
        stages,
        untrained=frozenset({0}),
        timed=replace(stages.timed, gradients=stages.timed.gradients[1:]),
    )
    found = synthesise(frozen, in_row=True, work=20_000)
    require_legal(frozen, found.orders)
    assert not [job for job in found.orders[0] if job[1] == 0 and job[0] != Kind.FORWARD]


def test_equal_input_gives_equal_orders() -> None:
    stages = unlike(5, v_line(3), 6, room=30)
    found: list[Synthesis] = [synthesise(stages, in_row=True, work=40_000) for _ in range(2)]
    assert found[0] == found[1]


def test_work_is_counted_whatever_the_size() -> None:
    """Sixteen devices folded, 64 micro-batches: six thousand jobs, and the same counted work."""
    stages = equal(v_line(16), 64, 16)
    found = synthesise(stages, in_row=False, work=100_000)
    assert found.played < 100_000 + 60 * OrderClock(stages).count
    require_legal(stages, found.orders)
    assert found.step_s <= 1.01 * (3 * 64 + 15 / 2)


def test_whole_backwards_take_what_both_parts_take() -> None:
    stages = unlike(3, (0, 1), 3)
    whole = stages.whole()
    assert not whole.splits
    assert bound_s(whole, in_row=True) == pytest.approx(
        bound_s(stages, in_row=True) - 3 * max(stages.timed.instruction_s.values()), rel=1e-9
    )


def test_every_permutation_of_messages_is_one_pipeline() -> None:
    """The order in which messages are listed says nothing but the order of sending."""
    stages = unlike(4, (0, 1, 0, 1), 3)
    for values in permutations(stages.timed.values):
        again = replace(stages, timed=replace(stages.timed, values=values))
        assert bound_s(again, in_row=False) == bound_s(stages, in_row=False)
