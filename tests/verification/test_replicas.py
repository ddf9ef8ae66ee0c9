"""Replicas have the bits of one process: in-process bundles against a reference that adds alone."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bigbrain_fx.core import Cluster, Device, Link, ParamRef, Stages, stages
from bigbrain_fx.emit import write_bundle
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import capture, load_model_file
from bigbrain_fx.plan import Options, Plan, Source, make_plan, updating
from bigbrain_fx.plan.replica_statistics import statistics
from bigbrain_fx.verification.imported_bundle import run_bundle
from bigbrain_fx.verification.links import same_training
from bigbrain_fx.verification.trace import Trace
from tests.support import samples
from tests.support.bundles import MODEL
from tools.conformance.matrix import Bench, imported, other_bytes

STEPS = 3
ROWS = """class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, x):
        {forward}


class Net("""
FLAT = "return self.norm(x.flatten(0, 1)).view_as(x)"


def with_layer(init: str, forward: str = FLAT) -> str:
    """Return the model with a layer of one's own in the place of its norms."""
    layer = ROWS.format(init=init, forward=forward)
    return MODEL.replace("class Net(", layer).replace("nn.LayerNorm(16)", "Rows()")


BATCH_NORM = with_layer("self.norm = nn.BatchNorm1d(16)")


pytestmark = pytest.mark.usefixtures("one_thread", "small_buckets")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return bench_of(tmp_path_factory.mktemp("model") / "net.py", MODEL)


def bench_of(path: Path, text: str, leaves: tuple[str, ...] = ()) -> Bench:
    path.write_text(text)
    file = load_model_file(path)
    about = {"name": "net", "autocast": file.autocast, "leaves": leaves}
    captured = capture(file.model, file.example_batch, file.loss, **about)  # type: ignore[arg-type]
    return Bench(file, captured, STEPS)


def cluster(*speeds: int, replicas: tuple[tuple[str, ...], ...] = ()) -> Cluster:
    made = (Device(f"d{i}", "h", "cpu", 2**33, s * 1e9, 12e9, 1e-6) for i, s in enumerate(speeds))
    return Cluster(tuple(made), Link(50e-6, 1e9), replicas=replicas)


def planned(bench: Bench, where: Cluster, **choices: object) -> Plan:
    file = bench.file
    source = Source(
        str(file.path), True, False, True, file.lr_scale is not None, file.clip_norm, ""
    )
    given = {"partitioner": "naive", "micro_batches": 8, **choices}
    options = Options(**given)  # type: ignore[arg-type]  # fields of Options
    return make_plan(bench.captured.graph, where, source, options)


def trained(bench: Bench, plan: Plan) -> tuple[Trace, str]:
    """Train a bundle and its reference; return what the bundle made, and what differs."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_bundle(plan, bench, Path(scratch, "bundle"))
        with imported(folder, force_adamw=False) as bundle:
            expected = bench.reference(plan, folder, bundle)
            actual = run_bundle(bundle, plan, bench.steps, plan.seed)
    failed = [c for c in same_training(plan, expected, actual) if c["passed"] is False]
    found = "; ".join(f"{c['name']}: {c['detail']}" for c in failed)
    return actual, found or other_bytes(expected, actual)


@pytest.mark.gate("3-3-1-backend")
@pytest.mark.parametrize(
    ("devices", "replicas", "zero", "order"),
    [
        (4, 2, 0, "replica"),
        pytest.param(4, 2, 1, "micro", marks=pytest.mark.nightly),
        (4, 2, 1, "tree"),
        pytest.param(3, 3, 0, "micro", marks=pytest.mark.nightly),
        pytest.param(3, 3, 1, "replica", marks=pytest.mark.nightly),
        pytest.param(4, 2, 2, "micro", marks=pytest.mark.nightly),
        (3, 3, 2, "tree"),
        (1, 1, 0, "tree"),
        (3, 3, 1, "backend"),
        (4, 2, 2, "backend"),
    ],
)
def test_a_bundle_has_the_bits_of_one_process(
    bench: Bench, devices: int, replicas: int, zero: int, order: str
) -> None:
    where = cluster(*[1] * devices)
    plan = planned(bench, where, replicas=replicas, zero_stage=zero, sum_order=order)
    assert plan.stages.replicas == replicas
    assert len(plan.stages.stages) == devices
    assert len(plan.stages.buckets) > devices // replicas
    assert trained(bench, plan)[1] == ""


@pytest.mark.gate("3-micro")
@pytest.mark.parametrize("order", ["micro", "tree", "backend"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_shard_groups_are_bitwise_equal(bench: Bench, zero: int, order: str) -> None:
    """Two groups of two replicas: each has all of the state, a half on each device."""
    if (zero, order) == (3, "backend"):
        return  # planned, but written by no bundle
    plan = planned(
        bench, cluster(1, 1, 1, 1), replicas=4, zero_stage=zero, sum_order=order, shard_group=2
    )
    ends = [(e.source, e.target) for e in plan.stages.edges if e.kind == "gather"]
    of = [stage.replica // 2 for stage in plan.stages.stages]
    assert ends
    assert all(of[source] == of[target] for source, target in ends)
    assert trained(bench, plan)[1] == ""


@pytest.mark.nightly
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("text", [BATCH_NORM, MODEL.replace("nn.LayerNorm(16)", "nn.Identity()")])
def test_shard_groups_of_other_models_are_bitwise_equal(
    tmp_path: Path, text: str, zero: int
) -> None:
    bench, where = bench_of(tmp_path / "net.py", text), cluster(*[1] * 8)
    plan = planned(bench, where, replicas=4, zero_stage=zero, sum_order="micro", shard_group=2)
    assert len(plan.stages.stages) >= 8
    assert trained(bench, plan)[1] == ""


@pytest.mark.parametrize("zero", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_many_replicas_with_an_exchange_a_bucket_are_bitwise_equal(
    bench: Bench, zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "MOST_IN_PAIRS", 2)
    plan = planned(bench, cluster(1, 1, 1), replicas=3, zero_stage=zero)
    assert sum(edge.kind == "reduce" for edge in plan.stages.edges) == 3 * len(plan.stages.buckets)
    assert trained(bench, plan)[1] == ""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("schedule", "choices"),
    [
        ("zb-h1", {"sum_order": "tree", "zero_stage": 2}),
        pytest.param(
            "zb-h1", {"replica_shares": (5, 3), "recompute": "all"}, marks=pytest.mark.nightly
        ),
        ("zb-v", {"sum_order": "micro", "zero_stage": 1}),
        pytest.param("1f1b", {"defer": (0, 3), "sum_order": "micro"}, marks=pytest.mark.nightly),
    ],
)
def test_gradients_of_weights_that_wait_are_summed_too(
    bench: Bench, schedule: str, choices: dict[str, object]
) -> None:
    where = cluster(1, 1, 1, 1)
    plan = planned(bench, where, replicas=2, schedule=schedule, **choices)
    stages = plan.stages
    assert stages.deferring
    for bucket in stages.buckets:
        for end in bucket.stages:
            waits = {name in stages.stages[end].deferred for name in bucket.params}
            assert waits == {stages.waits_for(bucket.name, end)}
    assert trained(bench, plan)[1] == ""


def test_a_circle_of_micro_batches_is_refused(bench: Bench) -> None:
    where, choices = cluster(1, 1, 1, 1), {"replicas": 2, "replica_shares": (3, 1)}
    with pytest.raises(InputError, match="wait for each other in a circle") as caught:
        planned(bench, where, schedule="zb-h1", sum_order="micro", **choices)
    assert "--all-reduce-order replica" in (caught.value.help or "")
    planned(bench, where, schedule="zb-h1", **choices)


def same(a: Trace, b: Trace) -> bool:
    return a.losses == b.losses and all(torch.equal(t, b.tensors[n]) for n, t in a.tensors.items())


@pytest.mark.nightly
def test_a_tree_has_the_same_bits_for_any_replicas_and_shares(bench: Bench) -> None:
    whole, _ = trained(bench, planned(bench, cluster(1), sum_order="tree"))
    ways = ((2, (6, 2), 2), (2, (5, 3), 1), (3, (3, 3, 2), 0), (4, (), 0))
    for count, shares, zero in ways:
        options = {"replicas": count, "replica_shares": shares, "sum_order": "tree"}
        options["zero_stage"] = zero
        found, fault = trained(bench, planned(bench, cluster(*[1] * count), **options))
        assert fault == ""
        assert same(whole, found)
    other, _ = trained(bench, planned(bench, cluster(1)))
    assert not same(whole, other)  # else nothing was shown


@pytest.mark.nightly
def test_by_number_has_the_bits_of_a_bundle_without_replicas(bench: Bench) -> None:
    whole, _ = trained(bench, planned(bench, cluster(1)))
    shares = {"replicas": 2, "replica_shares": (3, 1), "sum_order": "micro"}
    plan = planned(bench, cluster(1, 1), **shares)
    assert [len(own) for own in plan.stages.micros] == [6, 2]
    assert same(whole, trained(bench, plan)[0])


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


@pytest.mark.nightly
def test_replicas_that_are_cut_unlike_make_a_tied_weights_gradients_apart(bench: Bench) -> None:
    where = cluster(2, 1, 1, replicas=(("d0",), ("d1", "d2")))
    plan = planned(bench, where, sum_order="micro", replica_shares=(5, 3))
    assert [stage.device for stage in plan.stages.stages] == ["d0", "d0", "d1", "d2"]
    assert trained(bench, plan)[1] == ""
    with pytest.raises(InputError, match="and these replicas are cut unlike"):
        planned(bench, where, sum_order="backend", replica_shares=(5, 3))


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


MAYBE = """class Maybe(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        return self.inner(x) if x.sum() > 0 else x


class Net("""


@pytest.mark.nightly
@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_code_that_leaves_a_weight_out_in_some_replica(tmp_path: Path, zero: int) -> None:
    """The others' gradients reach it there, too: else replicas would drift apart."""
    norm, head = "nn.LayerNorm(16)", "\n        self.head"
    text = MODEL.replace("class Net(", MAYBE).replace(norm + head, "Maybe()" + head)
    path = tmp_path / "net.py"
    path.write_text(text)
    file = load_model_file(path)
    captured = capture(file.model, file.example_batch, file.loss, name="net", leaves=("Maybe",))
    found = Bench(file, captured, STEPS)
    plan = planned(found, cluster(1, 1), replicas=2, micro_batches=4, zero_stage=zero)
    assert any(bucket.marks > 0 for bucket in plan.stages.buckets)
    assert trained(found, plan)[1] == ""


def test_a_cpu_and_a_gpu_do_not_update_alike(bench: Bench) -> None:
    cpu, other = cluster(1, 1).devices
    where = Cluster((cpu, replace(other, kind="cuda")), Link(50e-6, 1e9))
    with pytest.raises(InputError, match="do not update them to the same bits"):
        planned(bench, where, replicas=2)
    assert planned(bench, where, replicas=2, zero_stage=1).stages.replicas == 2
    with pytest.raises(InputError, match="for devices of one kind, and these are cpu and cuda"):
        planned(bench, where, replicas=2, zero_stage=1, sum_order="backend")


@pytest.mark.nightly
def test_recompute_numbers_are_the_whole_plans(bench: Bench) -> None:
    where = cluster(1, 1, 1, 1)
    plan = planned(bench, where, replicas=2, recompute=(2,))
    assert plan.stages.recompute == (2,)
    assert planned(bench, where, replicas=2, recompute="all").stages.recompute == (0, 1, 2, 3)
    assert trained(bench, plan)[1] == ""


@pytest.fixture(scope="module")
def batch_norm(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return bench_of(tmp_path_factory.mktemp("norms") / "net.py", BATCH_NORM)


@pytest.mark.gate("2-choices0")
@pytest.mark.parametrize(
    ("devices", "choices"),
    [
        (2, {"replicas": 2, "replica_shares": (3, 1), "sum_order": "micro"}),
        (3, {"replicas": 3, "replica_shares": (3, 3, 2), "sum_order": "tree", "zero_stage": 2}),
        (4, {"replicas": 2, "recompute": "all"}),
    ],
)
def test_batch_norms_statistics_are_those_of_one_process(
    batch_norm: Bench, devices: int, choices: dict[str, object]
) -> None:
    plan = planned(batch_norm, cluster(*[1] * devices), **choices)
    found, fault = trained(batch_norm, plan)
    assert fault == ""
    names = [name for each in plan.stages.statistics for name in each.buffers]
    assert len(names) == 10
    counters = [name for each in plan.stages.statistics for name, _ in each.counters]
    assert [int(found.tensors[name]) for name in counters] == [8 * STEPS] * 5
    if choices.get("sum_order") == "micro":
        assert same(trained(batch_norm, planned(batch_norm, cluster(1)))[0], found)


@pytest.mark.nightly
def test_replicas_that_are_cut_unlike_exchange_statistics(batch_norm: Bench) -> None:
    where = cluster(2, 1, 1, replicas=(("d0",), ("d1", "d2")))
    plan = planned(batch_norm, where, sum_order="micro", replica_shares=(5, 3))
    ends = {each.stages for each in plan.stages.statistics}
    assert len(ends) > 1
    assert trained(batch_norm, plan)[1] == ""


SEVERAL = with_layer(
    """self.norm = nn.BatchNorm1d(16, momentum=0.3)
        self.wide = nn.BatchNorm1d(16, affine=False).double()
        self.free = nn.BatchNorm1d(16, track_running_stats=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int32))""",
    """self.seen += 2
        y = self.free(self.norm(self.norm(x.flatten(0, 1))))
        with torch.no_grad():
            z = self.wide(y.double()).float()
        return (y + z).view_as(x)""",
)


@pytest.mark.nightly
def test_norms_that_run_twice_or_without_gradients_and_counters(tmp_path: Path) -> None:
    found = bench_of(tmp_path / "net.py", SEVERAL)
    plan = planned(found, cluster(1, 1), replicas=2, micro_batches=4)
    kinds = {each.dtype: len(each.buffers) for each in plan.stages.statistics}
    assert kinds == {"float32": 5 * 4, "float64": 5 * 2, "int32": 0, "int64": 0}
    assert trained(found, plan)[1] == ""


def test_gradients_that_are_not_exchanged_are_refused(batch_norm: Bench) -> None:
    graph = batch_norm.captured.graph
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
