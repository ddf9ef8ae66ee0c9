"""What every schedule promises, tried on the whole table: a new one is tested by being listed."""

from __future__ import annotations

import ast
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

import bigbrain_fx.plan.schedule
from bigbrain_fx.core import (
    Backward,
    Cluster,
    Device,
    Edge,
    Forward,
    Link,
    OptimizerStep,
    Program,
    Recv,
    Send,
    Stage,
    Stages,
)
from bigbrain_fx.errors import InputError, ScheduleError
from bigbrain_fx.plan.schedule import (
    SCHEDULES,
    Deadlock,
    StageCosts,
    Synthesised,
    build,
    check,
)
from bigbrain_fx.plan.schedule.messages import with_messages
from bigbrain_fx.plan.schedule.virtual import timed_stages
from bigbrain_fx.plan.simulate import simulate
from bigbrain_fx.planning import Taste, VirtualStages, in_flight_to_fill
from bigbrain_fx.planning.listing import _Play
from tests.support.examples import examples

LINES = {"interleaved": (0, 1, 2) * 2, "zb-v": (0, 1, 2, 2, 1, 0), "dualpipe-v": (0, 1, 2, 2, 1, 0)}
TRAINING = [name for name in SCHEDULES if name not in ("forward", "auto", "gems", *LINES)]


def random_stages(seed: int, count: int, devices: int) -> Stages:
    """Draw an acyclic stage graph: values with several readers, relayed gradients, ties, norms."""
    dice = random.Random(seed)
    homes = [f"d{i if i < devices else dice.randrange(devices)}" for i in range(count)]
    activations = [
        Edge(f"v{source}", source, target, "activation", dice.choice((0, 1, 4)))
        for target in range(1, count)
        for source in sorted(dice.sample(range(target), min(target, dice.choice((0, 1, 1, 2)))))
    ]
    readers: dict[str, list[int]] = {}
    for edge in activations:
        readers.setdefault(edge.value, [edge.source]).append(edge.target)
    gradients = [
        Edge(value, later, earlier, "gradient", 2)
        for value, path in readers.items()
        for earlier, later in pairwise(path)
    ]
    last = count - 1
    tied = [Edge("w", a, b, "tied", 3) for a, b in ((0, last), (last, 0)) if a != b]
    norms = [
        Edge("norms", a, b, "norm", 4) for a in range(devices) for b in range(devices) if a != b
    ]
    stages = tuple(Stage(i, home, ()) for i, home in enumerate(homes))
    return Stages(stages, (*activations, *gradients, *tied, *norms))


def random_costs(seed: int, stages: Stages) -> StageCosts:
    dice = random.Random(seed)
    count = len(stages.stages)
    link = Link(dice.choice((0.0, 0.1, 2.0)), dice.choice((1.0, 10.0, float("inf"))))
    devices = tuple(Device(name, "h", "cpu", 1 << 30, 1.0, 1.0) for name in stages.devices)
    return StageCosts(
        forward_s=tuple(dice.choice((0.0, 0.5, 1.0, 3.0)) for _ in range(count)),
        backward_s=tuple(dice.choice((0.0, 1.0, 2.0, 5.0)) for _ in range(count)),
        saved_bytes=tuple(dice.randrange(10) for _ in range(count)),
        cluster=Cluster(devices, link),
    )


@st.composite
def cases(draw: st.DrawFn, *, chain: bool) -> tuple[Stages, StageCosts, int]:
    count = draw(st.integers(1, 5 if chain else 9))
    devices = count if chain else draw(st.integers(1, min(4, count)))
    seed = draw(st.integers(0, 10**6))
    stages = random_stages(seed, count, devices)
    return stages, random_costs(seed + 1, stages), draw(st.integers(1, 6))


def all_of(stages: Stages) -> frozenset[int]:
    return frozenset(stage.index for stage in stages.stages)


def assert_keeps_the_contract(
    programs: tuple[Program, ...], stages: Stages, costs: StageCosts, micro_batches: int
) -> None:
    assert [program.device for program in programs] == list(stages.devices)
    assert check(programs, stages, trained=all_of(stages), costs=costs) == []
    assert_every_message_once(programs, stages, micro_batches)
    assert_happens_before(programs, stages, costs)


def assert_every_message_once(
    programs: tuple[Program, ...], stages: Stages, micro_batches: int
) -> None:
    expected = sorted(
        (str(edge), micro)
        for edge in stages.edges
        if not stages.is_local(edge)
        for micro in (range(micro_batches) if edge.kind in ("activation", "gradient") else (-1,))
    )
    for kind in (Send, Recv):
        found = sorted(
            (str(i.edge), -1 if i.micro is None else i.micro)
            for program in programs
            for i in program.instructions
            if isinstance(i, kind)
        )
        assert found == expected


def assert_happens_before(programs: tuple[Program, ...], stages: Stages, costs: StageCosts) -> None:
    """Every reader starts after every maker has ended and the message has crossed."""
    bars = {bar.what: bar for bar in simulate(programs, stages, costs).timeline}
    for edge in stages.edges:
        if edge.kind not in ("activation", "gradient"):
            continue
        do = "forward" if edge.kind == "activation" else "backward"
        micros = [what for what in bars if what.startswith(f"{do} {edge.source} #")]
        for what in micros:
            reader = bars[what.replace(f"{do} {edge.source} #", f"{do} {edge.target} #")]
            crossing_s = 0.0 if stages.is_local(edge) else sum(costs.wire_s(stages, edge))
            assert reader.start_s >= bars[what].end_s + crossing_s - 1e-9


@pytest.mark.gate("list")
@pytest.mark.parametrize("name", TRAINING)
@settings(max_examples=examples(60), deadline=None)
@given(case=cases(chain=True))
def test_chains(name: str, case: tuple[Stages, StageCosts, int]) -> None:
    stages, costs, micro_batches = case
    programs = build(name, stages, micro_batches, costs, all_of(stages))
    assert_keeps_the_contract(programs, stages, costs, micro_batches)


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("micro_batches", [6, 9])
@pytest.mark.parametrize("defers", [False, True])
def test_several_pieces_a_device(name: str, micro_batches: int, defers: bool) -> None:
    for seed in range(4):
        stages = on_line(random_stages(seed, 6, 3), LINES[name], defers=defers)
        costs = random_costs(seed, stages)
        programs = build(name, stages, micro_batches, costs, all_of(stages))
        assert_keeps_the_contract(programs, stages, costs, micro_batches)


def on_line(stages: Stages, line: Sequence[int], *, defers: bool) -> Stages:
    """Put stages on devices of a line; where it defers, the parameter "w" waits in each."""
    waits = ("w",) if defers else ()
    each = zip(stages.stages, line, strict=True)
    moved = tuple(replace(stage, device=f"d{d}", deferred=waits) for stage, d in each)
    return Stages(
        moved, tuple(edge for edge in stages.edges if edge.kind in ("activation", "gradient"))
    )


@pytest.mark.parametrize("name", LINES)
def test_stages_that_lie_otherwise_are_refused(name: str) -> None:
    stages = on_line(random_stages(1, 6, 3), (0, 1, 2, 1, 0, 2), defers=False)
    with pytest.raises(InputError, match=f"schedule '{name}' needs stages on d0 d1 d2"):
        build(name, stages, 6, random_costs(1, stages), all_of(stages))


@settings(max_examples=examples(20), deadline=None)
@given(case=cases(chain=False))
def test_a_searched_order_runs_any_stage_graph(case: tuple[Stages, StageCosts, int]) -> None:
    stages, costs, micro_batches = case
    order = Synthesised(work=3_000).order(stages, micro_batches, costs, all_of(stages))
    programs = with_messages(stages, order, all_of(stages))
    assert_keeps_the_contract(programs, stages, costs, micro_batches)


@settings(max_examples=examples(150), deadline=None)
@given(case=cases(chain=False), in_flight=st.none() | st.integers(1, 7))
def test_list_runs_any_stage_graph(
    case: tuple[Stages, StageCosts, int], in_flight: int | None
) -> None:
    stages, costs, micro_batches = case
    limits = None if in_flight is None else (in_flight,) * len(stages.devices)
    programs = build("list", stages, micro_batches, costs, all_of(stages), limits)
    assert_keeps_the_contract(programs, stages, costs, micro_batches)


@settings(max_examples=examples(60), deadline=None)
@given(case=cases(chain=False))
def test_the_list_scheduler_and_the_simulator_share_their_physics(
    case: tuple[Stages, StageCosts, int],
) -> None:
    """What the list scheduler saw while it played is what the simulator says, to the second."""
    stages, costs, micro_batches = case
    trained = all_of(stages)
    timed = timed_stages(stages, costs, trained)
    in_flight = in_flight_to_fill(timed, micro_batches)
    whole = VirtualStages.unsplit(timed, micro_batches)
    played = _Play(whole, Taste(deep=False), dict(enumerate(in_flight)))
    played.orders()
    programs = build("list", stages, micro_batches, costs, trained, in_flight)
    bars = [bar for bar in simulate(programs, stages, costs).timeline if "#" in bar.what]
    for place, ended_s in played.last_s.items():
        device = stages.devices[place]
        assert max(bar.end_s for bar in bars if bar.device == device) == ended_s


@settings(max_examples=examples(60), deadline=None)
@given(case=cases(chain=True), more=st.integers(0, 3))
def test_1f1b_runs_with_any_warm_up_that_does_not_grow(
    case: tuple[Stages, StageCosts, int], more: int
) -> None:
    stages, costs, micro_batches = case
    trained = all_of(stages)
    fill = in_flight_to_fill(timed_stages(stages, costs, trained), micro_batches)
    programs = build("1f1b", stages, micro_batches, costs, trained, tuple(k + more for k in fill))
    assert_keeps_the_contract(programs, stages, costs, micro_batches)


@settings(max_examples=examples(100), deadline=None)
@given(case=cases(chain=False), data=st.data())
def test_the_checker_misses_no_missing_instruction(
    case: tuple[Stages, StageCosts, int], data: st.DataObject
) -> None:
    stages, costs, micro_batches = case
    programs = list(build("list", stages, micro_batches, costs, all_of(stages)))
    victim = data.draw(st.integers(0, len(programs) - 1))
    whole = programs[victim].instructions
    gone = data.draw(st.integers(0, len(whole) - 1))
    programs[victim] = replace(programs[victim], instructions=(*whole[:gone], *whole[gone + 1 :]))
    assert check(programs, stages, trained=all_of(stages)) != []


@settings(max_examples=examples(100), deadline=None)
@given(case=cases(chain=False), data=st.data())
def test_orders_that_the_checker_accepts_can_run(
    case: tuple[Stages, StageCosts, int], data: st.DataObject
) -> None:
    """Two neighbours change places: the checker and the simulator agree on whether that runs."""
    stages, costs, micro_batches = case
    programs = list(build("list", stages, micro_batches, costs, all_of(stages)))
    victim = data.draw(st.integers(0, len(programs) - 1))
    swapped = list(programs[victim].instructions)
    where = data.draw(st.integers(0, len(swapped) - 2))
    swapped[where : where + 2] = swapped[where + 1], swapped[where]
    programs[victim] = replace(programs[victim], instructions=tuple(swapped))
    stuck = [f for f in check(programs, stages) if isinstance(f, Deadlock)]
    if stuck:
        with pytest.raises(ScheduleError):
            simulate(programs, stages, costs)
    else:
        assert simulate(programs, stages, costs).step_s >= 0.0


@pytest.mark.parametrize("name", [*TRAINING, "forward", "auto"])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_inference_has_only_forwards(name: str, devices: int) -> None:
    stages = random_stages(seed=devices, count=devices, devices=devices)
    programs = build(name, stages, 3, random_costs(1, stages), frozenset())
    assert check(programs, stages, trained=frozenset()) == []
    for program in programs:
        for instruction in program.instructions:
            assert not isinstance(instruction, Backward | OptimizerStep)
            if isinstance(instruction, Send | Recv):
                assert instruction.edge.kind == "activation"
    forwards = [i for p in programs for i in p.instructions if isinstance(i, Forward)]
    assert len(forwards) == 3 * devices


def forward_only(stages: Stages) -> Stages:
    """Leave out what only training sends."""
    return replace(stages, edges=tuple(e for e in stages.edges if e.kind == "activation"))


@pytest.mark.parametrize("name", ["forward", "list"])
@settings(max_examples=examples(100), deadline=None)
@given(case=cases(chain=False))
def test_inference_runs_on_any_stage_graph(name: str, case: tuple[Stages, StageCosts, int]) -> None:
    stages, costs, micro_batches = forward_only(case[0]), case[1], case[2]
    programs = build(name, stages, micro_batches, costs, frozenset())
    assert check(programs, stages, trained=frozenset(), costs=costs) == []
    assert_every_message_once(programs, stages, micro_batches)
    assert_happens_before(programs, stages, costs)


def test_forward_only_does_not_train() -> None:
    stages = random_stages(1, 2, 2)
    with pytest.raises(InputError, match="has no backward, and this plan trains"):
        build("forward", stages, 4, random_costs(1, stages), all_of(stages))
    with pytest.raises(InputError, match="takes no in_flight"):
        build("forward", stages, 4, random_costs(1, stages), frozenset(), (1, 1))


@pytest.mark.parametrize("name", TRAINING)
def test_a_frozen_head_has_no_backward(name: str) -> None:
    """Stage 0 is frozen: values go on from it, gradients do not come back."""
    stages = Stages(
        tuple(Stage(i, f"d{i}", ()) for i in range(3)),
        (
            Edge("x", 0, 1, "activation", 1),
            Edge("y", 1, 2, "activation", 1),
            Edge("y", 2, 1, "gradient", 1),
        ),
    )
    trained = frozenset({1, 2})
    programs = build(name, stages, 4, random_costs(5, stages), trained)
    assert check(programs, stages, trained=trained) == []
    assert not [i for i in programs[0].instructions if isinstance(i, Backward)]
    assert programs[0].instructions[-1] == OptimizerStep()


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("micro_batches", [0, -1])
def test_no_micro_batch_is_refused(name: str, micro_batches: int) -> None:
    stages = random_stages(1, 2, 2)
    with pytest.raises(InputError, match="at least 1 micro-batch"):
        build(name, stages, micro_batches, random_costs(1, stages), all_of(stages))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("in_flight", [(1,), (1, 0), (1, 1, 1)])
def test_in_flight_of_the_wrong_form_is_refused(name: str, in_flight: tuple[int, ...]) -> None:
    stages = random_stages(1, 2, 2)
    with pytest.raises(InputError, match="in_flight needs one number of at least 1 for each of 2"):
        build(name, stages, 4, random_costs(1, stages), all_of(stages), in_flight)


@pytest.mark.parametrize("room", ["schedule", "simulate"])
def test_no_file_imports_torch(room: str) -> None:
    for path in (Path(bigbrain_fx.plan.schedule.__file__).parents[1] / room).glob("*.py"):
        imported = [
            name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in (getattr(node, "module", None), *(alias.name for alias in node.names))
        ]
        assert not [name for name in imported if name and name.split(".")[0] == "torch"]
