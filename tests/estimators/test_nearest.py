"""What nobody measured is scaled from the most alike op that somebody did."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from bigbrain_fx.core import Device, Graph, Ref
from bigbrain_fx.costs.profiles import ProfileStore, signatures
from bigbrain_fx.planning import registry as plugins
from estimators.nearest import Nearest
from estimators.op_rules import BACKWARD_LAUNCHES, FORWARD_LAUNCHES
from tests.support.profiled import MACHINE, profile_of
from tests.support.synthetic import cluster_of, graph_of, op

SAME = Device("same", "h", "cpu", 2**30, MACHINE.flops_per_s, MACHINE.memory_bytes_per_s, 1e-6)
STARTING_S = FORWARD_LAUNCHES * MACHINE.launch_s
LAUNCHES = FORWARD_LAUNCHES, BACKWARD_LAUNCHES / 2


def product(flops: int, target: str = "aten.mm.default") -> Graph:
    return graph_of([op("a", target, Ref("x"), flops=flops, writes_bytes=4)])


def alike(asked: Graph, *known: tuple[Graph, float]) -> float | None:
    profiles = []
    for graph, forward_s in known:
        ((entry, signature),) = signatures(graph)
        sizes = {"flops": int(entry.flops), "writes_bytes": int(entry.writes_bytes)}
        profiles.append(replace(profile_of(signature, **sizes), forward_s=forward_s))
    ((entry, signature),) = signatures(asked)
    found = Nearest.of(MACHINE, profiles).like(entry, signature, LAUNCHES)
    return None if found is None else found.forward_s


def test_half_the_work_takes_half_but_for_its_start() -> None:
    found = alike(product(10**9), (product(2 * 10**9), 1e-2))
    assert found == pytest.approx(STARTING_S + (1e-2 - STARTING_S) / 2)


def test_the_nearest_in_work_is_taken() -> None:
    known = (product(10**8), 5e-3), (product(10**10), 1e-1)
    assert alike(product(2 * 10**8), *known) == pytest.approx(2 * 5e-3 - STARTING_S)


def test_nothing_alike_is_nothing() -> None:
    assert alike(product(10**9), (product(10**9, "aten.bmm.default"), 1e-2)) is None
    assert alike(product(10**9), (product(10**6), 1e-2)) is None  # a thousandth of the work
    assert alike(product(10**9)) is None


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_estimator_takes_it_on_a_cpu_only(tmp_path: Path, kind: Literal["cpu", "cuda"]) -> None:
    whole, part = product(2 * 10**9), product(10**9)
    first = part.ops[0]
    other = replace(first, outputs=(replace(first.outputs[0], shape=(3,)),))
    asked = replace(part, ops=(other,))
    ((_, signature),) = signatures(whole)
    path, where = tmp_path / "p.sqlite", cluster_of(replace(SAME, kind=kind))
    machine = replace(MACHINE, kind=kind)
    ProfileStore(path).put(machine, profile_of(signature, flops=2 * 10**9, writes_bytes=4))
    costs = plugins.estimator("measured", profiles=str(path)).estimate(asked, where)
    plain = plugins.estimator("analytical").estimate(asked, where).op_cost("a", "same").forward_s
    expected_s = STARTING_S + (1e-3 - STARTING_S) / 2 if kind == "cpu" else plain
    assert costs.op_cost("a", "same").forward_s == pytest.approx(expected_s)
    assert costs.measured == {"same": ()}
