"""Scripts that start a bundle: quoted, whole, and refused where they could not run."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import bigbrain_fx as bb
from bigbrain_fx.bundles import Script, launch_script
from bigbrain_fx.plan import Plan
from tests.support.command_line import CHOICES, call, write_cluster, write_model

LIMIT_S = 240.0
HERE = str(Path(sys.executable).parent)
"""Scripts say `python`: the one that has torch, though nobody activated its environment."""
ODD = "/tmp/it's $(touch here) `x`"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split_on(tmp_path_factory.mktemp("scripts"))


def split_on(folder: Path, *hosts: str) -> Path:
    where = write_cluster(folder, hosts=hosts or ("localhost",))
    made = call("split", write_model(folder), "-d", where, "-o", folder / "b", *CHOICES)
    assert made.code == 0, made.err
    return folder / "b"


@pytest.fixture(scope="module")
def plan(bundle: Path) -> Plan:
    return bb.read_plan(bundle)


def on_hosts(plan: Plan, *hosts: str) -> Plan:
    """Return the plan with its devices on these hosts, in turn."""
    named = dict(zip(plan.stages.devices, hosts, strict=True))
    devices = tuple(replace(d, host=named.get(d.name, d.host)) for d in plan.cluster.devices)
    return replace(plan, cluster=replace(plan.cluster, devices=devices))


@pytest.mark.parametrize("kind", ["slurm", "torchrun", "ssh"])
@pytest.mark.parametrize("hosts", [("a", "a"), ("a", "b")])
def test_shells_read_them_and_no_word_is_run(plan: Plan, kind: str, hosts: tuple[str, str]) -> None:
    text = launch_script(kind, Script(on_hosts(plan, *hosts), ODD, ("--save", "a b;c")))
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "# rank 0: d0 on a\n" in text
    assert f"# rank 1: d1 on {hosts[1]}\n" in text
    assert ODD not in text.replace("'\"'\"'", "'").split("cd ")[0].partition("The bundle")[0]


def test_slurm_asks_for_a_task_a_device(plan: Plan) -> None:
    lines = launch_script("slurm", Script(on_hosts(plan, "b", "a"), "/b", ("--steps", "7")))
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks=2\n#SBATCH --cpus-per-task=1\n" in lines
    assert 'for at in 0 1; do echo "${nodes[at]}"; done > "$SLURM_HOSTFILE"' in lines
    assert "export MASTER_ADDR=${nodes[0]}" in lines
    assert lines.endswith("--kill-on-bad-exit=1 python train.py --steps 7\n")


def test_slurm_starts_a_supervisor_on_one_host(plan: Plan) -> None:
    alone = on_hosts(plan, "a", "a")
    lines = launch_script("slurm", Script(alone, "/b", ("--steps", "7")))
    assert "#SBATCH --nodes=1\n#SBATCH --ntasks=1\n#SBATCH --cpus-per-task=2\n" in lines
    assert lines.endswith("exec srun --ntasks=1 python launch.py --steps 7\n")
    lean = launch_script("slurm", Script(alone, "/b", ("--steps", "7"), lean=True))
    assert "#SBATCH --ntasks=2\n" in lean
    assert lean.endswith("python train.py --steps 7\n")


def test_ray_has_an_actor_a_device(plan: Plan) -> None:
    tree = ast.parse(launch_script("ray", Script(plan, ODD, ("--save", "a'b"))))
    found = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    size = {"num_cpus": 1, "num_gpus": 0, "memory": 2**30}
    assert found["DEVICES"] == [("bigbrain-net-d0", size), ("bigbrain-net-d1", size)]
    assert found["BUNDLE"] == ODD
    assert found["PROGRAM"] == ["python", "train.py", "--save", "a'b"]


def test_torchrun_refuses_devices_that_go_to_and_fro(plan: Plan) -> None:
    first, second = plan.stages.stages
    stages = replace(plan.stages, stages=(first, second, replace(second, device="d2")))
    d1 = plan.cluster.device["d1"]
    devices = (*plan.cluster.devices, replace(d1, name="d2"))
    three = replace(plan, stages=stages, cluster=replace(plan.cluster, devices=devices))
    with pytest.raises(bb.InputError, match="numbers processes host by host"):
        launch_script("torchrun", Script(on_hosts(three, "a", "b", "a"), "/b"))
    assert "--nnodes 2" in launch_script("torchrun", Script(on_hosts(three, "a", "a", "b"), "/b"))


def test_a_scheduler_that_is_not_here(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    out = tmp_path / "job"
    written = call("launch-script", bundle, "--for", "slurm", "-o", out, "--", "--steps", "3")
    assert written.code == 0
    assert "there is no sbatch on this machine: it was not tried" in written.err
    assert out.read_text().endswith("launch.py --steps 3\n")
    again = call("launch-script", bundle, "--for", "slurm", "-o", out)
    assert again.code == 2
    assert call("launch-script", bundle, "--for", "cron").code == 2


@pytest.mark.nightly
def test_nobody_said_where_to_meet(tmp_path: Path) -> None:
    """Several hosts without MASTER_ADDR are told at once; the deadline would be 300 s."""
    bundle = split_on(tmp_path, "node0", "node1")
    left_out = {"MASTER_ADDR", "PYTHONPATH"}
    environment = {k: v for k, v in os.environ.items() if k not in left_out}
    done = subprocess.run(
        [sys.executable, "train.py", "--steps", "1"],
        cwd=bundle,
        env={**environment, "RANK": "1", "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 2
    assert "devices of 2 hosts (node0, node1), and MASTER_ADDR does not say" in done.stderr


# --------------------------------------------------------------------------- run for real

STUBS = {
    "ssh": 'while [[ $1 == -* ]]; do [[ $1 == -o ]] && shift; shift; done; shift\nexec sh -c "$*"',
    "scontrol": "echo 127.0.0.1",
    "srun": "test $1 != --ntasks=1 || exec ${@:2}\nfor rank in 0 1; do\n"
    "  test $(sed -n $((rank + 1))p $SLURM_HOSTFILE) = 127.0.0.1\n"
    "  SLURM_PROCID=$rank SLURM_NTASKS=2 SLURM_LOCALID=$rank ${@:4} &\ndone\n"
    "wait -n && wait -n",
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "lean"), [("torchrun", False), ("ssh", False), ("slurm", False), ("slurm", True)]
)
def test_a_script_trains(bundle: Path, plan: Plan, tmp_path: Path, kind: str, lean: bool) -> None:
    """By torchrun for real; ssh, scontrol and srun are stood in for: they start the words here."""
    for name, text in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    words = ("--steps", "2", "--save", str(tmp_path / "saved"))
    script = Script(on_hosts(plan, "here", "here"), str(bundle), words, lean=lean)
    (tmp_path / "job").write_text(launch_script(kind, script))
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK")}
    done = subprocess.run(
        ["bash", tmp_path / "job"],
        env={
            **environment,
            "PATH": os.pathsep.join((str(tmp_path), HERE, os.environ["PATH"])),
            "MASTER_PORT": str(bb_port()),
            "SLURM_JOB_NODELIST": "here",
        },
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss ") == 2
    saved = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert saved == ["d0.safetensors", "d1.safetensors"]


def bb_port() -> int:
    from bigbrain_fx.bundles import free_port

    return free_port()
