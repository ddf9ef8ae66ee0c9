"""Chains in arrays against chains followed device by device: the same bits."""

from __future__ import annotations

import random

import numpy as np
import pytest

from bigbrain_fx.planning.clock import Message, TimedStages, alternating, played_s
from bigbrain_fx.planning.pace import ChainClock, is_plain, many_at_once, step_s


def chain(count: int, dice: random.Random) -> TimedStages:
    """Draw a chain; a third of what it takes is nothing."""

    def draw() -> float:
        return dice.choice((0.0, dice.random(), 2 * dice.random()))

    def message(source: int, target: int) -> Message:
        return Message(source, target, 10, draw(), draw() / 9, draw() / 30, draw() / 30)

    stages = range(count)
    values = [message(s, s + 1) for s in stages[:-1]]
    gradients = [message(s + 1, s) for s in stages[:-1]]
    dice.shuffle(gradients)
    forward_s, backward_s = (tuple(draw() for _ in stages) for _ in range(2))
    begin_s, instruction_s, once_s = ({stage: draw() for stage in stages} for _ in range(3))
    messages = tuple(values), tuple(gradients)
    return TimedStages(
        tuple(stages), forward_s, backward_s, *messages, begin_s, instruction_s, once_s
    )


@pytest.mark.parametrize("seed", range(30))
def test_a_chain_in_arrays_takes_to_the_bit_what_its_devices_take(seed: int) -> None:
    dice = random.Random(seed)
    stages, micro = chain(dice.randint(1, 12), dice), dice.randint(1, 20)
    in_flight = sorted((dice.randint(1, 25) for _ in stages.forward_s), reverse=True)
    assert is_plain(stages)
    followed_s = played_s(stages, alternating(stages, micro, in_flight), trains=True)
    assert not many_at_once(stages, micro, in_flight)
    assert step_s(stages, micro, in_flight) == followed_s
    once_s = np.array(list(stages.once_s.values()))
    assert ChainClock(stages, micro, np.array(in_flight)).step_s(once_s) == followed_s


def test_stages_without_waits_are_no_plain_chain() -> None:
    stages = chain(4, random.Random(0))
    skipping = TimedStages(
        stages.device_of,
        stages.forward_s,
        stages.backward_s,
        (*stages.values[:-1], Message(1, 3, 10)),
        stages.gradients,
        stages.begin_s,
        stages.instruction_s,
        stages.once_s,
    )
    assert not is_plain(skipping)


def test_arrays_are_for_many_stages_that_compute_at_once() -> None:
    stages = chain(64, random.Random(0))
    assert many_at_once(stages, 256, range(64, 0, -1))
    assert not many_at_once(
        stages, 256, [8] * 64
    )  # a forward goes through all before the next backward
    assert not many_at_once(chain(4, random.Random(0)), 256, range(4, 0, -1))
