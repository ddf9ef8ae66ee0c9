"""Processes without a supervisor: one is killed, all start again from the last commit."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from bigbrain_fx.bundles.launch import PEER_LOST, free_port
from bigbrain_fx.runtime.checkpoint_store import CheckpointStore
from tests.support import warm
from tests.support.bundles import copied, edit, split_small

STEPS, EVERY = 8, 2
DIE = """

def _die(step):
    import os, signal
    from pathlib import Path

    mark = Path(__file__).parent / "died"
    if step == 5 and os.environ.get("RANK") == "1" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, nursery: object) -> Path:
    return split_small(tmp_path_factory.mktemp("restart"))


def start(bundle: Path, rank: int, port: int, **more: str) -> warm.Popen:
    plain = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    ours = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = [sys.executable, "train.py", "--steps", str(STEPS), "--deadline", "60"]
    words += ["--checkpoint-dir", "commits", "--checkpoint-every", str(EVERY)]
    return warm.Popen(
        words,
        cwd=bundle,
        env={**plain, **ours, **place, **more},
        stdin=warm.DEVNULL,
        stdout=warm.DEVNULL,
        stderr=warm.PIPE,
        text=True,
    )


def run_both(bundle: Path, **more: str) -> tuple[list[int], str]:
    """Run both devices to their end; return their exit codes and what they said."""
    port, said = free_port(), ""
    processes = [start(bundle, rank, port, **more) for rank in range(2)]
    try:
        for process in processes:
            said += process.communicate(timeout=120)[1]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [process.returncode for process in processes], said


def checks(folder: Path) -> dict[str, str]:
    """Return a checksum of every tensor of the newest commit."""
    (record, *_) = CheckpointStore(folder).records()
    assert record.step == STEPS
    found: dict[str, str] = {}
    for device in record.devices:
        checked = CheckpointStore(folder).load(record, device, {}, print).checks
        found.update({f"{device}: {name}": check for name, check in checked.items()})
    return found


def test_a_killed_process_and_a_restart_leave_the_same_bits(bundle: Path, tmp_path: Path) -> None:
    codes, _ = run_both(bundle)
    assert codes == [0, 0]
    dying = copied(bundle, tmp_path)
    (dying / "commits").rename(tmp_path / "of-another-run")
    edit(dying / "training.py", "dice = torch.Gen", "_die(step)\n        dice = torch.Gen")
    (dying / "training.py").write_text((dying / "training.py").read_text() + DIE)
    codes, _ = run_both(dying)
    assert codes == [PEER_LOST, -signal.SIGKILL]
    codes, said = run_both(dying, TORCHELASTIC_RESTART_COUNT="1")
    assert codes == [0, 0]
    assert "restarted: all devices go on from the last checkpoint; none kept its state" in said
    assert re.search("going on from the checkpoint of step [24]", said)  # 4 may not be written yet
    assert checks(dying / "commits") == checks(bundle / "commits")
