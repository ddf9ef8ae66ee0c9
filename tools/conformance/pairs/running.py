"""Events after a pair's bundle is written: a kill, another cluster, a lost device.

A kill must leave the state that the undisturbed run has, tensor by tensor. A run that is moved, or
goes on without a device, must train as the plain loop does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from tools.conformance.apart import apart
from tools.conformance.faults.bundle import Fault, devices_of
from tools.conformance.faults.jobs import run_job
from tools.conformance.faults.verdicts import KEPT, Ground, judged
from tools.conformance.pairs import loops
from tools.conformance.pairs.calling import called, refusal
from tools.conformance.pairs.comparing import MICRO_BATCHES, compared, write_cluster
from tools.conformance.pairs.features import Pair

STEPS, MOVED_AT, DIES_AT = 6, 3, 3
DEADLINE_S = 300.0
DIES = """
def _dies(device, step):
    import os

    if (device.name, step) == ("{device}", {step}):
        os.kill(os.getpid(), 9)


HOOKS.on_step_begin.append(_dies)

"""


def after(pair: Pair, folder: Path) -> Mapping[str, str]:
    """Judge what comes after the split."""
    return {"P": _killed, "Q": _moved, "E": _lost}[pair.later](pair, folder)


def _ground(folder: Path) -> Ground:
    room = folder / "runs"
    room.mkdir()
    return Ground(room, folder / "bundle", devices_of(folder / "bundle"))


def _killed(pair: Pair, folder: Path) -> Mapping[str, str]:
    """One device dies in a forward, the last one before its update."""
    here = _ground(folder)
    faults = [Fault(here.names[0], 2, "forward"), Fault(here.names[-1], 4, "optimizer_step")]
    run = here.run(faults, steps=STEPS, spares=0, deadline_s=DEADLINE_S)
    found = judged(run, here.reference(STEPS), faults, "the undisturbed run's state")
    status = "bitwise" if found.status == KEPT else "wrong"
    return {"status": status, "detail": "" if status == "bitwise" else "; ".join(found.problems)}


def _lost(pair: Pair, folder: Path) -> Mapping[str, str]:
    """A device dies, and no process may be started: the others go on.

    A whole replica goes on in its processes; others are moved, from a snapshot.
    """
    here, stays = _ground(folder), pair.first.letter == "R"
    last = here.names[-1]
    copy = here.fresh([Fault(last, DIES_AT, "forward")]) if stays else _dying(folder, last)
    ours = (sys.executable, "-m", "bigbrain_fx", "run", ".", "--elastic", "--restarts", "0")
    files = ("--standby", "0", "--json", "--events", "../events.jsonl", "--logs", "../logs")
    snapshots = () if stays else ("--memory-checkpoint-every", "2")
    run = run_job(copy, (*ours, *files, *snapshots, "--steps", str(STEPS)), DEADLINE_S)
    if run.code or sorted(run.losses) != list(range(STEPS)):
        return refusal(run.code, run.said)
    if not run.of("replica_lost" if stays else "moved"):
        return {"status": "wrong", "detail": f"nothing was lost: {run.said[-1500:]}"}
    return apart(partial(_losses, pair, folder, run.losses), folder)


def _dying(folder: Path, device: str) -> Path:
    """Copy the bundle, of which a device dies whenever it comes to a step; moved ones, too."""
    copy = folder / "lost"
    shutil.copytree(folder / "bundle", copy / "bundle")
    program = copy / "bundle" / "train.py"
    text, begins = program.read_text(), "if __name__"
    if begins not in text:
        raise RuntimeError(f"{program} has no {begins!r} before which a kill can be installed")
    dies = DIES.format(device=device, step=DIES_AT) + begins
    program.write_text(dies.join(text.rsplit(begins, 1)))
    return copy


def _losses(pair: Pair, folder: Path, found: Mapping[int, float]) -> Mapping[str, str]:
    losses, _ = loops.of(pair.name)(loops.read(folder / "letters.py"), MICRO_BATCHES, STEPS)
    told = [found[step] for step in range(STEPS)]
    near = compared(pair, (losses, {}), (told, {}))
    if told == losses or near["status"] != "bitwise":
        return near
    return {"status": "reference", "detail": "losses to rounding"}


def _moved(pair: Pair, folder: Path) -> Mapping[str, str]:
    """The run ends at a commit; one device less goes on from there."""
    first = trained(folder / "bundle", "--checkpoint-every", "0", "--steps", str(MOVED_AT))
    if first:
        return {"status": "wrong", "detail": first}
    made = apart(partial(_resplit, folder, write_cluster(folder, pair.devices - 1)), folder)
    if made:
        return made
    saved = folder / "saved"
    words = ("--resume", "--steps", str(STEPS), "--save", str(saved))
    second = trained(folder / "moved", *words)
    if second:
        return {"status": "wrong", "detail": second}
    return apart(partial(_tensors, pair, folder, saved), folder)


def trained(bundle: Path, *words: str) -> str:
    """Train all devices in one process, a new one; return what it said if it failed."""
    plain = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "train.py", "--in-process", "--checkpoint-dir", "commits", *words],
        cwd=bundle,
        env={**plain, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return f"exit code {done.returncode}: {done.stderr[-1500:]}" if done.returncode else ""


def _resplit(folder: Path, devices: Path) -> Mapping[str, str]:
    words = map(str, (folder / "bundle", "-d", devices, "-o", folder / "moved"))
    code, text = called("resplit", *words, "--json")
    found = refusal(code, text) if code else {}
    if found and (folder / "moved").exists():
        return {**found, "status": "wrong", "detail": f"left a bundle: {found['detail']}"}
    return found


def _tensors(pair: Pair, folder: Path, saved: Path) -> Mapping[str, str]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(saved.glob("*.safetensors")):
        found.update(load_file(path))
    loop = loops.of(pair.name)
    losses, tensors = loop(loops.read(folder / "letters.py"), MICRO_BATCHES, STEPS)
    return compared(pair, (losses, tensors), (losses, found))
