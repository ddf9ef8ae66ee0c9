"""A process that dies while it writes into its store: what is half written there is never read."""

from __future__ import annotations

from pathlib import Path

import pytest

import bigbrain_fx
from bigbrain_fx.core import Cluster, DeviceStore
from bigbrain_fx.plan import Options
from tests.support.bundles import MODEL, cluster, edit
from tests.support.replayed import supervised

NAMES, STEPS = ("d0", "d1"), 5
DIES = '''

WRITES = 0


def _is_last(device: str) -> bool:
    """Whether this write is the one that a device dies in."""
    global WRITES
    WRITES += 1
    died = Path(__file__).parents[1] / "struck-store"
    if device != "d1" or WRITES != AT or died.exists():
        return False
    died.touch()
    return True
'''


def storing(folder: Path, schedule: str) -> Path:
    folder.mkdir()
    (folder / "letters.py").write_text(MODEL.replace("16", "64"))  # a page of state and more
    made = cluster(len(NAMES))
    stores = (DeviceStore(f"s{name}", name, 1 << 30, 1e12, str(folder)) for name in NAMES)
    where = Cluster(made.devices, made.default_link, stores=tuple(stores))
    options = Options("naive", schedule=schedule, micro_batches=4, offload=("activations", "state"))
    return bigbrain_fx.split(folder / "letters.py", where, folder / "bundle", options).bundle


@pytest.mark.nightly
@pytest.mark.parametrize("at", [7, 22])
@pytest.mark.parametrize("schedule", ["1f1b", "gems"])
def test_a_process_that_dies_in_a_write_is_replaced(tmp_path: Path, schedule: str, at: int) -> None:
    bundle = storing(tmp_path / "made", schedule)
    undisturbed = supervised(bundle, tmp_path / "undisturbed", NAMES, STEPS)
    file = bundle / "runtime" / "stores.py"
    edit(
        file,
        "        self._move(os.pwrite, room, data.cpu())",
        "        if _is_last(self.device):\n"
        "            self._move(os.pwrite, room, data[: len(data) // 2])\n"
        "            os.kill(os.getpid(), 9)\n"
        "        self._move(os.pwrite, room, data.cpu())",
    )
    file.write_text(file.read_text() + DIES.replace("AT", str(at)))
    seen = supervised(bundle, tmp_path / "run", NAMES, STEPS)
    assert [event["device"] for event in seen.of("died")] == ["d1"]
    assert seen.losses == undisturbed.losses
    assert seen.hashes == undisturbed.hashes
    assert not [path for path in (tmp_path / "made").iterdir() if path.name.startswith("tmp")]
