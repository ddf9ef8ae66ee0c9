"""Which number a process has: the launchers' variables, and who wins where several speak."""

from __future__ import annotations

import pytest

from bigbrain_fx.runtime.control import log_limit
from bigbrain_fx.runtime.rendezvous import LAUNCHERS, environment_number
from bigbrain_fx.supervisor import processes
from bigbrain_fx.supervisor.processes import LOG_BYTES, LOG_SHARERS


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for names in LAUNCHERS:
        for name in names.values():
            monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("names", LAUNCHERS, ids=lambda names: str(names["RANK"]))
def test_each_launcher_is_read(names: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in enumerate(names.values(), 3):
        monkeypatch.setenv(name, str(number))
    found = [environment_number(name, None) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    assert found == [3, 4, 5]


def test_what_stands_under_the_plain_name_wins(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_how_much_of_sent_messages_may_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number, or a part of what is free on the very host that starts a process; said once."""
    quarter, part = (int(processes.log_limit({LOG_SHARERS: n})[LOG_BYTES]) for n in ("2", "2000"))
    assert 0 < part < quarter / 500
    assert processes.log_limit({LOG_BYTES: "1000"}) == {}
    monkeypatch.setenv(LOG_BYTES, "1000")
    assert log_limit() == 1000
    assert log_limit() is None
