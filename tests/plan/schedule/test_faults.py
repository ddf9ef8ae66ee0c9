from __future__ import annotations

from dataclasses import replace

import pytest

from bigbrain_fx.core import (
    Backward,
    BackwardWeight,
    Bucket,
    Cluster,
    Device,
    Edge,
    Forward,
    Instruction,
    Link,
    OptimizerStep,
    Program,
    Recv,
    Send,
    Stage,
    Stages,
)
from bigbrain_fx.errors import ScheduleError
from bigbrain_fx.plan.schedule import (
    BackwardBeforeForward,
    Deadlock,
    DuplicateMessage,
    Finding,
    MicroOrder,
    Misplaced,
    MissingCompute,
    MissingInput,
    NothingDeferred,
    OutOfMemory,
    StageCosts,
    UnmatchedRecv,
    UnmatchedSend,
    WeightBeforeBackward,
    check,
    require_sound,
    table,
)

FREE = Link(0.0, float("inf"))


def chain(count: int) -> Stages:
    """Stages 0 .. count-1 on d0, d1, ...; x0 goes from 0 to 1, its gradient comes back."""
    forth = [Edge(f"x{i}", i, i + 1, "activation", 1) for i in range(count - 1)]
    back = [Edge(f"x{i}", i + 1, i, "gradient", 1) for i in range(count - 1)]
    return Stages(tuple(Stage(i, f"d{i}", ()) for i in range(count)), (*forth, *back))


def cluster(count: int, memory_bytes: int = 1 << 30) -> Cluster:
    return Cluster(
        tuple(Device(f"d{i}", "h", "cpu", memory_bytes, 1.0, 1.0) for i in range(count)), FREE
    )


def even_costs(count: int) -> StageCosts:
    return StageCosts((1.0,) * count, (2.0,) * count, (1,) * count, cluster(count))


STAGES = chain(2)
X, DX = STAGES.edges
SOUND = (
    Program("d0", (Forward(0, 0), Send(X, 0), Recv(DX, 0), Backward(0, 0), OptimizerStep())),
    Program("d1", (Recv(X, 0), Forward(1, 0), Backward(1, 0), Send(DX, 0), OptimizerStep())),
)


def with_changed(device: int, *instructions: Instruction) -> tuple[Program, ...]:
    programs = list(SOUND)
    programs[device] = replace(programs[device], instructions=instructions)
    return tuple(programs)


def test_sound_programs_have_no_faults() -> None:
    assert check(SOUND, STAGES, trained=frozenset({0, 1}), costs=even_costs(2)) == []
    require_sound(SOUND, STAGES)


F, B, W, END = Forward(0, 0), Backward(0, 0), BackwardWeight(0, 0), OptimizerStep()
F1, B1 = Forward(1, 0), Backward(1, 0)
ALONE = Stages((Stage(0, "d0", ()),), ())
DEFERS = Stages((Stage(0, "d0", (), deferred=("w",)),), ())
BESIDE = Stages((*DEFERS.stages, Stage(1, "d1", ())), ())
LOCAL, TIE = Edge("y", 0, 1, "activation"), Edge("w", 0, 1, "tied")


def alone(*instructions: Instruction) -> tuple[Program, ...]:
    return (Program("d0", instructions),)


def pair(*programs: tuple[Instruction, ...]) -> tuple[Program, ...]:
    return tuple(Program(f"d{i}", own) for i, own in enumerate(programs))


@pytest.mark.parametrize(
    ("programs", "stages", "expected"),
    [
        pytest.param(
            with_changed(0, F, Send(X, 0), B, END),
            STAGES,
            [UnmatchedSend("d1", 3, DX, 0), MissingInput("d0", 2, B, Recv(DX, 0))],
            id="unmatched send",
        ),
        pytest.param(
            with_changed(1, Recv(X, 0), F1, B1, END),
            STAGES,
            [UnmatchedRecv("d0", 2, DX, 0)],  # and no deadlock
            id="unmatched recv",
        ),
        pytest.param(
            with_changed(1, B1, Send(DX, 0), Recv(X, 0), F1, END),
            STAGES,
            [BackwardBeforeForward("d1", 0, 1, 0)],
            id="backward before forward",
        ),
        pytest.param(alone(Forward(0, 1), F), ALONE, [MicroOrder("d0", 1, F, 1)], id="descending"),
        pytest.param(alone(F, F), ALONE, [MicroOrder("d0", 1, F, 0)], id="twice"),
        pytest.param(  # both ends agree on which messages there are, and compute in order
            pair(
                (F, Forward(0, 1), Send(X, 1), Send(X, 0)),
                (Recv(X, 0), F1, Recv(X, 1), Forward(1, 1)),
            ),
            Stages(STAGES.stages, (X,)),
            [MicroOrder("d0", 3, Send(X, 0), 1)],
            id="a channel in another order",
        ),
        pytest.param(
            alone(F, Forward(0, 1), Backward(0, 1)),
            ALONE,
            [MissingCompute("d0", B), MissingCompute("d0", END)],
            id="a backward and the step are missing",
        ),
        pytest.param(alone(), ALONE, [MissingCompute("d0", F)], id="a forward is missing"),
        pytest.param(
            alone(F1, F),
            Stages((Stage(0, "d0", ()), Stage(1, "d0", ())), (LOCAL,)),
            [MissingInput("d0", 0, F1, F)],
            id="a local value is not made",
        ),
        pytest.param(
            with_changed(0, Send(X, 0), F, Recv(DX, 0), B, END),
            STAGES,
            [MissingInput("d0", 0, Send(X, 0), F)],
            id="sent before it is made",
        ),
        pytest.param(
            pair((F, Send(TIE, None), B, END), (F1, B1, END, Recv(TIE, None))),
            Stages(STAGES.stages, (TIE,)),
            [
                MissingInput("d0", 1, Send(TIE, None), B),
                MissingInput("d1", 2, END, Recv(TIE, None)),
            ],
            id="gradients and ties after the step",
        ),
        pytest.param(alone(F, B, W, END), DEFERS, [], id="weights by themselves"),
        pytest.param(
            alone(F, W, B, END), DEFERS, [WeightBeforeBackward("d0", 1, 0, 0)], id="weights first"
        ),
        pytest.param(alone(F, B, END), DEFERS, [MissingCompute("d0", W)], id="weights never made"),
        pytest.param(
            alone(F, B, W, Forward(0, 1), Backward(0, 1), END),
            DEFERS,
            [MissingCompute("d0", BackwardWeight(0, 1))],
            id="weights made for one of two",
        ),
        pytest.param(
            alone(F, B, W, W, END), DEFERS, [MicroOrder("d0", 3, W, 0)], id="weights made twice"
        ),
        pytest.param(
            alone(F, B, Forward(0, 1), Backward(0, 1), BackwardWeight(0, 1), W, END),
            DEFERS,
            [MicroOrder("d0", 5, W, 1)],
            id="weights in another order",
        ),
        pytest.param(
            alone(F, B, END, W),
            DEFERS,
            [MissingInput("d0", 2, END, W)],
            id="weights after the step",
        ),
        pytest.param(
            alone(F, B, W, END), ALONE, [NothingDeferred("d0", 2, 0, 0)], id="nothing defers"
        ),
        pytest.param(
            pair((F, B, Send(TIE, None), W, END), (F1, B1, Recv(TIE, None), END)),
            Stages(BESIDE.stages, (TIE,)),
            [MissingInput("d0", 2, Send(TIE, None), W)],
            id="a tied gradient before its weights",
        ),
    ],
)
def test_each_fault_is_found(
    programs: tuple[Program, ...], stages: Stages, expected: list[Finding]
) -> None:
    assert check(programs, stages) == expected


def test_a_message_that_stands_twice_is_found_at_both_ends() -> None:
    twice = with_changed(0, F, Send(X, 0), Send(X, 0), Recv(DX, 0), B, END)
    assert DuplicateMessage("d0", 2, X, 0, "send") in check(twice, STAGES)
    twice = with_changed(1, Recv(X, 0), Recv(X, 0), F1, B1, Send(DX, 0), END)
    assert DuplicateMessage("d1", 1, X, 0, "recv") in check(twice, STAGES)


def test_a_stage_that_trains_needs_its_backward() -> None:
    assert check(alone(F), ALONE, trained=frozenset({0})) == [
        MissingCompute("d0", B),
        MissingCompute("d0", END),
    ]


def test_weights_on_a_device_that_has_no_part_in_them() -> None:
    assert Misplaced("d1", 2, W) in check(pair((F, B, END), (F1, B1, W, END)), BESIDE)


def test_a_bucket_leaves_after_the_weights_that_it_waits_for() -> None:
    part = Edge("b", 0, 1, "reduce")
    stages = Stages(
        (*DEFERS.stages, Stage(1, "d1", (), replica=1, deferred=("w",))),
        (part,),
        micros=((0,), (0,)),
        buckets=(Bucket("b", (0, 1), ("w",), (0, 1), "float32"),),
    )
    other = (F1, B1, BackwardWeight(1, 0), Recv(part, None), END)
    assert check(pair((F, B, W, Send(part, None), END), other), stages) == []
    assert check(pair((F, B, Send(part, None), W, END), other), stages) == [
        MissingInput("d0", 2, Send(part, None), W)
    ]


def test_misplaced() -> None:
    local = Edge("y", 0, 1, "activation")
    stages = Stages((Stage(0, "d0", ()), Stage(1, "d0", ()), Stage(2, "d1", ())), (local,))
    programs = (
        Program("d0", (Forward(0, 0), Send(local, 0), Recv(local, 0), Forward(1, 0))),
        Program("d1", (Forward(2, 0), Forward(1, 0))),
    )
    found = [finding for finding in check(programs, stages) if isinstance(finding, Misplaced)]
    assert found == [
        Misplaced("d0", 1, Send(local, 0)),
        Misplaced("d0", 2, Recv(local, 0)),
        Misplaced("d1", 1, Forward(1, 0)),
    ]


def test_out_of_memory_names_the_device_and_the_bytes() -> None:
    costs = replace(
        even_costs(2),
        saved_bytes=(100, 10),
        weights_bytes={"d0": 1000, "d1": 0},
        cluster=cluster(2, memory_bytes=1100),
    )
    # 1000 of weights, 100 saved, 1 that is sent, 1 that is to come back
    fault = OutOfMemory("d0", 0, 1102, 1100)
    assert check(SOUND, STAGES, costs=costs) == [fault]
    with pytest.raises(ScheduleError, match="device 'd0' needs") as caught:
        require_sound(SOUND, STAGES, costs=costs)
    assert caught.value.help == "use smaller micro-batches, fewer in flight, or more devices"


DEADLOCKED = (
    Program("d0", (Forward(0, 0), Recv(DX, 0), Send(X, 0), Backward(0, 0), OptimizerStep())),
    SOUND[1],
)


def test_deadlock() -> None:
    assert check(DEADLOCKED, STAGES) == [Deadlock((("d0", 1, Recv(DX, 0)), ("d1", 0, Recv(X, 0))))]


def test_a_deadlock_is_shown_as_a_table() -> None:
    with pytest.raises(ScheduleError) as caught:
        require_sound(DEADLOCKED, STAGES)
    assert caught.value.exit_code == 1
    assert str(caught.value).splitlines() == [
        "the programs cannot run: deadlock: 'd0' waits for gradient x0 1->0, micro-batch 0; "
        "'d1' waits for activation x0 0->1, micro-batch 0",
        "  note: d0 @0 |   F0.0   [r1>0.0]  s0>1.0    B0.0    step",
        "  note: d1 @0 | [r0>1.0]   F1.0     B1.0    s1>0.0   step",
        "  help: the schedule is at fault, not your model: try another --schedule, and report this",
    ]


def test_three_devices_wait_in_a_circle() -> None:
    """d3 waits too, but it is not to blame."""
    ring = [Edge("x", i, (i + 1) % 3, "activation") for i in range(3)]
    tail = Edge("x", 2, 3, "activation")
    stages = Stages(tuple(Stage(i, f"d{i}", ()) for i in range(4)), (*ring, tail))
    programs = [
        Program(f"d{i}", (Recv(ring[i - 1], 0), Forward(i, 0), Send(ring[i], 0))) for i in range(3)
    ]
    programs[2] = replace(programs[2], instructions=(*programs[2].instructions, Send(tail, 0)))
    programs.insert(0, Program("d3", (Recv(tail, 0), Forward(3, 0))))
    (fault,) = check(programs, stages)
    assert isinstance(fault, Deadlock)
    assert [device for device, _, _ in fault.waiting] == ["d2", "d1", "d0"]


def test_a_long_table_shows_the_surroundings() -> None:
    program = Program("d0", tuple(Forward(0, m) for m in range(40)))
    fault = MicroOrder("d0", 20, Forward(0, 20), 21)
    assert table([program], [fault]) == (
        "d0 @16 |  F0.16   F0.17   F0.18   F0.19  [F0.20]  F0.21   F0.22   F0.23   F0.24  ..."
    )


def test_more_than_ten_faults_are_counted() -> None:
    program = Program("d0", tuple(Backward(0, m) for m in range(30)))
    with pytest.raises(ScheduleError) as caught:
        require_sound((program,), Stages((Stage(0, "d0", ()),), ()))
    assert "and 51 more" in caught.value.notes
