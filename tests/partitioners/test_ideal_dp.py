"""`ideal-dp` against brute force over every order, and against `chain-dp`."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from bigbrain_fx.core import Arg, Cluster, Costs, Graph, Link, Op, OpCost, ParamRef, Placement, Ref
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.planning.unit_work import work
from partitioners import ideal_dp
from partitioners.chain_dp import ChainDP
from partitioners.footprint import needs
from partitioners.ideal_dp import IdealDP
from partitioners.ideals import ideals, within
from partitioners.lattice import Lattice
from tests.support.brute_force import plain_fits, plain_step_s, unlike_cluster
from tests.support.examples import examples
from tests.support.synthetic import (
    cluster_of,
    device,
    graph_of,
    op,
    random_costs,
    random_graph,
    tensor,
    weight,
)

quick = settings(
    max_examples=examples(20),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
seeds = st.integers(0, 10_000)


def branchy_graph(seed: int, count: int) -> Graph:
    """Draw linear layers that read one or two of those before; the last reads the rest."""
    dice = random.Random(seed)
    ops: list[Op] = []
    for i in range(count):
        earlier = [f"v{j}" for j in range(i)]
        reads = dice.sample(earlier, min(i, dice.choice((0, 1, 1, 2)))) or ["x"]
        if i == count - 1:
            reads = [n for n in earlier if not any(n in entry.refs for entry in ops)] or ["x"]
        args: tuple[Arg, ...] = tuple(Ref(name) for name in sorted(reads))
        out = tensor(4, dice.choice((8, 64, 256)))
        ops.append(op(f"v{i}", "aten.linear.default", *args, ParamRef(f"w{i}"), out=out))
    return graph_of(ops, [weight(f"w{i}", dice.choice((1, 1000))) for i in range(count)])


def best_of_every_order(graph: Graph, cluster: Cluster, costs: Costs, micro: int) -> float:
    known = work(graph, costs)
    sets = ideals(len(graph.ops), known.edges, 10_000)
    assert sets is not None
    inside, last = within(sets, sets), len(sets) - 1
    names, best = [d.name for d in cluster.devices], float("inf")
    open_: list[tuple[int, ...]] = [(0,)]
    while open_:
        chain = open_.pop()
        if chain[-1] != last:
            if len(chain) <= len(names):
                after = np.flatnonzero(inside[chain[-1]])
                open_ += [(*chain, int(j)) for j in after if j != chain[-1]]
            continue
        stages = [np.flatnonzero(sets[b] & ~sets[a]).tolist() for a, b in pairwise(chain)]
        order = [unit for stage in stages for unit in stage]
        cuts = np.cumsum([0, *map(len, stages)]).tolist()
        ordered = replace(graph, ops=tuple(graph.ops[unit] for unit in order))
        for sequence in permutations(names, len(stages)):
            if plain_fits(known.reordered(order), cluster, sequence, cuts, micro):
                best = min(best, plain_step_s(ordered, costs, sequence, cuts, micro))
    return best


def step_s(placement: Placement, graph: Graph, costs: Costs, micro: int) -> float:
    """Work out the objective of a placement from the graph alone; stages in an order to run."""
    known = work(graph, costs)
    homes = [placement.device_of[entry.name] for entry in graph.ops]
    after: dict[str, set[str]] = {home: set() for home in homes}
    for maker, reader in known.edges:
        if homes[maker] != homes[reader]:
            after[homes[reader]].add(homes[maker])
    sequences = [
        sequence
        for sequence in permutations(after)
        if all(sequence.index(m) < i for i, h in enumerate(sequence) for m in after[h])
    ]
    found = []
    for sequence in sequences:
        stages = [[u for u, home in enumerate(homes) if home == name] for name in sequence]
        order = [unit for stage in stages for unit in stage]
        ordered = replace(graph, ops=tuple(graph.ops[unit] for unit in order))
        cuts = np.cumsum([0, *map(len, stages)]).tolist()
        found.append(plain_step_s(ordered, costs, sequence, cuts, micro))
    return min(found)


@quick
@given(
    seed=seeds,
    count=st.integers(1, 6),
    devices=st.integers(1, 3),
    micro=st.sampled_from((1, 8)),
)
def test_equals_brute_force(seed: int, count: int, devices: int, micro: int) -> None:
    graph = branchy_graph(seed, count)
    cluster = unlike_cluster(seed, devices, (1 << 30,))
    costs = random_costs(seed, graph, cluster)
    placement = IdealDP(micro, gap=0.0).partition(graph, cluster, costs)
    best = best_of_every_order(graph, cluster, costs, micro)
    assert step_s(placement, graph, costs, micro) == pytest.approx(best, rel=1e-9)


@quick
@given(seed=seeds, count=st.integers(1, 6), kib=st.sampled_from((4, 8, 16, 32)))
def test_fits_or_nothing_does(seed: int, count: int, kib: int) -> None:
    graph = branchy_graph(seed, count)
    cluster = unlike_cluster(seed, 2, (kib * 1024, kib * 2048))
    costs = random_costs(seed, graph, cluster)
    best = best_of_every_order(graph, cluster, costs, 4)
    planner = IdealDP(4, gap=0.0)
    if best == float("inf"):
        with pytest.raises(NoPlanError):
            planner.partition(graph, cluster, costs)
        return
    found = step_s(planner.partition(graph, cluster, costs), graph, costs, 4)
    assert found >= best * (1 - 1e-9)  # dearer where stages may change places, and would not fit


@pytest.mark.nightly
@quick
@given(seed=seeds, count=st.integers(1, 25), devices=st.integers(1, 4))
def test_is_never_behind_chain_dp(seed: int, count: int, devices: int) -> None:
    graph = random_graph(seed, count)
    cluster = unlike_cluster(seed, devices, (1 << 30,))
    costs = random_costs(seed, graph, cluster)
    chain = ChainDP(4).best(work(graph, costs), cluster)
    assert chain is not None
    found = IdealDP(4)._best(graph, work(graph, costs), cluster)
    assert found is not None
    assert found.split.step_s(4) <= chain[1].step_s(4)


@quick
@given(seed=seeds, count=st.integers(1, 10), flight=st.integers(1, 3))
def test_pieces_need_what_a_placement_of_them_needs(seed: int, count: int, flight: int) -> None:
    graph = random_graph(seed, count)
    cluster = cluster_of(device("d0"), device("d1"))
    known = work(graph, random_costs(seed, graph, cluster))
    sets = ideals(len(known.groups), known.edges, 400)
    if sets is None:
        return
    used = {1: cluster_of(device("d0")), 2: cluster}
    matrices = {n: Lattice(known, sets, c, 4).bytes_needed("d0", flight) for n, c in used.items()}
    dice = random.Random(seed)
    for small, large in np.argwhere(within(sets, sets)).tolist():
        if small == large or dice.random() > 0.2:
            continue
        piece = sets[large] & ~sets[small]
        homes = ["d0" if here else "d1" for here in piece]
        need = needs(known, homes, {"d0": flight, "d1": 1})["d0"]
        assert matrices[len(set(homes))][small, large] == pytest.approx(need.total, abs=2)


def test_finds_what_no_order_of_chain_dp_has() -> None:
    """Four branches of 3, 3, 1 and 1 ops: {0, 2} and {1, 3} would be 4 ops each."""
    ops, each = [], {}
    for branch, length in enumerate((3, 1, 3, 1)):
        for i in range(length):
            before = f"b{branch}_{i - 1}" if i else "x"
            name = f"b{branch}_{i}"
            ops.append(op(name, "aten.linear.default", Ref(before), out=tensor(4)))
            each[name] = OpCost(1.0, 1.0)
    ends = tuple(Ref(f"b{branch}_{length - 1}") for branch, length in enumerate((3, 1, 3, 1)))
    ops.append(op("loss", "aten.sum.default", ends, out=tensor(1)))
    each["loss"] = OpCost(0.0)
    graph = graph_of(ops)
    cluster = cluster_of(device("d0"), device("d1"), link=Link(0.0, 1e9))
    costs = Costs(dict.fromkeys(("d0", "d1"), each), cluster, {"d0": 0.0, "d1": 0.0})
    found = IdealDP(16)._best(graph, work(graph, costs), cluster)
    assert found is not None
    assert found.split.most_s == pytest.approx(8.0)
    assert "of all orders of ops" in IdealDP(16).partition(graph, cluster, costs).reason


def test_too_many_ideals_are_said() -> None:
    """Twenty ops that do not depend on each other could come first in a million ways."""
    ops = [op(f"v{i}", "aten.linear.default", Ref("x"), out=tensor(4)) for i in range(20)]
    ops.append(
        op("loss", "aten.sum.default", tuple(Ref(f"v{i}") for i in range(20)), out=tensor(1))
    )
    graph = graph_of(ops)
    cluster = cluster_of(device("d0"), device("d1"))
    reason = IdealDP(4).partition(graph, cluster, random_costs(1, graph, cluster)).reason
    assert "more than 1,500 sets" in reason


@pytest.mark.nightly
def test_many_orders_of_devices_are_narrowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six unlike devices have 1956 orders: the most promising are tried, and the reason says so."""
    monkeypatch.setattr(ideal_dp, "MOST_WORK", 1e7)
    graph = branchy_graph(4, 12)
    cluster = unlike_cluster(1, 6, (1 << 30,))
    costs = random_costs(1, graph, cluster)
    known = work(graph, costs)
    found, chain = IdealDP(8)._best(graph, known, cluster), ChainDP(8).best(known, cluster)
    assert found is not None
    assert chain is not None
    (tried,) = re.findall(r"of all orders of ops, (\d+) of 1956 orders of devices", found.searched)
    assert 1 < int(tried) < 100
    assert found.split.step_s(8) <= chain[1].step_s(8)


def test_micro_batches_must_be_positive() -> None:
    with pytest.raises(InputError, match="at least 1"):
        IdealDP(micro_batches=0)
