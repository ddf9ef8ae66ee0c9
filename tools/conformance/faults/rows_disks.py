"""Rows 14, 17 and 18: connections that drop all packets, a full disk, broken files of commits."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bigbrain_fx.runtime.checkpoint_store import CheckpointStore
from tools.conformance.faults.bundle import Fault
from tools.conformance.faults.jobs import Live, Run
from tools.conformance.faults.rows_processes import HANG_S
from tools.conformance.faults.rows_runs import remaining
from tools.conformance.faults.verdicts import (
    BROKEN,
    NOT_BUILT,
    STEPS,
    Ground,
    Verdict,
    judged,
    stopped,
    together,
)

DISK_BYTES = 16 * 2**20
# a bucket that is smaller than any message: the kernel drops what does not fit
DROPPING = ("root", "tbf", "rate", "8bit", "burst", "60", "latency", "1ms")
LOAD_S = 5.0


def needs_root() -> Verdict | None:
    """Return what to say where this host does not let us make namespaces and mounts."""
    if os.geteuid() == 0 and shutil.which("unshare") and shutil.which("tc"):
        return None
    return Verdict(NOT_BUILT, "not run: it needs root, unshare, ip and tc")


# --------------------------------------------------------------------------- connections


def packets_dropped(ground: Ground) -> Verdict:
    """Row 14: all packets are dropped until connections are given up; then a flap of the link."""
    refused = needs_root()
    if refused is not None:
        return refused

    def mend(live: Live) -> None:
        live.wait_struck(0)
        live.wait_event("links_lost")
        _in_namespace(live, "tc", "qdisc", "del", "dev", "lo", "root")
        until = live.wait_struck(1) + 1.0
        while time.time() < until:  # the link is down for a second: that is the fault
            time.sleep(0.01)
        _in_namespace(live, "ip", "link", "set", "lo", "up")

    drop = ("tc", "qdisc", "add", "dev", "lo", *DROPPING)
    faults = [
        Fault("d1", 3, "send", 1, "run", words=drop),
        Fault("d2", 7, "send", 1, "run", after=0, words=("ip", "link", "set", "lo", "down")),
    ]
    prefix = ("unshare", "-n", "sh", "-c", 'ip link set lo up; exec "$@"', "sh")
    run = ground.run(faults, spares=0, hang_s=HANG_S, during=mend, prefix=prefix)
    dropped_s = _formed_after(run, 0)
    outcome = f"dropped: connected anew after T_op = {HANG_S:g} s, resent; a flap of 1 s: waited"
    more = ["somebody was ended"] if run.of("died") else []
    return judged(run, ground.reference(), faults, outcome, HANG_S + 2.0, dropped_s, more)


def _formed_after(run: Run, number: int) -> float | None:
    at = run.struck.get(number)
    later = [e["time"] - at for e in run.of("formed") if at is not None and e["time"] >= at]
    return min(later, default=None)


def _in_namespace(live: Live, *words: str) -> None:
    net = f"--net=/proc/{live.process.pid}/ns/net"
    subprocess.run(("nsenter", net, *words), check=True, timeout=30)


# --------------------------------------------------------------------------- a full disk


def disk_full(ground: Ground) -> Verdict:
    """Row 17: a disk of 16 MiB is filled in step 3 and has room again in step 9."""
    refused = needs_root()
    if refused is not None:
        return refused
    with _small_disk(ground.folder / f"disk-{ground.count}") as disk:
        return _with_full_disk(ground, disk)


def _with_full_disk(ground: Ground, disk: Path) -> Verdict:
    commits, filler = disk / "commits", disk / "filler"

    def look(live: Live) -> None:
        live.wait_struck(0)
        live.wait_for(lambda: _warnings(live.folder) > 0, "a warning")
        live.facts["loadable"] = _loadable(commits)

    faults = [
        Fault("d0", 3, "begin", what="run", words=("sh", "-c", f"cat /dev/zero > {filler} || :")),
        Fault("d0", 8, "end", what="sleep", seconds=1.0, after=0),
        Fault("d0", 9, "begin", what="run", words=("rm", str(filler)), after=1),
    ]
    words = ("--commits", str(commits), "--commit-every", "2")
    run = ground.run(faults, *words, spares=0, during=look)
    newest = [record.step for record in CheckpointStore(commits).records()]
    checks = {
        "no older commit could be loaded while the disk was full": run.facts.get("loadable"),
        f"warnings: {_warnings(run.folder)}": _warnings(run.folder) >= 2,
        f"commits at the end: {newest}": newest[:1] == [STEPS],
        "temporary files on the disk": not list(commits.rglob("*.tmp")),
    }
    more = [text for text, holds in checks.items() if not holds]
    outcome = f"{_warnings(run.folder)} warnings, 0 steps lost, the older commit stays"
    return judged(run, ground.reference(), faults, outcome, more=more)


@contextmanager
def _small_disk(place: Path) -> Iterator[Path]:
    place.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "small-disk", str(place))
    subprocess.run(mount, check=True, timeout=30)
    try:
        yield place
    finally:
        subprocess.run(("umount", "--lazy", str(place)), check=True, timeout=30)


def _warnings(folder: Path) -> int:
    texts = [file.read_text(errors="replace") for file in (folder / "logs").glob("*.log")]
    return sum(text.count("WARNING: no commit at step") for text in texts)


def _loadable(commits: Path) -> bool:
    for record in CheckpointStore(commits).records()[:1]:
        for device in record.devices:
            CheckpointStore(commits).load(record, device, {}, lambda _: None)
        return True
    return False


# --------------------------------------------------------------------------- broken files


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-(len(data) // 3)] ^= 4
    path.write_bytes(data)


def _zero_tail(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


SPOILS: dict[str, Callable[[Path], object]] = {
    "a flipped bit": _flip,
    "a zero tail": _zero_tail,
    "a truncated file": _truncate,
    "a missing file": Path.unlink,
}


def broken_files(ground: Ground) -> Verdict:
    """Row 18: one file of the newest commit is broken, in four ways; then both commits are."""
    kept = ground.folder / f"kept-{ground.count}"
    made = ground.in_process("--commits", str(kept), "--commit-every", "2", steps=8)
    if made.code:
        return Verdict(BROKEN, "no commits", problems=(made.said[-500:],))
    found = [_with_broken(ground, kept, name) for name in SPOILS]
    found.append(_supervised_with_broken(ground, kept))
    found.append(_all_broken(ground, kept))
    return together(found, "named, the older commit is taken; both broken: nothing is started")


def _spoiled(ground: Ground, kept: Path, spoil: Callable[[Path], object], count: int) -> Path:
    copy = ground.folder / f"broken-{ground.count}"
    shutil.copytree(kept, copy)
    for record in CheckpointStore(copy).records()[:count]:
        spoil(copy / record.folder / "d2.safetensors")
    return copy


def _with_broken(ground: Ground, kept: Path, name: str) -> Verdict:
    commits = _spoiled(ground, kept, SPOILS[name], 1)
    run = ground.in_process("--commits", str(commits), "--resume")
    return _fell_back(ground, run, name)


def _supervised_with_broken(ground: Ground, kept: Path) -> Verdict:
    commits = _spoiled(ground, kept, _flip, 1)
    run = ground.run((), "--commits", str(commits), "--resume", spares=0)
    return _fell_back(ground, run, "a flipped bit")


def _fell_back(ground: Ground, run: Run, name: str) -> Verdict:
    warned = [line for line in run.said.splitlines() if "is broken:" in line]
    names_tensor = any("parameter:" in line or "optimizer:" in line for line in warned)
    checks = {
        f"{name}: the file is not named: {warned}": any("d2.safetensors" in x for x in warned),
        f"{name}: the tensor is not named: {warned}": names_tensor or name != "a flipped bit",
        f"{name}: not said to go back": "going back to the older commit of step 6" in run.said,
        f"{name}: began with step {min(run.losses, default=-1)}": min(run.losses, default=-1) == 6,
    }
    more = [text for text, holds in checks.items() if not holds]
    return judged(run, remaining(ground, run), (), "", LOAD_S, _joined_s(run), more)


def _joined_s(run: Run) -> float | None:
    """Return how long looking at commits and loading took where nobody else was waited for."""
    files = (run.folder / "bundle" / "faults").glob("joined-*")
    return min((float(file.read_text()) for file in files), default=None)


def _all_broken(ground: Ground, kept: Path) -> Verdict:
    run = ground.in_process("--commits", str(_spoiled(ground, kept, _flip, 2)), "--resume")
    checks = {
        f"exit code {run.code}": run.code == 2,
        "a step was run": not run.losses,
        "no reason is given": "commits is whole: nothing was started" in run.said,
    }
    return stopped(run, "", checks, _joined_s(run), LOAD_S)
