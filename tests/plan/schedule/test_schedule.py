from __future__ import annotations

from dataclasses import replace

import pytest

from bigbrain_fx.core import (
    Backward,
    Cluster,
    Costs,
    Device,
    Edge,
    Forward,
    Graph,
    Link,
    Op,
    OpCost,
    Param,
    ParamRef,
    Program,
    Recv,
    Ref,
    Send,
    Stage,
    Stages,
    TensorSpec,
)
from bigbrain_fx.errors import InputError, ScheduleError
from bigbrain_fx.plan.schedule import (
    SCHEDULES,
    StageCosts,
    build,
    check,
    held,
    stage_costs,
)
from bigbrain_fx.plan.schedule.virtual import timed_stages
from bigbrain_fx.planning import in_flight_to_fill

FREE = Link(0.0, float("inf"))


def chain(count: int) -> Stages:
    """Stages 0 .. count-1 on d0, d1, ...; x0 goes from 0 to 1, its gradient comes back."""
    forth = [Edge(f"x{i}", i, i + 1, "activation", 1) for i in range(count - 1)]
    back = [Edge(f"x{i}", i + 1, i, "gradient", 1) for i in range(count - 1)]
    return Stages(tuple(Stage(i, f"d{i}", ()) for i in range(count)), (*forth, *back))


def cluster(count: int, link: Link = FREE, memory_bytes: int = 1 << 30) -> Cluster:
    return Cluster(
        tuple(Device(f"d{i}", "h", "cpu", memory_bytes, 1.0, 1.0) for i in range(count)), link
    )


def even_costs(count: int, link: Link = FREE, *, f: float = 1.0, b: float = 2.0) -> StageCosts:
    return StageCosts((f,) * count, (b,) * count, (1,) * count, cluster(count, link))


def all_of(stages: Stages) -> frozenset[int]:
    return frozenset(range(len(stages.stages)))


def computed(program: Program) -> str:
    """Draw what a device computes: "F0 F1 B0 B1"; micro-batches only."""
    return " ".join(
        f"{i.do[0].upper()}{i.micro}"
        for i in program.instructions
        if isinstance(i, Forward | Backward)
    )


def written(program: Program) -> list[str]:
    """Write a program out, one word an instruction."""
    return [
        f"{i.do} {i.edge.value}{'' if i.micro is None else f'.{i.micro}'}"
        if isinstance(i, Send | Recv)
        else f"{i.do} {i.stage}.{i.micro}"
        if isinstance(i, Forward | Backward)
        else i.do
        for i in program.instructions
    ]


# ------------------------------------------------------------------------------- orders


def test_gpipe_runs_all_forwards_then_all_backwards() -> None:
    for program in build("gpipe", chain(3), 3, even_costs(3), all_of(chain(3))):
        assert computed(program) == "F0 F1 F2 B0 B1 B2"


def test_1f1b_alternates_after_the_warm_up() -> None:
    programs = build("1f1b", chain(3), 4, even_costs(3), all_of(chain(3)))
    assert [computed(program) for program in programs] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_1f1b_with_more_in_flight_warms_up_longer_but_never_beyond_the_last_micro_batch() -> None:
    programs = build("1f1b", chain(2), 4, even_costs(2), all_of(chain(2)), in_flight=(9, 2))
    assert [computed(program) for program in programs] == [
        "F0 F1 F2 F3 B0 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
    ]


def test_list_on_an_even_chain_is_1f1b() -> None:
    stages = chain(4)
    classic = build("1f1b", stages, 8, even_costs(4), all_of(stages))
    listed = build("list", stages, 8, even_costs(4), all_of(stages))
    assert [computed(p) for p in listed[1:]] == [computed(p) for p in classic[1:]]


def test_messages_stand_around_their_computation_in_the_order_of_the_edges() -> None:
    """d0 has stages 0 and 2, so y from 0 to 2 is handed over; w is tied between d0 and d1."""
    stages = Stages(
        (Stage(0, "d0", ()), Stage(1, "d1", ()), Stage(2, "d0", ())),
        (
            Edge("b", 0, 1, "activation"),
            Edge("a", 0, 1, "activation"),
            Edge("y", 0, 2, "activation"),
            Edge("c", 1, 2, "activation"),
            Edge("c", 2, 1, "gradient"),
            Edge("y", 2, 0, "gradient"),
            Edge("a", 1, 0, "gradient"),
            Edge("norms", 0, 1, "norm"),
            Edge("norms", 1, 0, "norm"),
            Edge("w", 1, 0, "tied"),
            Edge("w", 0, 1, "tied"),
            Edge("w", 2, 0, "tied"),
        ),
    )
    first, second = build("list", stages, 1, even_costs(3), all_of(stages))
    assert written(first) == [
        *("forward 0.0", "send b.0", "send a.0"),
        *("recv c.0", "forward 2.0"),
        *("backward 2.0", "send c.0"),
        *("recv a.0", "backward 0.0"),
        *("send w", "recv w", "send norms", "recv norms", "optimizer_step"),
    ]
    assert written(second) == [
        *("recv b.0", "recv a.0", "forward 1.0", "send c.0"),
        *("recv c.0", "backward 1.0", "send a.0"),
        *("send w", "recv w", "send norms", "recv norms", "optimizer_step"),
    ]
    assert check((first, second), stages) == []


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        (FREE, (4, 3, 2, 1)),  # classic 1F1B
        (Link(1.0, float("inf")), (7, 5, 3, 1)),  # a hop and back takes 5 units, a cycle 3
        (Link(100.0, float("inf")), (32, 32, 32, 1)),  # never more than there are
    ],
)
def test_in_flight_to_fill_follows_the_links(link: Link, expected: tuple[int, ...]) -> None:
    stages = chain(4)
    timed = timed_stages(stages, even_costs(4, link), all_of(stages))
    assert in_flight_to_fill(timed, 32) == expected


def test_in_flight_to_fill_of_free_work_is_everything() -> None:
    stages = chain(2)
    timed = timed_stages(stages, even_costs(2, f=0.0, b=0.0), all_of(stages))
    assert in_flight_to_fill(timed, 5) == (5, 5)


# ------------------------------------------------------------------------------- refused


def test_an_unknown_schedule_names_those_there_are() -> None:
    with pytest.raises(InputError, match="there is no schedule 'zigzag'") as caught:
        build("zigzag", chain(2), 1, even_costs(2), frozenset())
    assert caught.value.help == f"choose one of {', '.join(sorted(SCHEDULES))}"


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_chain_schedule_refuses_two_stages_on_a_device(name: str) -> None:
    stages = Stages((Stage(0, "d0", ()), Stage(1, "d1", ()), Stage(2, "d0", ())), ())
    with pytest.raises(InputError, match="but device 'd0' has stages 0, 2") as caught:
        build(name, stages, 2, even_costs(3), all_of(stages))
    assert caught.value.help is not None
    assert "--schedule list" in caught.value.help


def test_gpipe_takes_no_in_flight() -> None:
    with pytest.raises(InputError, match="takes no in_flight"):
        build("gpipe", chain(2), 2, even_costs(2), all_of(chain(2)), in_flight=(2, 2))


def test_1f1b_refuses_in_flight_that_would_deadlock() -> None:
    with pytest.raises(InputError, match="stage 0 has 1 and stage 1 has 2") as caught:
        build("1f1b", chain(2), 4, even_costs(2), all_of(chain(2)), in_flight=(1, 2))
    assert caught.value.help == "give stage 0 at least 2"


def test_a_gradient_needs_a_backward_at_both_ends() -> None:
    with pytest.raises(ScheduleError, match="but stage 0 has no Backward"):
        build("gpipe", chain(2), 1, even_costs(2), frozenset({1}))


# ------------------------------------------------------------------------------- costs and memory


def spec(*shape: int, grad: bool = False) -> TensorSpec:
    return TensorSpec(shape, "float32", (1,) * len(shape), grad)


def two_op_graph() -> Graph:
    """h = embed(x); y = head(h): both read the tied weight (8 x 4); the head's bias is frozen."""
    weight = spec(8, 4, grad=True)
    return Graph(
        name="tied",
        ops=(
            Op(
                "h",
                "embed",
                (ParamRef("emb.w"),),
                outputs=(spec(2, 4, grad=True),),
                writes_bytes=32,
            ),
            Op(
                "y",
                "head",
                (Ref("h"), ParamRef("head.w"), ParamRef("head.b")),
                outputs=(spec(2, 8, grad=True),),
                writes_bytes=64,
            ),
        ),
        inputs=(),
        params=(
            Param("emb.w", weight, "emb.w"),
            Param("head.w", weight, "emb.w"),
            Param("head.b", spec(8), "head.b"),
        ),
        outputs=("y",),
        loss=None,
    )


def two_op_costs(*devices: str) -> Costs:
    per_op = {"h": OpCost(1.0, 2.0, 1.0, 10, 5), "y": OpCost(3.0, 4.0, 2.0, 20, 7)}
    return Costs(
        {device: per_op for device in devices},
        cluster(len(devices)),
        dict.fromkeys(devices, 0.5),
        optimizer_state_per_byte=2.0,
    )


def test_stage_costs_of_two_devices() -> None:
    stages = Stages(
        (
            Stage(0, "d0", ("h",), params=("emb.w",)),
            Stage(1, "d1", ("y",), params=("head.w", "head.b")),
        ),
        (),
    )
    costs = stage_costs(two_op_graph(), stages, two_op_costs("d0", "d1"))
    assert costs.forward_s == (1.0, 3.0)
    assert costs.backward_s == (2.0, 4.0)
    assert costs.saved_bytes == (10, 20)
    assert costs.workspace_bytes == (32 + 5, 64 + 7)
    assert costs.gradient_bytes == (128, 128)
    assert costs.weights_bytes == {"d0": 128, "d1": 128 + 32}
    assert costs.optimizer_bytes == {"d0": 256, "d1": 256}
    assert costs.optimizer_s == {"d0": 64.0, "d1": 64.0}


def test_a_tied_weight_is_on_a_device_once_with_one_leaf_per_stage() -> None:
    stages = Stages(
        (
            Stage(0, "d0", ("h",), params=("emb.w",)),
            Stage(1, "d0", ("y",), params=("head.w", "head.b")),
        ),
        (),
    )
    costs = stage_costs(two_op_graph(), stages, two_op_costs("d0"))
    assert costs.weights_bytes == {"d0": 128 + 32}
    assert costs.optimizer_bytes == {"d0": 256}
    assert costs.gradient_bytes == (128, 128)


def test_the_optimizer_is_paid_by_the_tensor_and_by_the_byte() -> None:
    """Two trained tensors of 128 bytes under two stages; a tied one, and what is not trained."""
    one = Stage(0, "d0", ("h",), params=("emb.w",))
    two = Stage(1, "d0", ("y",), params=("head.w", "head.b"))
    costs = replace(two_op_costs("d0", "d1"), optimizer_s_per_tensor={"d0": 7.0, "d1": 100.0})
    assert two_op_graph().param["head.w"].canonical == "emb.w"
    tied = stage_costs(two_op_graph(), Stages((one, two), ()), costs)
    assert tied.optimizer_s == {"d0": 7.0 + 64.0}
    apart = Stages((one, replace(two, device="d1")), ())
    assert stage_costs(two_op_graph(), apart, costs).optimizer_s == {"d0": 71.0, "d1": 164.0}
    assert tied.optimizer_bytes == {"d0": 256}  # memory is what it was


def test_a_recomputed_op_is_paid_for_where_it_runs() -> None:
    stages = Stages((Stage(0, "d0", ("h",)), Stage(1, "d1", ("h", "y"), recomputed=("h",))), ())
    assert stage_costs(two_op_graph(), stages, two_op_costs("d0", "d1")).forward_s == (1.0, 4.0)


def test_held_follows_a_training_program() -> None:
    """Stage 1 of two receives 1 byte, saves 10, needs 5 to run, and has gradients of 100."""
    stages = chain(2)
    costs = replace(
        even_costs(2), saved_bytes=(0, 10), workspace_bytes=(0, 5), gradient_bytes=(0, 100)
    )
    program = build("gpipe", stages, 2, costs, all_of(stages))[1]
    rows = [
        (word, entry.gradients_bytes, entry.activations_bytes, entry.messages_bytes)
        for word, entry in zip(written(program), held(program, stages, costs), strict=True)
    ]
    assert rows == [
        ("recv x0.0", 0, 0, 2),  # the next receive is posted already
        ("forward 1.0", 0, 10 + 5, 2),
        ("recv x0.1", 0, 10, 2),
        ("forward 1.1", 0, 20 + 5, 2),
        ("backward 1.0", 100, 20 + 5, 2 + 1),
        ("send x0.0", 100, 10, 1 + 1),
        ("backward 1.1", 100, 10 + 5 + 100, 1 + 1),  # made again, and added
        ("send x0.1", 100, 0, 1),
        ("optimizer_step", 100, 0, 0),
    ]


def test_held_keeps_an_inference_value_until_its_last_use() -> None:
    """d0 makes x for stage 1 on d1 and for its own stage 2, which also gets y."""
    stages = Stages(
        (Stage(0, "d0", ()), Stage(1, "d1", ()), Stage(2, "d0", ())),
        (
            Edge("x", 0, 1, "activation", 7),
            Edge("x", 0, 2, "activation", 7),
            Edge("y", 1, 2, "activation", 3),
        ),
    )
    costs = even_costs(3)
    program = build("list", stages, 1, costs, frozenset())[0]
    messages = [entry.messages_bytes for entry in held(program, stages, costs)]
    assert list(zip(written(program), messages, strict=True)) == [
        ("forward 0.0", 7 + 3),  # the receive of y is posted
        ("send x.0", 7 + 3),
        ("recv y.0", 7 + 3),
        ("forward 2.0", 7 + 3),
    ]


def test_held_counts_a_value_for_several_readers_once() -> None:
    stages = Stages(
        tuple(Stage(i, f"d{i}", ()) for i in range(3)),
        (Edge("x", 0, 1, "activation", 7), Edge("x", 0, 2, "activation", 7)),
    )
    program = build("gpipe", stages, 1, even_costs(3), all_of(stages))[0]
    entries = list(held(program, stages, even_costs(3)))
    assert [entry.messages_bytes for entry in entries] == [7, 7, 7, 7, 0]
    assert [entry.total_bytes for entry in entries] == [8, 8, 8, 8, 0]
