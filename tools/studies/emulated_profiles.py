"""Profile a model on every device of an emulated cluster, all at once: they share the machine.

Each device has a database of its own. What a device computes faster than others it computes so
much more often, so that none is alone for long.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bigbrain_fx.bundles.launch import Command, RunError
from tools.studies.emulation.network import Network
from tools.studies.emulation.started import NursedProcess

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 900.0
_POLL_S = 0.2


def profile_devices(
    net: Network,
    model: Path,
    rows: int,
    folder: Path,
    rounds: int,
    *,
    tensor_shares: Sequence[int] = (),
    anew: bool = True,
) -> Mapping[str, Path]:
    """Measure a model's ops on each device; return the database of each.

    Args:
        net: where.
        model: the file.
        rows: of a micro-batch.
        folder: for databases and logs.
        rounds: of the slowest device.
        tensor_shares: of a tensor group's members, whose parts are measured, too.
        anew: whether databases that are there are replaced, and not added to.

    Raises:
        RunError: a device's process failed, or none of them ended in time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    slowest = min(quota.cores for quota in net.quotas.values())
    running = []
    for rank, (name, quota) in enumerate(net.quotas.items()):
        store, log = folder / f"{name}.sqlite", folder / f"{name}.log"
        if anew:
            store.unlink(missing_ok=True)
        wanted = _wanted(model, store, rows, round(rounds * quota.cores / slowest))
        wanted = {**wanted, "tensor_shares": list(tensor_shares)}
        running.append((name, log, net.spawn(_command(net, name, rank, wanted, log))))
    try:
        _wait(running)
    finally:
        for _, _, process in running:
            process.kill()
            process.wait()
    return {name: folder / f"{name}.sqlite" for name in net.quotas}


def _wanted(model: Path, store: Path, rows: int, rounds: int) -> Mapping[str, object]:
    return {
        "location": str(model),
        "store": str(store.resolve()),
        "rows": [rows],
        "threads": 1,
        "rounds": rounds,
        "seed": 0,
        "training": True,
        "assume": {},
        "leaves": [],
        "device": "cpu",
        "tensor_axes": [],
    }


def _command(
    net: Network, name: str, rank: int, wanted: Mapping[str, object], log: Path
) -> Command:
    words = ("-m", "tools.studies.emulated_profiled", net.groups.of[name].compute)
    environment = {**os.environ, "RANK": str(rank), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    everything = (sys.executable, *words, json.dumps(net.cpus[name]), json.dumps(wanted))
    return Command(name, everything, log.parent, environment, log, reports=False)


def _wait(running: Sequence[tuple[str, Path, NursedProcess]]) -> None:
    until = time.monotonic() + DEADLINE_S
    for name, log, process in running:
        try:
            code = process.wait(max(_POLL_S, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise _failed(name, log, f"took longer than {DEADLINE_S:g} s") from None
        if code != 0 or '"measured"' not in log.read_text():
            raise _failed(name, log, f"ended with code {code}")


def _failed(name: str, log: Path, how: str) -> RunError:
    last = log.read_text().splitlines()[-8:]
    return RunError(f"profiling on device {name} {how}", at=str(log), notes=tuple(last))
