"""With ZeRO 3 a message is held until it is taken: which messages wait for one another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from bigbrain_fx.core import Edge, Forward, Instruction, Program, Recv
from bigbrain_fx.plan.simulate.clock import Execution
from bigbrain_fx.plan.simulate.forecast import _sent
from bigbrain_fx.plan.simulate.messages import Flight

PART = Edge("bucket0", 0, 1, "reduce", 8)
WEIGHTS = Edge("bucket0", 0, 1, "gather", 8)


def held_until(*taken: tuple[Instruction, float]) -> dict[tuple[Edge, int | None], float]:
    """Send part, weights, part from a to b; say until when a has each, b taking them so."""
    stages: Any = SimpleNamespace(
        gathers=True,
        by_backend=False,
        stages=[SimpleNamespace(device="a"), SimpleNamespace(device="b")],
    )
    flights = [Flight(edge, micro, 0, 1, 1) for edge, micro in ((PART, 0), (WEIGHTS, 0), (PART, 1))]
    spans = {"b": [(end_s - 1, end_s) for _, end_s in taken]}
    programs = [Program("b", tuple(instruction for instruction, _ in taken))]
    found = _sent(programs, stages, Execution(spans, flights))["a"]
    return {(flight.edge, flight.micro): flight.free_s for flight in found}


def test_weights_do_not_wait_for_a_part_that_was_sent_before_them() -> None:
    taken = (Recv(WEIGHTS, 0), 2.0), (Recv(PART, 0), 9.0), (Recv(PART, 1), 10.0)
    assert held_until(*taken) == {(PART, 0): 9.0, (WEIGHTS, 0): 2.0, (PART, 1): 10.0}


def test_a_part_waits_for_those_that_were_sent_before_it() -> None:
    taken = (Recv(WEIGHTS, 0), 2.0), (Recv(PART, 1), 3.0), (Recv(PART, 0), 9.0)
    assert held_until(*taken) == {(PART, 0): 9.0, (WEIGHTS, 0): 2.0, (PART, 1): 9.0}


def test_a_part_is_taken_one_computation_late() -> None:
    taken = (
        (Recv(WEIGHTS, 0), 2.0),
        (Forward(1, 0), 3.0),
        (Recv(PART, 0), 4.0),
        (Recv(PART, 1), 5.0),
    )
    assert held_until(*taken) == {(WEIGHTS, 0): 3.0, (PART, 0): 5.0, (PART, 1): 6.0}
