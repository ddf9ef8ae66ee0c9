"""What memory is left: of the host, of a control group of either version, of those around it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from bigbrain_fx.supervisor.host_memory import available_bytes, left_bytes

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
