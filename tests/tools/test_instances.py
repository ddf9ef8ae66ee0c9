"""The public formats, and their objective, on small files made here; the real ones where given.

`BIGBRAIN_PLANNER_DATA=/folder/of/the/public/data` runs the tests on published instances.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from bigbrain_fx.errors import InputError
from tools.calls import Calls
from tools.instance_files import find, in_milliseconds, name_of, read, transfers_in_seconds
from tools.instances import (
    Instance,
    Node,
    feasible,
    latency,
    max_load,
    stacked,
    unlike,
    varied,
)
from tools.latency_walk import sooner
from tools.load_solvers.contiguous import best_contiguous
from tools.load_solvers.problem import Kind

DATA = os.environ.get("BIGBRAIN_PLANNER_DATA", "")
published = pytest.mark.skipif(
    not DATA, reason="set BIGBRAIN_PLANNER_DATA to the folder of the public planner data"
)


def node(number: int, time: float, color: int, back: bool = False, runs: bool = True) -> object:
    return {
        "id": number,
        "name": f"node{number}",
        "supportedOnFpga": int(runs),
        "fpgaLatency": time,
        "cpuLatency": 10 * time,
        "isBackwardNode": back,
        "colorClass": color,
        "size": 100.0,
    }


def edge(a: int, b: int, cost: float) -> object:
    return {"sourceId": a, "destId": b, "cost": cost}


@pytest.fixture
def training(tmp_path: Path) -> Path:
    """0 -> 1 -> 2 forward, and back: 5 (of 2) -> 4 (of 1) -> 3 (of 0); 6 is backward alone."""
    colors = [0, 1, 2, 0, 1, 2, 9]
    nodes = [node(10 + i, 1.0 + i, colors[i], i >= 3, i != 6) for i in range(7)]
    pairs = [(0, 1, 1.0), (1, 2, 2.0), (5, 4, 3.0), (4, 3, 4.0), (4, 6, 0.5), (6, 3, 0.25)]
    edges = [edge(10 + a, 10 + b, cost) for a, b, cost in pairs]
    found = {"maxSizePerFPGA": 400.0, "maxFPGAs": 2, "maxCPUs": 1, "nodes": nodes, "edges": edges}
    path = tmp_path / "throughput-inputs" / "LayerGraphs" / "toy.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(found))
    return path


def test_dnn_partitioning(training: Path) -> None:
    instance = read(training)
    assert name_of(training) == "throughput/LayerGraphs_toy"
    assert [name for name, _ in find(training.parents[2])] == ["throughput/LayerGraphs_toy"]
    assert instance.kinds == (Kind("accelerator", 2, 400.0), Kind("cpu", 1))
    assert instance.nodes[6].times == (float("inf"), 70.0)
    # 0 | 1 2: a forward value, its mirror 4 -> 3, and 6's, which is with 1, cross.
    homes = (0, 1, 1, 0, 1, 1, 2)
    assert max_load(instance, homes) == 70.0  # the CPU pays for no transfer
    loads = instance.problem.loads([homes[instance.group_of.index(g)] for g in range(4)])
    assert loads.tolist() == [1 + 4 + 1 + 4 + 0.25, 2 + 3 + 5 + 6 + 1 + 4, 70.0]
    assert feasible(instance, homes)
    assert not feasible(instance, (0, 1, 1, 0, 1, 1, 0))  # 6 does not run there
    assert not feasible(instance, (0, 1, 1, 1, 1, 1, 2))  # 0 and 3 must share a device
    assert not feasible(instance, (0, 0, 0, 0, 0, 0, 2))  # 600 bytes of 400


def test_a_backward_node_alone_takes_its_place_from_the_way_back(training: Path) -> None:
    """6 runs after 4 and before 3, so its mirrored place is after 0's group and before 1's."""
    instance = read(training)
    group = instance.group_of
    assert group[0] == group[3]
    assert (group[0], group[6], group[1], group[2]) == (0, 1, 2, 3)
    assert instance.problem.edges == ((0, 1), (0, 2), (1, 2), (2, 3))


def test_pipedream(tmp_path: Path) -> None:
    path = tmp_path / "pipedream" / "toy" / "graph.txt"
    path.parent.mkdir(parents=True)
    path.write_text(
        "node1 -- Input0 -- forward_compute_time=0.000, backward_compute_time=0.000, "
        "activation_size=[3125000.0; 0.0], parameter_size=0.000\n"
        "node2 -- Linear(1, 1) -- forward_compute_time=1.500, backward_compute_time=2.500, "
        "activation_size=8.0, parameter_size=16.000\n"
        "\tnode1 -- node2\n"
    )
    instance = read(path)
    assert [n.times for n in instance.nodes] == [(0.0,), (4.0,)]
    assert instance.nodes[1].nbytes == 4 * 16 + 8
    assert instance.edges == ((0, 1, 2.0),)  # 3,125,000 bytes take 1 ms on 25 Gbit/s, twice
    assert name_of(path) == "pipedream/toy"


def test_piper(tmp_path: Path) -> None:
    table = {
        "1": [
            {"id": "activation recomp", "timePerSample": 9.0},
            {"id": "vanilla", "timePerSample": 2.0, "memoryUsageA": 5.0, "memoryUsageB": 1.0},
        ]
    }
    nodes = [{"id": i, "name": f"n{i}", "TMPCs": table} for i in (3, 7)]
    found = {
        "maxDevices": 2,
        "maxMemoryPerDevice": 12.0,
        "bandwidth": 1000.0,
        "nodes": nodes,
        "edges": [{"sourceId": 3, "destId": 7, "communicationCost": 4.0}],
    }
    path = tmp_path / "piper" / "inputs" / "toy.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(found))
    instance = read(path)
    assert instance.nodes[0] == Node("n3", (2.0,), 6.0)
    assert instance.edges == ((0, 1, 8.0),)
    assert name_of(path) == "piper/toy"


def test_what_is_no_instance_is_said(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(InputError, match="cannot read"):
        read(path)
    path.write_text("{}")
    with pytest.raises(InputError, match="not an instance"):
        read(path)
    path.write_text('{"maxFPGAs": 1}')
    with pytest.raises(InputError, match="not an instance"):
        read(path)
    with pytest.raises(InputError, match="no instances"):
        list(find(tmp_path / "nowhere"))


def test_unlike_devices_are_drawn_by_a_rule(training: Path) -> None:
    plain = Instance(
        "plain",
        tuple(Node(str(i), (1.0, 10.0), 1.0) for i in range(4)),
        ((0, 1, 1.0),),
        (Kind("accelerator", 5, 100.0), Kind("cpu", 1)),
        (1.0, 0.0),
    )
    drawn = [unlike(plain, seed) for seed in range(20)]
    assert drawn[3] == unlike(plain, 3)
    assert {len(found.kinds) for found in drawn} == {3, 4}
    for found in drawn:
        assert sum(kind.count for kind in found.kinds) == 6
        assert {found.transfer[0], *found.transfer[:-1]} == {1.0, 4.0}
        assert found.nodes[0].times[0] == 1.0
        assert found.kinds[-1] == Kind("cpu", 1)
    assert unlike(read(training), 0).problem.count == 4


@published
def test_transfers_that_are_seconds_are_told_by_the_same_models_latency_files() -> None:
    """The same layers of the same models, with the same work: only the transfers differ."""
    every = dict(find(Path(DATA)))
    alone_too = (n for n in every if n.startswith("latency/"))
    both = [n for n in alone_too if n.replace("latency", "throughput") in every]
    seconds = []
    for name in both:
        alone, several = read(every[name]), read(every[name.replace("latency", "throughput")])
        assert several.nodes[0].times == alone.nodes[0].times
        seconds.append(transfers_in_seconds(name.replace("latency", "throughput")))
        mended = in_milliseconds(several) if seconds[-1] else several
        moved = [sum(cost for _, _, cost in each.edges) for each in (mended, alone)]
        assert moved[0] == pytest.approx(moved[1], rel=1e-6)
    assert set(seconds) == {True, False} or not seconds


@published
def test_published_values() -> None:
    reference = json.loads((Path(DATA) / "reference.json").read_text())["throughput"]
    seen = 0
    for name, path in find(Path(DATA)):
        task, _, key = name.partition("/")
        if task != "throughput":
            continue
        seen += 1
        instance = read(path)
        one = [0] * len(instance.nodes)
        assert max_load(instance, one) == pytest.approx(reference[key]["one"], rel=1e-4)
        assert feasible(instance, one) == reference[key]["one_ok"]
    assert seen


@published
def test_ideals_give_the_published_contiguous_optimum() -> None:
    reference = json.loads((Path(DATA) / "reference.json").read_text())["throughput"]
    for name, path in find(Path(DATA)):
        task, _, key = name.partition("/")
        if task != "throughput":
            continue
        instance = read(path)
        found = best_contiguous(instance.problem)
        assert found is not None
        assert found.proven
        homes = instance.spread(found.homes)
        assert feasible(instance, homes)
        assert max_load(instance, homes) == pytest.approx(found.load)
        assert found.load == pytest.approx(reference[key]["contig_opt"], rel=1e-5), name


# --------------------------------------------------------------------------- latency


def two_branches() -> Instance:
    """0 feeds 1 and 2, they feed 3; each takes 2 on an accelerator, 20 on a CPU, moving takes 1."""
    return Instance(
        "branches",
        tuple(Node(str(i), (2.0, 20.0), 1.0) for i in range(4)),
        tuple((a, b, 1.0) for a, b in ((0, 1), (0, 2), (1, 3), (2, 3))),
        (Kind("accelerator", 2, 10.0), Kind("cpu", 1)),
        (1.0, 0.0),
    )


def test_latency_of_one_call_is_its_time() -> None:
    assert latency(two_branches(), (0, 0, 0, 0)) == 8.0


def test_cpus_are_unlimited_and_pay_no_transfer() -> None:
    assert latency(two_branches(), (2, 2, 2, 2)) == 60.0


def test_a_call_moves_in_computes_and_moves_out() -> None:
    """0 and 1 with 0 out and 1 out: 4 + 2; then 2: in, out; then 3 on the first device again."""
    assert latency(two_branches(), (0, 0, 1, 1)) == (4 + 2) + (2 + 4)
    assert latency(two_branches(), (0, 0, 1, 0)) == (4 + 2) + (1 + 2 + 1) + (2 + 2)


def test_calls_on_two_devices_run_at_once() -> None:
    """Calls 0 | 1 and 2 on two devices | 3: 0 and 3 share a device, but not a call."""
    instance = two_branches()
    instance = replace(instance, kinds=(Kind("accelerator", 3, 10.0), Kind("cpu", 1)))
    assert latency(instance, (0, 1, 2, 0)) == (2 + 1) + (1 + 2 + 1) + (2 + 2)


@published
def test_published_latencies() -> None:
    """All on CPUs, and the contiguous placements of least sum where all ideals can be listed."""
    reference = json.loads((Path(DATA) / "reference.json").read_text())["latency"]
    proven = 0
    for name, path in find(Path(DATA)):
        task, _, key = name.partition("/")
        if task != "latency":
            continue
        instance = read(path)
        cpu = len(instance.kind_of_device) - 1
        all_cpu = latency(instance, [cpu] * len(instance.nodes))
        assert all_cpu == pytest.approx(reference[key]["allcpu"], rel=1e-6)
        found = best_contiguous(instance.problem, objective="sum")
        assert found is not None
        homes = instance.spread(found.homes)
        assert feasible(instance, homes)
        if found.proven:
            proven += 1
            assert latency(instance, homes) == pytest.approx(reference[key]["chain"], rel=1e-6)
    assert proven >= 4


# --------------------------------------------------------------------------- other instances


def drawn(seed: int, count: int) -> Instance:
    dice = random.Random(seed)
    edges = [(a, b, dice.choice((0.0, 1.0, 4.0))) for b in range(count) for a in range(b)
             if dice.random() < 2 / count]  # fmt: skip
    cost = {a: time for a, _, time in edges}  # one for all that a node makes
    return Instance(
        "drawn",
        tuple(Node(str(i), (dice.choice((0.0, 2.0)), 9.0), 1.0) for i in range(count)),
        tuple((a, b, cost[a]) for a, b, _ in edges),
        (Kind("accelerator", 3, 10.0), Kind("cpu", 2)),
        (1.0, 0.0),
    )


@pytest.mark.parametrize("seed", range(20))
def test_fast_latencies_are_the_judge_s(seed: int) -> None:
    dice, instance = random.Random(seed), drawn(seed, 14)
    calls = Calls(instance)
    for stay in (0.0, 0.5, 0.9):
        homes = [dice.randrange(5)]
        while len(homes) < 14:
            homes.append(homes[-1] if dice.random() < stay else dice.randrange(5))
        assert calls.latency(homes) == pytest.approx(latency(instance, homes))


def test_a_walk_is_no_slower_fits_and_is_repeatable() -> None:
    instance = drawn(3, 12)
    homes = [3] * 12  # all on a CPU
    found = sooner(instance, homes, 300, 1)
    assert instance.problem.fits(found)
    assert latency(instance, instance.spread(found)) < latency(instance, instance.spread(homes))
    assert sooner(instance, homes, 300, 1) == found


def test_stacked_copies_feed_each_other() -> None:
    plain = replace(two_branches(), name="b")
    found = stacked(plain, 10)
    assert len(found.nodes) == 10
    assert (3, 4, 1.0) in found.edges
    assert (7, 8, 1.0) in found.edges
    assert found.problem.count == 10
    assert found.kinds[0].memory_bytes == pytest.approx(25.0)


def test_other_devices_memory_and_links() -> None:
    plain = two_branches()
    assert varied(plain) is plain
    found = varied(plain, accelerators=5, memory=0.5, wires=1000.0)
    assert [kind.count for kind in found.kinds] == [5, 1]
    assert found.kinds[0].memory_bytes == 5.0
    assert {time for _, _, time in found.edges} == {1000.0}
    assert found.name != plain.name
