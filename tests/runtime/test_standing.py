"""What is computed, summed and told by replicas that go on without others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bigbrain_fx.runtime.device import Device
from bigbrain_fx.runtime.standing import TakingOver, merged, shared_out


@pytest.mark.parametrize(
    ("before", "lost", "after"),
    [
        (((0, 2), (1, 3)), {1}, ((0, 1, 2, 3), ())),
        (((0, 3, 6), (1, 4, 7), (2, 5)), {0}, ((), (0, 1, 4, 6, 7), (2, 3, 5))),
        ((range(6), (6,), (7,)), {1}, (range(7), (), (7,))),
        (((0, 1), (2,), (3,)), {0, 1}, ((), (), range(4))),
    ],
)
def test_micro_batches_go_to_who_then_has_the_fewest_for_its_share(
    before: Sequence[Sequence[int]], lost: set[int], after: Sequence[Sequence[int]]
) -> None:
    assert shared_out(before, lost) == tuple(map(tuple, after))


@pytest.mark.parametrize(
    ("lost", "found"),
    [({0}, (0, 7, 9)), ({1}, (7, 0, 9)), ({2}, (3, 13, 0)), ({0, 1}, (0, 0, 16))],
)
def test_no_number_moves_within_a_bucket(lost: set[int], found: tuple[int, ...]) -> None:
    pieces = (3, 4, 9)
    assert merged(pieces, lost) == found
    edges = {sum(pieces[:place]) for place in range(4)}
    assert {sum(found[:place]) for place in range(4)} <= edges


class Emitted(Device):
    """Has two micro-batches in flight, as 1f1b of the first of two stages."""

    micros: tuple[Sequence[int], ...] = ((0, 2), (1, 3))
    done: list[str]

    def step_once(self) -> None:
        own = self.micros[self.replica]
        for i in range(2):
            self.forward_0(own[i])
        for i in range(2):
            self.backward_0(own[i])
        self.update()

    def forward_0(self, m: int) -> None:
        self.done.append(f"f{m}")

    def backward_0(self, m: int) -> None:
        self.done.append(f"b{m}")

    def update(self) -> None:
        raise AssertionError("the emitted update knows channels of the lost")


class Taking(TakingOver, Emitted):
    """Writes down what it does."""

    micros = ((0, 1, 3), ())
    emitted = Emitted

    def __init__(self) -> None:
        self.done = []

    def sum_gradients(self) -> None:
        self.done.append("sum")

    def exchange_statistics(self) -> None:
        self.done.append("statistics")

    def optimizer_step(self) -> None:
        self.done.append("update")


def test_the_schedule_is_gone_through_again_and_one_update_is_made() -> None:
    device = Taking()
    device.step_once()
    assert device.done == ["f0", "f1", "b0", "b1", "f3", "b3", "sum", "statistics", "update"]
