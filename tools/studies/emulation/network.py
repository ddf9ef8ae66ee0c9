"""A running emulation: devices that differ, wires between them, and what can be run there."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bigbrain_fx.bundles import launch
from bigbrain_fx.bundles.launch import Command, Run, RunError, RunOptions, StepLine
from bigbrain_fx.core import Cluster, Link
from bigbrain_fx.errors import InputError
from bigbrain_fx.measure.host import Survey, survey
from bigbrain_fx.measure.host.limits import usable_cores
from bigbrain_fx.plan import read_plan
from tools.studies.emulation.groups import (
    Groups,
    find_trees,
    make_groups,
    sweep_leftovers,
    was_out_of_memory,
)
from tools.studies.emulation.quotas import Places, Quota, nics, placed, quotas, wires
from tools.studies.emulation.relay import INTERFACE, address
from tools.studies.emulation.started import (
    HERE,
    NursedProcess,
    Nursery,
    Relay,
    awake,
    nursed,
    watched,
    wired,
)

_PASSES = 2
_ECHOES_S, _FEWEST_ECHOES, _ECHO_DEADLINE_S = 0.5, 20, 60.0
CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21


@dataclass
class Network:
    """A cluster that is being emulated; make one with `emulated`.

    Attributes:
        cluster: what is emulated.
        quotas: what each device may use.
        namespaces: the path of each device's network namespace, by name.
        cpus: on which CPUs each device computes.
    """

    cluster: Cluster
    quotas: Mapping[str, Quota]
    namespaces: Mapping[str, str]
    cpus: Places
    groups: Groups
    nursery: Nursery
    _master: str = ""

    @property
    def baseline_rss_bytes(self) -> int:
        """What every device's process holds before it runs anything: Python and torch."""
        return self.nursery.rss_bytes

    def run(
        self,
        bundle: str | Path,
        options: RunOptions | None = None,
        on_step: Callable[[StepLine], None] | None = None,
        on_batch: Callable[[launch.BatchLine], None] | None = None,
    ) -> Run:
        """Run a bundle on the emulated devices and wait for its end: `launch.run` in another place.

        Raises:
            InputError: as `launch.run`; the bundle has a device that the cluster has not.
            RunError: a process failed, for instance because it needed more memory than its device.
        """
        self._require_devices(read_plan(bundle).stages.devices)
        try:
            return launch.run(bundle, options, on_step, on_batch, spawn=self.spawn)
        except RunError as error:
            raise self._explained(error) from error

    def survey(self, window_s: float = 1.0) -> Survey:
        """Measure the devices and their links as `bigbrain_fx.measure.host.survey` does."""
        return survey(self.cluster.devices, self.spawn, window_s=window_s)

    def spawn(self, command: Command) -> NursedProcess:
        """Start a process on the device that it is for: a `Spawn` of `bigbrain_fx.bundles.launch`.

        Ranks are started in their order: the device of rank 0 is where the others meet.
        """
        if command.environment["RANK"] == "0":
            self._master = address(list(self.namespaces).index(command.device))
        joined = self.groups.of[command.device]
        order = {
            "words": command.words[1:],  # less the interpreter: the nursery is one
            "folder": str(command.folder.resolve()),
            "environment": {
                **command.environment,
                "MASTER_ADDR": self._master,
                "GLOO_SOCKET_IFNAME": INTERFACE,
            },
            "namespace": self.namespaces[command.device],
            "groups": joined.process,
            "quota_group": joined.compute,
            "cpus": self.cpus[command.device],
        }
        reader, writer = os.pipe() if command.reports else (None, None)
        with command.log.open("w") as log:
            stdout = log.fileno() if writer is None else writer
            pid = self.nursery.start(order, stdout, log.fileno())
        if writer is not None:
            os.close(writer)
        return NursedProcess(self.nursery, pid, None if reader is None else os.fdopen(reader))

    def _require_devices(self, needed: Sequence[str]) -> None:
        absent = [name for name in needed if name not in self.namespaces]
        if absent:
            raise InputError(
                f"the bundle is for a device {absent[0]}, which the emulated cluster has not",
                notes=(f"it has {', '.join(self.namespaces)}",),
                help="split the model for this cluster, or name its devices alike",
            )

    def _explained(self, error: RunError) -> RunError:
        for name, joined in self.groups.of.items():
            if was_out_of_memory(joined):
                limit = self.quotas[name].memory_bytes / 2**20
                return RunError(
                    f"device {name} needed more than its memory of {limit:.0f} MiB",
                    at=error.at,
                    help="give it more in the cluster file, or split the model anew",
                )
        return error


def missing() -> str | None:
    """Say in one sentence what this machine lacks for emulation; None: nothing."""
    if platform.system() != "Linux":
        return f"emulating a cluster needs Linux, found {platform.system()}"
    if not _has_capabilities(CAP_NET_ADMIN, CAP_SYS_ADMIN):
        return "emulating a cluster needs root (network namespaces and control groups)"
    if not Path("/dev/net/tun").exists():
        return "emulating a cluster needs /dev/net/tun (`modprobe tun`)"
    try:  # whether the kernel allows it in this container, nothing else tells
        make_groups(find_trees(), {"trial": Quota(0.5, 4000, 8000, 2**26)}).remove()
    except InputError as error:
        return f"emulating a cluster needs control groups: {error.what}"
    return None


def _has_capabilities(*numbers: int) -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            held = int(line.split()[1], 16)
            return all(held >> number & 1 for number in numbers)
    return False


@contextmanager
def emulated(
    cluster: Cluster, *, share: float | None = None, clamp: bool = False
) -> Iterator[Network]:
    """Emulate a cluster on this machine until the block ends; nothing of it is left then.

    Devices compute in proportion to their `flops_per_s`, within their `memory_bytes`, and each
    direction of each pair is a wire with the link's latency and rate; a host's NIC, where the file
    says what it carries, is shared by all messages out of it, and into it. The latency is that of a
    message of gloo: what gloo, the kernel and the relay add is measured first, and taken off.
    Should this process be killed, everything ends with it; a watchdog removes the control groups,
    and so does the next start.

    Args:
        cluster: CPU devices.
        share: cores of the fastest device; see `quotas`.
        clamp: take 1 Gbit/s and 1 ms for links that are better.

    Raises:
        InputError: this machine cannot do it, or not such a cluster.
    """
    lacking = missing()
    if lacking is not None:
        raise InputError(lacking)
    if any(device.kind != "cpu" for device in cluster.devices):
        raise InputError("only CPU devices can be emulated", help='describe them as "kind": "cpu"')
    allowed, lines = quotas(cluster, usable_cores(), share), wires(cluster, clamp)
    trees = find_trees()
    sweep_leftovers(trees)
    names = [device.name for device in cluster.devices]
    with ExitStack() as stack:
        groups = make_groups(trees, allowed)
        stack.enter_context(watched(groups.folders))
        stack.callback(groups.remove)
        processors = sorted(os.sched_getaffinity(0))
        stack.enter_context(awake(processors))
        relay = stack.enter_context(wired(len(names), lines, nics(cluster)))
        nursery = stack.enter_context(nursed())
        paths = dict(zip(names, relay.namespaces, strict=True))
        threads = {device.name: device.threads for device in cluster.devices}
        cpus = placed(allowed, threads, processors)
        network = Network(cluster, allowed, paths, cpus, groups, nursery)
        if lines:
            _take_off(relay, network, lines)
        yield network


def _take_off(relay: Relay, network: Network, lines: Sequence[tuple[int, int, Link]]) -> None:
    """Deliver as much sooner as messages are late; find that twice: the first time is cold."""
    lead_s = 0.0
    for _ in range(_PASSES):
        lead_s = max(0.0, lead_s + _late_s(network, lines))
        relay.lead(lead_s)


def _late_s(network: Network, lines: Sequence[tuple[int, int, Link]]) -> float:
    """Measure how much later than described a message is on the shortest wire, where it matters."""
    a, b, link = min(lines, key=lambda line: line[2].latency_s)
    names = list(network.namespaces)
    rounds = max(_FEWEST_ECHOES, round(_ECHOES_S / (2 * link.latency_s)))
    with tempfile.TemporaryDirectory(prefix="bigbrain-fx-emulate-") as scratch:
        out = Path(scratch, "echo.json")
        words = ("python", str(HERE / "echo.py"), str(rounds), str(out))
        processes = []
        for rank, name in enumerate((names[a], names[b])):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_PORT": "29500",
            }
            log = Path(scratch, f"{name}.log")
            command = Command(name, words, Path(scratch), environment, log, reports=False)
            processes.append(network.spawn(command))
        for process in processes:
            if process.wait(_ECHO_DEADLINE_S + 4 * rounds * link.latency_s) != 0:
                raise InputError(f"the emulated network does not answer: {log.read_text()[-300:]}")
        one_way_s = float(json.loads(out.read_text())["one_way_s"])
    return one_way_s - link.latency_s
