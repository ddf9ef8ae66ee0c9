"""Smaller batches in tensor groups: a plain loop's numbers, and values that grow with rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bigbrain_fx.core import Graph, Op, Param, ParamRef, Ref, TensorSpec
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Plan
from bigbrain_fx.plan.tensor.messages import require_growing
from bigbrain_fx.runtime import joined
from bigbrain_fx.verification.trace import Trace
from bigbrain_fx.weights import part_name
from tests.support.bundles import uneven
from tests.support.synthetic import graph_of
from tests.support.training import (
    AXES,
    HEADS,
    SHARED,
    bench_of,
    equal,
    planned,
    trained,
    with_own_optimizer,
)
from tools.conformance.forms import loop

pytestmark = pytest.mark.usefixtures("one_thread", "small_buckets")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("text", "choices"), [(SHARED, {}), (HEADS, AXES)], ids=["shared weight", "sequence"]
)
def test_a_group_trains_as_a_plain_loop_does(text: str, choices: dict[str, Any]) -> None:
    """The plain loop of `tools.conformance.forms` weighs micro-batches by their rows."""
    bench = bench_of(uneven(text.replace("0.1", "0.0")), steps=4)
    given = {"tensor": 2, "micro_batches": 4, "tensor_shares": (3, 1), **choices}
    plan = with_own_optimizer(planned(bench, equal(2), **given))
    actual, fault = trained(bench, plan)
    assert fault == ""
    as_a_plain_loop(plan, actual, bench.file.path, 4)


def as_a_plain_loop(plan: Plan, actual: Trace, model: Path, steps: int) -> None:
    """Hold what a bundle made against a loop of plain PyTorch."""
    losses, tensors = loop.train(model, steps)
    assert [float(each) for each in actual.losses] == pytest.approx(losses, rel=1e-5)
    shards = {(shard.param, shard.member): shard for shard in plan.sharded.shards}
    for name, tensor in tensors.items():
        own = [shards[name, m] for m in range(plan.stages.members) if (name, m) in shards]
        parts = [actual.tensors[part_name(name, shard.member)] for shard in own]
        lengths = [shard.stop - shard.start for shard in own]
        found = joined(parts, own[0].dim, own[0].inner, lengths) if own else actual.tensors[name]
        assert torch.allclose(found, tensor, rtol=1e-5, atol=1e-6), name


def exchanging(*shape: int | str) -> Graph:
    """Return a graph with one exchange, of a value of this shape."""
    spec = TensorSpec(shape, "float32", (1,) * len(shape), True)
    made = Op("made", "aten.relu.default", (Ref("x"),), outputs=(spec,), source="net.py:7")
    sent = Op("sent", "shard.all_reduce", (Ref("made"),), outputs=(spec,))
    return graph_of([made, sent])


@pytest.mark.parametrize("shape", [(), ("B",), ("2*B", 3), (4, "B")])
def test_values_that_grow_with_rows_and_single_numbers_are_sent(
    shape: tuple[int | str, ...],
) -> None:
    require_growing(replace(exchanging(*shape), batch=8))


@pytest.mark.parametrize("shape", [(1,), (4, 3), ("B", "B"), ("1 + B", 3)])
def test_values_that_do_not_grow_with_rows_are_refused(shape: tuple[int | str, ...]) -> None:
    with pytest.raises(InputError, match=r"exchange 'made', .* does not grow") as caught:
        require_growing(replace(exchanging(*shape), batch=8))
    assert caught.value.at == "net.py:7"


def test_a_weights_gradient_is_known_without_rows() -> None:
    weight = Param("scale", TensorSpec((4,), "float32", (1,), True), "scale")
    spec, frozen = weight.spec, replace(weight, spec=replace(weight.spec, requires_grad=False))
    sent = Op("sent", "shard.all_gather", (ParamRef("scale"), 0, 1, (3, 1)), outputs=(spec,))
    require_growing(replace(graph_of([sent], [weight]), batch=8))
    with pytest.raises(InputError, match="does not grow"):
        require_growing(replace(graph_of([sent], [frozen]), batch=8))
