"""Which number a process has: launchers' variables, who wins where several speak; its report."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch

from bigbrain_fx.runtime.coded import InputError
from bigbrain_fx.runtime.control import log_limit
from bigbrain_fx.runtime.gpus import own_gpu
from bigbrain_fx.runtime.limits import SHARE_GPUS
from bigbrain_fx.runtime.rendezvous import (
    LAUNCHERS,
    _interface_to,
    environment_number,
    require_gpu,
    write_report,
)
from bigbrain_fx.supervisor import processes
from bigbrain_fx.supervisor.processes import LOG_BYTES, LOG_SHARERS


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for names in LAUNCHERS:
        for name in names.values():
            monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("kinds", "rank", "local_rank", "gpu"),
    [
        (["cuda"] * 4, 2, 2, 2),
        (["cuda"] * 4, 3, 1, 1),  # the second host's second
        (["cpu", "cuda"], 1, 1, 0),
        (["cuda", "cpu", "cuda", "cpu", "cpu", "cuda"], 5, 2, 0),
        (["cuda", "cpu", "cuda"], 2, 2, 1),
    ],
)
def test_a_process_takes_the_gpu_that_is_its_own(
    kinds: list[str], rank: int, local_rank: int, gpu: int
) -> None:
    assert own_gpu(kinds, rank, local_rank) == gpu


def test_processes_share_gpus_where_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(InputError, match=f"has 2 GPUs.*{SHARE_GPUS}=1"):
        require_gpu(["cuda"] * 4, 2)
    monkeypatch.setenv(SHARE_GPUS, "1")
    require_gpu(["cuda"] * 4, 2)
    assert [own_gpu(["cuda"] * 4, rank, rank) for rank in range(4)] == [0, 1, 0, 1]


def test_gloo_listens_on_the_way_to_rank_0() -> None:
    assert _interface_to("127.0.0.2") == "lo"
    assert _interface_to("no such host") is None
    assert _interface_to("192.0.2.1") in (None, *(name for _, name in socket.if_nameindex()))


@pytest.mark.parametrize("names", LAUNCHERS, ids=lambda names: str(names["RANK"]))
def test_each_launcher_is_read(names: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in enumerate(names.values(), 3):
        monkeypatch.setenv(name, str(number))
    found = [environment_number(name, None) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    assert found == [3, 4, 5]


def test_the_variable_with_the_plain_name_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an sbatch script Slurm speaks of the script; a supervisor has said LOCAL_RANK itself."""
    for name in ("SLURM_PROCID", "SLURM_LOCALID"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert environment_number("LOCAL_RANK", 0) == 2
    assert environment_number("WORLD_SIZE", 8) == 4
    assert environment_number("RANK", 1) == 0


def test_srun_with_pmi_has_local_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"PMI_RANK": "5", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}.items():
        monkeypatch.setenv(name, text)
    assert environment_number("LOCAL_RANK", 0) == 1


def test_nobody_has_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment_number("RANK", 7) == 7
    with pytest.raises(SystemExit, match="RANK is not set"):
        environment_number("RANK", None)


def test_the_limit_of_kept_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number, or a part of what is free on the very host that starts a process; said once."""
    quarter, part = (int(processes.log_limit({LOG_SHARERS: n})[LOG_BYTES]) for n in ("2", "2000"))
    assert 0 < part < quarter / 500
    assert processes.log_limit({LOG_BYTES: "1000"}) == {}
    monkeypatch.setenv(LOG_BYTES, "1000")
    assert log_limit() == 1000
    assert log_limit() is None


def test_a_report_says_what_tensors_took_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_report("d0", tmp_path)
    assert json.loads((tmp_path / "d0.json").read_text()).keys() == {"device", "max_rss_bytes"}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 4321)
    write_report("d1", tmp_path)
    said = json.loads((tmp_path / "d1.json").read_text())
    assert (said["device"], said["max_allocated_bytes"]) == ("d1", 4321)
    assert said["max_rss_bytes"] > 0
