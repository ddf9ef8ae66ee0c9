"""What a stage keeps for ops that run again: each is followed once, whatever leads back to it."""

from __future__ import annotations

from dataclasses import replace

from bigbrain_fx.core import Costs, Edge, OpCost, Ref, Saves, Stage, Stages
from bigbrain_fx.plan.schedule import stage_costs
from tests.plan.schedule.test_schedule import even_costs
from tests.support.synthetic import graph_of, op, tensor

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
