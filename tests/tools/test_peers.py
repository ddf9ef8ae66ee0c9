"""The table over peers: what is counted, what a death looks like, who is told to be absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import peers
from tools.peers import PEERS, Peer, PeerRow, Trained, lines_beside_plain, measured, told, trained

# Rank 1 waits to be killed; rank 0 then ends, as under torchrun, or takes its place. Its memory
# can be read only while it is there: it stays until that was done once.
FAKE = """
'''Two ranks.'''
import os, pathlib, signal, subprocess, sys, time
for step in range(3):
    print(f"STEP 0 {step} {2.0 - step}", flush=True)
other = subprocess.Popen(["sleep", "60"], env={**os.environ, "RANK": "1"})
for step in range(2, 6):
    print(f"STEP 0 {step} {2.0 - step}", flush=True)
    if step == 2 and os.environ["KILLED"]:
        code = other.wait()
        if os.environ["KILLED"] == "ends":
            sys.exit(1)
other.kill()
seen, deadline = pathlib.Path(os.environ["SEEN"]), time.monotonic() + 60
while not seen.exists() and time.monotonic() < deadline:
    time.sleep(0.01)
"""
FAKE_PEER = Peer("fake", "fake", by_torchrun=False)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    (tmp_path / "fake.py").write_text(FAKE.replace("range(3)", "range(2)"))
    monkeypatch.setattr(peers, "SCRIPTS", tmp_path)
    monkeypatch.setattr(peers, "KILLED_AFTER", 2)
    monkeypatch.setattr(peers, "SETTLED", 1)
    monkeypatch.setenv("KILLED", "")
    seen, memory = tmp_path / "seen", peers._memory
    monkeypatch.setenv("SEEN", str(seen))

    def memory_seen(pid: int) -> dict[int, int]:
        found = memory(pid)
        seen.touch()
        return found

    monkeypatch.setattr(peers, "_memory", memory_seen)
    return monkeypatch


def test_a_run_in_peace(fake: pytest.MonkeyPatch) -> None:
    del fake
    found = trained(FAKE_PEER)
    assert found.losses == tuple(2.0 - step for step in range(6))
    assert (found.code, found.killed) == (0, False)
    assert found.memory_bytes > 2**20
    assert found.rows_per_s > 0.0 <= found.others


@pytest.mark.parametrize(("how", "code", "after"), [("ends", 1, 0), ("goes on", 0, 3)])
def test_a_death(fake: pytest.MonkeyPatch, how: str, code: int, after: int) -> None:
    fake.setenv("KILLED", how)
    found = trained(FAKE_PEER, kill=True)
    assert (found.killed, found.code, found.after_kill) == (True, code, after)


def test_rows_say_what_was_found() -> None:
    quiet = Trained((2.0, 1.0), 3.25, 40.0, 30.0, 0.0, 5 << 20, 0)
    row = PeerRow(
        PEERS[1], 7, quiet, Trained((2.0, 1.0), 3.0, 40.0, 30.0, 0.0, 5 << 20, 0, 1, killed=True)
    )
    cells = told(row, (2.0, 1.0))
    assert cells["losses"] == "the bits"
    assert cells["kill"] == "goes on: 1 more steps, the same losses"
    assert cells["wall"] == "30.0"
    rates = told(row, (2.0, 1.0), [10.0, 20.0, 30.0])["wall"]
    assert rates == "20.0 (15.0 to 25.0; 3 runs)"
    assert told(row, (2.0, 1.0), [10.0])["wall"] == "not measured"
    assert told(row, (2.0, 1.1))["losses"] == "OTHERS: 9.1e-02 apart"
    assert lines_beside_plain("plain") == 0
    assert 0 < lines_beside_plain("ours") < lines_beside_plain("pipelining")


def test_who_is_not_installed_is_a_row() -> None:
    row = measured(Peer("theirs", "ddp", "no_such_package"))
    assert told(row, ())["losses"] == "no_such_package is not installed here"
