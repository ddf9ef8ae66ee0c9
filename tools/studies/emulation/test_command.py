"""The command runs a bundle, and names in one line what a host lacks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from bigbrain_fx.cluster import to_json
from bigbrain_fx.core import Link
from bigbrain_fx.measure.host import DeviceProbe, Rates, Survey
from tests.support.bundles import split_small
from tools.studies.emulation import __main__ as emulate, network
from tools.studies.emulation.test_emulation import DEADLINE_S, MIB, ROOT, cluster, real


@pytest.fixture
def described(tmp_path: Path) -> str:
    (tmp_path / "cluster.json").write_text(to_json(cluster(2, 1)))
    return str(tmp_path / "cluster.json")


@pytest.mark.nightly
@real
def test_a_bundle_is_run_by_the_command(described: str, tmp_path: Path) -> None:
    bundle = split_small(tmp_path, cluster(2, 1))
    words = ["-m", "tools.studies.emulation", described, "--", str(bundle), "--steps", "2"]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    head, *steps, last = done.stdout.splitlines()
    assert re.fullmatch(r"cores: d0 0\.\d+, d1 0\.\d+", head)
    assert [line.split()[:3] for line in steps] == [["step", "0", "loss"], ["step", "1", "loss"]]
    assert re.fullmatch(r"peak memory: d0 \d+ MiB, d1 \d+ MiB \(of which .* torch\)", last)


def test_what_doctor_finds_is_shown_beside_what_was_described() -> None:
    rates = [Rates(4e9, 1e10, 1e-6), Rates(2.2e9, 1e10, 1e-6)]
    probes = (DeviceProbe(f"d{i}", f"h{i}", 1, MIB, rate) for i, rate in enumerate(rates))
    found = Survey(tuple(probes), (("d0", "d1", Link(0.9e-3, 100e6)),), took_s=1.0)
    head, speed, latency, rate = emulate.compared(cluster(2, 1), found).splitlines()
    assert head.split() == ["described", "measured", "error"]
    assert speed.split() == ["d1/d0", "speed", "0.5", "0.55", "+10.0", "%"]
    assert latency.split() == ["d0-d1", "1", "0.9", "-10.0", "%", "ms"]
    assert rate.split() == ["d0-d1", "1000", "800", "-20.0", "%", "Mbit/s"]


def test_what_is_missing_is_one_line(described: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "missing", lambda: "emulating a cluster needs root")
    done = CliRunner().invoke(emulate.main, [described, "--doctor"])
    assert (done.exit_code, done.output) == (2, "error: emulating a cluster needs root\n")
