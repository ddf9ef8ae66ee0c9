"""Replicas have the bits of one process: in-process bundles against a reference that adds alone."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bigbrain_fx.core import Cluster, Link, ParamRef, Stages
from bigbrain_fx.emit import write_bundle
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Options, Source, make_plan, replica_cut, updating
from bigbrain_fx.plan.replica_statistics import statistics
from bigbrain_fx.verification.imported_bundle import run_bundle
from tests.support import samples
from tests.support.bundles import MODEL
from tests.support.training import (
    BATCH_NORM,
    STEPS,
    bench_of,
    cluster,
    equal,
    planned,
    same,
    trained,
)
from tools.conformance.matrix import Bench, imported

pytestmark = pytest.mark.usefixtures("one_thread", "small_buckets")


def test_a_circle_of_micro_batches_is_refused(bench: Bench) -> None:
    where, choices = cluster(1, 1, 1, 1), {"replicas": 2, "replica_shares": (3, 1)}
    with pytest.raises(InputError, match="wait for each other in a circle") as caught:
        planned(bench, where, schedule="zb-h1", sum_order="micro", **choices)
    assert "--all-reduce-order replica" in (caught.value.help or "")
    planned(bench, where, schedule="zb-h1", **choices)


@pytest.mark.nightly
def test_a_tree_has_the_same_bits_for_any_replicas_and_shares(bench: Bench) -> None:
    whole, _ = trained(bench, planned(bench, cluster(1), sum_order="tree"))
    ways = (
        *((2, (6, 2), 2), (2, (5, 3), 1), (3, (3, 3, 2), 0), (4, (), 0)),
        *((2, (), 3), (3, (5, 2, 1), 3)),
    )
    for count, shares, zero in ways:
        options = {"replicas": count, "replica_shares": shares, "sum_order": "tree"}
        options["zero_stage"] = zero
        found, fault = trained(bench, planned(bench, equal(count), **options))
        assert fault == ""
        assert same(whole, found)
    other, _ = trained(bench, planned(bench, cluster(1)))
    assert not same(whole, other)  # else nothing was shown


@pytest.mark.nightly
@pytest.mark.parametrize("text", [MODEL, BATCH_NORM], ids=["", "batch norms"])
def test_by_number_has_the_bits_of_a_bundle_without_replicas(text: str) -> None:
    bench = bench_of(text)
    whole, _ = trained(bench, planned(bench, cluster(1)))
    shares: Any = {"replicas": 2, "replica_shares": (3, 1), "sum_order": "micro"}
    plan = planned(bench, cluster(1, 1), **shares)
    assert [len(own) for own in plan.stages.micros] == [6, 2]
    found, fault = trained(bench, plan)
    assert fault == ""
    assert same(whole, found)
    counters = [name for each in plan.stages.statistics for name, _ in each.counters]
    assert [int(found.tensors[name]) for name in counters] == [8 * STEPS] * len(counters)
    assert len(counters) == (5 if text == BATCH_NORM else 0)


def test_zero_divides_the_state_of_the_optimizer(bench: Bench) -> None:
    plan = planned(bench, cluster(1, 1), replicas=2, zero_stage=1)
    alone = planned(bench, cluster(1, 1), replicas=2)
    whole = [entry.optimizer_bytes for entry in alone.forecast.devices]
    halves = [entry.optimizer_bytes for entry in plan.forecast.devices]
    assert sum(halves) * 2 == sum(whole)
    assert max(halves) < 0.6 * max(whole)
    assert set(updating(plan.graph, plan.stages).values()) == {0, 1}


def test_zero_divides_the_gradients_of_a_model_of_more_than_a_bucket() -> None:
    graph, where = samples.sample("gpt").graph, samples.cluster(2)
    one = Options("naive", micro_batches=4, replicas=2, zero_stage=1)
    two = replace(one, zero_stage=2, sum_order="micro")
    plans = [make_plan(graph, where, Source(""), options) for options in (one, two)]
    held = [[entry.gradients_bytes for entry in plan.forecast.devices] for plan in plans]
    assert max(held[1]) < 0.6 * max(held[0])


@pytest.mark.parametrize(
    ("choices", "said", "help_"),
    [
        (
            {
                "replicas": 2,
                "zero_stage": 2,
                "sum_order": "backend",
                "replica_shares": (3, 1),
            },
            "sums micro-batches one of each replica together, and they have 6, 2",
            "--replica-ratio 1:1",
        ),
        (
            {"replicas": 2, "zero_stage": 2, "sum_order": "backend", "schedule": "zb-h1"},
            "and here some come later",
            "--schedule 1f1b",
        ),
        ({"replicas": 3}, "3 replicas need as many devices at least", "--replicas 2"),
        (
            {"replicas": 2, "replica_shares": (2, 1)},
            "8 micro-batches cannot be shared 2:1",
            "use shares whose sum divides 8",
        ),
        ({"replicas": 2, "micro_batches": 1}, "2 replicas need a micro-batch each", "batches 2,"),
    ],
)
def test_options_against_replicas_are_refused(
    bench: Bench, choices: dict[str, object], said: str, help_: str
) -> None:
    with pytest.raises(InputError, match=said) as caught:
        planned(bench, cluster(1, 1), **choices)
    assert help_ in (caught.value.help or "")


def test_pieces_for_collectives_are_equal_and_their_room_is_forecast(bench: Bench) -> None:
    args = bench, cluster(1, 1)
    even = planned(*args, replicas=2, zero_stage=1, sum_order="backend")
    own = planned(*args, replicas=2, zero_stage=1)
    sent = {edge.value: set[int]() for edge in even.stages.edges if edge.kind == "reduce"}
    for edge in even.stages.edges:
        if edge.kind in ("reduce", "gather"):
            sent[edge.value].add(edge.nbytes)
    buckets = even.stages.bucket
    assert sent == {name: {4 * max(buckets[name].pieces)} for name in sent}
    filled = sum(2 * max(b.pieces) for b in buckets.values())
    whole = sum(sum(b.pieces) for b in buckets.values())
    assert whole < filled < 1.5 * whole
    held = [plan.forecast.devices[0].gradients_bytes for plan in (own, even)]
    assert held[1] == pytest.approx(held[0] * filled / whole, rel=0.02)


def test_a_cpu_and_a_gpu_do_not_update_alike(bench: Bench) -> None:
    cpu, other = cluster(1, 1).devices
    where = Cluster((cpu, replace(other, kind="cuda")), Link(50e-6, 1e9))
    with pytest.raises(InputError, match="do not update them to the same bits"):
        planned(bench, where, replicas=2)
    assert planned(bench, where, replicas=2, zero_stage=1).stages.replicas == 2
    with pytest.raises(InputError, match="for devices of one kind, and these are cpu and cuda"):
        planned(bench, where, replicas=2, zero_stage=1, sum_order="backend")


def test_gradients_that_are_not_exchanged_are_refused() -> None:
    graph = bench_of(BATCH_NORM).captured.graph
    norm = next(op for op in graph.ops if op.target == "aten.batch_norm.default")
    read = graph.op[norm.refs[0]]
    mean, momentum = norm.mutates[0], 6
    spec = read.outputs[0]
    apart = replace(spec, strides=(2 * spec.strides[0], *spec.strides[1:]))
    reads = replace(read, args=(*read.args, ParamRef(mean)))
    own = replace(norm, target="leaf.norm", args=())
    loose = replace(norm, args=(*norm.args[:momentum], None))
    instances = replace(norm, target="aten.instance_norm.default")
    cases = (
        (replace(read, outputs=(apart,)), "strides are not those of its shape", ".contiguous()"),
        (reads, f"writes '{mean}' and reads it elsewhere", "read it between steps"),
        (own, f"the forward writes into '{mean}'", "give a BatchNorm a momentum"),
        (loose, f"the forward writes into '{mean}'", "use one replica"),
        (instances, f"the forward writes into '{mean}'", "leave out track_running_stats"),
    )
    for changed, said, help_ in cases:
        ops = tuple(changed if op.name == changed.name else op for op in graph.ops)
        with pytest.raises(InputError, match=said) as caught:
            [*statistics(replace(graph, ops=ops), Stages((), (), micros=((0,), (1,))), 2)]
        assert help_ in (caught.value.help or "")


@pytest.mark.nightly
@pytest.mark.parametrize("zero", [2, 3])
def test_seven_micro_batches_hold_own_rows_and_three_buckets_of_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zero: int
) -> None:
    """And the last stage's: not those of a whole stage until its backward has ended."""
    monkeypatch.setattr(replica_cut, "LEAST_BUCKET", 256)
    sevenths = bench_of(MODEL.replace("(8, 6)", "(14, 6)"))
    choices = {"replicas": 2, "replica_shares": (4, 3), "sum_order": "micro", "zero_stage": zero}
    plan = planned(sevenths, cluster(1, 1), micro_batches=7, schedule="1f1b", **choices)
    most = Counter[int]()
    with imported(write_bundle(plan, sevenths, tmp_path / "bundle"), force_adamw=False) as bundle:
        own = importlib.import_module("runtime.replicas").Replicas

        def counting(self: Any, *words: Any) -> bool:  # as the bundle's class has it
            added: bool = add(self, *words)
            most[id(self)] = max(most[id(self)], sum(_held_bytes(self)))
            return added

        add = own.add
        monkeypatch.setattr(own, "add", counting)
        run_bundle(bundle, plan, 1, plan.seed)
    sizes = [4 * sum(bucket.pieces) for bucket in plan.stages.buckets]
    rows = max(sum(4 * bucket.pieces[place] for bucket in plan.stages.buckets) for place in (0, 1))
    assert len(most) == 2
    assert max(most.values()) <= rows + 3 * max(sizes) < sum(sizes) + rows


def _held_bytes(replicas: Any) -> Iterator[int]:  # as the bundle's class has it
    """Yield the bytes of each memory that buckets hold."""
    running = replicas._now.values()
    parts = [part for each in running for _, _, part in (*each.total.parts, *each.own.parts)]
    own = [tensor for each in running for tensor in (each.flat, each.piece) if tensor is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in (*parts, *own)}
    yield from (storage.nbytes() for storage in storages.values())
