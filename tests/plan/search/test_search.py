"""What `auto` promises, over small graphs whose best plan is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from bigbrain_fx.core import Cluster, Costs, Link, ModuleCall, Placement, Saves
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan import (
    Options,
    from_json,
    make_plan,
    replan,
    to_json,
)
from bigbrain_fx.plan.fastest import CPU
from bigbrain_fx.plan.memory_check import needed_bytes
from bigbrain_fx.plan.search import MEMORY_SLACK, Ask, Score, Trial
from bigbrain_fx.plan.search.candidates import CutBlocks, Ranking
from tests.support.search_cases import SOURCE, auto, case, equal, even_chain, quick, seeds
from tests.support.synthetic import (
    cluster_of,
    device,
    graph_of,
    op,
)

MIB = 2**20


def no_costs(rows: int) -> Costs:
    raise AssertionError(rows)


def no_place(name: str, micro_batches: int) -> Placement:
    raise AssertionError((name, micro_batches))


def richer(cluster: Cluster, links: float, memory: float) -> Cluster:
    def faster(link: Link) -> Link:
        return Link(link.latency_s, link.bytes_per_s * links)

    return replace(
        cluster,
        devices=tuple(
            replace(d, memory_bytes=int(d.memory_bytes * memory)) for d in cluster.devices
        ),
        default_link=faster(cluster.default_link),
        links=tuple((a, b, faster(link)) for a, b, link in cluster.links),
    )


# --------------------------------------------------------------------------- against the best


@pytest.mark.nightly
@quick
@given(seed=seeds, count=st.integers(1, 14), devices=st.integers(1, 4))
def test_never_worse_than_its_ingredients(seed: int, count: int, devices: int) -> None:
    graph, cluster = case(seed, count, devices)
    plan = auto(graph, cluster)
    for name in ("naive", "chain-dp"):
        other = make_plan(graph, cluster, SOURCE, Options(name))
        assert plan.forecast.step_s <= other.forecast.step_s * (1 + CPU + 1e-9)


@pytest.mark.nightly
@quick
@given(
    seed=seeds,
    count=st.integers(2, 7),
    kib=st.sampled_from((100, 200, 400, 10**6)),
    links=st.floats(1, 20),
    memory=st.floats(1, 20),
)
def test_a_richer_cluster_is_never_worse(
    seed: int, count: int, kib: int, links: float, memory: float
) -> None:
    graph, poor = case(seed, count, 2 + seed % 2, memory_bytes=17 * MIB + kib * 1024)
    try:
        before_s = auto(graph, poor).forecast.step_s
    except NoPlanError:
        return
    for by in ((links, 1.0), (1.0, memory)):
        assert auto(graph, richer(poor, *by)).forecast.step_s <= before_s * (1 + CPU + 1e-9)


@pytest.mark.nightly
def test_a_known_plan_of_other_devices_is_left_out() -> None:
    graph, cluster = case(3, 12, 3)
    first = auto(graph, cluster, effort="fast")
    elsewhere = cluster_of(device("other"), device("another"))
    assert set(replan(first, elsewhere).stages.devices) <= {"other", "another"}


def test_a_known_plan_is_scored_too() -> None:
    graph, cluster = case(3, 12, 3)
    first = auto(graph, cluster, effort="high")
    again = make_plan(graph, cluster, SOURCE, Options("auto", effort="fast"), known=(first,))
    most_s = first.forecast.step_s * (1 + CPU)
    assert again.forecast.step_s <= most_s
    assert replan(first, richer(cluster, 2, 1)).forecast.step_s <= most_s


@pytest.mark.nightly
@quick
@given(seed=seeds, count=st.integers(1, 12), kib=st.integers(20, 600))
def test_memory_is_a_hard_limit(seed: int, count: int, kib: int) -> None:
    graph, cluster = case(seed, count, 3, memory_bytes=17 * MIB + kib * 1024)
    try:
        plan = auto(graph, cluster)
    except NoPlanError:
        return
    for entry in plan.forecast.devices:
        has = cluster.device[entry.device]
        assert needed_bytes(entry, has) <= has.memory_bytes


@pytest.mark.nightly
def test_a_plan_that_does_not_fit_comes_with_the_arithmetic() -> None:
    graph, cluster = case(2, 6, 2, memory_bytes=MIB)
    with pytest.raises(NoPlanError, match="memory") as caught:
        auto(graph, cluster)
    assert any("needs" in note and "has" in note for note in caught.value.notes)


# --------------------------------------------------------------------------- unlike devices


@pytest.mark.nightly
def test_heavier_stages_land_on_stronger_devices() -> None:
    cluster = cluster_of(device("slow", 1), device("fast", 4), link=Link(1e-6, 1e10))
    plan = auto(even_chain(20), cluster)
    sizes = {stage.device: len(stage.ops) for stage in plan.stages.stages}
    assert sizes["fast"] >= 3 * sizes["slow"]


def test_fewer_devices_where_that_is_faster() -> None:
    cluster = cluster_of(device("a", 1), device("b", 1), link=Link(1.0, 1e3))
    assert len(auto(even_chain(8), cluster).stages.devices) == 1


@pytest.mark.nightly
def test_slow_links_get_more_micro_batches_in_flight() -> None:
    """A round trip takes as long as a stage: classic 1F1B would wait for it."""
    graph, cluster = even_chain(16, rows=16), equal(4, Link(0.1, 1e9))
    plan = auto(graph, cluster, micro_batches=16, defer=())  # backwards stay whole
    options = Options("chain-dp", micro_batches=16)
    classic = make_plan(graph, cluster, SOURCE, options)
    assert plan.in_flight is not None
    assert sum(plan.in_flight) > sum(range(1, len(plan.in_flight) + 1))
    assert plan.forecast.step_s < 0.9 * classic.forecast.step_s


# --------------------------------------------------------------------------- choices


def test_requested_options_are_kept() -> None:
    graph, cluster = case(2, 8, 2)
    plan = auto(graph, cluster, micro_batches=4, schedule="gpipe")
    assert (plan.partitioner, plan.schedule, plan.micro_batches) == ("auto", "gpipe", 4)
    assert auto(graph, cluster, schedule="list").schedule == "list"


@pytest.mark.nightly
def test_latency_is_few_micro_batches() -> None:
    plan = auto(even_chain(16), equal(3, Link(1e-6, 1e10)), objective="latency")
    assert plan.micro_batches <= 2
    assert plan.search is not None
    assert all(each.micro_batches <= 2 for each in plan.search.others)


@pytest.mark.nightly
def test_memory_is_the_emptiest_within_the_slack() -> None:
    graph, cluster = even_chain(24), equal(3, Link(1e-6, 1e10))
    fast, small = auto(graph, cluster), auto(graph, cluster, objective="memory")
    assert fast.search is not None
    assert small.search is not None
    assert small.search.winner.memory_share <= fast.search.winner.memory_share
    every = [small.search.winner, *small.search.others]
    best_s = min(each.step_s for each in every if each.step_s is not None)
    assert small.forecast.step_s <= MEMORY_SLACK * best_s * (1 + 1e-9)


@pytest.mark.parametrize("choice", [{"objective": "fame"}, {"effort": "none"}])
def test_words_that_nobody_knows_are_refused(choice: dict[str, object]) -> None:
    graph, cluster = case(2, 3, 2)
    with pytest.raises(InputError, match="there is no"):
        auto(graph, cluster, **choice)


def test_of_plans_too_near_to_tell_the_simplest_is_taken() -> None:
    """Half a percent faster on two devices, or with an op of another block: not worth following."""
    graph, cluster = case(3, 12, 3)
    names = [op.name for op in graph.ops]
    one = Trial("a", Placement(dict.fromkeys(names, "d0")), "1f1b", 1)
    two = Trial("b", Placement({**one.placement.device_of, names[-1]: "d1"}), "1f1b", 1)
    took_s = {"a": 1.005, "b": 1.0}

    def judge(trial: Trial) -> Score:
        devices = tuple(dict.fromkeys(trial.placement.device_of.values()))
        return Score(took_s[trial.partitioner], devices, (1,) * len(devices), 0.1, True)

    for apart, best in ((0.0, "b"), (0.004, "b"), (0.006, "a")):
        ask = Ask(graph, cluster, no_costs, (1,), no_place, judge, apart=apart)
        ranking = Ranking(ask)
        assert ranking.consider(one)
        assert ranking.consider(two)
        chosen = ranking.chosen()
        assert chosen is not None
        assert chosen.trial.partitioner == best
    winner, others = ranking.table()
    assert (winner.partitioner, winner.step_s) == ("a", 1.005)
    assert others[0].why == "-0.5% time: too near to say; the best is simpler"


def test_whole_blocks_count() -> None:
    paths = [(ModuleCall(f"layers.{i // 2}.up", "Up"),) for i in range(4)]
    ops = [op(f"o{i}", "aten.relu.default", modules=path) for i, path in enumerate(paths)]
    blocks = CutBlocks(graph_of(ops))
    whole = {"o0": "d0", "o1": "d0", "o2": "d1", "o3": "d1"}
    assert blocks.cut(Placement(whole)) == 0
    assert blocks.cut(Placement({**whole, "o1": "d1"})) == 1


@pytest.mark.nightly
def test_the_table_says_why_each_loses() -> None:
    search = auto(even_chain(24), equal(3, Link(1e-4, 1e8))).search
    assert search is not None
    assert len(search.others) <= 5
    times = [each.step_s for each in search.others if each.step_s is not None]
    assert times == sorted(times)
    assert all(each.why for each in search.others)
    assert sum(line.startswith("no ") for line in str(search).splitlines()) == 1


def test_inference_is_searched_too() -> None:
    graph, cluster = case(4, 10, 3)
    ops = tuple(
        replace(op, outputs=tuple(replace(o, requires_grad=False) for o in op.outputs))
        for op in graph.ops
    )
    serving = replace(graph, ops=ops, loss=None, training=False)
    plan = auto(serving, cluster)
    other = make_plan(serving, cluster, SOURCE, Options("chain-dp"))
    assert plan.schedule in ("forward", "list")
    assert plan.forecast.step_s <= other.forecast.step_s * (1 + 1e-9)


@pytest.mark.nightly
def test_a_tight_memory_recomputes() -> None:
    """There is room for a split that keeps one micro-batch's activations, and no more."""
    graph, link = even_chain(12), Link(1e-6, 1e10)
    ops = tuple(replace(op, saves=Saves(own_bytes="2000000*B")) for op in graph.ops)
    graph = replace(graph, ops=ops)
    plan = auto(graph, equal(2, link, memory_bytes=74 * MIB), micro_batches=16)
    assert plan.stages.recompute
    with pytest.raises(NoPlanError):
        make_plan(
            graph,
            equal(2, link, memory_bytes=74 * MIB),
            SOURCE,
            Options("chain-dp", micro_batches=16),
        )
    none = auto(graph, equal(2, link, memory_bytes=74 * MIB), micro_batches=16, recompute=())
    assert not none.stages.recompute  # --activation-checkpointing none


# --------------------------------------------------------------------------- the same again


@pytest.mark.nightly
def test_a_plan_with_its_search_is_saved_and_read() -> None:
    graph, cluster = case(5, 8, 2)
    plan = auto(graph, cluster)
    text = to_json(plan)
    assert from_json(text, "plan.json") == plan
    assert to_json(auto(graph, cluster)) == text
