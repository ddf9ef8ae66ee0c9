"""Between tensor groups members send parts of a value that all of them have, with the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bigbrain_fx.core import Cluster, Device, Host, Link
from bigbrain_fx.plan import Plan, read_plan, to_json
from tests.support.training import WIDE, bench_of, planned, trained
from tools.conformance.matrix import Bench

BLOCK = "nn.Linear(160, 96), nn.GELU(), nn.Linear(96, 160), nn.LayerNorm(160)"
BYTES = 4 * 128 * 160  # of what crosses
DEEP = WIDE.replace(BLOCK, f"{BLOCK}, {BLOCK}")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def bench() -> Bench:
    return bench_of(DEEP, steps=2)


def hosts(nic_bytes_per_s: float | None = None) -> Cluster:
    """Two hosts of two devices; inside a host messages are fast."""
    names = [(f"d{i}", f"h{i // 2}") for i in range(4)]
    devices = tuple(Device(name, host, "cpu", 2**33, 1e9, 12e9, 1e-6) for name, host in names)
    near = Link(1e-6, 50e9)
    links = (("d0", "d1", near), ("d2", "d3", near))
    shared = () if nic_bytes_per_s is None else (Host("h0", nic_bytes_per_s), Host("h1", 1e7))
    return Cluster(devices, Link(1e-4, 1e7), links, shared)


def planned_by_hosts(bench: Bench, where: Cluster, **choices: object) -> Plan:
    pins = tuple((f"{n}", "d0" if n < 4 else "d2") for n in range(8))
    given: Any = {"micro_batches": 2, "tensor": 2, "pins": pins, **choices}
    return planned(bench, where, **given)


def sent(plan: Plan) -> set[int]:
    kinds = ("activation", "gradient")
    return {edge.nbytes for edge in plan.stages.edges if edge.kind in kinds}


@pytest.mark.gate("shares1")
@pytest.mark.parametrize("shares", [(), (3, 1)])
def test_each_member_sends_its_part_and_the_bits_stay(
    bench: Bench, tmp_path: Path, shares: tuple[int, ...]
) -> None:
    plan = planned_by_hosts(bench, hosts(), tensor_shares=shares)
    parts = {BYTES // 2} if not shares else {BYTES * 3 // 4, BYTES // 4}
    assert sent(plan) == parts
    assert trained(bench, plan, tmp_path / "bundle")[1] == ""
    (tmp_path / "plan.json").write_bytes(to_json(plan))
    again = read_plan(tmp_path / "plan.json")
    assert [m.ops for m in again.sharded.members] == [m.ops for m in plan.sharded.members]


def test_parts_are_for_links_and_nics_that_are_slower_than_those_inside(bench: Bench) -> None:
    fast = Link(1e-6, 1e12)
    assert sent(planned_by_hosts(bench, replace(hosts(), default_link=fast))) == {BYTES}
    assert sent(planned_by_hosts(bench, replace(hosts(1e7), default_link=fast))) == {BYTES // 2}


@pytest.mark.nightly
def test_replicas_of_groups_send_parts_too(bench: Bench, tmp_path: Path) -> None:
    one = hosts()
    more = tuple(replace(d, name=f"e{d.name}", host=f"e{d.host}") for d in one.devices)
    links = (*one.links, *((f"e{a}", f"e{b}", link) for a, b, link in one.links))
    plan = planned_by_hosts(
        bench, replace(one, devices=(*one.devices, *more), links=links), replicas=2
    )
    assert sent(plan) == {BYTES // 2}
    assert trained(bench, plan, tmp_path / "bundle")[1] == ""
