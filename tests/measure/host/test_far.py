"""Hosts that are asked by ssh: what they find comes back, and who does not answer is named."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bigbrain_fx.core import VERSION
from bigbrain_fx.errors import InputError
from bigbrain_fx.measure import Hosts, survey_hosts
from bigbrain_fx.measure.host import far
from bigbrain_fx.measure.host.far import require_answers
from bigbrain_fx.measure.host.fleet import Fleet, run
from tests.support.command_line import call

SSH = """#!/bin/sh
# stands in for ssh: two loopback addresses are the hosts; what it is told goes to a shell
while [ "$1" = -o ]; do shift 2; done
case $1 in 127.0.0.*) exec env -i PATH="$PATH" sh -c "$2";; esac
echo "ssh: Could not resolve hostname $1" >&2; exit 255
"""
WORKER = """
import json, os, sys
rank, out = os.environ["RANK"], sys.argv[sys.argv.index("--out") + 1]
names = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS HOME".split()
print(".", flush=True)
print("RESULT " + json.dumps({"out": out, **{n: os.environ.get(n) for n in names}}), flush=True)
print("a warning at the end")
"""
TWO = Hosts(("127.0.0.2", "127.0.0.3"), sys.executable, 29511)


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for ssh, and no host that is this one."""
    found = tmp_path / "bin" / "ssh"
    found.parent.mkdir()
    found.write_text(SSH)
    found.chmod(0o755)
    monkeypatch.setenv("PATH", f"{found.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(far, "_is_here", lambda _: False)
    return found


@pytest.mark.usefixtures("ssh")
def test_a_process_elsewhere_is_told_its_place_and_prints_what_it_found(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    fleet = Fleet(
        names=("127.0.0.2/0", "127.0.0.3/0", "127.0.0.3/1"),
        kinds=("cpu",) * 3,
        threads=(1, 2, 1),
        busy=3,
        linked=3,
        window_s=0.1,
        deadline_s=60.0,
        hosts=("127.0.0.2", "127.0.0.3", "127.0.0.3"),
    )
    found = run(fleet, (sys.executable, str(tmp_path / "worker.py")), TWO.spawn)
    assert [each["LOCAL_RANK"] for each in found] == ["0", "0", "1"]
    assert [each["OMP_NUM_THREADS"] for each in found] == ["1", "2", "1"]
    assert found[2] == {
        "out": "-",
        "RANK": "2",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.2",
        "MASTER_PORT": "29511",
        "OMP_NUM_THREADS": "1",
        "HOME": None,  # nothing of this process's environment goes along
    }


def test_hosts_are_asked_before_anything_is_measured(ssh: Path) -> None:
    require_answers(TWO)
    for names, why in (
        (("127.0.0.2", "nowhere"), "nowhere does not run"),
        (("127.0.0.2",), "expected two hosts or more, found 1 host"),
        (("a", "a"), "found a twice"),
        (("-oProxyCommand=x", "b"), "is no host's name"),
    ):
        with pytest.raises(InputError, match=why):
            survey_hosts(Hosts(names, sys.executable))
    ssh.write_text("#!/bin/sh\necho 9.9.9\n")
    with pytest.raises(InputError, match=f"has bigbrain-fx 9.9.9, this host {VERSION}"):
        require_answers(TWO)


def test_without_ssh_that_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(far, "_is_here", lambda _: False)
    done = call("doctor", "--hosts", "a,b")
    assert done.code == 2
    assert "ssh is not on this machine" in done.err


def test_a_name_of_this_host_that_leads_nowhere_is_refused() -> None:
    with pytest.raises(InputError, match=r"127\.0\.0\.1 is 127\.0\.0\.1 here, where the other"):
        require_answers(Hosts(("127.0.0.1", "192.0.2.1")))
    assert far._is_here("127.0.0.2")
    assert not far._is_here("192.0.2.1")


@pytest.mark.nightly
@pytest.mark.usefixtures("ssh")
def test_links_between_hosts_stand_in_the_cluster_file() -> None:
    found = survey_hosts(TWO, devices=2)
    hosts = [device.host for device in found.cluster.devices]
    assert hosts == ["127.0.0.2", "127.0.0.2", "127.0.0.3", "127.0.0.3"]
    assert len({(a, b) for a, b, _ in found.cluster.links}) == 6
    assert all(link.bytes_per_s > 0 for _, _, link in found.cluster.links)
