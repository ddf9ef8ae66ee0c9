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


def test_unmatched_send() -> None:
    programs = with_changed(0, Forward(0, 0), Send(X, 0), Backward(0, 0), OptimizerStep())
    assert check(programs, STAGES) == [
        UnmatchedSend("d1", 3, DX, 0),
        MissingInput("d0", 2, Backward(0, 0), Recv(DX, 0)),
    ]


def test_unmatched_recv_is_not_a_deadlock() -> None:
    programs = with_changed(1, Recv(X, 0), Forward(1, 0), Backward(1, 0), OptimizerStep())
    assert check(programs, STAGES) == [UnmatchedRecv("d0", 2, DX, 0)]


def test_duplicate_message() -> None:
    programs = with_changed(
        0, Forward(0, 0), Send(X, 0), Send(X, 0), Recv(DX, 0), Backward(0, 0), OptimizerStep()
    )
    assert DuplicateMessage("d0", 2, X, 0, "send") in check(programs, STAGES)
    twice = with_changed(
        1, Recv(X, 0), Recv(X, 0), Forward(1, 0), Backward(1, 0), Send(DX, 0), OptimizerStep()
    )
    assert DuplicateMessage("d1", 1, X, 0, "recv") in check(twice, STAGES)


def test_backward_before_forward() -> None:
    programs = with_changed(
        1, Backward(1, 0), Send(DX, 0), Recv(X, 0), Forward(1, 0), OptimizerStep()
    )
    assert check(programs, STAGES) == [BackwardBeforeForward("d1", 0, 1, 0)]


def test_micro_batches_must_ascend() -> None:
    stages = Stages((Stage(0, "d0", ()),), ())
    program = Program("d0", (Forward(0, 1), Forward(0, 0)))
    assert check((program,), stages) == [MicroOrder("d0", 1, Forward(0, 0), 1)]
    again = Program("d0", (Forward(0, 0), Forward(0, 0)))
    assert check((again,), stages) == [MicroOrder("d0", 1, Forward(0, 0), 0)]


def test_a_channel_keeps_its_order() -> None:
    """Both ends agree on which messages there are, and neither computes out of order."""
    stages = Stages(STAGES.stages, (X,))
    programs = (
        Program("d0", (Forward(0, 0), Forward(0, 1), Send(X, 1), Send(X, 0))),
        Program("d1", (Recv(X, 0), Forward(1, 0), Recv(X, 1), Forward(1, 1))),
    )
    assert check(programs, stages) == [MicroOrder("d0", 3, Send(X, 0), 1)]


def test_missing_compute() -> None:
    stages = Stages((Stage(0, "d0", ()),), ())
    program = Program("d0", (Forward(0, 0), Forward(0, 1), Backward(0, 1)))
    assert check((program,), stages) == [
        MissingCompute("d0", Backward(0, 0)),
        MissingCompute("d0", OptimizerStep()),
    ]
    assert check((Program("d0", ()),), stages) == [MissingCompute("d0", Forward(0, 0))]
    forwards = Program("d0", (Forward(0, 0),))
    assert check((forwards,), stages, trained=frozenset({0})) == [
        MissingCompute("d0", Backward(0, 0)),
        MissingCompute("d0", OptimizerStep()),
    ]


def test_missing_input_of_a_local_edge() -> None:
    local = Edge("y", 0, 1, "activation")
    stages = Stages((Stage(0, "d0", ()), Stage(1, "d0", ())), (local,))
    program = Program("d0", (Forward(1, 0), Forward(0, 0)))
    assert check((program,), stages) == [MissingInput("d0", 0, Forward(1, 0), Forward(0, 0))]


def test_a_message_is_sent_after_it_is_made() -> None:
    programs = with_changed(
        0, Send(X, 0), Forward(0, 0), Recv(DX, 0), Backward(0, 0), OptimizerStep()
    )
    assert check(programs, STAGES) == [MissingInput("d0", 0, Send(X, 0), Forward(0, 0))]


def test_the_optimizer_waits_for_gradients_and_ties() -> None:
    tie = Edge("w", 0, 1, "tied")
    stages = Stages(STAGES.stages, (tie,))
    programs = (
        Program("d0", (Forward(0, 0), Send(tie, None), Backward(0, 0), OptimizerStep())),
        Program("d1", (Forward(1, 0), Backward(1, 0), OptimizerStep(), Recv(tie, None))),
    )
    assert check(programs, stages) == [
        MissingInput("d0", 1, Send(tie, None), Backward(0, 0)),
        MissingInput("d1", 2, OptimizerStep(), Recv(tie, None)),
    ]


DEFERS = Stages((Stage(0, "d0", (), deferred=("w",)),), ())
F, B, W = Forward(0, 0), Backward(0, 0), BackwardWeight(0, 0)


def found_in(*instructions: Instruction, stages: Stages = DEFERS) -> list[Finding]:
    return check((Program("d0", instructions),), stages)


def test_weights_have_a_backward_of_their_own() -> None:
    assert found_in(F, B, W, OptimizerStep()) == []


def test_weights_before_their_backward() -> None:
    assert found_in(F, W, B, OptimizerStep()) == [WeightBeforeBackward("d0", 1, 0, 0)]


def test_weights_that_are_never_made() -> None:
    assert found_in(F, B, OptimizerStep()) == [MissingCompute("d0", W)]
    two = (F, B, W, Forward(0, 1), Backward(0, 1), OptimizerStep())
    assert found_in(*two) == [MissingCompute("d0", BackwardWeight(0, 1))]


def test_weights_that_are_made_twice() -> None:
    assert found_in(F, B, W, W, OptimizerStep()) == [MicroOrder("d0", 3, W, 0)]


def test_weights_in_another_order_than_micro_batches() -> None:
    one = (Forward(0, 1), Backward(0, 1))
    assert found_in(F, B, *one, BackwardWeight(0, 1), W, OptimizerStep()) == [
        MicroOrder("d0", 5, W, 1)
    ]


def test_weights_after_the_optimizer_step() -> None:
    assert found_in(F, B, OptimizerStep(), W) == [MissingInput("d0", 2, OptimizerStep(), W)]


def test_weights_of_a_stage_that_defers_nothing() -> None:
    plain = Stages((Stage(0, "d0", ()),), ())
    assert found_in(F, B, W, OptimizerStep(), stages=plain) == [NothingDeferred("d0", 2, 0, 0)]


def test_weights_on_a_device_that_has_no_part_in_them() -> None:
    stages = Stages((*DEFERS.stages, Stage(1, "d1", ())), ())
    programs = (
        Program("d0", (F, B, OptimizerStep())),
        Program("d1", (Forward(1, 0), Backward(1, 0), W, OptimizerStep())),
    )
    assert Misplaced("d1", 2, W) in check(programs, stages)


def test_a_tied_gradient_waits_where_its_parameter_is_deferred() -> None:
    tie = Edge("w", 0, 1, "tied")
    stages = Stages((*DEFERS.stages, Stage(1, "d1", ())), (tie,))
    programs = (
        Program("d0", (F, B, Send(tie, None), W, OptimizerStep())),
        Program("d1", (Forward(1, 0), Backward(1, 0), Recv(tie, None), OptimizerStep())),
    )
    assert check(programs, stages) == [MissingInput("d0", 2, Send(tie, None), W)]


def test_a_bucket_leaves_after_the_weights_that_it_waits_for() -> None:
    part = Edge("b", 0, 1, "reduce")
    stages = Stages(
        (*DEFERS.stages, Stage(1, "d1", (), replica=1, deferred=("w",))),
        (part,),
        micros=((0,), (0,)),
        buckets=(Bucket("b", (0, 1), ("w",), (0, 1), "float32"),),
    )
    other = (Forward(1, 0), Backward(1, 0), BackwardWeight(1, 0), Recv(part, None))
    early = Program("d0", (F, B, Send(part, None), W, OptimizerStep()))
    late = Program("d0", (F, B, W, Send(part, None), OptimizerStep()))
    end = Program("d1", (*other, OptimizerStep()))
    assert check((late, end), stages) == []
    assert check((early, end), stages) == [MissingInput("d0", 2, Send(part, None), W)]


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
