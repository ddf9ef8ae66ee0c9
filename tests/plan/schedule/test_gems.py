"""GEMS: its step is the closed form, one micro-batch is held, and what is none is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from bigbrain_fx.core import Backward, Forward, Program, Stages
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.schedule import (
    BackwardBeforeForward,
    Deadlock,
    MissingCompute,
    StageCosts,
    build,
    check,
    held,
)
from bigbrain_fx.plan.simulate import simulate
from tests.support.pipelines import all_of, even_costs, mirrored


def costs_of(count: int, f: float = 1.0, b: float = 2.0) -> StageCosts:
    """Of both replicas' stages, on as many devices as one has stages."""
    one = even_costs(count, f=f, b=b)
    return StageCosts(one.forward_s * 2, one.backward_s * 2, (1,) * 2 * count, one.cluster)


def programs_of(stages: Stages, micro_batches: int, costs: StageCosts) -> tuple[Program, ...]:
    return build("gems", stages, micro_batches, costs, all_of(stages))


def computed(program: Program) -> str:
    """Draw what a device computes: "F0 B0 f1 b1", the second replica's in small letters."""

    def one(i: Forward | Backward) -> str:
        letter = i.do[0].upper() if i.stage < 4 else i.do[0]
        return f"{letter}{i.micro}"

    return " ".join(one(i) for i in program.instructions if isinstance(i, Forward | Backward))


def test_each_device_takes_one_micro_batch_after_the_other() -> None:
    for program in programs_of(mirrored(4, 4), 4, costs_of(4)):
        assert computed(program) == "F0 B0 f1 b1 F2 B2 f3 b3"


@pytest.mark.parametrize("p", [2, 4, 6, 8])
@pytest.mark.parametrize(("f", "b"), [(1, 1), (1, 2), (2, 3), (1, 5)])
def test_a_step_is_the_closed_form(p: int, f: int, b: int) -> None:
    """Jain et al.: a forward follows the other replica's backward, and the last device shows it."""
    for n in range(2, 14, 2):
        stages, costs = mirrored(p, n), costs_of(p, f, b)
        programs = programs_of(stages, n, costs)
        assert check(programs, stages, trained=all_of(stages), costs=costs) == []
        assert simulate(programs, stages, costs).step_s == p * f + n * p * b + (n - 1) * f


def test_a_longer_forward_is_the_one_waited_for() -> None:
    """The closed form holds for b >= f; else forwards are the front: M p f and a backward each."""
    p, n, f, b = 4, 6, 5, 2
    stages, costs = mirrored(p, n), costs_of(p, f, b)
    found = simulate(programs_of(stages, n, costs), stages, costs).step_s
    assert found > p * f + n * p * b + (n - 1) * f
    assert found == n * p * f + p * b + (n - 1) * b


def live(program: Program) -> Iterator[int]:
    """Yield how many micro-batches a device holds between forward and backward."""
    count = 0
    for instruction in program.instructions:
        count += isinstance(instruction, Forward) - isinstance(instruction, Backward)
        yield count


def test_one_micro_batch_is_held_on_each_device() -> None:
    stages, costs = mirrored(4, 8), costs_of(4)
    for program in programs_of(stages, 8, costs):
        assert max(live(program)) == 1
        assert max(now.activations_bytes for now in held(program, stages, costs)) == 1
    chain = build("1f1b", one_of(stages), 8, even_costs(4), frozenset(range(4)))
    assert [max(live(program)) for program in chain] == [4, 3, 2, 1]


def one_of(stages: Stages) -> Stages:
    """Return the first replica alone."""
    own = stages.of_replica(0)
    inside = {stage.index for stage in own}
    edges = tuple(edge for edge in stages.edges if {edge.source, edge.target} <= inside)
    return Stages(own, edges)


def test_groups_of_devices_go_side_by_side() -> None:
    """HY: four replicas on two groups of two devices, each as GEMS alone with half of them."""
    pair = mirrored(2, 4)
    more = tuple(
        replace(s, index=s.index + 4, device=f"d{int(s.device[1:]) + 2}", replica=s.replica + 2)
        for s in pair.stages
    )
    edges = tuple(replace(e, source=e.source + 4, target=e.target + 4) for e in pair.edges)
    micros = tuple(tuple(range(number, 8, 4)) for number in range(4))
    stages = Stages((*pair.stages, *more), (*pair.edges, *edges), micros=micros)
    base = even_costs(4)
    costs = StageCosts((1.0,) * 8, (2.0,) * 8, (1,) * 8, base.cluster)
    programs = programs_of(stages, 8, costs)
    assert check(programs, stages, trained=all_of(stages), costs=costs) == []
    assert simulate(programs, stages, costs).step_s == 2 * 1 + 4 * 2 * 2 + 3 * 1


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        (one_of(mirrored(4, 4)), "needs two replicas on one line of an even number of devices"),
        (mirrored(3, 4), "an even number of devices, the second in reverse"),
        (mirrored(4, 5), "takes micro-batches in turn, and replicas have 3, 2"),
    ],
)
def test_plans_that_are_no_gems_are_refused(stages: Stages, said: str) -> None:
    with pytest.raises(InputError, match=said):
        build("gems", stages, 4, costs_of(len(stages.devices)), all_of(stages))
    with pytest.raises(InputError, match="says itself how many micro-batches"):
        build("gems", stages, 4, costs_of(4), all_of(stages), (1,) * len(stages.devices))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "list"])
def test_no_other_schedule_orders_two_replicas_of_a_device(schedule: str) -> None:
    stages = mirrored(4, 4)
    with pytest.raises(InputError, match="d3 is part of replicas 0 and 1") as caught:
        build(schedule, stages, 4, costs_of(4), all_of(stages))
    assert "--schedule gems" in (caught.value.help or "")


def test_the_checker_finds_what_is_wrong_with_an_order() -> None:
    stages, costs = mirrored(2, 2), costs_of(2)
    programs = list(programs_of(stages, 2, costs))
    first = programs[0].instructions
    place = next(i for i, x in enumerate(first) if isinstance(x, Forward) and x.stage == 3)

    def found(*instructions: object) -> list[object]:
        changed = replace(programs[0], instructions=instructions)  # type: ignore[arg-type]  # some of its own
        return [*check([changed, programs[1]], stages, trained=all_of(stages))]

    without = found(*(i for i in first if i is not first[place]))
    assert any(isinstance(fault, MissingCompute | BackwardBeforeForward) for fault in without)
    waits = found(*first[place - 1 :], *first[: place - 1])  # micro-batch 1 first: it never comes
    assert any(isinstance(fault, Deadlock) for fault in waits)
