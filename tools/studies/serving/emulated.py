"""Tokens a second and latency of a served bundle on unlike emulated devices, beside one process.

`tools.studies.serving` writes the rows: each cluster's first device is the same, so is the share of
a core that it has. The server, its clients and what carries packets have the rest of the machine.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import bigbrain_fx
from bigbrain_fx.core import Cluster, Device, Link
from bigbrain_fx.plan import Options
from bigbrain_fx.serving import ServeOptions, Serving, served
from tools.studies.emulation import Network, emulated
from tools.studies.emulation.relay import INTERFACE, address

INSIDE = Path(__file__).resolve().parents[2] / "emulation" / "inside.py"
SPEEDS = ((2,), (2, 1), (2, 1, 1))
SHARE = 0.45  # of a core, of the fastest device
LINK = Link(1e-3, 125e6)  # 1 Gbit/s
ROUNDS, CLIENTS = 3, (1, 8)
Ask = Callable[[Serving, str, object], object]


@dataclass(frozen=True)
class SpeedRow:
    """One cluster, asked by so many clients at once: each round's rate, each answer's time."""

    speeds: tuple[int, ...]
    cache: bool
    clients: int
    tokens_per_s: tuple[float, ...]
    answer_s: tuple[float, ...]

    def __str__(self) -> str:
        rates = sorted(self.tokens_per_s)
        tenths = statistics.quantiles(self.answer_s, n=10)
        cells = (
            "1, one process" if len(self.speeds) == 1 else ":".join(map(str, self.speeds)),
            "yes" if self.cache else "no",
            self.clients,
            f"{statistics.median(rates):.1f} ({rates[0]:.1f} to {rates[-1]:.1f})",
            f"{statistics.median(self.answer_s):.2f}",
            f"{tenths[-1]:.2f}",
        )
        return f"| {' | '.join(map(str, cells))} |"


@contextmanager
def inside(net: Network, devices: Sequence[str]) -> Iterator[None]:
    """Start the processes of a served bundle on emulated devices."""
    real: Any = subprocess.Popen
    names = list(net.namespaces)
    master = address(names.index(devices[0]))

    class Placed(real):  # type: ignore[misc]  # what Popen is here
        def __init__(self, words: Any, **options: Any) -> None:  # noqa: ANN401  # as Popen's
            if "--serve" in words:
                rank = int(options["env"]["RANK"])
                met = {"MASTER_ADDR": master, "GLOO_SOCKET_IFNAME": INTERFACE}
                words = [words[0], str(INSIDE), _order(net, devices[rank]), *words[1:]]
                options = {**options, "env": {**options["env"], **met}}
            super().__init__(words, **options)

    with mock.patch.object(subprocess, "Popen", Placed):
        yield


def _order(net: Network, device: str) -> str:
    """Return what `emulation/inside.py` is told."""
    joined = net.groups.of[device]
    return json.dumps(
        {
            "groups": joined.process,
            "namespace": net.namespaces[device],
            "quota_group": joined.compute,
            "cpus": net.cpus[device],
        }
    )


def asked(
    serving: Serving, clients: int, ask: Ask, prompts: Sequence[list[int]], tokens: int
) -> SpeedRow:
    """Ask all prompts in each round; the first, which nobody counts, warms up."""
    rates, times = [], []
    for number in range(ROUNDS + 1):
        began = time.monotonic()
        with ThreadPoolExecutor(clients) as pool:
            found = list(pool.map(lambda row: _one(serving, ask, row, tokens), prompts))
        if number:
            rates.append(len(prompts) * tokens / (time.monotonic() - began))
            times += found
    return SpeedRow((), False, clients, tuple(rates), tuple(times))


def _one(serving: Serving, ask: Ask, row: list[int], tokens: int) -> float:
    began = time.monotonic()
    ask(serving, "/v1/completions", {"prompt": row, "max_tokens": tokens})
    return time.monotonic() - began


def cluster_of(speeds: tuple[int, ...]) -> Cluster:
    """Describe the cluster that is emulated."""
    devices = (
        Device(f"d{n}", f"h{n}", "cpu", 2**32, 1e10 * s, 2e9 * s) for n, s in enumerate(speeds)
    )
    return Cluster(tuple(devices), LINK)


def emulated_rows(
    model: Path,
    places: int,
    ask: Ask,
    prompts: Sequence[list[int]],
    tokens: int,
    scratch: Path,
) -> Iterator[SpeedRow]:
    """Serve the model on each cluster, with a cache and without."""
    for speeds in SPEEDS:
        cluster = cluster_of(speeds)
        share = SHARE * max(speeds) / SPEEDS[0][0]
        with emulated(cluster, share=share) as net:
            for cache in (False, True):
                folder = scratch / f"emulated_{len(speeds)}_{cache}"
                # `naive` uses every device; where forecasts decide, so small a model stays on one
                chosen = Options(
                    "naive", mode="eval", micro_batches=1, cache=places if cache else 0
                )
                made = bigbrain_fx.split(model, cluster, folder, chosen)
                with (
                    inside(net, made.plan.stages.devices),
                    served(folder, ServeOptions(port=0)) as on,
                ):
                    for clients in CLIENTS:
                        row = asked(on, clients, ask, prompts, tokens)
                        yield SpeedRow(speeds, cache, clients, row.tokens_per_s, row.answer_s)
