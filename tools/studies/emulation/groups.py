"""Control groups of both kinds: a quota for the threads that compute, a limit of memory.

This file knows the two file systems (v1: one tree per controller; v2: one tree, threads in a
threaded group below the device's own); what limits are right is `quotas`' to know.

    v1  cpu/[own]/NAME             v2  NAME                   weight: served before others
        cpu/[own]/NAME/D-compute       NAME/D                 memory.max
        memory/[own]/NAME/D            NAME/D/compute         cpu.max, threaded
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bigbrain_fx.errors import InputError
from tools.studies.emulation.quotas import Quota
from tools.studies.emulation.watchdog import sweep

PREFIX = "bigbrain-emulate-"
MOUNT = Path("/sys/fs/cgroup")
MOST_SHARES, MOST_WEIGHT = 262_144, 10_000  # the kernel's limits, v1 and v2


@dataclass(frozen=True)
class Joined:
    """What a device's process writes itself into: `process`; and its thread, later: `compute`."""

    process: tuple[str, ...]
    compute: str
    out_of_memory: Path


@dataclass(frozen=True)
class Trees:
    """Where groups can be made: `cpu` and `memory` are the same folder in version 2."""

    version: Literal[1, 2]
    cpu: Path
    memory: Path
    mount: Path = MOUNT


@dataclass(frozen=True)
class Groups:
    """The groups of one emulation; `folders` are what must be removed."""

    folders: tuple[Path, ...]
    of: Mapping[str, Joined]

    def remove(self) -> None:
        """Kill what is still in them and remove them.

        Raises:
            InputError: the kernel does not let go of one.
        """
        left = sweep(self.folders)
        if left:
            raise InputError(
                f"cannot remove the control group {left[0]}",
                help=f"see which processes are in {left[0] / 'cgroup.procs'}",
            )


def find_trees(mount: Path = MOUNT, own: str | None = None) -> Trees:
    """Find where groups with a CPU quota and a memory limit can be made.

    In version 1 they are made below this process's own group, whose limits then hold too. In
    version 2 that is not possible (a group with processes cannot have groups with memory limits),
    so they are made at the top.

    Args:
        mount: where control groups are mounted; tests bring their own.
        own: the text of /proc/self/cgroup.

    Raises:
        InputError: neither version has both controllers.
    """
    own = Path("/proc/self/cgroup").read_text() if own is None else own
    cpu, memory = _first_version(mount, own, "cpu"), _first_version(mount, own, "memory")
    if cpu is not None and memory is not None:
        return Trees(1, cpu, memory, mount)
    for root in (mount, mount / "unified"):
        if {"cpu", "memory"} <= set(_text(root / "cgroup.controllers").split()):
            return Trees(2, root, root, mount)
    raise InputError(
        f"no control groups with cpu and memory controllers under {mount}",
        help="mount them (version 1 or 2) to emulate a cluster",
    )


def make_groups(trees: Trees, quotas: Mapping[str, Quota]) -> Groups:
    """Make the groups of one emulation.

    Raises:
        InputError: the kernel refuses; nothing is left of them.
    """
    name = f"{PREFIX}{os.getpid()}-{_started(os.getpid())}-{os.urandom(3).hex()}"
    folders = tuple(dict.fromkeys((trees.cpu / name, trees.memory / name)))
    try:
        if trees.version == 1:
            return Groups(folders, _make_first(folders, quotas))
        return Groups(folders, _make_second(trees.cpu, folders[0], quotas))
    except OSError as error:
        sweep(folders)
        raise InputError(
            f"cannot make a control group: {error.strerror}",
            at=str(error.filename),
            help="run as root, in a container with the right to make control groups",
        ) from error


def sweep_leftovers(trees: Trees) -> list[Path]:
    """Remove groups whose owner is gone; return those that were found."""
    found = [folder for folder in _ours(trees) if not _owner_lives(folder.name)]
    sweep(found)
    return found


def _make_first(folders: tuple[Path, ...], quotas: Mapping[str, Quota]) -> Mapping[str, Joined]:
    cpu, memory = folders
    for folder in folders:
        folder.mkdir()
    (cpu / "cpu.shares").write_text(str(MOST_SHARES))
    joined = {}
    for name, quota in quotas.items():
        compute, held = cpu / f"{name}-compute", memory / name
        compute.mkdir()
        held.mkdir()
        (compute / "cpu.cfs_period_us").write_text(str(quota.period_us))
        (compute / "cpu.cfs_quota_us").write_text(str(quota.quota_us))
        (held / "memory.limit_in_bytes").write_text(str(quota.memory_bytes))
        process = (str(held / "cgroup.procs"), str(cpu / "cgroup.procs"))
        joined[name] = Joined(process, str(compute / "tasks"), held / "memory.oom_control")
    return joined


def _make_second(root: Path, top: Path, quotas: Mapping[str, Quota]) -> Mapping[str, Joined]:
    _allow(root, "+cpu +memory")
    top.mkdir()
    _allow(top, "+cpu +memory")
    (top / "cpu.weight").write_text(str(MOST_WEIGHT))
    joined = {}
    for name, quota in quotas.items():
        held, compute = top / name, top / name / "compute"
        held.mkdir()
        (held / "memory.max").write_text(str(quota.memory_bytes))
        compute.mkdir()
        (compute / "cgroup.type").write_text("threaded")
        _allow(held, "+cpu")
        (compute / "cpu.max").write_text(f"{quota.quota_us} {quota.period_us}")
        joined[name] = Joined(
            (str(held / "cgroup.procs"),), str(compute / "cgroup.threads"), held / "memory.events"
        )
    return joined


def _allow(folder: Path, controllers: str) -> None:
    (folder / "cgroup.subtree_control").write_text(controllers)


def was_out_of_memory(joined: Joined) -> bool:
    """Say whether the kernel killed a process of this device for its memory limit."""
    words = _text(joined.out_of_memory).split()
    counts = dict(zip(words[::2], words[1::2], strict=False))
    return int(counts.get("oom_kill", 0)) > 0


def _first_version(mount: Path, own: str, controller: str) -> Path | None:
    """Return this process's own group in the version 1 tree of a controller, if there is one."""
    for line in own.splitlines():
        _, names, path = line.split(":", 2)
        if controller not in names.split(","):
            continue
        for tree in (mount / names, mount / controller):
            if tree.is_dir():
                folder = tree / path.lstrip("/")
                return folder if folder.is_dir() else tree  # in a container: the host's path
    return None


def _ours(trees: Trees) -> Iterator[Path]:
    """Yield the groups of every emulation, wherever its process stood."""
    for name in ("cpu", "cpu,cpuacct", "memory", ".", "unified"):
        tree = trees.mount / name
        if not tree.is_dir():
            continue
        for path, folders, _ in os.walk(tree):
            ours = [folder for folder in folders if folder.startswith(PREFIX)]
            yield from (Path(path, folder) for folder in ours)
            folders[:] = [] if name == "." else [f for f in folders if f not in ours]


def _owner_lives(name: str) -> bool:
    pid, started, *_ = [*name.removeprefix(PREFIX).split("-"), "", ""]
    return started != "" and _started(int(pid)) == started


def _started(pid: int) -> str:
    """Return when a process started, in the kernel's ticks: with its id, its identity."""
    words = _text(Path("/proc", str(pid), "stat")).rpartition(")")[2].split()
    return words[19] if words else ""


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
