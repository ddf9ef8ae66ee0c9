"""The command line: every command works, and keeps the conventions of its output."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from bigbrain_fx import cli
from bigbrain_fx.cli import console as show
from bigbrain_fx.core import Link
from bigbrain_fx.measure import host as doctor
from bigbrain_fx.measure.host import HostProbe, Rates
from bigbrain_fx.plan import read_plan
from tests.support.command_line import CHOICES, call, files, write_cluster, write_model

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    "split",
    "estimate",
    "explain",
    "simulate",
    "compare",
    "plugins",
    "run",
    "verify",
    "schema",
    "init",
    "doctor",
    "profile",
)


def python(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# --------------------------------------------------------------------------- the whole road


@pytest.mark.nightly
def test_split_json_and_the_plan_agree(bundle: Path, tmp_path: Path) -> None:
    model = bundle.parent / "model.py"
    made = call("split", model, *_for(bundle), "--out", tmp_path / "b", "--json")
    (found,) = made.objects
    plan = read_plan(tmp_path / "b")
    assert made.code == 0
    assert found["bundle"] == str(tmp_path / "b")
    assert found["parameters"] == 5 * (8 * 8 + 8)
    assert found["plan"] == plan.key
    assert found["step_s"] == plan.forecast.step_s
    assert [entry["device"] for entry in found["devices"]] == ["d0", "d1"]
    assert [entry["memory_bytes"] for entry in found["devices"]] == [2**30, 2**30]
    assert files(tmp_path / "b") == files(bundle)  # the same plan, the same bytes


def _for(bundle: Path) -> tuple[str | Path, ...]:
    return "--devices", bundle.parent / "cluster.json", *CHOICES


def test_estimate_needs_no_weights_and_agrees_with_split(bundle: Path) -> None:
    (found,) = call("estimate", bundle.parent / "model.py", *_for(bundle), "--json").objects
    assert found["step_s"] == read_plan(bundle).forecast.step_s


def test_simulate_here_and_elsewhere(bundle: Path, tmp_path: Path) -> None:
    (here,) = call("simulate", bundle, "--json").objects
    (same,) = call("simulate", bundle / "plan.json", *_for(bundle)[:2], "--json").objects
    assert here["step_s"] == same["step_s"] == read_plan(bundle).forecast.step_s
    slow = write_cluster(tmp_path, speed=1)
    (slower,) = call("simulate", bundle, "--devices", slow, "--json").objects
    assert slower["step_s"] > here["step_s"]
    text = call("simulate", bundle, "--devices", slow).out
    assert f"fits 2 devices: {slower['step_s']:.4g} s a step" in text


def test_explain_lists_axes_as_json_and_as_text(bundle: Path) -> None:
    text = call("explain", bundle, "--axes").out
    (found,) = call("explain", bundle, "--axes", "--json").objects
    assert any(axis["chosen"] for axis in found["axes"])
    assert all(axis["name"] in text for axis in found["axes"])
    assert all(f"{name} {count}" in text for name, count in found["without_rule"].items())


def test_explain_says_the_same_as_json_and_as_text(bundle: Path) -> None:
    text, (found,) = call("explain", bundle).out, call("explain", bundle, "--json").objects
    for part in found["devices"]:
        assert part["modules"] in text
    assert f"forecast {found['step_s']:.4f} s a step" in text
    assert len(found["cuts"]) == 1
    assert len(found["cuts"][0]["alternatives"]) == 1  # the head alone is no neighbour to move


@pytest.mark.nightly
def test_verify_fails_with_exit_code_5(bundle: Path, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(bundle, tmp_path / "changed"))
    device = changed / "device_d0.py"
    text = device.read_text()
    assert "torch.tanh(" in text
    device.write_text(text.replace("torch.tanh(", "torch.sin("))
    done = call("verify", changed, "--steps", "1", "--json")
    assert done.code == 5
    assert done.objects[0]["passed"] is False
    assert done.err.startswith(
        "error[BX3800]: the bundle does not compute what the model computes: "
    )


def test_doctor_writes_a_cluster_that_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bundle: Path
) -> None:
    def probe(threads: int, devices: int, quick: bool, kind: str | None) -> HostProbe:
        return _probed(threads, devices)

    monkeypatch.setattr(doctor, "probe", probe)
    out = tmp_path / "here.json"
    done = call("doctor", "--write", out, "--json")
    assert done.code == 0, done.err
    (found,) = done.objects
    measured = found.pop("measured")
    assert found == json.loads(out.read_text())
    assert measured["cpu"] == {"flops_per_s": 1e10, "memory_bytes_per_s": 1e10, "launch_s": 1e-6}
    assert done.err == f"wrote {out}\n"
    assert call("simulate", bundle, "--devices", out).code == 0
    again = call("doctor", "--write", out)
    assert again.code == 2
    assert again.err.startswith(f"error[BX3514]: {out} exists already")


def _probed(threads: int, devices: int) -> HostProbe:
    rates, link = Rates(1e10, 1e10, 1e-6), Link(1e-5, 1e9)
    return HostProbe("cpu", devices, threads, 2, 2**31, rates, link, (), (), took_s=0.1)


# --------------------------------------------------------------------------- conventions


@pytest.mark.nightly
def test_json_is_alone_on_stdout_whatever_the_model_file_prints(bundle: Path) -> None:
    words = map(str, ("estimate", bundle.parent / "model.py", *_for(bundle), "--json"))
    done = python("-m", "bigbrain_fx", *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == "Net"
    assert "a model file may print" in done.stderr


@pytest.mark.nightly
def test_no_control_codes_in_a_pipe(bundle: Path) -> None:
    done = python("-m", "bigbrain_fx", "explain", str(bundle))
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert done.stdout.isascii()
    assert done.stdout.splitlines()[3].split()[:3] == ["device", "stages", "modules"]


def test_no_color_on_a_terminal(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes this for a terminal
    assert "\x1b[1m" in call("simulate", bundle).out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in call("simulate", bundle).out  # 31 is red, 32 green, ...


@pytest.mark.nightly
def test_options_come_from_the_environment(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIGBRAIN_FX_DEVICES", str(bundle.parent / "cluster.json"))
    monkeypatch.setenv("BIGBRAIN_FX_MICRO_BATCHES", "2")
    monkeypatch.setenv("BIGBRAIN_FX_ESTIMATE_PARTITIONER", "naive")
    monkeypatch.setenv("BIGBRAIN_FX_JSON", "1")
    (found,) = call("estimate", bundle.parent / "model.py", "--schedule", "gpipe").objects
    assert (found["partitioner"], found["schedule"]) == ("naive", "gpipe")
    assert (found["micro_batches"], found["rows"]) == (2, 4)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_readable(command: str) -> None:
    done = call(command, "--help")
    assert done.code == 0
    assert done.out.startswith(f"Usage: bigbrain-fx {command}")
    assert max(map(len, done.out.splitlines())) <= 80
    assert "{names}" not in done.out
    assert "--json" in done.out


def test_help_lists_the_plug_ins() -> None:
    text = " ".join(call("split", "--help").out.split())
    ours = "analytical, auto, chain-dp, learned, m-etf, m-sct, m-topo, measured, naive"
    assert f"One of {ours}, scattered." in text
    schedules = "1f1b, auto, dualpipe-v, forward, gems, gpipe, interleaved, list, zb-h1, zb-v"
    assert f"One of {schedules} [default: for chains 1f1b, or forward to" in text


def test_every_command_is_listed_with_a_whole_sentence() -> None:
    text = call("--help").out
    for command in COMMANDS:
        (line,) = [row for row in text.splitlines() if row.strip().startswith(f"{command} ")]
        assert line.endswith(".")
        assert "..." not in line


def test_schema_is_quick_and_json() -> None:
    done = python("-c", _IMPORTED.format(words=["schema"]))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["title"] == "bigbrain-fx cluster"
    assert json.loads(call("schema", "--json").out) == json.loads(done.stdout)
    imported = set(json.loads(done.stderr))
    assert not imported & {"torch", "numpy", "networkx", "rich", "partitioners"}


_IMPORTED = """
import json, sys
from bigbrain_fx.cli import main
main({words})
print(json.dumps(sorted({{name.split(".")[0] for name in sys.modules}})), file=sys.stderr)
"""


@pytest.mark.nightly
def test_split_imports_no_torch_in_this_process(bundle: Path, tmp_path: Path) -> None:
    model, cluster = str(write_model(tmp_path)), str(bundle.parent / "cluster.json")
    words = ["split", model, "--devices", cluster, "--out", str(tmp_path / "b")]
    done = python("-c", _IMPORTED.format(words=words))
    assert done.returncode == 0, done.stderr
    imported = set(json.loads(done.stderr.splitlines()[-1]))
    assert "networkx" in imported  # it did the work
    assert "torch" not in imported


def test_debug_shows_the_traceback_and_keeps_the_exit_code(tmp_path: Path) -> None:
    plain = call("explain", tmp_path / "nothing")
    assert plain.code == 2
    assert "Traceback" not in plain.err
    debugged = call("explain", tmp_path / "nothing", "--debug")
    assert debugged.code == 2
    assert debugged.err.startswith("Traceback")
    assert debugged.err.endswith(plain.err)


def test_a_fault_of_ours_is_called_so(monkeypatch: pytest.MonkeyPatch, bundle: Path) -> None:
    def broken(plan: object, verbose: bool) -> None:
        raise LookupError("no such cell")

    monkeypatch.setattr(show, "show_forecast", broken)
    done = call("simulate", bundle)
    assert done.code == 1
    assert done.err.startswith("error[BX3592]: internal error: LookupError: no such cell\n  help: ")


def test_the_program_is_installed_under_its_name() -> None:
    done = call("--version")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert done.out == f"bigbrain-fx, version {project['version']}\n"
    assert callable(cli.main)
