"""Orders with a name: job by job those of torch; on equal stages, seconds of the closed form."""

from __future__ import annotations

from typing import Any

import pytest

from bigbrain_fx.errors import InputError
from bigbrain_fx.planning.clock import Kind, OrderClock, VirtualStages, loop_line, v_line
from bigbrain_fx.planning.known_orders import (
    Ranked,
    dualpipe_v,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from tests.support.virtual_line import virtual_line

KINDS = {
    "FORWARD": Kind.FORWARD,
    "BACKWARD_INPUT": Kind.BACKWARD,
    "FULL_BACKWARD": Kind.BACKWARD,
    "BACKWARD_WEIGHT": Kind.BACKWARD_WEIGHT,
}


def of_torch(name: str, devices: int, micro_batches: int, pieces: int, *, splits: bool) -> Ranked:
    """Ask torch for an order; its schedules read these fields of themselves and no others."""
    from torch.distributed.pipelining import schedules

    schedule = getattr(schedules, name)
    own: Any = schedule.__new__(schedule)
    own.pp_group_size, own._n_microbatches, own._num_stages = devices, micro_batches, devices
    own.num_stages, own.n_local_stages = devices * pieces, pieces
    own.microbatches_per_round = micro_batches // max(1, micro_batches // devices)
    if name == "Schedule1F1B":
        orders = own._get_pipeline_order()
    else:
        orders = {rank: own._calculate_single_rank_operations(rank) for rank in range(devices)}
    return tuple(tuple(jobs_of(orders[rank], splits)) for rank in range(devices))


def jobs_of(actions: list[Any], splits: bool) -> Any:
    for action in filter(None, actions):
        if action.sub_actions:
            yield from jobs_of(list(action.sub_actions), splits)
        elif (what := action.computation_type.name) in KINDS:
            yield KINDS[what], action.stage_index, action.microbatch_index
            if what == "FULL_BACKWARD" and splits:
                yield Kind.BACKWARD_WEIGHT, action.stage_index, action.microbatch_index


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("micro", range(4, 17))
def test_orders_are_those_of_torch(devices: int, micro: int) -> None:
    torchs = of_torch("Schedule1F1B", devices, micro, 1, splits=False)
    # the last device's listing in torch 2.13 begins with micro-batch 1 (what it runs does not)
    assert one_f_one_b(devices, micro)[:-1] == torchs[:-1]
    assert zb_v(devices, micro) == of_torch("ScheduleZBVZeroBubble", devices, micro, 2, splits=True)
    assert zb_h1(devices, micro) == of_torch(
        "ScheduleInterleavedZeroBubble", devices, micro, 1, splits=True
    )
    if micro % max(1, micro // devices) == 0:
        for pieces in (2, 3):
            assert interleaved(devices, micro, pieces) == of_torch(
                "ScheduleInterleaved1F1B", devices, micro, pieces, splits=False
            )
    if micro >= 2 * devices:
        assert dualpipe_v(devices, micro) == of_torch(
            "ScheduleDualPipeV", devices, micro, 2, splits=True
        )


def equal(device_of: tuple[int, ...], micro: int, *, splits: bool = True) -> VirtualStages:
    """Return stages of equal shares of a device: F, B and W take 1 in all of each device."""
    share = len(set(device_of)) / len(device_of)
    each = (share,) * len(device_of)
    found = virtual_line(device_of, each, each, each, micro, saved_bytes=each, waiting_bytes=each)
    return found if splits else found.whole()


def seconds(stages: VirtualStages, ranked: Ranked) -> tuple[float, float]:
    """Return the seconds of a step alone, and of one in a row."""
    clock = OrderClock(stages)
    row_s, alone_s = clock.row_s(dict(enumerate(ranked)))
    return alone_s, row_s


def test_equal_stages_take_the_closed_form() -> None:
    line = (0, 1, 2, 3)
    assert seconds(equal(line, 8, splits=False), one_f_one_b(4, 8)) == (33, 33)
    looped = equal(loop_line(4, 2), 8, splits=False)
    assert seconds(looped, interleaved(4, 8, 2))[0] == 28.5
    assert seconds(equal(line, 8), zb_h1(4, 8)) == (27, 27)
    assert seconds(equal(v_line(4), 8), zb_v(4, 8)) == (25.5, 24)


def test_zb_v_and_zb_h1_hold_what_1f1b_holds() -> None:
    assert equal((0, 1, 2, 3), 8, splits=False).peaks(dict(enumerate(one_f_one_b(4, 8))))[0] == 4
    assert max(equal((0, 1, 2, 3), 8).peaks(dict(enumerate(zb_h1(4, 8)))).values()) == 4
    assert max(equal(v_line(4), 8).peaks(dict(enumerate(zb_v(4, 8)))).values()) == 4


@pytest.mark.parametrize("micro", [1, 2, 3, 6])
def test_few_micro_batches_are_not_padded(micro: int) -> None:
    stages = equal(v_line(4), micro)
    orders = zb_v(4, micro)
    assert {len(jobs) for jobs in orders} == {6 * micro}
    assert seconds(stages, orders)[0] < float("inf")


def test_micro_batches_that_make_no_even_rounds_are_refused_with_numbers_that_do() -> None:
    with pytest.raises(InputError, match="9 on 4 devices make 2 rounds") as caught:
        interleaved(4, 9, 2)
    assert "--micro-batches 8 or 12" in str(caught.value.help)
    interleaved(4, 8, 2)
    interleaved(4, 12, 2)


def test_dualpipe_v_needs_a_micro_batch_for_each_stage() -> None:
    with pytest.raises(InputError, match="at least as many micro-batches as stages, 8, not 7"):
        dualpipe_v(4, 7)
    assert seconds(equal(v_line(4), 8), dualpipe_v(4, 8))[0] < float("inf")
