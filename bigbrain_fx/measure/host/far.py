"""Devices of several hosts: the probe's processes are started there, by ssh.

    bigbrain-fx doctor --hosts node1,node2 --write cluster.json

A process of this host is a plain child. Nothing is copied: the hosts have bigbrain-fx installed,
and what a process finds comes back on ssh's own output. This file knows hosts and ssh; what is
measured it does not know.
"""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bigbrain_fx.bundles import Command, Process, popen
from bigbrain_fx.core import VERSION, Device
from bigbrain_fx.errors import InputError
from bigbrain_fx.measure.host.figures import Kind
from bigbrain_fx.measure.host.fleet import ON_STDOUT
from bigbrain_fx.measure.host.survey import Survey, survey

PORT = 29500
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
_PASSED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # those of one host: the loopback
_ANSWER_S = 120.0  # in which a host says which bigbrain-fx it has
_WINDOW_S = {True: 0.25, False: 1.0}
_ASK = "import bigbrain_fx.core as core; print(core.VERSION)"


@dataclass(frozen=True)
class Hosts:
    """Hosts by the names under which they reach each other; rank 0 listens on the first.

    Attributes:
        python: the interpreter there that has bigbrain-fx.
        port: of the first host, where all meet.
    """

    names: tuple[str, ...]
    python: str = sys.executable
    port: int = PORT

    def spawn(self, command: Command) -> Process:
        """Start a device's process on its host: a `Spawn`, whose devices are named HOST/NUMBER."""
        host = command.device.partition("/")[0]
        meeting = {"MASTER_ADDR": self.names[0], "MASTER_PORT": str(self.port)}
        plain = {k: v for k, v in command.environment.items() if k not in _INTERFACES}
        if _is_here(host):
            return popen(replace(command, environment={**plain, **meeting}))
        told = {name: command.environment[name] for name in _PASSED} | meeting
        words = list(command.words[1:])  # less the interpreter, which is another there
        words[words.index("--out") + 1] = ON_STDOUT
        far = ["env", *(f"{name}={value}" for name, value in told.items()), self.python, *words]
        words_here = (*_SSH, host, shlex.join(far))
        return popen(replace(command, words=words_here, environment=plain))


def survey_hosts(
    hosts: Hosts, devices: int = 1, threads: int = 1, kind: Kind = "cpu", *, quick: bool = True
) -> Survey:
    """Measure identical devices on several hosts while all compute, then the link of every pair.

    Args:
        hosts: two at least; each must be reached by ssh without a password, unless it is this one.
        devices: how many on each.
        threads: CPU threads of each device.
        kind: of all devices; over GPUs alone links are those of nccl, else of gloo.
        quick: a quarter second for each figure, else a second.

    Raises:
        InputError: no such hosts, or one that cannot be reached, or has another bigbrain-fx.
        ProbeError: a process failed or hung.
    """
    _require_names(hosts.names)
    require_answers(hosts)
    start = time.monotonic()
    asked = [
        Device(f"{host}/{number}", host, kind, 0, 1.0, 1.0, 0.0, threads=threads)
        for host, number in itertools.product(hosts.names, range(devices))
    ]
    found = survey(asked, hosts.spawn, window_s=_WINDOW_S[quick])
    return replace(_named(found), took_s=time.monotonic() - start)


def _named(found: Survey) -> Survey:
    """Call devices d0, d1, ...; those of one host's CPU share its memory."""
    names = {probe.name: f"d{number}" for number, probe in enumerate(found.devices)}
    count = Counter(probe.host for probe in found.devices if probe.kind == "cpu")
    return Survey(
        tuple(
            replace(d, name=names[d.name], memory_bytes=d.memory_bytes // (count[d.host] or 1))
            for d in found.devices
        ),
        tuple((names[a], names[b], link) for a, b, link in found.links),
        found.took_s,
    )


# --------------------------------------------------------------------------- before it begins


def _require_names(names: Sequence[str]) -> None:
    for name in names:
        if not _HOST.fullmatch(name):
            raise InputError(
                f"{name!r} is no host's name",
                code="BX1502",
                at="--hosts",
                help="--hosts node1,node2",
            )
    twice = [name for name, count in Counter(names).items() if count > 1]
    if len(names) < 2 or twice:
        what = f"{twice[0]} twice" if twice else f"{len(names)} host"
        raise InputError(
            f"expected two hosts or more, found {what}",
            code="BX1503",
            at="--hosts",
            help="name each once; `doctor` without --hosts measures this one",
        )


def require_answers(hosts: Hosts) -> None:
    """Ask all hosts at once which bigbrain-fx they have.

    Raises:
        InputError: ssh is not here, a host does not answer, or has another one than this host.
    """
    _require_reachable(hosts.names)
    far = [host for host in hosts.names if not _is_here(host)]
    if far and shutil.which(_SSH[0]) is None:
        raise InputError(
            "ssh is not on this machine",
            code="BX1504",
            at="--hosts",
            help="install it: hosts are asked by it",
        )
    asked = {host: _ask(host, hosts.python) for host in far}
    try:
        for host, process in asked.items():
            _require_answer(host, process, hosts.python)
    finally:
        for process in asked.values():
            process.kill()
            process.communicate()


def _ask(host: str, python: str) -> subprocess.Popen[str]:
    words = (*_SSH, host, shlex.join([python, "-c", _ASK]))
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)


def _require_answer(host: str, process: subprocess.Popen[str], python: str) -> None:
    try:
        out, err = process.communicate(timeout=_ANSWER_S)
    except subprocess.TimeoutExpired:
        out, err = "", f"no answer within {_ANSWER_S:.0f} s"
    found = out.split()[-1:] or [""]
    if process.returncode == 0 and found[0] == VERSION:
        return
    if process.returncode == 0:
        raise InputError(
            f"{host} has bigbrain-fx {found[0]}, this host {VERSION}",
            code="BX1505",
            at="--hosts",
            help="install the same one on all hosts",
        )
    raise InputError(
        f"{host} does not run {python} with bigbrain-fx",
        code="BX1506",
        at="--hosts",
        notes=tuple(err.strip().splitlines()[-3:]),
        help=f"`ssh {host} {shlex.quote(python)} -c 'import bigbrain_fx'` must work without a "
        "password; --python names another interpreter there",
    )


def _is_here(host: str) -> bool:
    """Whether a name is of this host: then one can listen at it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
        return True


def _require_reachable(names: Sequence[str]) -> None:
    """Refuse a name of this host that leads others to themselves, as Debian's 127.0.1.1 does."""
    own = [host for host in names if _is_here(host)]
    for host in own:
        address = socket.gethostbyname(host)
        if address.startswith("127.") and len(own) < len(names):
            raise InputError(
                f"{host} is {address} here, where the other hosts cannot reach it",
                code="BX1507",
                at="--hosts",
                help="give this host's address in the network of the others",
            )
