"""The sequence between the sums of a tensor group: the bits of members in lockstep, and plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bigbrain_fx.core import Axis
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Plan, part_channels
from bigbrain_fx.plan.nouns import to_json
from bigbrain_fx.plan.tensor import axis_choices
from bigbrain_fx.verification.members import same_graph
from tests.support.bundles import uneven
from tests.verification.test_members import HEADS, planned, trained
from tests.verification.test_members_uneven import as_a_plain_loop
from tests.verification.test_replicas import bench_of
from tools.conformance.matrix import Bench

pytestmark = pytest.mark.usefixtures("one_thread", "small_buckets")
AXES = {"tensor_axes": ("heads", "hidden", "sequence")}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return bench_of(tmp_path_factory.mktemp("model") / "net.py", HEADS)


def sequences(plan: Plan) -> list[Axis]:
    assert plan.placement.tensor is not None
    return [axis for axis in plan.placement.tensor.axes if axis.kind == "sequence"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("devices", "choices"),
    [
        (2, {"tensor_shares": (3, 1)}),
        (3, {"tensor": 3, "recompute": "all"}),
        (4, {"schedule": "zb-h1"}),
        (4, {"replicas": 2, "sum_order": "micro", "zero_stage": 1}),
    ],
    ids=str,
)
def test_a_bundle_has_the_bits_of_its_members_in_lockstep(
    bench: Bench, tmp_path: Path, devices: int, choices: dict[str, object]
) -> None:
    plan = planned(bench, devices, **AXES, **choices)
    assert sequences(plan)
    actual, fault = trained(bench, plan, tmp_path / "bundle")
    text = "\n".join(path.read_text() for path in (tmp_path / "bundle").glob("*.py"))
    assert fault == ""
    assert not actual.unlike
    assert "reduce_scatter(" in text
    assert "gather_to_group(" in text


def test_the_members_graphs_are_the_graph_to_rounding(bench: Bench) -> None:
    plan = planned(bench, 3, tensor=3, tensor_shares=(2, 1, 1), **AXES)
    assert sequences(plan)
    found = same_graph(bench.captured, plan)  # 1e-5 in its own types, 1e-12 in float64
    assert found["passed"], found


@pytest.mark.nightly
def test_a_group_trains_as_a_plain_loop_does(tmp_path: Path) -> None:
    """On batches of other sizes, too."""
    text = uneven(HEADS.replace("0.1", "0.0"))
    bench = replace(bench_of(tmp_path / "net.py", text), steps=4)
    plan = planned(bench, 2, tensor_shares=(3, 1), **AXES)
    plan = replace(plan, source=replace(plan.source, drop_last=False, has_optimizer=True))
    actual, fault = trained(bench, plan, tmp_path / "bundle")
    assert sequences(plan)
    assert fault == ""
    as_a_plain_loop(plan, actual, tmp_path / "net.py", 4)


def test_gradients_of_whole_parameters_are_one_message(bench: Bench) -> None:
    """Of norms and biases: members add what each has of them when the backward ends."""
    graph = planned(bench, 2, **AXES).sharded.members[0]
    waiting = [op for op in graph.ops if op.target == "shard.copy_to_group" and op.params]
    numel = sum(op.outputs[0].numel for op in waiting)
    assert len(waiting) > 2
    (one,) = [c for c in part_channels(planned(bench, 2, **AXES)) if c.numel == numel][:1]
    assert one.per_step == 4  # micro-batches


def test_bytes_of_each_axis_add_up_to_all_bytes(bench: Bench) -> None:
    plan = planned(bench, 2, **AXES)
    (left,) = [c for c in axis_choices(plan) if "sequence" in c.name]
    without = planned(bench, 2, tensor_axes=("heads", "hidden"))
    sent = [
        sum(c.nbytes for c in part_channels(each) if c.sender == "d0") for each in (plan, without)
    ]
    assert left.sent_bytes == sent[0] - sent[1]
    assert left.whole_s == without.forecast.step_s


def test_the_sequence_is_divided_unasked_where_that_is_faster(bench: Bench) -> None:
    """The same axes, whoever names them; never slower by forecast than without."""
    kinds = "heads", "hidden", "vocabulary"
    found, named = planned(bench, 2), planned(bench, 2, tensor_axes=kinds)
    both = planned(bench, 2, tensor_axes=(*kinds, "sequence"))
    assert found.forecast.step_s <= min(named.forecast.step_s, both.forecast.step_s)


def test_a_name_that_is_none_is_told_the_nearest(bench: Bench) -> None:
    with pytest.raises(InputError, match="no axis 'sequences'") as caught:
        planned(bench, 2, tensor_axes=("heads", "sequences"))
    assert "sequence" in str(caught.value.help)


def test_a_plan_of_an_older_version_is_written_as_it_was(bench: Bench) -> None:
    """So its key, by which processes know each other, is the same."""
    plan = planned(bench, 2, **AXES)
    tensor = plan.placement.tensor
    assert tensor is not None
    assert b'"scatters":true' in to_json(plan)
    older = replace(plan, placement=replace(plan.placement, tensor=replace(tensor, scatters=False)))
    assert b"scatters" not in to_json(older)
