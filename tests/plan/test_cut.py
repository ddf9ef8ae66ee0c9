"""Any placement becomes an acyclic list of stages, and every value gets where it is read."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st

from bigbrain_fx.core import Edge, Graph, Op, ParamRef, Placement, Ref, Stage, Stages
from bigbrain_fx.plan.cut import cut, holders, live_ops, norms_spec, owners, roots, trained
from bigbrain_fx.planning.units import is_size, units
from tests.support import samples
from tests.support.examples import examples
from tests.support.synthetic import graph_of, op, random_graph, tensor, weight

PLAIN = tensor(4, grad=False)
quick = settings(max_examples=examples(60), deadline=None, derandomize=True)
seeds = st.integers(0, 10**6)


def linear(name: str, read: str, param: str) -> Op:
    return op(name, "aten.linear.default", Ref(read), ParamRef(param))


def add(name: str, *reads: str) -> Op:
    return op(name, "aten.add.Tensor", *map(Ref, reads))


def placed(graph: Graph, homes: str) -> Placement:
    """Place ops by a word: one letter each, in order."""
    return Placement({entry.name: home for entry, home in zip(graph.ops, homes, strict=True)})


def stages_of(graph: Graph, homes: str, *, clip: bool = False) -> Stages:
    return cut(graph, placed(graph, homes), graph.batch, clip=clip)


def shown(stages: Stages) -> str:
    return " ".join(f"{stage.device}:{'+'.join(stage.ops)}" for stage in stages.stages)


def edges(stages: Stages, kind: str) -> list[str]:
    return [str(edge).removeprefix(f"{kind} ") for edge in stages.edges if edge.kind == kind]


# --------------------------------------------------------------------------- made by hand


def test_a_chain_gives_one_stage_a_device() -> None:
    graph = graph_of([add("p", "x"), add("q", "p"), add("r", "q"), add("s", "r")])
    found = stages_of(graph, "aabb")
    assert shown(found) == "a:p+q b:r+s"
    assert found.is_chain
    assert edges(found, "activation") == ["q 0->1"]
    assert edges(found, "gradient") == ["q 1->0"]
    first, second = found.stages
    assert (first.sends, second.receives, first.inputs) == (("q",), ("q",), ("x",))
    assert found.edges[0].nbytes == 16


def test_going_to_and_fro_gives_a_stage_a_turn() -> None:
    graph = graph_of([add("p", "x"), add("q", "p"), add("r", "q"), add("s", "r")])
    assert shown(stages_of(graph, "abab")) == "a:p b:q a:r b:s"


def test_branches_wait_for_nobody() -> None:
    r"""Device a runs both of its ends in one go where it can.

    x ── p(a) ── q(b) ── s(a)
     └── r(a) ───────────┘         p and r together, not p, q, r, s
    """
    graph = graph_of([add("p", "x"), add("q", "p"), add("r", "x"), add("s", "q", "r")])
    assert shown(stages_of(graph, "abaa")) == "a:p+r b:q a:s"


def test_cheap_values_are_recomputed_not_sent() -> None:
    mask = op("mask", "aten.ones.default", out=PLAIN)
    ops = [mask, add("p", "x", "mask"), add("q", "p", "mask")]
    found = stages_of(graph_of(ops), "aab")
    assert shown(found) == "a:mask+p b:mask+q"
    assert [stage.recomputed for stage in found.stages] == [("mask",), ("mask",)]
    assert edges(found, "activation") == ["p 0->1"]


def test_a_size_is_read_from_what_the_stage_has() -> None:
    """Stage 1 makes a mask of B rows and has p: no need for x, whose size the graph reads."""
    graph = graph_of(
        [
            Op("rows", "aten.sym_size.int", (Ref("x"), 0)),
            op("p", "aten.relu.default", Ref("x"), out=tensor(4, 4)),
            op("mask", "aten.ones.default", (Ref("rows"),), out=PLAIN),
            add("q", "p", "mask"),
        ]
    )
    found = stages_of(graph, "aaab")
    assert [stage.inputs for stage in found.stages] == [("x",), ()]


def test_tied_gradients_go_between_all_devices_that_hold_the_parameter() -> None:
    """w in stages 0 (a), 1 (b), 2 (c): each leaf to the two other devices, last stage first."""
    params = [weight("w", 4), weight("head", 4, canonical="w"), weight("own", 4)]
    ops = [
        linear("p", "x", "w"),
        linear("q", "p", "head"),
        linear("r", "q", "w"),
        linear("s", "r", "own"),
    ]
    graph = graph_of(ops, params)
    found = stages_of(graph, "abcc")
    assert edges(found, "tied") == ["w 2->0", "w 2->1", "w 1->0", "w 1->2", "w 0->1", "w 0->2"]
    assert {n: [s.index for s in at] for n, at in holders(graph, found.stages).items()} == {
        "w": [0, 1, 2],
        "own": [2],
    }
    assert owners(graph, found) == {"a": ["w"], "b": [], "c": ["own"]}


def test_frozen_parameters_are_not_tied() -> None:
    frozen = replace(weight("w", 4), spec=tensor(4, grad=False))
    ops = [add("p", "x"), linear("q", "p", "w"), linear("r", "q", "w")]
    assert edges(stages_of(graph_of(ops, [frozen]), "aab"), "tied") == []


def test_norms_go_between_all_devices_when_clipping() -> None:
    ops = [linear("p", "x", "v"), linear("q", "p", "w"), add("r", "q")]
    graph = graph_of(ops, [weight("v", 4), weight("w", 4)])
    found = stages_of(graph, "abc", clip=True)
    expected = ["norms 0->1", "norms 0->2", "norms 1->0", "norms 1->2"]
    assert sorted(edges(found, "norm")) == expected  # c owns nothing and has nothing to say
    assert edges(stages_of(graph, "abc"), "norm") == []


@pytest.mark.parametrize(
    ("of_v", "of_w", "expected"),
    [
        ("float32", "float32", "float32"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float64", "float64", "float64"),
        ("bfloat16", "float16", "float32"),
        ("bfloat16", "float64", "float64"),
        ("complex64", "complex64", "float32"),
    ],
)
def test_norms_have_the_type_that_torch_gives_them(of_v: str, of_w: str, expected: str) -> None:
    params = [
        replace(weight(name, 4), spec=tensor(4, dtype=kind))
        for name, kind in (("v", of_v), ("w", of_w))
    ]
    graph = graph_of([linear("p", "x", "v"), linear("q", "p", "w")], params)
    found = norms_spec(graph, ["v", "w"])
    assert (found.shape, found.dtype) == ((2,), expected)
    stacked = [torch.ones(4, dtype=getattr(torch, kind)).norm() for kind in (of_v, of_w)]
    assert torch.stack(stacked).dtype == getattr(torch, expected)


def test_unneeded_ops_are_dropped() -> None:
    """A dead op runs nowhere; one that writes a buffer is never dead."""
    ops = [add("dead", "x"), linear("count", "x", "b"), add("p", "x")]
    writes = replace(ops[1], mutates=("b",))
    graph = graph_of([ops[0], writes, ops[2]], [replace(weight("b", 4), kind="buffer")])
    assert live_ops(graph) == {"count", "p"}
    assert "dead" not in shown(stages_of(graph, "aab"))


def test_ops_that_must_share_follow_the_heaviest() -> None:
    split = op("split", "aten.split.Tensor", Ref("x"), 2, is_tuple=True)
    parts = [op(name, "operator.getitem", Ref("split"), i) for i, name in enumerate("pq")]
    graph = graph_of([replace(split, flops=10**6), *parts, add("r", "p", "q")])
    found = stages_of(graph, "baab")
    assert shown(found) == "b:split+p+q+r"
    assert found.moved == ("p", "q")


def test_inference_has_outputs_and_no_gradients() -> None:
    graph = replace(graph_of([linear("p", "x", "w"), add("q", "p")], [weight("w", 4)]), loss=None)
    found = stages_of(graph, "ab")
    assert {edge.kind for edge in found.edges} == {"activation"}
    assert trained(graph, found.stages) == frozenset()
    assert [roots(graph, stage) for stage in found.stages] == [("p",), ("q",)]


# --------------------------------------------------------------------------- models of people


@pytest.mark.parametrize("name", samples.cases(("unet", "resnet", "gpt", "encdec")))
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_a_chain_of_devices_gives_as_many_stages(name: str, devices: int) -> None:
    """A plain level rule gives 5 stages for 3 devices on U-Net and ResNet."""
    graph = samples.sample(name).graph
    found = cut(graph, contiguous(graph, devices), 2)
    assert len(found.stages) == devices
    assert found.is_chain
    assert_sound(graph, found)


@pytest.mark.parametrize("name", samples.cases(("unet", "resnet", "gpt", "encdec")))
@pytest.mark.parametrize("seed", range(3))
def test_models_scattered(name: str, seed: int) -> None:
    graph = samples.sample(name).graph
    dice = random.Random(seed)
    placement = Placement({entry.name: dice.choice("abcd") for entry in graph.ops})
    assert_sound(graph, cut(graph, placement, 2, clip=True))


def contiguous(graph: Graph, devices: int, rows: int = 2) -> Placement:
    """Cut the groups, as they are listed, into equal runs."""
    found = units(graph.at(rows))
    homes = {name: "d0" for name in found.replicated}
    for number, group in enumerate(found.groups):
        homes.update(dict.fromkeys(group, f"d{number * devices // len(found.groups)}"))
    return Placement(homes)


# --------------------------------------------------------------------------- drawn


def drawn_graph(seed: int, count: int) -> Graph:
    """Draw a graph and let a few of its ops write in place into what they read."""
    graph, dice = random_graph(seed, count), random.Random(seed)
    ops: list[Op] = []
    for entry in graph.ops:
        in_place = entry.target == "aten.linear.default" and dice.random() < 0.4
        first = entry.refs[0] if entry.refs else "x"
        if in_place and first in graph.op and not graph.op[first].is_tuple:
            ops.append(replace(entry, mutates=(first,), view_of=first))
        else:
            ops.append(entry)
    return replace(graph, ops=tuple(ops))


@quick
@given(seeds, st.integers(1, 40), st.integers(1, 5), st.booleans())
def test_any_placement_gives_sound_stages(seed: int, count: int, devices: int, clip: bool) -> None:
    graph, dice = drawn_graph(seed, count), random.Random(seed + 1)
    placement = Placement({entry.name: f"d{dice.randrange(devices)}" for entry in graph.ops})
    found = cut(graph, placement, graph.batch, clip=clip)
    assert_sound(graph, found)
    assert cut(graph, placement, graph.batch, clip=clip) == found
    assert_moved(graph, placement, found)


@quick
@given(seeds, st.integers(1, 40), st.integers(1, 5))
def test_any_chain_gives_a_stage_a_device(seed: int, count: int, devices: int) -> None:
    graph = drawn_graph(seed, count)
    found = cut(graph, contiguous(graph, devices, graph.batch), graph.batch)
    assert found.is_chain
    assert_sound(graph, found)


def assert_sound(graph: Graph, found: Stages) -> None:
    assert [stage.index for stage in found.stages] == list(range(len(found.stages)))
    assert_every_op_once(graph, found)
    assert_groups_together(graph, found)
    assert_all_reads_are_local(graph, found)
    assert_activations(found)
    assert_gradients(graph, found)
    assert_tied(graph, found)
    assert_norms(graph, found)
    assert len({(e.value, e.source, e.target, e.kind) for e in found.edges}) == len(found.edges)


def own(stage: Stage) -> list[str]:
    return [name for name in stage.ops if name not in stage.recomputed]


def assert_every_op_once(graph: Graph, found: Stages) -> None:
    cheap = units(graph.at(2)).replicated
    listed = [name for stage in found.stages for name in own(stage)]
    assert sorted(listed) == sorted(live_ops(graph) - cheap)
    place = {entry.name: i for i, entry in enumerate(graph.ops)}
    for stage in found.stages:
        assert cheap.issuperset(stage.recomputed)
        assert all(place[a] < place[b] for a, b in pairwise(stage.ops))


def assert_groups_together(graph: Graph, found: Stages) -> None:
    home = {name: stage.index for stage in found.stages for name in own(stage)}
    for group in units(graph.at(2)).groups:
        assert len({home[name] for name in group if name in home}) <= 1


def assert_all_reads_are_local(graph: Graph, found: Stages) -> None:
    for stage in found.stages:
        has = {*stage.ops, *stage.receives, *stage.inputs}
        for name in stage.ops:
            if not is_size(graph.op[name]):
                assert has.issuperset(graph.op[name].refs)
            assert set(stage.params).issuperset(graph.op[name].params)


def assert_activations(found: Stages) -> None:
    maker = {name: stage.index for stage in found.stages for name in own(stage)}
    for stage in found.stages:
        received = found.into(stage.index, "activation")
        assert sorted(edge.value for edge in received) == sorted(stage.receives)
        for edge in received:
            source = found.stages[edge.source]
            assert maker[edge.value] <= source.index < stage.index
            assert edge.value in source.sends or edge.value in source.receives
    messages = [
        (e.value, found.stages[e.target].device)
        for e in found.edges
        if e.kind == "activation" and not found.is_local(e)
    ]
    assert len(set(messages)) == len(messages)


def assert_gradients(graph: Graph, found: Stages) -> None:
    maker = {name: stage.index for stage in found.stages for name in own(stage)}
    backward = trained(graph, found.stages)
    expected: list[tuple[str, int, int]] = []
    for value, first in maker.items():
        readers = [s.index for s in found.stages if value in s.receives and s.index in backward]
        if graph.op[value].requires_grad:
            expected += [(value, b, a) for a, b in pairwise([first, *readers])]
    listed = [e for e in found.edges if e.kind == "gradient"]
    assert sorted((e.value, e.source, e.target) for e in listed) == sorted(expected)
    assert backward.issuperset(end for e in listed for end in (e.source, e.target))


def assert_tied(graph: Graph, found: Stages) -> None:
    expected: list[tuple[str, int, str]] = []
    for name, held in holders(graph, found.stages).items():
        for source in held:
            others = {stage.device for stage in held} - {source.device}
            expected += [(name, source.index, device) for device in others]
    listed = [e for e in found.edges if e.kind == "tied"]
    found_ends = [(e.value, e.source, found.stages[e.target].device) for e in listed]
    assert sorted(found_ends) == sorted(expected)
    assert all(is_last_first(edges) for edges in by_parameter(listed))


def by_parameter(listed: Sequence[Edge]) -> list[list[Edge]]:
    return [[e for e in listed if e.value == name] for name in {e.value for e in listed}]


def is_last_first(listed: Sequence[Edge]) -> bool:
    return all(a.source >= b.source for a, b in pairwise(listed))


def assert_norms(graph: Graph, found: Stages) -> None:
    owned = owners(graph, found)
    canonical = [name for names in owned.values() for name in names]
    assert sorted(canonical) == sorted(holders(graph, found.stages))
    for edge in (edge for edge in found.edges if edge.kind == "norm"):
        assert edge.nbytes == 4 * len(owned[found.stages[edge.source].device])


def assert_moved(graph: Graph, placement: Placement, found: Stages) -> None:
    home = {name: stage.device for stage in found.stages for name in own(stage)}
    assert sorted(found.moved) == sorted(n for n, d in home.items() if placement.device_of[n] != d)


# --------------------------------------------------------------------------- where gradients stop


def detached(name: str, read: str) -> Op:
    return op(name, "aten.detach.default", Ref(read), out=PLAIN)


def test_a_value_that_its_reader_detaches_gets_no_gradient() -> None:
    # p goes to b, which detaches it: one process leaves its parameter without a gradient
    ops = [linear("p", "x", "w"), linear("q", "x", "v"), detached("d", "p"), add("r", "d", "q")]
    found = stages_of(graph_of(ops, [weight("w", 4), weight("v", 4)]), "aabb")
    assert edges(found, "activation") == ["p 0->1", "q 0->1"]
    assert edges(found, "gradient") == ["q 1->0"]


def test_a_stage_whose_values_are_all_detached_has_no_backward() -> None:
    ops = [linear("p", "x", "w"), detached("d", "p"), linear("q", "d", "v")]
    graph = graph_of(ops, [weight("w", 4), weight("v", 4)])
    found = stages_of(graph, "abb")
    assert edges(found, "gradient") == []
    assert trained(graph, found.stages) == {1}
    assert list(holders(graph, found.stages)) == ["v"]


def test_a_parameter_is_kept_equal_where_a_stage_only_reads_it() -> None:
    # b uses w, too, but gives it no gradient: without a's it would keep the first step's numbers
    ops = [linear("p", "x", "w"), linear("t", "x", "w"), detached("d", "t"), add("r", "p", "d")]
    graph = graph_of(ops, [weight("w", 4)])
    found = stages_of(graph, "abbb")
    assert [stage.index for stage in holders(graph, found.stages)["w"]] == [0, 1]
    assert edges(found, "tied") == ["w 0->1"]


def test_a_gradient_reaches_what_was_written_into() -> None:
    written = op("c", "aten.copy_.default", Ref("v"), Ref("s"), mutates=("p",), view_of="p")
    view = op("v", "aten.select.int", Ref("p"), view_of="p")
    ops = [linear("s", "x", "u"), linear("p", "x", "w"), view, written, add("r", "p")]
    graph = graph_of(ops, [weight("w", 4), weight("u", 4)])
    assert {"s", "c", "v", "p", "r"} <= graph.graded
