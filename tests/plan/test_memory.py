"""Memory: what capture measures, the walk through a stage, the room for messages, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Literal

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from bigbrain_fx.core import (
    Bucket,
    Costs,
    Edge,
    Graph,
    ModuleCall,
    Op,
    OpCost,
    Overheads,
    Param,
    ParamRef,
    Placement,
    Ref,
    Saves,
    Stage,
    Stages,
)
from bigbrain_fx.frontend import capture, run_graph
from bigbrain_fx.plan.cut import cut
from bigbrain_fx.plan.recompute import deferring
from bigbrain_fx.plan.schedule import StageCosts, build, held
from bigbrain_fx.plan.schedule.costs import stage_costs
from bigbrain_fx.planning.registry import estimator
from tests.plan.schedule.test_schedule import even_costs
from tests.support import samples
from tests.support.synthetic import graph_of, op, tensor


class Net(nn.Module):
    """A little of everything that keeps things for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.batch = nn.BatchNorm2d(8)
        self.norm = nn.LayerNorm(36)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(36, 12)

    def forward(self, x: Tensor) -> Tensor:
        """Return one number."""
        x = self.batch(self.conv(x)).flatten(2)
        q, k, v = (self.drop(self.out(self.norm(x)))).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])
        return (torch.nn.functional.gelu(mixed) * mixed).softmax(-1).square().mean()


@pytest.fixture(scope="module")
def graph() -> Graph:
    return capture(Net(), (torch.randn(4, 3, 8, 8),)).graph


def saved_bytes(graph: Graph) -> int:
    """Add up what the ops of a concrete graph keep, each storage once; the batch left out."""
    roots = {op.name: op.name for op in graph.ops}
    for made in graph.ops:
        roots[made.name] = roots.get(made.view_of or made.name, made.name)
    kept, own = set(), 0
    for made in graph.ops:
        if made.saves is not None:
            own += int(made.saves.own_bytes)
            names = (made.refs[p] if p >= 0 else made.name for p in made.saves.values)
            kept |= {roots[name] for name in names if name in roots}
    return own + sum(spec.nbytes for name in kept for spec in graph.op[name].outputs)


@pytest.mark.parametrize("rows", [2, 5, 7])
def test_measured_bytes_are_autograds_saved_tensors(graph: Graph, rows: int) -> None:
    net = Net()
    batch = torch.randn(rows, 3, 8, 8)
    free = {t.untyped_storage().data_ptr() for t in (*net.parameters(), *net.buffers(), batch)}
    found: dict[int, tuple[Tensor, int]] = {}

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        found[storage.data_ptr()] = saved, storage.nbytes()
        return saved

    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        loss = run_graph(graph, tensors, {graph.inputs[0].name: batch})
    assert loss
    real = sum(nbytes for pointer, (_, nbytes) in found.items() if pointer not in free)
    assert saved_bytes(graph.at(rows)) == pytest.approx(real, abs=64)  # a scalar here and there


def test_every_op_that_makes_a_tensor_is_measured(graph: Graph) -> None:
    unknown = [made.target for made in graph.ops if made.outputs and made.saves is None]
    assert set(unknown) <= {"operator.getitem"}


def test_saves_go_through_json_and_may_be_absent(graph: Graph) -> None:
    adapter = TypeAdapter(Graph)
    assert adapter.validate_json(adapter.dump_json(graph)) == graph
    old = json.loads(adapter.dump_json(graph))
    for entry in old["ops"]:
        del entry["saves"]
    read = adapter.validate_python(old, strict=False)
    assert all(made.saves is None for made in read.ops)


def test_cuda_keeps_a_byte_of_noise_by_rule(graph: Graph) -> None:
    (drop,) = (made for made in graph.at(4).ops if made.target == "aten.dropout.default")
    assert drop.saves is not None
    elements = drop.outputs[0].numel
    assert (drop.saves.own_bytes, drop.saves.cuda_own_bytes) == (4 * elements, elements)


# --------------------------------------------------------------------------- the walk


def kept(made: Op, **saves: object) -> Op:
    return replace(made, saves=Saves(**saves))  # type: ignore[arg-type]  # fields of Saves


def test_a_stage_is_followed_forward_and_backward() -> None:
    """Three ops of 400 bytes: a is kept by b, b's own noise of 100, c keeps nothing."""
    a = kept(op("a", "aten.relu.default", Ref("x"), out=tensor(100)), forward_bytes=400)
    b = kept(
        op("b", "aten.mul.Tensor", Ref("a"), out=tensor(100)),
        values=(0,),
        own_bytes=100,
        forward_bytes=700,
        backward_bytes=600,
    )
    c = kept(op("c", "aten.neg.default", Ref("b"), out=tensor(100)), forward_bytes=400)
    graph = replace(graph_of([a, b, c]), loss="c")
    stages = Stages((Stage(0, "d0", ("a", "b", "c")),), ())
    each = {made.name: OpCost(1.0, 2.0) for made in graph.ops}
    base = even_costs(1).cluster
    costs = stage_costs(graph, stages, Costs({"d0": each}, base, {"d0": 0.0}))
    (working,) = costs.working
    assert working.saved_bytes == 400 + 100  # a, and b's noise
    assert working.forward_bytes == 500 + 400 + 400  # b goes when c is made
    # c's gradient goes on as a new one of 400; b's 600 come on top
    assert working.backward_bytes[0] == 400 + 600


def test_a_stage_that_runs_again_keeps_what_it_writes_and_pays_in_its_backward() -> None:
    """As above, with a buffer of 40 bytes that a writes; b is sent."""
    buffer = Param("n", tensor(10, grad=False), "n", "buffer")
    a = kept(op("a", "aten.relu.default", Ref("x"), out=tensor(100)), forward_bytes=400)
    b = kept(
        op("b", "aten.mul.Tensor", Ref("a"), out=tensor(100)),
        values=(0,),
        own_bytes=100,
        forward_bytes=700,
        backward_bytes=600,
    )
    loss = kept(op("c", "aten.neg.default", Ref("b"), out=tensor(100)), forward_bytes=400)
    writes = replace(a, mutates=("n",), args=(Ref("x"), ParamRef("n")))
    graph = replace(graph_of([writes, b, loss], [buffer]), loss="c")
    parts = Stage(0, "d0", ("a", "b"), params=("n",), sends=("b",)), Stage(1, "d1", ("c",))
    edges = Edge("b", 0, 1, "activation", 400), Edge("b", 1, 0, "gradient", 400)
    each = {made.name: OpCost(1.0, 2.0) for made in graph.ops}
    slow = Overheads(instruction_s=0.5)
    cluster = even_costs(2).cluster
    devices = tuple(replace(device, overheads=slow) for device in cluster.devices)
    costs = Costs(
        {"d0": each, "d1": each}, replace(cluster, devices=devices), {"d0": 0.0, "d1": 0.0}
    )
    plain, again = (
        stage_costs(graph, Stages((replace(parts[0], runs_again=r), parts[1]), edges), costs)
        for r in (False, True)
    )
    assert (plain.backward_s, again.backward_s) == ((4.0, 2.0), (4.0 + 2.0 + 0.5, 2.0))
    before, after = plain.working[0], again.working[0]
    assert (before.saved_bytes, after.saved_bytes) == (400 + 100, 40)
    assert before.forward_bytes == 400 + 700 - 400  # what is sent counts as a message
    assert after.forward_bytes == before.forward_bytes + 40
    # all of the second forward, its result too, and then the backward of b on top
    assert after.backward_bytes[1] == before.backward_bytes[1] + 500 + 400

    stages = Stages((replace(parts[0], runs_again=True), parts[1]), edges)
    program, _ = build("gpipe", stages, 2, again, frozenset({0, 1}))
    booked = [entry.messages_bytes for entry in held(program, stages, again)]
    posted = 2 * 400  # both gradients' receives
    assert [str(i.do) for i in program.instructions[:4]] == ["forward", "send", "forward", "send"]
    assert booked[:4] == [posted + 400] * 4  # a result goes when it has left
    backward = [b for b, i in zip(booked, program.instructions, strict=True) if i.do == "backward"]
    assert backward == [800, 400]  # no result is held: the second run's is part of `working`


def _line(made: Op, call: ModuleCall, number: int, code: str) -> Op:
    modules = (ModuleCall("", "Net"), call)
    return replace(kept(made), modules=modules, source=f"net.py:{number}", code=code)


def test_a_name_in_a_module_takes_nothing_from_the_same_name_in_the_stage_s_own_text() -> None:
    """The first module is cut, so its `t` is a variable of the stage: the second has another."""
    cut_one, whole = ModuleCall("one", "Net.Part"), ModuleCall("two", "Net.Part")
    outs = {"out": tensor(100)}
    before = _line(op("z", "aten.relu.default", Ref("x"), **outs), cut_one, 1, "s = f(x)")
    ops = [
        _line(op("a", "aten.relu.default", Ref("z"), **outs), cut_one, 2, "t = f(s)"),
        _line(op("b", "aten.relu.default", Ref("a"), **outs), cut_one, 3, "u = f(t)"),
        _line(op("c", "aten.relu.default", Ref("b"), **outs), whole, 1, "s = f(x)"),
        _line(op("d", "aten.relu.default", Ref("c"), **outs), whole, 2, "t = f(s)"),
        _line(op("e", "aten.relu.default", Ref("d"), **outs), whole, 3, "u = f(t)"),
    ]
    graph = replace(graph_of([before, *ops]), loss="e")
    parts = Stage(0, "d0", ("z",), sends=("z",)), Stage(1, "d1", tuple("abcde"))
    edges = Edge("z", 0, 1, "activation", 400), Edge("z", 1, 0, "gradient", 400)
    each = {made.name: OpCost(1.0, 2.0) for made in graph.ops}
    costs = Costs({"d0": each, "d1": each}, even_costs(2).cluster, {"d0": 0.0, "d1": 0.0})
    found = stage_costs(graph, Stages(parts, edges), costs)
    assert found.working[1].forward_bytes == 5 * 400


@pytest.mark.parametrize("reads", [False, True])
def test_values_without_a_backward_go_with_their_last_reader(
    reads: bool,
) -> None:
    """A stage sends a, and m, a mask of 80 bytes, which the next one's backward may read."""
    a = kept(op("a", "aten.relu.default", Ref("x"), out=tensor(100)))
    m = kept(op("m", "aten.gt.Scalar", Ref("a"), out=tensor(20, grad=False)))
    values = (0, 1) if reads else (0,)
    c = kept(op("c", "aten.mul.Tensor", Ref("a"), Ref("m"), out=tensor(100)), values=values)
    graph = replace(graph_of([a, m, c]), loss="c")
    parts = (
        Stage(0, "d0", ("a", "m"), sends=("a", "m")),
        Stage(1, "d1", ("c",), receives=("a", "m")),
    )
    edges = (
        Edge("a", 0, 1, "activation", 400),
        Edge("m", 0, 1, "activation", 80),
        Edge("a", 1, 0, "gradient", 400),
    )
    each = {made.name: OpCost(1.0, 2.0) for made in graph.ops}
    costs = Costs({"d0": each, "d1": each}, even_costs(2).cluster, {"d0": 0.0, "d1": 0.0})
    stages = Stages(parts, edges)
    found = stage_costs(graph, stages, costs)
    programs = build("gpipe", stages, 2, found, frozenset({0, 1}))
    booked = [
        [
            entry.messages_bytes
            for entry, done in zip(held(program, stages, found), program.instructions, strict=True)
            if done.do == "backward"
        ]
        for program in programs
    ]
    # a of both micro-batches and gradients: posted, or made
    assert booked[0] == [2 * 400 + 2 * 400, 400 + 400]
    mask = 80 if reads else 0
    assert booked[1] == [2 * (400 + mask) + 400, (400 + mask) + 400]


@pytest.mark.parametrize(
    ("line", "most"),
    [("y = y + x", 2), ("y += x", 2), ("y @= x", 2), ("z = y + x", 3), ("y == x", 3)],
)
def test_a_value_goes_as_its_name_is_given_to_what_was_made_of_it(line: str, most: int) -> None:
    call = ModuleCall("one", "Net.Part")
    outs = {"out": tensor(100)}
    ops = [
        _line(op("a", "aten.relu.default", Ref("x"), **outs), call, 1, "y = f(x)"),
        _line(op("b", "aten.relu.default", Ref("a"), **outs), call, 2, line),
        _line(op("c", "aten.relu.default", Ref("b"), **outs), call, 3, "return f(y)"),
    ]
    assert _forward_bytes(ops) == most * 400


def test_a_value_stays_while_a_line_makes_more_of_it_before_its_name_is_given() -> None:
    """`y = f(f(y))`: the old y is there until both are made."""
    call = ModuleCall("one", "Net.Part")
    outs = {"out": tensor(100)}
    ops = [
        _line(op("a", "aten.relu.default", Ref("x"), **outs), call, 1, "y = f(x)"),
        _line(op("b", "aten.relu.default", Ref("a"), **outs), call, 2, "y = f(f(y))"),
        _line(op("c", "aten.relu.default", Ref("b"), **outs), call, 2, "y = f(f(y))"),
    ]
    assert _forward_bytes(ops) == 3 * 400


def _forward_bytes(ops: list[Op]) -> int:
    """Return the most that the forward of one stage of these ops holds."""
    graph = replace(graph_of(ops), loss="c")
    stages = Stages((Stage(0, "d0", tuple(graph.op)),), ())
    each = {made.name: OpCost(1.0, 2.0) for made in graph.ops}
    found = stage_costs(graph, stages, Costs({"d0": each}, even_costs(1).cluster, {"d0": 0.0}))
    return found.working[0].forward_bytes


def test_a_gradient_that_is_a_part_keeps_the_whole_where_no_message_copies_it() -> None:
    """What is concatenated gets parts of one gradient; both stages are on one device."""
    a, b = (
        kept(op(name, "aten.relu.default", Ref("x"), out=tensor(2, size)))
        for name, size in (("a", 8), ("b", 24))
    )
    both = kept(op("c", "aten.cat.default", Ref("a"), Ref("b"), out=tensor(2, 32)), passed=(0, 1))
    graph = replace(graph_of([a, b, both]), loss="c")
    parts = Stage(0, "d0", ("a", "b"), sends=("a", "b")), Stage(1, "d0", ("c",))
    sizes = (("a", 2 * 8 * 4), ("b", 2 * 24 * 4))
    edges = tuple(
        edge
        for name, size in sizes
        for edge in (Edge(name, 0, 1, "activation", size), Edge(name, 1, 0, "gradient", size))
    )
    each = {made.name: OpCost(1.0, 2.0) for made in graph.ops}

    def costs_on(devices: tuple[str, str]) -> tuple[Stages, StageCosts]:
        homes = zip(parts, devices, strict=True)
        stages = Stages(tuple(replace(part, device=home) for part, home in homes), edges)
        where = even_costs(2).cluster
        costs = Costs({"d0": each, "d1": each}, where, {"d0": 0.0, "d1": 0.0})
        return stages, stage_costs(graph, stages, costs)

    stages, costs = costs_on(("d0", "d0"))
    assert costs.whole_bytes == {edges[1]: 256 - 192}  # of both: the whole, once
    alone = replace(stages, edges=edges[:3])  # b's is not asked for
    each_costs = Costs({"d0": each}, even_costs(1).cluster, {"d0": 0.0})
    found = stage_costs(graph, alone, each_costs)
    assert found.whole_bytes == {edges[1]: 256}
    assert found.working[1].backward_bytes == (-256, -256)  # the ledger has all of it, once
    assert costs_on(("d0", "d1"))[1].whole_bytes == {}


def test_a_later_gradient_is_there_once_beside_the_sum_that_it_is_added_to() -> None:
    """A weight of 2,000 bytes: the first gradient is the sum, later ones are added in place."""
    weight = Param("w", tensor(500), "w")
    a = kept(op("a", "aten.mul.Tensor", Ref("x"), ParamRef("w"), out=tensor(1)))
    graph = replace(graph_of([a], [weight]), loss="a")
    stages = Stages((Stage(0, "d0", ("a",), params=("w",)),), ())
    costs = Costs({"d0": {"a": OpCost(1.0, 2.0)}}, even_costs(1).cluster, {"d0": 0.0})
    (working,) = stage_costs(graph, stages, costs).working
    assert working.backward_bytes == (0, 2000)  # on top of the sum, which the ledger has


def test_a_parameter_that_is_used_twice_has_two_gradients_until_they_are_added() -> None:
    """Of each micro-batch: one, another and what comes of both, before it is added to the sum."""
    weight = Param("w", tensor(500), "w")
    a = kept(op("a", "aten.mul.Tensor", Ref("x"), ParamRef("w"), out=tensor(1)))
    b = kept(op("b", "aten.mul.Tensor", Ref("a"), ParamRef("w"), out=tensor(1)))
    graph = replace(graph_of([a, b], [weight]), loss="b")
    stages = Stages((Stage(0, "d0", ("a", "b"), params=("w",)),), ())
    each = {made.name: OpCost(1.0, 2.0) for made in graph.ops}
    costs = Costs({"d0": each}, even_costs(1).cluster, {"d0": 0.0})
    (working,) = stage_costs(graph, stages, costs).working
    first, later = working.backward_bytes
    assert later == first + 2000


def test_a_backward_that_leaves_weights_for_later_makes_no_gradient_of_them() -> None:
    """Convolutions, whose weights are far larger than all that they read."""
    net = nn.Sequential(nn.Conv2d(64, 64, 3), nn.Conv2d(64, 64, 3))
    found = capture(net, (torch.randn(2, 64, 6, 6),), lambda y, _: y.square().mean()).graph
    where = samples.cluster(1)
    whole = cut(found, Placement({o.name: where.devices[0].name for o in found.ops}), 2)
    costs = estimator("analytical").estimate(found.at(2), where)
    apart = deferring(found.at(2), whole, [0], "all")
    plain, split = (stage_costs(found.at(2), s, costs).working[0] for s in (whole, apart))
    weight_bytes = 64 * 64 * 9 * 4
    assert plain.backward_bytes[1] > weight_bytes > split.backward_bytes[1]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_all_of_a_bucket_is_there_with_its_first_gradient(zero: Literal[1, 2, 3]) -> None:
    """Weights of 200 and 400 bytes in one bucket: that of 400 has its gradient first.

    It is copied into the bucket while the gradients of both results, of 400 bytes each, are there.
    """
    params = [Param(name, tensor(size), name) for name, size in (("v", 50), ("w", 100))]
    a = kept(op("a", "aten.mul.Tensor", Ref("x"), ParamRef("v"), out=tensor(100)))
    b = kept(op("b", "aten.mul.Tensor", Ref("a"), ParamRef("w"), out=tensor(100)))
    c = kept(op("c", "aten.neg.default", Ref("b"), out=tensor(100)))
    graph = replace(graph_of([a, b, c], params), loss="c")
    bucket = Bucket("bucket0", (0, 1), ("v", "w"), (75, 75), "float32")
    both = tuple(Stage(i, f"d{i}", ("a", "b", "c"), params=("v", "w"), replica=i) for i in range(2))
    stages = Stages(both, (), micros=((0,), (1,)), buckets=(bucket,), zero_stage=zero)
    each = {made.name: OpCost(1.0, 2.0) for made in graph.ops}
    where = even_costs(2).cluster
    costs = Costs(dict.fromkeys(("d0", "d1"), each), where, dict.fromkeys(("d0", "d1"), 0.0))
    own = 200 + 400 if zero == 1 else 0  # the ledger adds them, where no parts are summed
    found = [each.backward_bytes[0] + own for each in stage_costs(graph, stages, costs).working]
    assert found == [600 + 3 * 400] * 2
