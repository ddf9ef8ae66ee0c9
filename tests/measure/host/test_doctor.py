"""The probe of this host: limits, processes that end, and a cluster made of what was measured."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bigbrain_fx.cluster import read_cluster
from bigbrain_fx.core import Device, Link
from bigbrain_fx.errors import InputError
from bigbrain_fx.measure.host import (
    DeviceProbe,
    HostProbe,
    MatmulRate,
    ProbeError,
    Rates,
    Survey,
    measure,
    probe,
    survey,
)
from bigbrain_fx.measure.host.figures import half_flops_per_s
from bigbrain_fx.measure.host.fleet import Fleet, run
from bigbrain_fx.measure.host.measure import (
    per_call_s,
    processor_share,
)
from bigbrain_fx.measure.host.overheads import stretched

GIB = 2**30
FLEET = Fleet(("d0", "d1"), ("cpu", "cpu"), (1, 1), busy=2, linked=2, window_s=0.1, deadline_s=30.0)

FAST = Rates(8e12, 300e9, 4e-6)
CPU = HostProbe(
    kind="cpu",
    devices=2,
    threads=1,
    cores=2,
    memory_bytes=8 * GIB + 12345,
    cpu=Rates(61.2345e9, 11.987e9, 2.3456e-6),
    link=Link(48.76e-6, 1.2345e9),
    gpus=(),
    gpu_links=(),
    took_s=7.0,
)
GPUS = replace(
    CPU,
    kind="cuda",
    gpus=tuple(
        DeviceProbe(f"NVIDIA T{i}", "localhost", 1, (i + 3) * GIB, FAST, kind="cuda")
        for i in range(3)
    ),
    gpu_links=tuple((a, b, Link(9e-6, 11e9)) for a, b in ((0, 1), (0, 2), (1, 2))),
)


# --------------------------------------------------------------------------- the real thing


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> HostProbe:
    """Probe this host, from a folder whose torch.py must not be imported."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "torch.py").write_text("raise SystemExit('the wrong torch')", encoding="utf-8")
    before = Path.cwd()
    os.chdir(folder)
    try:
        return probe(threads=1, devices=2, kind="cpu")
    finally:
        os.chdir(before)


@pytest.mark.nightly
def test_the_cluster_is_this_host(measured: HostProbe) -> None:
    cluster = measured.cluster
    assert [device.name for device in cluster.devices] == ["d0", "d1"]
    assert {(d.host, d.kind, d.threads) for d in cluster.devices} == {("localhost", "cpu", 1)}
    total = sum(device.memory_bytes for device in cluster.devices)
    assert 0.98 * measured.memory_bytes < total <= measured.memory_bytes


@pytest.mark.nightly
def test_products_are_measured_by_size_and_dtype(measured: HostProbe) -> None:
    rows = {(row.dtype, row.rows, row.inner, row.columns): row for row in measured.matmul}
    assert len(rows) == len(measured.matmul)
    assert {row.dtype for row in measured.matmul} == {"float32", "bfloat16"}
    assert {("float32", 64, 64, 64), ("bfloat16", 512, 1024, 1024)} <= set(rows)
    assert all(1e6 < row.flops_per_s < 1e13 for row in measured.matmul)
    as_json = json.loads(json.dumps(measured.measured))
    assert len(as_json["matmul"]) == len(rows)
    assert as_json["link"]["latency_s"] == measured.link.latency_s


@pytest.mark.nightly
def test_every_pair_of_devices_is_surveyed() -> None:
    device = Device("a", "here", "cpu", GIB, 1.0, 1.0)  # its rates do not matter
    found = survey([device, replace(device, name="b"), replace(device, name="c")], window_s=0.02)
    assert [probe.name for probe in found.devices] == ["a", "b", "c"]
    assert [pair for *pair, _ in found.links] == [["a", "b"], ["a", "c"], ["b", "c"]]
    assert all(1e-6 < link.latency_s < 1.0 for *_, link in found.links)
    assert all(probe.rates.flops_per_s > 1e8 for probe in found.devices)


@pytest.mark.nightly
def test_a_written_cluster_can_be_read(measured: HostProbe, tmp_path: Path) -> None:
    measured.write(tmp_path / "cluster.json")
    assert read_cluster(tmp_path / "cluster.json") == measured.cluster


# --------------------------------------------------------------------------- the noun


def test_cpu_devices_share_the_memory_and_figures_have_three_digits() -> None:
    device = Device("d0", "localhost", "cpu", 4 * GIB, 61.2e9, 12.0e9, 2.35e-6, 1)
    assert CPU.cluster.devices == (device, replace(device, name="d1"))
    assert CPU.cluster.default_link == Link(48.8e-6, 1.23e9)


def test_gpu_devices_have_their_own_memory_and_link() -> None:
    devices = GPUS.cluster.devices
    assert [(d.name, d.kind, d.memory_bytes) for d in devices] == [
        ("d0", "cuda", 3 * GIB),
        ("d1", "cuda", 4 * GIB),
    ]
    assert GPUS.cluster.default_link == Link(9e-6, 11e9)


def test_a_survey_prints() -> None:
    assert str(CPU).splitlines() == [
        "host      2 cores, 8.0 GiB of memory for use",
        "cpu       61.2 GFLOP/s, 12.0 GB/s, 2.3 us per op",
        "          each of 2 processes at once, 1 thread(s) each",
        "loopback  49 us, 1.23 GB/s",
        "overheads 0 us a message, 0 us an instruction, 0 us a step",
        "cluster   2 cpu device(s), probed in 7.0 s",
    ]
    assert "gpu 2     NVIDIA T2, 5.0 GiB free, 8000.0 GFLOP/s, 300.0 GB/s, 4.0 us per op" in str(
        GPUS
    )
    assert "gpu-gpu   9 us, 11.00 GB/s" in str(GPUS)


def test_a_survey_is_a_cluster_of_unlike_devices(tmp_path: Path) -> None:
    fast, slow = Rates(61.2345e9, 12e9, 2e-6), Rates(30.66e9, 6e9, 4e-6)
    found = Survey(
        (DeviceProbe("a", "x", 1, GIB, fast), DeviceProbe("b", "y", 2, 2 * GIB, slow)),
        (("a", "b", Link(1.01234e-3, 119.876e6)),),
        took_s=9.6,
    )
    cluster = found.cluster
    assert [(d.name, d.host, d.threads, d.flops_per_s) for d in cluster.devices] == [
        ("a", "x", 1, 61.2e9),
        ("b", "y", 2, 30.7e9),
    ]
    assert cluster.link("b", "a") == Link(1.01e-3, 120e6)
    found.write(tmp_path / "cluster.json")
    assert read_cluster(tmp_path / "cluster.json") == cluster
    assert "a-b       1012 us, 0.12 GB/s" in str(found).splitlines()


SHARED = "4 threads share 2 cores: each gets what it got here"
BUSY = "the host was busy (load 1.5 on 2 cores): probe again when it is quiet"
FEW = (
    "1 of 2 devices could be GPUs, so all are CPU devices: "
    "`--devices 1 --kind cuda` describes the GPUs"
)


@pytest.mark.parametrize(
    ("changes", "notes"),
    [
        ({}, ()),
        ({"devices": 4}, (SHARED,)),
        ({"load": 0.9}, ()),
        ({"load": 1.5}, (BUSY,)),
        ({"gpus": GPUS.gpus[:1]}, (FEW,)),
        ({"gpus": GPUS.gpus}, ()),  # asked for, as there are enough
    ],
)
def test_a_survey_notes_doubtful_figures(changes: dict[str, Any], notes: tuple[str, ...]) -> None:
    found = replace(CPU, **changes)
    assert found.notes == notes
    assert [line for line in str(found).splitlines() if line.startswith("note ")] == [
        f"note      {note}" for note in notes
    ]


def test_an_existing_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match="exists already") as caught:
        CPU.write(path)
    assert (caught.value.at, caught.value.exit_code) == (str(path), 2)
    assert path.read_text(encoding="utf-8") == "mine"
    CPU.write(path, force=True)
    assert read_cluster(path) == CPU.cluster
    with pytest.raises(InputError, match="cannot write the cluster file: No such file"):
        CPU.write(tmp_path / "no" / "cluster.json")


@pytest.mark.parametrize(
    ("threads", "devices", "at"),
    [(0, 2, "--threads"), (10_000, 2, "--threads"), (1, 0, "--devices"), (1, 10_000, "--devices")],
)
def test_numbers_this_host_cannot_do(threads: int, devices: int, at: str) -> None:
    with pytest.raises(InputError, match="expected 1 to") as caught:
        probe(threads=threads, devices=devices)
    assert (caught.value.at, caught.value.exit_code) == (at, 2)


# --------------------------------------------------------------------------- processes

REPORT = """
import json, os, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
seen = {"rank": int(options["--rank"]), "lo": os.environ["GLOO_SOCKET_IFNAME"], "pid": os.getpid(),
        "threads": os.environ["OMP_NUM_THREADS"], "here": os.getcwd() in options["--out"]}
open(options["--out"], "w").write(json.dumps(seen))
"""

# Rank 0 waits for an answer that never comes, until it is ended; rank 1 fails.
FAIL = """
import os, sys, threading
open(os.environ["BIGBRAIN_FX_TEST_PIDS"], "a").write(f"{os.getpid()} ")
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if options["--rank"] == "1":
    raise SystemExit("no such luck")
threading.Event().wait(60)
"""

HANG = FAIL.replace('"1"', '"never"')


def _worker(folder: Path, text: str) -> list[str]:
    path = folder / "worker.py"
    path.write_text(text, encoding="utf-8")
    return [sys.executable, str(path)]


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_workers_report_by_rank(tmp_path: Path) -> None:
    results = run(FLEET, _worker(tmp_path, REPORT))
    assert [result["rank"] for result in results] == [0, 1]
    assert {(r["lo"], r["threads"], r["here"]) for r in results} == {("lo", "1", True)}


@pytest.mark.parametrize(
    ("text", "deadline_s", "what", "notes"),
    [
        (FAIL, 30.0, "process 1 ended with code 1", ("no such luck",)),
        (HANG, 1.0, "process 0 did not get on for", ()),
    ],
)
def test_a_worker_that_fails_ends_the_fleet(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    deadline_s: float,
    what: str,
    notes: tuple[str, ...],
) -> None:
    pids = tmp_path / "pids"
    monkeypatch.setenv("BIGBRAIN_FX_TEST_PIDS", str(pids))
    fleet = replace(FLEET, deadline_s=deadline_s)
    with pytest.raises(ProbeError, match=what) as caught:
        run(fleet, _worker(tmp_path, text))
    assert (caught.value.exit_code, caught.value.notes) == (1, notes)
    started = [int(pid) for pid in pids.read_text(encoding="utf-8").split()]
    assert started
    assert not any(_is_running(pid) for pid in started)


# Gets on three times, more than half a deadline apart: later than any deadline from the start.
SLOW = """
import json, sys, threading
from pathlib import Path
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
for _ in range(3):
    threading.Event().wait(0.6)
    Path(options["--out"]).with_suffix(".alive").touch()
Path(options["--out"]).write_text("{}")
"""


def test_a_torch_that_cannot_be_loaded_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a traceback, exit code 1, and the question whether `lo` is up."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('undefined symbol: nil')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(InputError, match=r"torch cannot be loaded \(ImportError: undefined symbol"):
        run(FLEET)


@pytest.mark.nightly
def test_a_fleet_that_gets_on_is_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (0.1, 0.1, 0.1))
    assert run(replace(FLEET, deadline_s=1.2), _worker(tmp_path, SLOW)) == [{}, {}]


@pytest.mark.gate("0.1-`lo` up")
@pytest.mark.parametrize(("load", "said"), [(40.0, "this host is busy (load 40"), (0.1, "`lo` up")])
def test_a_busy_host_is_not_blamed_on_its_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: float, said: str
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    with pytest.raises(ProbeError) as caught:
        run(FLEET, _worker(tmp_path, "raise SystemExit('no')"))
    assert said in str(caught.value.help)


def test_calls_that_load_a_kernel_do_not_count() -> None:
    """The first call takes long; each of the next stretches is as many calls as fill it."""
    calls: list[int] = []
    now = iter(float(i) for i in range(1000))  # a stretch takes a second, however many calls
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: next(now))
        per_call_s(calls.append, window_s=8.0, sync=lambda: calls.append(-1))
    assert calls[:6] == [0, -1] * 3
    assert len(calls) == 2 * (3 + 1 + 5)  # warm-up, one stretch long enough, five that count


def test_a_quota_takes_its_part_of_every_period(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor's clock stands while a thread is held: 1 ms in 8 is what it has."""
    wall = (0.001 * tick for tick in itertools.count())
    now_s = [0.0]

    def looked() -> float:
        now_s[0] = next(wall)
        return now_s[0]

    monkeypatch.setattr(time, "perf_counter", looked)
    monkeypatch.setattr(time, "thread_time", lambda: now_s[0] / 8)
    assert processor_share(1.0) == pytest.approx(1 / 8, rel=0.01)


def test_a_message_takes_longer_on_a_share_of_a_processor() -> None:
    own = {"message_s": 1e-4, "message_bytes_per_s": 4e9, "instruction_s": 2e-5, "step_s": 3e-4}
    found = stretched(own, 0.25)
    assert found == {
        "message_s": 4e-4,
        "message_bytes_per_s": 1e9,
        "instruction_s": 8e-5,
        "step_s": 1.2e-3,
    }
    assert stretched(own, 1.0) == own


def test_a_gpus_caches_are_larger_and_its_memory_is_left_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = {"bytes": 80 * GIB}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free["bytes"], 96 * GIB))
    cuda = torch.device("cuda", 0)
    assert measure._at_most(GIB, cuda) == measure._at_most(GIB, torch.device("cpu")) == GIB
    free["bytes"] = GIB
    assert measure._at_most(GIB, cuda) == GIB // 4


@pytest.mark.parametrize(("capability", "half"), [((7, 5), "float16"), ((8, 0), "bfloat16")])
def test_half_precision_is_what_a_gpu_has(
    capability: tuple[int, int], half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    names = [str(d).removeprefix("torch.") for d in measure.dtypes("cuda", torch.device("cuda", 0))]
    assert ("bfloat16" in names) == (half == "bfloat16")
    rates = {"float32": 1.0, "bfloat16": 2.0, "float16": 3.0}
    table = [
        MatmulRate(name, side, side, side, rates[name] * share)
        for name in names
        for side, share in ((2**10, 1.0), (2**9, 1e-3))
    ]
    assert half_flops_per_s(table, "cuda") == rates[half]
    assert half_flops_per_s(table[1::2], "cuda") is None  # small products alone


def test_a_gpu_whose_cublas_takes_nothing_can_be_written(tmp_path: Path) -> None:
    said = [replace(GPUS.gpus[0], blas_bytes=found) for found in (0, 32 * 2**20)]
    probe = replace(GPUS, gpus=tuple(said), gpu_links=GPUS.gpu_links[:1])
    probe.write(tmp_path / "cluster.json")
    found = read_cluster(tmp_path / "cluster.json")
    assert found == probe.cluster
    assert [device.blas_bytes for device in found.devices] == [None, 32 * 2**20]
