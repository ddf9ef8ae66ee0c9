"""Small models and clusters, drawn by a seed: lines of 3 to 8 ops on 2 to 4 devices.

Half of the clusters are of equal devices, half of the links are equal, and in a third of the
instances a device lacks memory for the whole model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.core import Cluster, Device, Graph, Link
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.frontend import capture
from bigbrain_fx.plan import Options, Source, make_plan

SOURCE = Source("line.py")
BATCH = 12
GIB = 2**30
PROCESS_BYTES, PROCESS = 40 << 20, 1.2
"""What a process takes: so many bytes, and so much of its tensors."""
_WIDTHS = (32, 256)


@dataclass(frozen=True)
class Instance:
    """A model, where it runs, and how many micro-batches a step has."""

    seed: int
    graph: Graph
    cluster: Cluster
    micro_batches: int

    def __str__(self) -> str:
        """Say what it is, in a line."""
        speeds = ":".join(f"{d.flops_per_s / 1e9:g}" for d in self.cluster.devices)
        links = "unlike links" if self.cluster.links else "equal links"
        room = "tight" if self.cluster.devices[0].memory_bytes < GIB else "ample"
        return (
            f"seed {self.seed}: {len(self.graph.ops)} ops on {speeds}, {links}, {room} memory, "
            f"{self.micro_batches} micro-batches"
        )


class Line(nn.Module):
    """Layers in a row, "l" a product with weights and "g" a pass over values; a loss at the end."""

    def __init__(self, layers: str, width: int) -> None:
        super().__init__()
        self.layers = layers
        for number, kind in enumerate(layers):
            if kind == "l":
                self.add_module(f"l{number}", nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss of a batch."""
        for number, kind in enumerate(self.layers):
            x = self.get_submodule(f"l{number}")(x) if kind == "l" else F.gelu(x)
        return x.pow(2).mean()


@cache
def line(layers: str, width: int) -> Graph:
    """Return the captured graph of such a line; two ops more than layers."""
    return capture(Line(layers, width), {"x": torch.randn(BATCH, width)}).graph


def drawn(seed: int) -> Instance:
    """Draw an instance."""
    dice = random.Random(seed)
    count = dice.choice((2, 2, 3, 3, 4))
    ops = dice.randint(3, 8 if count < 4 else 6)
    layers = "l" + "".join(dice.choice("llg") for _ in range(ops - 3))
    graph = _with_work(line(layers, dice.choice(_WIDTHS)), dice)
    speeds = [dice.choice((1, 2, 3, 4)) for _ in range(count)] if dice.random() < 0.5 else [1]
    devices = [_device(i, (speeds * count)[i]) for i in range(count)]
    found = Instance(seed, graph, _linked(devices, dice), dice.choice((1, 2, 3, 4)))
    return _tight(found, dice.uniform(0.35, 0.9)) if dice.random() < 1 / 3 else found


def _with_work(graph: Graph, dice: random.Random) -> Graph:
    def flops() -> str:
        return f"{dice.choice((0, 10**5, 10**6, 4 * 10**6))}*B"

    return replace(graph, ops=tuple(replace(op, flops=flops()) for op in graph.ops))


def _device(number: int, speed: int) -> Device:
    return Device(f"d{number}", "host", "cpu", 4 * GIB, 1e9 * speed, 1e9 * speed, 1e-6)


def _link(dice: random.Random) -> Link:
    return Link(dice.choice((1e-6, 1e-4)), dice.choice((1e6, 1e7, 1e8, 1e9)))


def _linked(devices: Sequence[Device], dice: random.Random) -> Cluster:
    found = Cluster(tuple(devices), _link(dice))
    if dice.random() < 0.5:
        return found
    names = [device.name for device in devices]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    return replace(found, links=tuple((a, b, _link(dice)) for a, b in pairs))


def _tight(found: Instance, share: float) -> Instance:
    """Return it with devices that each hold such a share of what the whole model needs on one."""
    one = replace(found.cluster, devices=found.cluster.devices[:1], links=())
    alone = Options("naive", micro_batches=found.micro_batches)
    try:
        plan = make_plan(found.graph, one, SOURCE, alone)
    except NoPlanError as error:  # 4 GiB hold any of these lines
        raise AssertionError(found) from error
    need = PROCESS * max(entry.peak_bytes for entry in plan.forecast.devices)
    memory = PROCESS_BYTES + int(share * need)
    devices = tuple(replace(d, memory_bytes=memory) for d in found.cluster.devices)
    return replace(found, cluster=replace(found.cluster, devices=devices))
