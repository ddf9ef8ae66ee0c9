"""A plan -> a file that starts its bundle where people start jobs: Slurm, ssh, torchrun, Ray.

This file knows hosts, devices and their order; what a device's process does is in the bundle. Every
word of a script that is not ours is quoted.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bigbrain_fx.bundles.launch.host_commands import SECRET, commands, hosts, secret_command
from bigbrain_fx.bundles.launch.options import RunOptions
from bigbrain_fx.bundles.launch.program import entry
from bigbrain_fx.bundles.launch.supervised import can_supervise
from bigbrain_fx.core import Device
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Plan

PORT = 29500
STRICT = "set -euo pipefail"


@dataclass(frozen=True)
class Script:
    """Inputs of a script.

    Attributes:
        plan: whose devices are started.
        bundle: where the bundle is on every host.
        arguments: for its program.
        python: the command of Python there.
        lean: it has no launch.py: it was made by `split --lean`.
    """

    plan: Plan
    bundle: str
    arguments: Sequence[str] = ()
    python: str = "python"
    lean: bool = False

    @property
    def devices(self) -> list[Device]:
        """The devices, by rank."""
        return [self.plan.cluster.device[name] for name in self.plan.stages.devices]

    @property
    def program(self) -> str:
        """Return the command of a device's process, as words of a shell."""
        return shlex.join([self.python, entry(self.plan), *self.arguments])

    def is_on(self) -> list[str]:
        """Say where each device is, a comment a line."""
        return [f"# rank {i}: {d.name} on {d.host}" for i, d in enumerate(self.devices)]


def launch_script(kind: str, script: Script) -> str:
    """Return the text of a file that starts a bundle.

    Raises:
        InputError: this plan cannot be started so, or something is missing that it needs.
    """
    return STARTERS[kind].text(script)


# --------------------------------------------------------------------------- Slurm


def _slurm(script: Script) -> str:
    """A supervisor, where all devices are of one host; else a task a device."""
    used = hosts(script.plan)
    if len(used) == 1 and _is_supervised(script):
        [(_, launch)] = _launches(script, used)
        asked = {"ntasks": 1, "cpus-per-task": sum(d.threads for d in script.devices)}
        start = ["# what dies is replaced; scancel and the job's end write a checkpoint first"]
        start += [f"cd {shlex.quote(script.bundle)}", f"exec srun --ntasks=1 {launch}"]
    else:
        most = max(device.threads for device in script.devices)
        asked = {"ntasks": len(script.devices), "cpus-per-task": most}
        start = _tasks(script, used)
    counted = (sum(d.kind == "cuda" and d.host == host for d in script.devices) for host in used)
    gpus = {"gpus-per-node": most} if (most := max(counted)) else {}
    numbers = {"nodes": len(used), **asked, **gpus}
    heads = (f"#SBATCH --{name}={value}" for name, value in numbers.items())
    name = f"#SBATCH --job-name={_name(script.plan)}"
    return _lines("#!/bin/bash", name, *heads, *script.is_on(), STRICT, *start)


def _tasks(script: Script, used: Sequence[str]) -> list[str]:
    """Return what starts a task a device, on the node that stands for its host.

    srun's rank variables are read.
    """
    at = [used.index(device.host) for device in script.devices]
    return [
        'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "SLURM_HOSTFILE=$(mktemp)  # the node of each rank",
        "trap 'rm -f \"$SLURM_HOSTFILE\"' EXIT",
        f'for at in {" ".join(map(str, at))}; do echo "${{nodes[at]}}"; done > "$SLURM_HOSTFILE"',
        "export SLURM_HOSTFILE",
        f"export MASTER_ADDR=${{nodes[{at[0]}]}} MASTER_PORT=${{MASTER_PORT:-{PORT}}}",
        f"cd {shlex.quote(script.bundle)}",
        f"srun --ntasks={len(at)} --distribution=arbitrary --kill-on-bad-exit=1 {script.program}",
    ]


# --------------------------------------------------------------------------- torchrun


def _torchrun(script: Script) -> str:
    """One command a host; torchrun numbers processes host by host."""
    used, on = hosts(script.plan), [device.host for device in script.devices]
    if len(used) == 1:
        head = ["torchrun", "--standalone", "--nproc-per-node", str(len(on))]
        return _lines(
            "#!/bin/bash",
            *script.is_on(),
            STRICT,
            f"cd {shlex.quote(script.bundle)}",
            f"exec {shlex.join([*head, entry(script.plan), *script.arguments])}",
        )
    if on != [host for host in used for each in on if each == host]:
        raise InputError(
            "torchrun numbers processes host by host, and this plan's devices go to and fro: "
            + ", ".join(f"{d.name} on {d.host}" for d in script.devices),
            code="BX3068",
            help="use --for ssh or --for slurm; or order the devices of cluster.json by host and "
            "split again",
        )
    cases = [
        f"  {shlex.quote(host)}) rank={number}; count={on.count(host)} ;;"
        for number, host in enumerate(used)
    ]
    return _lines(
        "#!/bin/bash",
        f"# On each host: bash THIS_FILE NAME, where NAME is one of {' '.join(used)}",
        *script.is_on(),
        STRICT,
        'case "${1:-}" in',
        *cases,
        f'  *) echo "which host is this? one of: {" ".join(map(_plain, used))}" >&2; exit 2 ;;',
        "esac",
        f"cd {shlex.quote(script.bundle)}",
        f'exec torchrun --nnodes {len(used)} --node-rank "$rank" --nproc-per-node "$count" '
        f'--master-addr {shlex.quote(used[0])} --master-port "${{MASTER_PORT:-{PORT}}}" '
        f"{shlex.join([entry(script.plan), *script.arguments])}",
    )


# --------------------------------------------------------------------------- ssh


def _ssh(script: Script) -> str:
    """A supervisor on the first host and an agent on each other; GPUs alone: a process a device."""
    used, supervised = hosts(script.plan), _is_supervised(script)
    there = f"cd {shlex.quote(script.bundle)} && exec "
    calls = _launches(script, used) if supervised else _plain_calls(script)
    notes = []
    if supervised and len(used) > 1:
        notes = [f"# All hosts need one file `{SECRET}` in the bundle; to make it:"]
        notes.append(f"#   {secret_command()}")
    return _lines(
        "#!/bin/bash",
        f"# The bundle is at {_plain(script.bundle)} on each host, and ssh asks for no password.",
        *notes,
        *script.is_on(),
        "set -uo pipefail",
        "pids=()",
        'on() { local host=$1; shift; ssh -tt -o BatchMode=yes "$host" "$@" < /dev/null & '
        "pids+=($!); }",
        "trap 'kill \"${pids[@]}\" 2> /dev/null' EXIT",
        *(f"on {shlex.quote(host)} {shlex.quote(there + call)}" for host, call in calls),
        'wait "${pids[0]}"' if supervised else "wait -n; code=$?",
        *([] if supervised else ['for pid in "${pids[@]}"; do wait "$pid" || code=$?; done']),
        "exit" if supervised else "exit $code",
    )


def _is_supervised(script: Script) -> bool:
    return can_supervise(script.plan) and not script.lean


def _launches(script: Script, used: Sequence[str]) -> list[tuple[str, str]]:
    words = [script.python, "launch.py", *script.arguments]
    if len(used) == 1:
        return [(used[0], shlex.join(words))]
    address = ["--listen", f"{used[0]}:{PORT}", "--secret", SECRET]
    join = [script.python, "launch.py", "--join", f"{used[0]}:{PORT}", "--secret", SECRET]
    return [
        (used[0], shlex.join([*words, *address])),
        *((host, shlex.join([*join, "--host", host])) for host in used[1:]),
    ]


def _plain_calls(script: Script) -> list[tuple[str, str]]:
    """Return host and command of each process."""
    made = commands(script.plan, RunOptions(steps=1, port=PORT))
    heads = [(host, call.partition(" python ")[0]) for host, call in made]
    return [(host, f"env {head} {script.program}") for host, head in heads]


# --------------------------------------------------------------------------- Ray


_RAY = '''\
"""Start a bundle's devices as Ray actors, one each, with the resources of cluster.json."""

import os
import socket
import subprocess

import ray

BUNDLE = {bundle}
PROGRAM = {program}
DEVICES = {devices}


@ray.remote
class Device:
    def address(self):
        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def run(self, **ours):
        environment = {{**os.environ, **ours}}
        return subprocess.run(PROGRAM, cwd=BUNDLE, env=environment, check=False).returncode


def main():
    ray.init()
    actors = [Device.options(name=name, **size).remote() for name, size in DEVICES]
    host, port = ray.get(actors[0].address.remote())
    common = {{"WORLD_SIZE": str(len(actors)), "MASTER_ADDR": host, "MASTER_PORT": str(port)}}
    runs = [
        actor.run.remote(RANK=str(rank), LOCAL_RANK="0", **common)
        for rank, actor in enumerate(actors)
    ]
    codes = ray.get(runs)
    for (name, _), code in zip(DEVICES, codes, strict=True):
        print(f"{{name}} ended with exit code {{code}}")
    raise SystemExit(max(abs(code) for code in codes))


if __name__ == "__main__":
    main()
'''


def _ray(script: Script) -> str:
    sizes = [
        (
            f"{_name(script.plan)}-{device.name}",
            {
                "num_cpus": device.threads,
                "num_gpus": int(device.kind == "cuda"),
                "memory": device.memory_bytes,
            },
        )
        for device in script.devices
    ]
    words = [script.python, entry(script.plan), *script.arguments]
    return _RAY.format(bundle=repr(script.bundle), program=repr(words), devices=repr(sizes))


# --------------------------------------------------------------------------- all of them


@dataclass(frozen=True)
class Starter:
    """One way of starting jobs.

    Attributes:
        text: writes the file.
        suffix: of its name.
        start: what one types to start it.
        needs: the program that must be there for that.
    """

    text: Callable[[Script], str]
    suffix: str
    start: str
    needs: str


STARTERS: Mapping[str, Starter] = {
    "slurm": Starter(_slurm, ".sbatch", "sbatch {}", "sbatch"),
    "ray": Starter(_ray, ".py", "python {}", "ray"),
    "torchrun": Starter(_torchrun, ".sh", "bash {}", "torchrun"),
    "ssh": Starter(_ssh, ".sh", "bash {}", "ssh"),
}


def _lines(*lines: str) -> str:
    return "\n".join(lines) + "\n"


def _name(plan: Plan) -> str:
    """Return the model's name as a label that DNS takes."""
    found = re.sub(r"[^a-z0-9]+", "-", plan.graph.name.lower()).strip("-")
    return f"bigbrain-{found or 'model'}"[:50].rstrip("-")


def _plain(text: str) -> str:
    """Return text for a comment or a message: nothing in it that a shell would read."""
    return re.sub(r"[^\w./:@+-]", "_", text)
