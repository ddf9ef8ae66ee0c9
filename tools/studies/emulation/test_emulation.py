"""A cluster on one machine: shares, control groups of both kinds, wires; nothing is left of it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bigbrain_fx.bundles.launch import Command, RunOptions
from bigbrain_fx.cluster import to_json
from bigbrain_fx.core import Cluster, Device, Link
from bigbrain_fx.errors import InputError
from tests.support.bundles import split_small
from tools.studies.emulation import Network, Quota, emulated, missing, quotas, wires
from tools.studies.emulation.groups import (
    PREFIX,
    find_trees,
    make_groups,
    sweep_leftovers,
    was_out_of_memory as ran_out,
)
from tools.studies.emulation.quotas import placed
from tools.studies.emulation.relay import Clock, Wire
from tools.studies.emulation.started import NursedProcess
from tools.studies.emulation.watchdog import sweep

MIB = 2**20
DEADLINE_S = 60.0
WIRE = Link(1e-3, 125e6)
ROOT = Path(__file__).resolve().parents[3]
real = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def cluster(*parts: float, threads: int = 1, memory_bytes: int = 1024 * MIB) -> Cluster:
    """Devices d0, d1, ... whose speeds are as `parts`."""
    devices = tuple(
        Device(f"d{i}", f"h{i}", "cpu", memory_bytes, part * 1e9, 1e10, threads=threads)
        for i, part in enumerate(parts)
    )
    return Cluster(devices, WIRE)


# --------------------------------------------------------------------------- shares and wires


def test_shares_are_in_proportion_and_half_of_the_machine() -> None:
    found = quotas(cluster(4, 2, 1, 1), cores=2)
    assert [quota.cores for quota in found.values()] == [0.5, 0.25, 0.125, 0.125]
    assert found["d0"] == Quota(0.5, 4000, 8000, 1024 * MIB)
    assert {quota.period_us for quota in found.values()} == {8000}  # 1 ms / the smallest share


@pytest.mark.parametrize(
    ("parts", "share", "what"),
    [
        ((2, 1), 0.7, "1.05 cores together, more than half of this machine"),
        ((2, 1), 0.0, "0.00 cores"),
        ((1, 1e-6), None, "more seldom than the kernel can arrange"),
    ],
)
def test_shares_that_cannot_be(parts: tuple[float, ...], share: float | None, what: str) -> None:
    with pytest.raises(InputError, match=what):
        quotas(cluster(*parts), cores=2, share=share)


def test_devices_are_spread_over_the_cpus() -> None:
    found = quotas(cluster(4, 2, 1, 1), cores=2)
    threads = dict.fromkeys(found, 1)
    assert placed(found, threads, (0, 1)) == {"d0": (0,), "d1": (1,), "d2": (1,), "d3": (1,)}
    assert placed(found, {**threads, "d0": 2}, (0, 1))["d0"] == (0, 1)


def test_both_directions_of_each_pair_are_wires() -> None:
    slow = Link(5e-3, 12.5e6)
    three = replace(cluster(1, 1, 1), links=(("d0", "d2", slow),))
    found = {(a, b): link for a, b, link in wires(three)}
    assert len(found) == 6
    assert found[0, 2] == found[2, 0] == slow
    assert found[1, 2] == WIRE


@pytest.mark.parametrize("link", [Link(1e-3, 126e6), Link(9e-4, 125e6)])
def test_better_links_are_refused_or_clamped(link: Link) -> None:
    better = replace(cluster(1, 1), default_link=link)
    with pytest.raises(InputError, match="at most 1 Gbit/s and at least 1 ms"):
        wires(better)
    assert wires(better, clamp=True) == [(0, 1, WIRE), (1, 0, WIRE)]


def test_a_wire_carries_one_packet_at_a_time() -> None:
    wire = Wire(latency_s=1.0, bytes_per_s=100.0)
    assert wire.arrival_s(10.0, 200) == 13.0
    assert wire.arrival_s(10.5, 100) == 14.0  # waits until 12.0
    assert wire.arrival_s(20.0, 100) == 22.0
    wire.lead(0.25)
    assert wire.arrival_s(30.0, 100) == 31.75


def test_packets_of_one_host_share_its_nic() -> None:
    """Each wire could carry a packet at once; together they wait for the slower NIC."""
    nic = Clock(bytes_per_s=50.0)
    wires = [Wire(1.0, 100.0, [nic]) for _ in range(2)]
    assert [wire.arrival_s(10.0, 100) for wire in wires] == [13.0, 15.0]
    assert wires[0].arrival_s(20.0, 100) == 23.0
    alone = Wire(1.0, 10.0, [nic])
    assert alone.arrival_s(30.0, 100) == 41.0  # the wire is slower than the NIC


# --------------------------------------------------------------------------- control groups


def test_version_2_gets_a_threaded_group_in_each_device_s(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    trees = find_trees(tmp_path, "0::/user.slice\n")
    groups = make_groups(trees, {"d0": Quota(0.5, 4000, 8000, 64 * MIB)})
    (top,) = groups.folders
    texts = {str(p.relative_to(top)): p.read_text() for p in top.rglob("*") if p.is_file()}
    assert top.name.startswith(f"{PREFIX}{os.getpid()}-")
    assert texts == {
        "cgroup.subtree_control": "+cpu +memory",
        "cpu.weight": "10000",
        "d0/memory.max": str(64 * MIB),
        "d0/cgroup.subtree_control": "+cpu",
        "d0/compute/cgroup.type": "threaded",
        "d0/compute/cpu.max": "4000 8000",
    }
    assert groups.of["d0"].process == (str(top / "d0/cgroup.procs"),)
    assert groups.of["d0"].compute == str(top / "d0/compute/cgroup.threads")


@real
def test_groups_of_a_gone_owner_are_swept() -> None:
    trees = find_trees()
    groups = make_groups(trees, {"d0": Quota(0.5, 4000, 8000, 64 * MIB)})
    assert sweep_leftovers(trees) == []  # its owner lives
    moved = [folder.with_name(f"{PREFIX}{2**22 + 1}-1-test") for folder in groups.folders]
    for folder in groups.folders:
        assert sweep([folder]) == []
    for folder in moved:
        (folder / "d0").mkdir(parents=True)
    assert sorted(sweep_leftovers(trees)) == sorted(moved)
    assert not any(folder.exists() for folder in moved)


# --------------------------------------------------------------------------- the real thing

PROGRAM = """
import json, os, sys
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
tasks = {int(p.name): (p / "cgroup").read_text() for p in Path("/proc/self/task").iterdir()}
seen = {"main": tasks.pop(os.getpid()), "others": list(tasks.values()), "total": float(total),
        "interfaces": sorted(Path("/proc/self/net/dev").read_text().split())}
Path(sys.argv[1]).write_text(json.dumps(seen))
dist.barrier()
"""
GREEDY = "bytearray(2**31)\n"  # two gibibytes, all written


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    with emulated(cluster(2, 1)) as found:
        yield found
    assert not any(folder.exists() for folder in found.groups.folders)
    assert not any(Path(namespace).exists() for namespace in found.namespaces.values())


def start(
    net: Network, folder: Path, device: str, rank: int, program: str
) -> tuple[NursedProcess, Path]:
    """Start a program on a device, as one of two ranks; return it and the file that it writes."""
    (folder / "program.py").write_text(program)
    out, log = folder / f"{rank}.json", folder / f"{rank}.log"
    environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    words = ("python", str(folder / "program.py"), str(out))
    process = net.spawn(Command(device, words, folder, environment, log, reports=False))
    return process, out


@pytest.mark.nightly
@real
def test_losses_are_those_of_one_process(net: Network, tmp_path: Path) -> None:
    bundle = split_small(tmp_path, cluster(2, 1))
    done = net.run(bundle, RunOptions(steps=2, deadline_s=DEADLINE_S))
    words = ("python", "train.py", "--in-process", "--steps", "2", "--json")
    alone = Command("d0", words, bundle, {**os.environ, "RANK": "0"}, tmp_path / "log", False)
    assert net.spawn(alone).wait(DEADLINE_S) == 0
    losses = [json.loads(line)["loss"] for line in (tmp_path / "log").read_text().splitlines()]
    assert [line.loss for line in done.steps] == losses
    assert set(done.max_rss_bytes) == {"d0", "d1"}
    with pytest.raises(InputError, match="the bundle is for a device d1"):
        replace(net, namespaces={"d0": net.namespaces["d0"]}).run(bundle)


@pytest.mark.nightly
@real
def test_only_the_computing_thread_is_held(net: Network, tmp_path: Path) -> None:
    found = [start(net, tmp_path, f"d{rank}", rank, PROGRAM) for rank in (0, 1)]
    for process, out in found:
        assert process.wait(DEADLINE_S) == 0
        seen = json.loads(out.read_text())
        group = f"d{out.stem}" + ("-compute" if find_trees().version == 1 else "/compute")
        assert group in seen["main"]
        assert seen["others"]  # gloo's
        assert not any(group in others for others in seen["others"])
        assert seen["total"] == 2.0
        assert [word for word in seen["interfaces"] if word.endswith(":")] == ["lo:", "wire:"]


@pytest.mark.nightly
@real
def test_a_device_cannot_have_more_than_its_memory(net: Network, tmp_path: Path) -> None:
    process, _ = start(net, tmp_path, "d1", 0, GREEDY)
    assert process.wait(DEADLINE_S) == -signal.SIGKILL
    assert ran_out(net.groups.of["d1"])
    assert not ran_out(net.groups.of["d0"])


WHOLE = """
import json, os, sys
from pathlib import Path
from bigbrain_fx.cluster import read_cluster
from bigbrain_fx.bundles.launch import Command
from tools.studies.emulation import emulated
folder = Path(sys.argv[1])
(folder / "program.py").write_text("import time; print('here', flush=True); time.sleep(1000)")
with emulated(read_cluster(folder / "cluster.json")) as net:
    words = ("python", str(folder / "program.py"))
    environment = {**os.environ, "RANK": "0"}
    command = Command("d0", words, folder, environment, folder / "log", reports=True)
    net.spawn(command).stdout.readline()
    print(*net.groups.folders, flush=True)
    sys.stdin.read()
"""


def descendants(pid: int) -> list[int]:
    parents = {}
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if path.name.isdigit():
                stat = (path / "stat").read_text()
                parents[int(path.name)] = int(stat.rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found.extend(child for child, parent in parents.items() if parent == one)
    return found[1:]


@pytest.mark.nightly
@real
def test_nothing_is_left_of_a_killed_emulation(tmp_path: Path) -> None:
    """Relay, nursery, a device, what keeps processors awake, the watchdog, the groups."""
    (tmp_path / "cluster.json").write_text(to_json(cluster(2, 1)))
    with subprocess.Popen(
        [sys.executable, "-c", WHOLE, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as owner:
        assert owner.stdout is not None
        folders = owner.stdout.readline().split()
        assert folders
        ends = [os.pidfd_open(pid) for pid in descendants(owner.pid)]
        assert len(ends) >= 4 + len(os.sched_getaffinity(0))
        owner.send_signal(signal.SIGKILL)
        for end in ends:
            assert select.select([end], (), (), DEADLINE_S)[0]
            os.close(end)
    assert not any(Path(folder).exists() for folder in folders)
