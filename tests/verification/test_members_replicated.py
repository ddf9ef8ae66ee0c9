"""Replicas of tensor groups have the bits of replicas in lockstep, each of members in lockstep."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from bigbrain_fx.bundles import verify
from bigbrain_fx.core import Host
from bigbrain_fx.emit import bundle_texts
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Options, Plan, Source, make_plan, part_channels
from bigbrain_fx.verification.reference import MembersReference
from tests.support.bundles import cluster as where, split_small
from tests.support.messages import refused
from tests.support.training import equal, grouped
from tools.conformance.matrix import Bench

pytestmark = pytest.mark.usefixtures("one_thread", "small_buckets")


def gradients(bench: Bench, plan: Plan) -> dict[str, Tensor]:
    """Return the gradients of all members of a step, by the names under which they are kept."""
    rows = [bench.captured.inputs(plan.rows) for _ in range(plan.micro_batches)]
    tensors = {name: tensor.detach() for name, tensor in bench.captured.tensors.items()}
    reference = MembersReference(plan, tensors, {})
    _, found = reference.of_each(rows, 0, 0)
    return {reference.stored(n, m): g for m, own in enumerate(found) for n, g in own.items()}


def same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.nightly
def test_the_order_of_sums_says_the_bits(heads: Bench) -> None:
    """Summed by number they are those of one replica, in whatever replicas; else they are not."""
    one = gradients(heads, grouped(heads, 2))
    assert same_tensors(one, gradients(heads, grouped(heads, 4, replicas=2, sum_order="micro")))
    assert not same_tensors(one, gradients(heads, grouped(heads, 4, replicas=2)))
    tree = gradients(heads, grouped(heads, 2, replicas=1, sum_order="tree"))
    assert same_tensors(tree, gradients(heads, grouped(heads, 8, replicas=4, sum_order="tree")))


def test_exchanges_of_a_forward_are_made_again_with_it(heads: Bench) -> None:
    once, again = (
        part_channels(grouped(heads, 2, recompute=recompute)) for recompute in (None, "all")
    )
    assert {(p.sender, p.numel) for p in once} == {(p.sender, p.numel) for p in again}
    sent = [sum(part.per_step for part in parts) for parts in (once, again)]
    assert sent[0] < sent[1] < 2 * sent[0]  # those of the backward are not


@pytest.mark.nightly
def test_a_member_sums_with_the_same_member_of_the_other_replicas(heads: Bench) -> None:
    plan = grouped(heads, 8, replicas=2)
    member = {stage.device: stage.member for stage in plan.stages.stages}
    sums = [edge for edge in plan.stages.edges if edge.kind in ("reduce", "gather")]
    stages = plan.stages.stages
    assert sums
    assert all(stages[e.source].member == stages[e.target].member for e in sums)
    assert all(stages[e.source].replica != stages[e.target].replica for e in sums)
    parts = part_channels(plan)
    assert all(member[part.sender] != member[part.receiver] for part in parts)
    alone = part_channels(grouped(heads, 4))
    assert sum(p.per_step for p in parts) == sum(p.per_step for p in alone)
    assert "replica 1 of 2, TP rank 1 of 2" in bundle_texts(plan)["device_d7.py"]


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"replicas": 3}, "groups of 2 devices, and replica 0 of 3 has 1"),
        ({"replicas": 2, "offload": ("activations", "state", "weights")}, "--tensor-parallel"),
        ({"replicas": 2, "asynchronous": "2bw"}, "--asynchronous"),
        ({"replicas": 8, "tensor": 2}, "8 replicas need as many devices"),
    ],
)
def test_options_against_replicated_groups_are_refused(
    heads: Bench, choices: dict[str, object], said: str
) -> None:
    with pytest.raises(InputError) as caught:
        grouped(heads, 3 if choices["replicas"] == 3 else 4, **choices)
    assert said in f"{caught.value.what} {caught.value.help}"


def test_collectives_sum_each_member_with_its_peers(heads: Bench) -> None:
    """A process group is of the devices with one part of the weights; a lone group has none."""
    options = {"replicas": 2, "zero_stage": 1, "sum_order": "backend"}
    plan = grouped(heads, 8, **options)
    stages = plan.stages.stages
    assert plan.stages.by_backend
    groups = {tuple(stages[index].device for index in b.stages) for b in plan.stages.buckets}
    assert groups == {(f"d{i}", f"d{i + 4}") for i in range(4)}
    with refused("BX1344"):
        grouped(heads, 2, sum_order="backend")


@pytest.mark.nightly
@pytest.mark.parametrize("zero", [0, 2])
def test_processes_sum_members_by_collectives_to_rounding(
    zero: Literal[0, 2], tmp_path: Path
) -> None:
    options = Options(
        "naive", micro_batches=4, replicas=2, tensor=2, zero_stage=zero, sum_order="backend"
    )
    found = verify(split_small(tmp_path, where(4), options), steps=3, processes=True)
    assert found.passed
    assert sum(check.rounded for check in found.checks) == 4


@pytest.mark.nightly
def test_unlike_replicas_that_are_named(heads: Bench) -> None:
    where = replace(equal(6), replicas=(("d0", "d1", "d2", "d3"), ("d4", "d5")))
    options = Options("naive", micro_batches=4, tensor=2)
    plan = make_plan(heads.captured.graph, where, Source(""), options)
    assert plan.placement.tensor is not None
    assert plan.placement.tensor.groups == (("d0", "d1"), ("d2", "d3"), ("d4", "d5"))
    assert plan.stages.replicas == 2


def test_columns_share_the_nic_of_a_host(heads: Bench) -> None:
    """No step ends before all that leaves a host has gone through its NIC, of whichever member."""
    rate = 1e5
    hosts = tuple(Host(name, nic_bytes_per_s=rate) for name in "ab")
    devices = tuple(replace(d, host="ab"[i // 2]) for i, d in enumerate(equal(4).devices))
    where = replace(equal(4), devices=devices, hosts=hosts)
    source = Source(str(heads.file.path), True, False, True, True, heads.file.clip_norm, "")
    options = Options("naive", micro_batches=4, tensor=2, replicas=2)
    plan = make_plan(heads.captured.graph, where, source, options)
    host_of = {stage.index: where.device[stage.device].host for stage in plan.stages.stages}
    sums = [edge for edge in plan.stages.edges if edge.kind in ("reduce", "gather")]
    left = sum(e.nbytes for e in sums if (host_of[e.source], host_of[e.target]) == ("a", "b"))
    assert left
    assert plan.forecast.step_s >= left / rate
