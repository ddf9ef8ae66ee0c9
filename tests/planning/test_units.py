"""Which ops stay together, and the figures of units."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from bigbrain_fx.core import Graph, ModuleCall, Op, Param, ParamRef, Ref
from bigbrain_fx.planning import work
from bigbrain_fx.planning.registry import estimator
from bigbrain_fx.planning.unit_work import OnKind
from bigbrain_fx.planning.units import Units, is_size, mutated_roots, units
from tests.support.examples import examples
from tests.support.synthetic import (
    chain_graph,
    cluster_of,
    device,
    graph_of,
    op,
    random_graph,
    tensor,
    weight,
)

GRAD, PLAIN = tensor(4), tensor(4, grad=False)


def relu(name: str, *reads: str, modules: tuple[ModuleCall, ...] = ()) -> Op:
    return op(name, "aten.relu.default", *map(Ref, reads), modules=modules)


def group_of(found: Units, name: str) -> tuple[str, ...]:
    return next(group for group in found.groups if name in group)


def test_independent_ops_are_groups_of_their_own() -> None:
    graph = graph_of([relu("a", "x"), relu("b", "a"), relu("c", "b")])
    assert units(graph).groups == (("a",), ("b",), ("c",))
    assert units(graph).replicated == frozenset()


def test_a_tuple_stays_with_what_takes_it_apart() -> None:
    parts = [op(n, "operator.getitem", Ref("split"), i, view_of="a") for i, n in enumerate("pq")]
    graph = graph_of(
        [
            relu("a", "x"),
            op("split", "aten.split.Tensor", Ref("a"), 2, is_tuple=True),
            *parts,
            relu("b", "p", "q"),
        ]
    )
    assert units(graph).groups == (("a",), ("split", "p", "q"), ("b",))


def test_all_that_touch_a_mutated_buffer_stay_together() -> None:
    """Also an op that only reads it, after the last write: its value is the device's."""
    buffer = Param("mean", PLAIN, "mean", "buffer")
    norm = op("norm", "aten.batch_norm.default", Ref("a"), ParamRef("mean"), mutates=("mean",))
    reader = op("reader", "aten.mul.Tensor", Ref("b"), ParamRef("mean"))
    ops = [relu("a", "x"), norm, relu("b", "x"), reader, relu("last", "norm", "reader")]
    graph = graph_of(ops, [buffer])
    assert group_of(units(graph), "norm") == ("norm", "reader")
    assert mutated_roots(graph) == {"mean"}


def test_an_unmutated_buffer_joins_nobody() -> None:
    buffer = Param("table", PLAIN, "table", "buffer")
    reads = [op(n, "aten.mul.Tensor", Ref("x"), ParamRef("table")) for n in "ab"]
    graph = graph_of([*reads, relu("c", "a", "b")], [buffer])
    assert units(graph).groups == (("a",), ("b",), ("c",))


def test_a_counter_joins_its_layer() -> None:
    """BatchNorm's `num_batches_tracked += 1` gives nothing to anybody; it follows its norm."""
    layer = (ModuleCall("norm", "torch.nn.BatchNorm2d"),)
    counter = Param("norm.count", tensor(grad=False, dtype="int64"), "norm.count", "buffer")
    add = op(
        "add", "aten.add_.Tensor", ParamRef("norm.count"), 1, out=PLAIN, mutates=("norm.count",)
    )
    graph = graph_of(
        [
            replace(add, modules=layer),
            relu("norm", "x", modules=layer),
            relu("b", "norm"),
        ],
        [counter],
    )
    assert units(graph).groups == (("add", "norm"), ("b",))


def test_a_mutated_value_keeps_views_writers_and_early_readers() -> None:
    r"""Readers after the last write see what they should anywhere.

    a ── view ── write_         late reads the written value: no need to stay
     └── early ───────┘
    """
    graph = graph_of(
        [
            relu("a", "x"),
            op("view", "aten.view.default", Ref("a"), view_of="a"),
            relu("early", "a"),
            op(
                "write",
                "aten.add_.Tensor",
                Ref("view"),
                Ref("early"),
                view_of="view",
                mutates=("view",),
            ),
            relu("late", "write"),
        ]
    )
    assert units(graph).groups == (("a", "view", "early", "write"), ("late",))
    assert mutated_roots(graph) == {"a"}


def test_unmutated_views_join_nobody() -> None:
    views = [op(n, "aten.view.default", Ref("a"), view_of="a") for n in "pq"]
    graph = graph_of([relu("a", "x"), *views, relu("b", "p", "q")])
    assert units(graph).groups == (("a",), ("p",), ("q",), ("b",))


def test_groups_that_would_wait_for_each_other_merge() -> None:
    """The buffer holds first and last together, so what lies between them must come too."""
    buffer = Param("state", PLAIN, "state", "buffer")
    first = op("first", "aten.batch_norm.default", Ref("x"), ParamRef("state"), mutates=("state",))
    last = op("last", "aten.batch_norm.default", Ref("mid"), ParamRef("state"), mutates=("state",))
    graph = graph_of([first, relu("mid", "first"), last, relu("after", "last")], [buffer])
    assert units(graph).groups == (("first", "mid", "last"), ("after",))


def test_cheap_values_are_copied() -> None:
    """Sizes, constants and masks from inputs; unmutated buffers too."""
    buffer = Param("table", PLAIN, "table", "buffer")
    graph = graph_of(
        [
            Op("rows", "aten.sym_size.int", (Ref("x"), 0)),
            op("ones", "aten.ones.default", (Ref("rows"),), out=PLAIN),
            op("mask", "aten.mul.Tensor", Ref("ones"), ParamRef("table"), out=PLAIN),
            op("a", "aten.mul.Tensor", Ref("x"), Ref("mask")),
        ],
        [buffer],
    )
    found = units(graph)
    assert found.replicated == {"rows", "ones", "mask"}
    assert found.groups == (("a",),)
    assert is_size(graph.op["rows"])
    assert not is_size(graph.op["ones"])


@pytest.mark.parametrize(
    "why",
    [
        {"out": GRAD},
        {"random": True},
        {"mutates": ("w",)},
        {"flops": 10**9},
    ],
    ids=["wants a gradient", "draws", "writes", "dear"],
)
def test_ops_that_are_not_copied(why: dict[str, object]) -> None:
    more = {"out": PLAIN, **why}
    value = op("value", "aten.mul.Tensor", Ref("x"), **more)  # type: ignore[arg-type]  # by name
    graph = graph_of([value, relu("a", "value")], [Param("w", PLAIN, "w", "buffer")])
    assert units(graph).replicated == frozenset()


def test_values_of_parameters_and_results_are_not_copied() -> None:
    of_param = op("p", "aten.mul.Tensor", ParamRef("w"), 2, out=PLAIN)
    result = op("r", "aten.mul.Tensor", Ref("x"), 2, out=PLAIN)
    graph = graph_of([of_param, relu("a", "p"), result], [weight("w", 4)])
    assert units(graph).replicated == frozenset()


def test_values_written_later_are_not_copied() -> None:
    write = op("w", "aten.add_.Tensor", Ref("v"), 1, out=PLAIN, view_of="v", mutates=("v",))
    graph = graph_of([op("v", "aten.mul.Tensor", Ref("x"), 2, out=PLAIN), write, relu("a", "w")])
    assert units(graph).replicated == frozenset()


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 30))
def test_groups_cover_the_graph_once_and_can_run_in_their_order(seed: int, count: int) -> None:
    graph = random_graph(seed, count)
    found = units(graph)
    listed = [name for group in found.groups for name in group]
    assert sorted([*listed, *found.replicated]) == sorted(graph.op)
    assert_runs_in_order(graph, found)
    assert units(graph) == found


def assert_runs_in_order(graph: Graph, found: Units) -> None:
    done = set(found.replicated) | set(graph.input)
    for group in found.groups:
        assert list(group) == sorted(group, key=[o.name for o in graph.ops].index)
        done |= set(group)
        assert all(done.issuperset(graph.op[name].refs) for name in group)


# --------------------------------------------------------------------------- figures


def test_units_are_put_in_order_once_for_devices_that_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of hundreds of GPUs there are a few kinds: what is done for each device takes minutes."""
    graph = chain_graph(0, 6)
    cluster = cluster_of(*(device(f"d{i}", 1 + i % 2) for i in range(6)))
    known = work(graph, estimator("analytical").estimate(graph, cluster))
    asked: list[OnKind] = []
    merged = OnKind.merged

    def counted(self: OnKind, *args: object) -> OnKind:
        asked.append(self)
        return merged(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(OnKind, "merged", counted)
    found = known.merged([[old] for old in reversed(range(known.count))])
    assert len(asked) == len({id(on) for on in known.on.values()}) == 2
    assert len({id(on) for on in found.on.values()}) == 2
    for name, on in known.on.items():
        assert found.on[name].forward_s.tolist() == on.forward_s.tolist()[::-1]
