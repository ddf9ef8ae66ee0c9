"""Memory of a host, and processes that the kernel ends for lack of it."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from bigbrain_fx.runtime.control import last_word
from bigbrain_fx.supervisor.events import status
from bigbrain_fx.supervisor.host_memory import WITHIN_S, MemoryKills, available_bytes, left_bytes
from bigbrain_fx.supervisor.judging import Death, Judge


def counted(path: Path, number: int) -> Path:
    path.write_text(f"nr_free_pages 5\noom_kill {number}\nnuma_hit 7\n")
    return path


def killed(step: int = -1, device: str = "d0", *, for_memory: bool = True) -> Death:
    return Death(device, step, -9, None, "log", finished_one=step > 0, for_memory=for_memory)


def test_a_sigkill_after_a_rise_is_the_kernels(tmp_path: Path) -> None:
    counts = counted(tmp_path / "vmstat", 60)
    kills = MemoryKills(counts)
    assert not kills.meant(-signal.SIGKILL, 1.0)  # somebody's `kill -9`
    counted(counts, 62)
    assert not kills.meant(-signal.SIGTERM, 2.0)
    assert not kills.meant(1, 2.0)
    assert kills.meant(-signal.SIGKILL, 2.0)
    assert kills.meant(-signal.SIGKILL, 2.1)  # the second of the two
    assert not kills.meant(-signal.SIGKILL, 2.1 + WITHIN_S)


def test_a_rise_long_before_is_another_program_s(tmp_path: Path) -> None:
    counts = counted(tmp_path / "vmstat", 60)
    kills = MemoryKills(counts)
    counted(counts, 61)
    kills.look(10.0)
    assert not kills.meant(-signal.SIGKILL, 11.0 + WITHIN_S)


@pytest.mark.parametrize("text", ["", "oom_kill\n", "oom_kill many\n", "nr_free_pages 5\n"])
def test_a_kernel_that_does_not_count_means_none(tmp_path: Path, text: str) -> None:
    counts = tmp_path / "vmstat"
    assert not MemoryKills(counts).meant(-signal.SIGKILL, 1.0)  # no such file
    counts.write_text(text)
    assert not MemoryKills(counts).meant(-signal.SIGKILL, 1.0)


def test_memory_that_runs_out_before_the_first_step_ends_the_run_at_the_second_time() -> None:
    judge = Judge(20, 600.0)
    assert judge.stop_for(killed(), 0.0) is None
    stop = judge.stop_for(killed(), 1.0)
    assert stop is not None
    assert stop.moves
    assert "--activation-checkpointing all" in stop.more
    assert "as memory ran out" in killed().how


def test_memory_that_runs_out_at_one_step_again_ends_the_run() -> None:
    judge = Judge(20, 600.0)
    assert judge.stop_for(killed(7), 0.0) is None
    assert judge.stop_for(killed(7, "d1"), 1.0) is None
    assert judge.stop_for(killed(9), 2.0) is None  # it came further
    stop = judge.stop_for(killed(9), 3.0)
    assert stop is not None
    assert stop.reason == "memory ran out at the same step again"


def failed(step: int, free: str) -> Death:
    gpu = f"CUDA out of memory. Tried to allocate 2.00 GiB, {free} GiB of it free (at 0x7f)\nmore"
    word = last_word(torch.OutOfMemoryError(gpu), 1)
    return Death("d0", step, 1, word.said, "log", step > 0, told_memory=word.of_memory)


def test_a_gpu_whose_memory_runs_out_at_one_step_again_ends_the_run() -> None:
    judge = Judge(20, 600.0)
    assert judge.stop_for(failed(7, "0.12"), 0.0) is None
    assert judge.stop_for(failed(8, "0.12"), 1.0) is None  # it came further
    stop = judge.stop_for(failed(8, "0.97"), 2.0)  # other numbers, the same error
    assert stop is not None
    assert stop.reason == "memory ran out at the same step again"
    assert "--activation-checkpointing all" in stop.more
    assert not stop.moves
    text = failed(7, "0.12").text or ""
    assert text.startswith("OutOfMemoryError: memory has run out (CUDA out of memory. Tried")
    assert "--offload" in text
    assert "more" not in text.partition(":")[2].partition(")")[0]


def test_a_line_says_why_a_process_ended() -> None:
    entry = {"event": "died", "generation": 0, "device": "d0", "how": "ended with exit code 1"}
    entry |= {"step": 3, "pid": 5, "silent_s": 0.1}
    why = {"text": f"ValueError: no {'x' * 400}\nmore"}
    assert status({**entry, "text": None}) == "[generation 0] d0 ended with exit code 1 in step 3"
    long = status({**entry, **why}) or ""
    assert long.startswith("[generation 0] d0 ended with exit code 1 in step 3: ValueError: no xxx")
    assert "more" not in long
    assert len(long) < 300


def test_processes_killed_by_others_are_replaced() -> None:
    judge = Judge(20, 600.0)
    assert [judge.stop_for(killed(7, for_memory=False), float(n)) for n in range(5)] == [None] * 5


# --------------------------------------------------------------------------- memory that is left


GIB = 2**30
HOST = {"proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {32 << 20} kB\n"}
TWO = {
    **HOST,
    "proc/self/cgroup": "0::/pod/work\n",
    "sys/fs/cgroup/pod/work/memory.max": "max\n",
    "sys/fs/cgroup/pod/work/memory.current": f"{GIB}\n",
    "sys/fs/cgroup/pod/memory.max": f"{8 * GIB}\n",
    "sys/fs/cgroup/pod/memory.current": f"{5 * GIB}\n",
    "sys/fs/cgroup/pod/memory.stat": f"anon 7\nactive_file 5\ninactive_file {GIB}\n",
}
ONE = {
    **HOST,
    "proc/self/cgroup": "9:name=systemd:/\n4:memory:/host/path\n",  # not there in the container
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
    "sys/fs/cgroup/memory/memory.stat": f"cache 5\ntotal_inactive_file {GIB // 2}\n",
}
FULL = {**TWO, "sys/fs/cgroup/pod/memory.current": f"{10 * GIB}\n"}


def root(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "left"),
    [(HOST, 32 * GIB), (TWO, 4 * GIB), (ONE, GIB * 3 // 2), (FULL, 0)],
    ids=["host", "version 2", "version 1", "full"],
)
def test_the_least_of_all_limits_is_what_is_left(
    files: Mapping[str, str], left: int, tmp_path: Path
) -> None:
    assert available_bytes(root(tmp_path, files)) == left


def test_a_host_without_memory_figures(tmp_path: Path) -> None:
    assert left_bytes(tmp_path) == float("inf")
    assert available_bytes(tmp_path) == GIB
