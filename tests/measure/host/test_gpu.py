"""GPUs in the probe: what their processes tell becomes a host, a cluster and a text.

Where there is no GPU, scripts stand in for the processes: one that only tells figures, and one that
runs the whole worker on the CPU over a gloo that behaves as nccl does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from bigbrain_fx.cluster import read_cluster
from bigbrain_fx.core import Link, Overheads
from bigbrain_fx.errors import InputError
from bigbrain_fx.measure.host import HostProbe, ProbeError, probe
from bigbrain_fx.measure.host.fleet import Fleet, patience_s, run
from tests.support.nccl_like import NCCL_LIKE

GIB = 2**30
WORLD = "BIGBRAIN_FX_TEST_WORLD"

# Tells figures as a process of its kind would. The world says how many GPUs there are, and which
# pairs have a slow link.
TELLER = f"""
import json, os, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
rank, kinds = int(options["--rank"]), options["--kinds"].split(",")
world = json.loads(os.environ["{WORLD}"])
is_gpu = kinds[rank] == "cuda"
assert os.environ["LOCAL_RANK"] == str(rank) and os.environ["WORLD_SIZE"] == str(len(kinds))
if is_gpu and world.get("broken"):
    raise SystemExit("CUDA error: out of memory")
scale = 1000.0 if is_gpu else 1.0
product = {{"rows": 2048 if is_gpu else 512, "inner": 1024, "columns": 1024}}
small = {{"rows": 512, "inner": 512, "columns": 512, "dtype": "bfloat16", "flops_per_s": 1.0}}

def link(peer):
    is_slow = sorted((rank, peer)) in world.get("slow", [])
    latency_s, bytes_per_s = (9e-6, 1e10 if is_slow else 2e11) if is_gpu else (4.8e-5, 1.25e9)
    return {{"peer": peer, "latency_s": latency_s, "bytes_per_s": bytes_per_s * (1 + rank / 100)}}

peers = [peer for peer in range(int(options["--linked"])) if peer != rank]
own = {{"instruction_s": 2e-5 * (1 + is_gpu), "step_s": 1e-4}}
if peers:
    own |= {{"message_s": 3e-5 * (1 + is_gpu), "message_bytes_per_s": 2e9 * scale}}
found = {{
    "memory_bytes": (rank + 3) * 2**30 + 12345,
    "flops_per_s": 5e10 * scale,
    "memory_bytes_per_s": 1e10 * scale,
    "launch_s": 2e-6,
    "matmul": [{{**product, "dtype": "bfloat16", "flops_per_s": 1e11 * scale}}] + [small] * is_gpu,
    "links": [link(peer) for peer in peers] if rank < int(options["--linked"]) else [],
    "overheads": own,
}}
if is_gpu:
    found |= {{"name": f"NVIDIA T{{rank}}", "blas_bytes": 32 * 2**20}}
elif rank == 0 and "--gpus" in sys.argv:
    found["gpus"] = world["gpus"]
open(options["--out"], "w").write(json.dumps(found))
"""


@pytest.fixture
def teller(tmp_path: Path) -> list[str]:
    return _script(tmp_path, TELLER)


def _script(folder: Path, text: str) -> list[str]:
    path = folder / "worker.py"
    path.write_text(text, encoding="utf-8")
    return [sys.executable, str(path)]


def _told(monkeypatch: pytest.MonkeyPatch, **world: object) -> None:
    monkeypatch.setenv(WORLD, json.dumps(world))


# --------------------------------------------------------------------------- from processes


@pytest.mark.nightly
def test_every_gpu_is_probed_by_its_own_process(
    teller: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _told(monkeypatch, gpus=3)
    found = probe(devices=2, worker=teller)
    assert (found.kind, [gpu.name for gpu in found.gpus]) == (
        "cuda",
        ["NVIDIA T0", "NVIDIA T1", "NVIDIA T2"],
    )
    assert [(a, b) for a, b, _ in found.gpu_links] == [(0, 1), (0, 2), (1, 2)]
    first, second = found.cluster.devices  # two were asked for
    assert (first.name, first.kind, first.memory_bytes) == ("d0", "cuda", 3 * GIB)
    assert (second.memory_bytes, second.flops_per_s) == (4 * GIB, 5e13)
    assert (second.half_flops_per_s, second.blas_bytes) == (1e14, 32 * 2**20)
    assert first.overheads == Overheads(6e-5, 2e12, 4e-5, 1e-4)  # of the GPU's process
    assert found.cluster.default_link == Link(9e-6, 2.01e11)
    assert found.overheads == Overheads(3e-5, 2e9, 2e-5, 1e-4)  # of CPU processes
    assert (found.cpu.flops_per_s, found.link.latency_s) == (5e10, 4.8e-5)
    found.write(tmp_path / "cluster.json")
    assert read_cluster(tmp_path / "cluster.json") == found.cluster


def test_pairs_that_differ_have_a_link_each(
    teller: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _told(monkeypatch, gpus=4, slow=[[0, 2], [0, 3], [1, 2], [1, 3]])
    found = probe(devices=4, worker=teller)
    cluster = found.cluster
    assert len(cluster.links) == 6
    assert cluster.link("d0", "d1") == Link(9e-6, 2.01e11)
    assert cluster.link("d3", "d0") == Link(9e-6, 1.02e10)  # 1.015e10, to three digits
    assert cluster.default_link == cluster.link("d0", "d2") == Link(9e-6, 1.01e10)
    assert cluster.device["d3"].name == "d3"
    lines = str(found).splitlines()
    assert "gpu 0-1   9 us, 201.00 GB/s" in lines
    assert "gpu 1-3   9 us, 10.20 GB/s" in lines
    assert not any(line.startswith("gpu-gpu") for line in lines)


@pytest.mark.nightly
def test_only_links_of_devices_in_use_count(
    teller: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _told(monkeypatch, gpus=3, slow=[[0, 2], [1, 2]])
    cluster = probe(devices=2, worker=teller).cluster
    assert (cluster.default_link, cluster.links) == (Link(9e-6, 2.01e11), ())


def test_one_gpu_has_no_link_and_messages_cost_what_cpu_processes_found(
    teller: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _told(monkeypatch, gpus=1)
    found = probe(devices=1, worker=teller)
    assert (found.kind, found.gpu_links) == ("cuda", ())
    (device,) = found.cluster.devices
    assert device.overheads == Overheads(3e-5, 2e9, 4e-5, 1e-4)
    assert found.cluster.default_link == Link(4.8e-5, 1.26e9)
    assert "gpu 0     NVIDIA T0, 3.0 GiB free, 50000.0 GFLOP/s, 10000.0 GB/s, 2.0 us per op" in str(
        found
    )


def test_too_few_gpus_are_shown_beside_a_cluster_of_cpu_processes(
    teller: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _told(monkeypatch, gpus=1)
    found = probe(devices=2, worker=teller)
    assert (found.kind, len(found.gpus)) == ("cpu", 1)
    assert {device.kind for device in found.cluster.devices} == {"cpu"}
    assert found.cluster.devices[0].overheads == found.overheads


def test_gpus_can_be_left_alone(teller: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _told(monkeypatch, gpus=2, broken=True)
    assert probe(kind="cpu", worker=teller).gpus == ()


@pytest.mark.gate("1---devices---devices 1")
@pytest.mark.parametrize(
    ("gpus", "at", "help_"),
    [(0, "--kind cuda", "probe the CPU instead: --kind cpu"), (1, "--devices", "--devices 1")],
)
def test_gpus_that_are_not_there(
    teller: list[str], monkeypatch: pytest.MonkeyPatch, gpus: int, at: str, help_: str
) -> None:
    _told(monkeypatch, gpus=gpus)
    with pytest.raises(InputError, match=f"expected 2 GPUs, found {gpus}") as caught:
        probe(kind="cuda", worker=teller)
    assert (caught.value.at, caught.value.exit_code) == (at, 2)
    assert help_ in str(caught.value.help)


def test_a_gpu_that_fails_is_named(teller: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _told(monkeypatch, gpus=1, broken=True)
    with pytest.raises(ProbeError, match="process of GPU 0 ended with code 1") as caught:
        probe(worker=teller)
    assert caught.value.notes == ("CUDA error: out of memory",)
    assert "`--kind cpu` leaves GPUs alone" in str(caught.value.help)


def test_a_measurement_is_json(teller: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _told(monkeypatch, gpus=2)
    measured = json.loads(json.dumps(probe(worker=teller).measured))
    ((one, other, link),) = measured["gpu_links"]
    assert (one, other, link["latency_s"], link["bytes_per_s"]) == (0, 1, 9e-6, 2.01e11)
    assert measured["gpus"][1]["overheads"]["message_s"] == 6e-5


@pytest.mark.gate("words1")
@pytest.mark.parametrize("words", [(), ("--kind", "cpu"), ("--kind", "cuda")])
def test_the_command_takes_the_kind(
    teller: list[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    from bigbrain_fx import cli
    from bigbrain_fx.measure import host as doctor

    asked: list[object] = []

    def told(threads: int, devices: int, quick: bool, kind: Any) -> HostProbe:
        asked.append(kind)
        return probe(threads, devices, quick, kind, worker=teller)

    _told(monkeypatch, gpus=2)
    monkeypatch.setattr(doctor, "probe", told)
    done = CliRunner().invoke(cli.cli, ["doctor", "--json", *words])
    assert done.exit_code == 0, done.output
    kinds = {device["kind"] for device in json.loads(done.stdout)["devices"]}
    assert (asked, kinds) == ([words[-1] if words else None], {words[-1] if words else "cuda"})


# --------------------------------------------------------------------------- the whole worker

# The worker itself, on the CPU.
WORKER = f"""{NCCL_LIKE}
import os, sys

import torch
from bigbrain_fx.measure.host import measure, worker
from bigbrain_fx.runtime.gpus import own_gpu

kinds = dict(zip(sys.argv[1::2], sys.argv[2::2]))["--kinds"].split(",")


def own_device(kinds, rank):
    seen.append((kinds[rank], own_gpu(kinds, rank, int(os.environ["LOCAL_RANK"]))))
    return torch.device("cpu")


def memory(device):
    ((kind, number),) = seen
    return {{"memory_bytes": 1, "name": f"{{kind}} {{number}}"}}


seen = []
worker.own_device, worker._memory = own_device, memory
measure.SHAPES["cuda"] = ((8, 8, 8), (8, 8, 16))
measure.TABLES["cuda"], measure.DTYPES["cuda"] = ((8, 8, 8),), (torch.float32,)
worker.main()
"""


def _run_worker(folder: Path, *kinds: Any, hosts: tuple[str, ...] = ()) -> list[Mapping[str, Any]]:
    count = len(kinds)
    fleet = Fleet(
        names=tuple(f"d{i}" for i in range(count)),
        kinds=kinds,
        threads=(1,) * count,
        busy=count,
        linked=count,
        window_s=0.02,
        deadline_s=50.0,
        hosts=hosts,
        table=True,
    )
    return run(fleet, _script(folder, WORKER))


@pytest.mark.nightly
def test_gpus_are_measured_over_nccl(tmp_path: Path) -> None:
    found = _run_worker(tmp_path, "cuda", "cuda", "cuda")
    assert [result["name"] for result in found] == ["cuda 0", "cuda 1", "cuda 2"]
    peers = [[link["peer"] for link in result["links"]] for result in found]
    assert peers == [[1, 2], [0, 2], [0, 1]]
    for result in found:
        assert [(row["rows"], row["dtype"]) for row in result["matmul"]] == [(8, "float32")]
        assert all(link["latency_s"] > 0 and link["bytes_per_s"] > 0 for link in result["links"])
        assert min(result["overheads"].values()) >= 0.0
        assert result["overheads"]["message_s"] > 0.0


@pytest.mark.nightly
def test_a_gpu_alone_measures_what_needs_no_peer(tmp_path: Path) -> None:
    (found,) = _run_worker(tmp_path, "cuda")
    assert (found["links"], sorted(found["overheads"])) == ([], ["instruction_s", "step_s"])
    assert found["flops_per_s"] > 0


@pytest.mark.nightly
def test_unlike_kinds_are_measured_in_step(tmp_path: Path) -> None:
    found = _run_worker(tmp_path, "cpu", "cuda", hosts=("x", "y"))
    assert [result["name"] for result in found] == ["cpu 0", "cuda 0"]  # each its host's first
    assert len(found[0]["matmul"]) > len(found[1]["matmul"]) == 1
    assert all(result["overheads"]["message_s"] > 0 for result in found)


def test_patience_grows_with_pairs_and_gpus() -> None:
    assert patience_s(("cpu", "cpu"), 1.0) == 60 + 40 + 16
    assert patience_s(("cuda",), 1.0) == 120 + 40
    assert patience_s(("cuda",) * 4, 1.0) == 120 + 40 + 6 * (16 + 10)


# --------------------------------------------------------------------------- the real thing


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_real_gpus_are_probed() -> None:
    found = probe(devices=1, kind="cuda")
    count = torch.cuda.device_count()
    assert [gpu.name for gpu in found.gpus] == list(map(torch.cuda.get_device_name, range(count)))
    assert len(found.gpu_links) == count * (count - 1) // 2
    for i, gpu in enumerate(found.gpus):
        _, total_bytes = torch.cuda.mem_get_info(i)
        assert GIB < gpu.memory_bytes < total_bytes
        assert gpu.rates.flops_per_s > found.cpu.flops_per_s
        assert gpu.rates.memory_bytes_per_s > found.cpu.memory_bytes_per_s
        assert {row.dtype for row in gpu.matmul} == {"float32", "bfloat16", "float16"}
        assert 0.0 < gpu.overheads.message_s < 1.0
    half = found.cluster.devices[0].half_flops_per_s
    assert half is not None
    assert half > 1e12
    assert replace(found, devices=count).cluster.devices[-1].kind == "cuda"
