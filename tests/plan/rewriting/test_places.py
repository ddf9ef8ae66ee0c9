"""Where a graph can be computed otherwise, and what is left as it is; no torch runs here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigbrain_fx.core import Graph, Op, ParamRef, Ref, Rewritten
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import (
    Options,
    Source,
    make_plan,
    places_again,
    read_rewrites,
    rewrite_places,
    rewrite_trial,
    rewritten_graph,
    to_json,
)
from bigbrain_fx.plan.rewritable import layers_text
from tests.support.synthetic import cluster_of, device, graph_of, op, tensor, weight

LINEAR = "aten.linear.default"


def layer(name: str, x: str, weight_: str, width: int, **more: object) -> Op:
    return op(name, LINEAR, Ref(x), ParamRef(weight_), out=tensor(4, width), **more)


def qkv(**changed: Op) -> Graph:
    """Return three layers that read x, and what reads them."""
    ops = {
        "q": layer("q", "x", "q.weight", 8),
        "k": layer("k", "x", "k.weight", 4),
        "v": layer("v", "x", "v.weight", 4),
        "sum": op("sum", "aten.cat.default", (Ref("q"), Ref("k"), Ref("v"))),
    }
    params = [weight("q.weight", 8, 4), weight("k.weight", 4, 4), weight("v.weight", 4, 4)]
    return graph_of(list((ops | changed).values()), params)


def test_layers_that_read_one_value_are_one_product_whose_parts_keep_their_names() -> None:
    graph = qkv()
    (place,) = rewrite_places(graph, ["linears"])
    assert place.ops == ("q", "k", "v")
    assert place.layers == ("q", "k", "v")
    made = rewritten_graph(graph, [place])
    assert [op.target for op in made.ops] == [
        "aten.cat.default",
        LINEAR,
        "aten.split_with_sizes.default",
        *["operator.getitem"] * 3,
        "aten.cat.default",
    ]
    product = made.ops[1]
    assert product.outputs[0].shape == (4, 16)
    assert product.flops == sum(int(graph.op[name].flops) for name in "qkv")
    assert [graph.op[name].outputs for name in "qkv"] == [made.op[n].outputs for n in "qkv"]
    assert made.params == graph.params
    assert made.ops[-1] == graph.ops[-1]


@pytest.mark.parametrize(
    ("changed", "joined"),
    [
        ({"k": op("k", LINEAR, Ref("q"), ParamRef("k.weight"))}, ("q", "v")),  # of another value
        ({"k": layer("k", "x", "v.weight", 4)}, ()),  # one weight twice: q is alone
        ({"k": op("k", LINEAR, Ref("x"), Ref("q"))}, ("q", "v")),  # no weight of its own
        ({"k": op("k", "aten.mul_.Tensor", Ref("x"), 2.0, mutates=("x",))}, ()),  # x is written
        ({"k": op("k", "aten.mul_.Tensor", ParamRef("q.weight"), 2, mutates=("q.weight",))}, ()),
        ({"k": op("k", LINEAR, Ref("x"), ParamRef("k.weight"), out=tensor(4, 4, dtype="bfloat16"))},
         ("q", "v")),
    ],
)  # fmt: skip
def test_what_is_not_alike_is_left_as_it_is(
    changed: dict[str, Op], joined: tuple[str, ...]
) -> None:
    found = rewrite_places(qkv(**changed), ["linears"])
    assert [place.ops for place in found] == ([joined] if joined else [])


def test_a_frozen_layer_is_not_joined_to_trained_ones() -> None:
    graph = qkv()
    frozen = replace(graph.params[1], spec=replace(graph.params[1].spec, requires_grad=False))
    graph = replace(graph, params=(graph.params[0], frozen, graph.params[2]))
    assert [place.ops for place in rewrite_places(graph, ["linears"])] == [("q", "v")]


def scores(width: int, **more: object) -> Graph:
    ops = [
        op("s", "aten.matmul.default", Ref("x"), Ref("x2"), out=tensor(4, width)),
        op("d", "aten.div.Tensor", Ref("s"), 8.0, out=tensor(4, width)),
        op("soft", "aten.softmax.int", Ref("d"), -1, out=tensor(4, width)),
    ]
    first = op("x2", "aten.mul.Tensor", Ref("x"), Ref("x"), out=tensor(4, width))
    return replace(graph_of([first, *ops]), **more)  # type: ignore[arg-type]


def test_a_number_goes_to_the_smaller_operand() -> None:
    graph = scores(64)
    (place,) = rewrite_places(graph, ["scales"])
    made = rewritten_graph(graph, [place])
    scaled, product = made.ops[1:3]
    assert (scaled.target, scaled.args, scaled.outputs[0].shape) == (
        "aten.div.Tensor",
        (Ref("x"), 8.0),
        (4, 4),
    )
    assert (product.name, product.args) == ("d", (Ref(scaled.name), Ref("x2")))
    assert made.ops[3:] == graph.ops[3:]


def test_a_number_stays_where_no_operand_is_smaller_or_others_read_the_product() -> None:
    assert not rewrite_places(scores(4), ["scales"])
    assert not rewrite_places(scores(64, outputs=("s", "soft")), ["scales"])


def test_a_plans_places_are_found_again_and_cut_out() -> None:
    graph = qkv()
    (place,) = rewrite_places(graph, ["linears"])
    assert places_again(graph, [Rewritten("linears", place.ops)]) == (place,)
    assert not places_again(graph, [Rewritten("linears", ("q", "v"))])
    trial = rewrite_trial(graph, place, 4)
    assert trial.before.outputs == trial.after.outputs == ("k", "q", "v")
    assert {e.name for e in trial.after.inputs} == {"x"}
    assert len(trial.after.params) == 3


def test_names_are_read_or_refused() -> None:
    assert read_rewrites("none") == ()
    assert read_rewrites("auto") == ("auto",)
    assert read_rewrites("scales, linears") == ("scales", "linears")
    with pytest.raises(InputError, match="there is no rewrite 'linear'") as error:
        read_rewrites("linear")
    assert "did you mean linears?" in str(error.value.help)


def test_layers_of_one_module_are_named_shortly() -> None:
    assert layers_text(["a.q", "a.k"]) == "q, k of a"
    assert layers_text(["a.q", "b.k"]) == "a.q, b.k"
    assert layers_text(["q", "k"]) == "q, k"


def test_a_plan_of_the_model_as_it_is_says_nothing_of_rewrites() -> None:
    where = cluster_of(device("d0"), device("d1"))
    plan = make_plan(qkv(), where, Source("model.py"), Options("naive"))
    assert b"rewritten" not in to_json(plan)
