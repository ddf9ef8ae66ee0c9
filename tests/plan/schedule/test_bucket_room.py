"""Memory by hand: buckets that fill in a backward, and ops that run again."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from bigbrain_fx.core import (
    Bucket,
    Cluster,
    Costs,
    Device,
    Edge,
    Link,
    OpCost,
    Ref,
    Saves,
    Stage,
    Stages,
)
from bigbrain_fx.core.placement import SumOrder
from bigbrain_fx.plan.schedule import stage_costs
from bigbrain_fx.plan.schedule.stage_part import OUT, BucketRoom, Part, summed_bytes, sums_parts
from bigbrain_fx.runtime import replicas as of_a_bundle
from tests.plan.schedule.test_schedule import even_costs
from tests.support.synthetic import graph_of, op, tensor

NAMES = ("a", "b", "c", "d")
BUCKETS = tuple(Bucket(f"bucket-{n}", (0, 1), (n,), (10, 30), "float32") for n in NAMES)


def part(order: SumOrder, zero: Literal[0, 1, 2, 3], kind: Literal["cpu", "cuda"] = "cpu") -> Part:
    both = tuple(Stage(i, f"d{i}", (), params=NAMES, replica=i) for i in range(2))
    stages = Stages(
        both, (), micros=((0, 2), (1, 3)), buckets=BUCKETS, zero_stage=zero, sum_order=order
    )
    devices = tuple(Device(f"d{i}", "h", kind, 1 << 30, 1e9, 1e9) for i in range(2))
    where = Cluster(devices, Link(1e-4, 1e9))
    return Part(
        graph_of([op("a", "aten.neg.default", Ref("x"))]),
        stages,
        stages.stages[0],
        Costs({}, where, {}),
    )


def followed(room: BucketRoom) -> list[int]:
    """Return what is there after each gradient was put into its bucket."""
    live, found = 0, []
    for name in NAMES:
        live += room.take(name)
        live += room.done(name)
        found.append(live)
    return found


def test_two_that_have_left_are_held_until_they_are_settled() -> None:
    """Each bucket has 160 bytes, of which messages are views, and a copy of the largest piece."""
    assert followed(BucketRoom(part("micro", 2), is_first=False)) == [280, 560, 560, 560]


def test_the_first_micro_batchs_pieces_become_the_sums() -> None:
    """The larger piece of any replica, 120, is what is counted."""
    assert followed(BucketRoom(part("micro", 2), is_first=True)) == [280, 560, 680, 800]


def test_on_a_gpu_all_buckets_are_there_until_the_end() -> None:
    """Whose allocator takes 512 bytes for 160."""
    assert followed(BucketRoom(part("micro", 2, "cuda"), is_first=False)) == [512, 1024, 1536, 2048]


@pytest.mark.parametrize(("is_first", "expected"), [(True, [160, 320, 480, 640]), (False, [0] * 4)])
def test_a_replicas_own_sum_is_its_buckets(is_first: bool, expected: list[int]) -> None:
    """From the second micro-batch on the ledger has them."""
    assert followed(BucketRoom(part("replica", 1), is_first)) == expected


def test_a_tree_has_new_buckets_for_each_micro_batch() -> None:
    assert followed(BucketRoom(part("tree", 1), is_first=False)) == [160, 320, 480, 640]


def test_sums_of_parts_and_their_sizes() -> None:
    found = {
        (order, zero): (sums_parts(p.stages), summed_bytes(p.stages, BUCKETS[0], 0))
        for order, zero in (("replica", 1), ("replica", 2), ("micro", 0), ("tree", 1), ("tree", 2))
        for p in (part(order, zero),)  # type: ignore[arg-type]  # literals
    }
    assert found == {
        ("replica", 1): (False, 160),
        ("replica", 2): (True, 40),
        ("micro", 0): (True, 40),
        ("tree", 1): (True, 160),
        ("tree", 2): (True, 40),
    }


def test_as_many_wait_as_in_a_bundle() -> None:
    assert OUT == of_a_bundle.OUT


# --------------------------------------------------------------------------- ops that run again


BLOCKS = 60  # 2 ** 60 ways back, past each block and through it


def test_blocks_that_run_again_are_followed_once() -> None:
    """A block is h + relu(h): all but the first value is made again from it."""
    out, ops = tensor(100), [op("h0", "aten.relu.default", Ref("x"), out=tensor(100))]
    for i in range(BLOCKS):
        ops.append(op(f"r{i}", "aten.relu.default", Ref(f"h{i}"), out=out, saves=Saves((-1,))))
        sum_ = op(f"h{i + 1}", "aten.mul.Tensor", Ref(f"h{i}"), Ref(f"r{i}"), out=out)
        ops.append(replace(sum_, saves=Saves((0, 1))))
    last = op("loss", "aten.neg.default", Ref(f"h{BLOCKS}"), out=out, saves=Saves())
    graph = replace(graph_of([*ops, last]), loss="loss")
    again = tuple(made.name for made in ops[1:])
    own = Stage(0, "d0", (*(made.name for made in ops), "loss"), again=again)
    each = {made.name: OpCost(1.0, 2.0) for made in graph.ops}
    costs = Costs({"d0": each}, even_costs(1).cluster, {"d0": 0.0})
    edges: tuple[Edge, ...] = ()
    made_again, kept = (
        stage_costs(graph, Stages((replace(own, again=names),), edges), costs).working[0]
        for names in (again, ())
    )
    assert made_again.saved_bytes == 400
    assert kept.saved_bytes > BLOCKS * 400
