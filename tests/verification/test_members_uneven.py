"""Smaller batches in tensor groups: the bits of members in lockstep, and a plain loop's numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bigbrain_fx.core import Graph, Op, Param, ParamRef, Ref, TensorSpec
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Plan, part_channels
from bigbrain_fx.plan.tensor.messages import require_growing
from bigbrain_fx.runtime import joined
from bigbrain_fx.verification.members import same_graph
from bigbrain_fx.verification.trace import Trace
from bigbrain_fx.weights import part_name
from tests.support.bundles import uneven
from tests.support.synthetic import graph_of
from tests.verification.test_members import HEADS, WIDE, planned, trained
from tests.verification.test_replicas import bench_of
from tools.conformance.forms import loop
from tools.conformance.matrix import Bench

# A weight that all heads share: its gradient is a sum over members, of no rows.
SCALED = HEADS.replace(
    "self.out = nn.Linear(16, 16)",
    "self.out = nn.Linear(16, 16)\n        self.scale = nn.Parameter(torch.ones(4))",
).replace("        mixed = F.sc", "        q = q * self.scale\n        mixed = F.sc")


pytestmark = pytest.mark.usefixtures("one_thread", "small_buckets")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    path = tmp_path_factory.mktemp("model") / "net.py"
    return replace(bench_of(path, uneven(SCALED)), steps=4)


def differences(bench: Bench, devices: int, folder: Path, **choices: object) -> str:
    """Return what differs between a bundle and its reference."""
    plan = planned(bench, devices, **choices)
    plan = replace(plan, source=replace(plan.source, drop_last=False))
    actual, fault = trained(bench, plan, folder / "bundle")
    return fault or ", ".join(actual.unlike)


@pytest.mark.gate("2-{'tensor_shares': (3, 1)}")
@pytest.mark.parametrize(
    ("devices", "choices"),
    [
        (2, {"tensor_shares": (3, 1)}),
        (4, {"schedule": "zb-h1"}),
        (4, {"replicas": 2, "sum_order": "micro", "recompute": "all"}),
    ],
    ids=str,
)
def test_a_bundle_has_the_bits_of_its_members_in_lockstep(
    bench: Bench, tmp_path: Path, devices: int, choices: dict[str, object]
) -> None:
    """Micro-batches of 2, of 1, and of no rows, with draws and a tied weight."""
    assert differences(bench, devices, tmp_path, **choices) == ""


def test_sums_in_pieces_are_sent_as_those_of_a_full_micro_batch(tmp_path: Path) -> None:
    """Of 128 rows, 110 and few: other pieces, and some of a tensor that would not be cut."""
    bench = replace(bench_of(tmp_path / "net.py", uneven(WIDE, (256, 219, 3, 1))), steps=4)
    assert len({part.numel for part in part_channels(planned(bench, 3, tensor=3))}) > 1
    assert differences(bench, 3, tmp_path, tensor=3, micro_batches=2) == ""


def test_members_of_few_rows_compute_what_the_graph_does(bench: Bench) -> None:
    found = same_graph(bench.captured, planned(bench, 2), few=1)
    assert found["passed"] is True
    assert found["name"] == "captured graph ≈ TP ranks' graphs, micro-batches of 1 rows"


@pytest.mark.nightly
def test_a_group_trains_as_a_plain_loop_does(tmp_path: Path) -> None:
    """The plain loop of `tools.conformance.forms` weighs micro-batches by their rows."""
    bench = replace(bench_of(tmp_path / "net.py", uneven(SCALED.replace("0.1", "0.0"))), steps=4)
    plan = planned(bench, 2, tensor_shares=(3, 1))
    plan = replace(plan, source=replace(plan.source, drop_last=False, has_optimizer=True))
    actual, fault = trained(bench, plan, tmp_path / "bundle")
    assert fault == ""
    as_a_plain_loop(plan, actual, tmp_path / "net.py", 4)


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
