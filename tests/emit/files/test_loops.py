"""Micro-batches become loops, and the loops are exactly the steps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from bigbrain_fx.core import Backward, Cluster, Device, Edge, Forward, Link, Program, Stage, Stages
from bigbrain_fx.emit.files.schedule_text import MicroAction, MicroLoop, roll, unroll
from bigbrain_fx.plan.schedule import StageCosts, build
from tests.support.examples import examples


def steps_of(word: str) -> list[MicroAction]:
    """Read "F0 B0 F1" as steps."""
    return [MicroAction(cell[0], int(cell[1:])) for cell in word.split()]


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(
    st.lists(
        st.builds(
            MicroLoop,
            st.lists(
                st.builds(MicroAction, st.sampled_from("FGB"), st.integers(0, 3)),
                min_size=1,
                max_size=4,
            ).map(tuple),
            st.integers(1, 9),
        ),
        max_size=5,
    )
)
def test_rolling_never_needs_more_statements_than_steps(loops: list[MicroLoop]) -> None:
    steps = unroll(loops)
    rolled = roll(steps)
    assert unroll(rolled) == steps
    assert sum(len(loop.body) for loop in rolled) <= len(steps)


def chain(count: int) -> tuple[Stages, StageCosts]:
    stages = tuple(Stage(i, f"d{i}", ()) for i in range(count))
    edges = [Edge(f"v{i}", i, i + 1, "activation", 4) for i in range(count - 1)]
    back = [Edge(f"v{i}", i + 1, i, "gradient", 4) for i in range(count - 1)]
    devices = tuple(Device(f"d{i}", "h", "cpu", 1 << 30, 1.0, 1.0) for i in range(count))
    ones = (1.0,) * count
    costs = StageCosts(ones, ones, (1,) * count, Cluster(devices, Link(0.0, 1.0)))
    return Stages(stages, (*edges, *back)), costs


def rolled(schedule: str, count: int, micro_batches: int, stage: int) -> list[MicroLoop]:
    stages, costs = chain(count)
    trained = frozenset(range(count))
    programs = build(schedule, stages, micro_batches, costs, trained)
    steps = computed(programs[stage])
    loops = roll(steps)
    assert unroll(loops) == steps
    return loops


def computed(program: Program) -> list[MicroAction]:
    return [
        MicroAction("F" if isinstance(i, Forward) else "B", i.micro)
        for i in program.instructions
        if isinstance(i, Forward | Backward)
    ]


@pytest.mark.parametrize(
    ("schedule", "stage", "expected"),
    [
        ("gpipe", 0, "8 x (F0); 8 x (B0)"),
        ("gpipe", 3, "8 x (F0); 8 x (B0)"),
        ("1f1b", 0, "4 x (F0); 4 x (B0 F4); 4 x (B4)"),
        ("1f1b", 1, "3 x (F0); 5 x (B0 F3); 3 x (B5)"),
        ("1f1b", 2, "2 x (F0); 6 x (B0 F2); 2 x (B6)"),
        ("1f1b", 3, "8 x (F0 B0)"),
    ],
)
def test_a_schedule_is_few_loops(schedule: str, stage: int, expected: str) -> None:
    """The loops cover the same steps in the same order, however a stage's warm-up is written."""
    loops = rolled(schedule, 4, 8, stage)
    assert unroll(loops) == unroll(parsed(expected))
    assert sum(len(loop.body) for loop in loops) <= 5


def parsed(text: str) -> list[MicroLoop]:
    loops = []
    for part in text.split("; "):
        count, _, body = part.partition(" x ")
        loops.append(MicroLoop(tuple(steps_of(body.strip("()"))), int(count)))
    return loops
