"""The scenarios of `tools.studies.which_planner`: seeded graphs and clusters, and captured models.

Graphs are made of the project's own public types, so a planner sees what it would see of a model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from bigbrain_fx.core import (
    Arg,
    Cluster,
    Device,
    Graph,
    Input,
    Link,
    Op,
    Param,
    ParamRef,
    Ref,
    TensorSpec,
)
from bigbrain_fx.costs.model import PlaceRates
from bigbrain_fx.plan import Options, Source, make_plan

GIB = 2**30
ROWS, MICRO_BATCHES = 256, 8
MODELS = ("gpt", "moe", "unet", "encdec")
SPEEDS: Mapping[str, tuple[float, ...]] = {
    "alike": (1.0, 1.0, 1.0, 1.0),
    "unlike": (4.0, 2.0, 1.0, 1.0),
}
LINKS = {"1 Gbit/s": Link(1e-4, 125e6), "10 Gbit/s": Link(2e-5, 1.25e9)}
_WIDTHS = (256, 512, 1024)


@dataclass(frozen=True)
class Scenario:
    """A graph, a cluster, and how many micro-batches a step has.

    `family` is what the table groups by; `model` the captured model, or "".
    """

    name: str
    family: str
    graph: Graph
    cluster: Cluster
    micro_batches: int
    model: str = ""


def synthetic(seeds: int) -> Iterator[Scenario]:
    """Yield chains and branchy graphs on devices alike and unlike, with memory ample and tight."""
    for seed in range(seeds):
        graphs = {"chain": chain(seed, 24), "branchy": branchy(seed, 6)}
        for shape, graph in graphs.items():
            for kind in SPEEDS:
                cluster = cluster_of(kind, "1 Gbit/s")
                family = f"{shape}, {kind}"
                plain = Scenario(f"{family}, seed {seed}", family, graph, cluster, MICRO_BATCHES)
                yield plain
                if kind == "unlike":
                    yield tight(plain)


def captured(models: Mapping[str, Graph], rates: PlaceRates | None = None) -> Iterator[Scenario]:
    """Yield captured models on unlike devices, over a fast link and a slow one.

    Args:
        models: by name.
        rates: of a device of speed 1; None for those of drawn scenarios.
    """
    for model, graph in models.items():
        for link in LINKS:
            name = f"{model}, unlike, {link}"
            cluster = cluster_of("unlike", link, rates)
            yield Scenario(name, f"models, unlike, {link}", graph, cluster, graph.batch // 2, model)


def cluster_of(kind: str, link: str, rates: PlaceRates | None = None) -> Cluster:
    """Return four devices, each a host of its own."""
    flops, nbytes = (rates.flops_per_s, rates.memory_bytes_per_s) if rates else (60e9, 12e9)
    launch_s = rates.launch_s if rates else 5e-6
    devices = tuple(
        Device(f"d{i}", f"h{i}", "cpu", 64 * GIB, s * flops, s * nbytes, launch_s / s)
        for i, s in enumerate(SPEEDS[kind])
    )
    return Cluster(devices, LINKS[link])


def tight(plain: Scenario) -> Scenario:
    """Return the scenario with so little memory that little more than one kind of split fits.

    Equal memory on all devices: a twentieth more than what a plan that spreads bytes evenly
    (m-topo) needs on its fullest device, so the fastest device cannot take what its speed asks for.
    """
    options = Options(partitioner="m-topo", micro_batches=plain.micro_batches, schedule="1f1b")
    plan = make_plan(plain.graph, plain.cluster, SOURCE, options)
    peak = max(entry.peak_bytes for entry in plan.forecast.devices)
    limit = int(1.05 * 1.2 * peak) + 64 * 2**20  # plans on CPUs are refused by 1.2 x tensors
    devices = tuple(replace(d, memory_bytes=limit) for d in plain.cluster.devices)
    return replace(
        plain,
        name=f"{plain.name}, tight",
        family=f"{plain.family}, tight memory",
        cluster=replace(plain.cluster, devices=devices),
    )


SOURCE = Source("scenario")


# --------------------------------------------------------------------------- graphs


def chain(seed: int, layers: int) -> Graph:
    """Return layers in a row, of drawn widths: there is one order, and cuts differ in bytes."""
    made = _Graph(seed)
    value = "x"
    for _ in range(layers):
        value = made.linear(value, made.dice.choice(_WIDTHS))
    return made.done(value)


def branchy(seed: int, blocks: int) -> Graph:
    """Return blocks of two to four branches of drawn depth that are added up, one after another."""
    made = _Graph(seed)
    value = "x"
    for _ in range(blocks):
        width = made.dice.choice(_WIDTHS)
        ends = []
        for _ in range(made.dice.choice((2, 3, 4))):
            end = value
            for _ in range(made.dice.choice((0, 1, 2))):
                end = made.linear(end, made.dice.choice(_WIDTHS))
            ends.append(made.linear(end, width))
        value = made.sum(ends)
    return made.done(value)


class _Graph:
    """A graph in the making: mutable. Sizes are arithmetic over the batch."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self._ops: list[Op] = []
        self._params: list[Param] = []
        self._width = {"x": _WIDTHS[0]}

    def linear(self, source: str, width: int) -> str:
        """Add a product with a weight, and a pass over its result."""
        name, deep = f"linear_{len(self._ops)}", self._width[source]
        weight = TensorSpec((width, deep), "float32", (deep, 1), True)
        self._params.append(Param(f"{name}.weight", weight, f"{name}.weight"))
        args: tuple[Arg, ...] = (Ref(source), ParamRef(f"{name}.weight"))
        self._add(name, "aten.linear.default", args, width, 2 * deep * width, 4 * deep * width)
        gelu = f"gelu_{len(self._ops)}"
        self._add(gelu, "aten.gelu.default", (Ref(name),), width, 8 * width)
        return gelu

    def sum(self, sources: Sequence[str]) -> str:
        """Add up values of one width, two at a time."""
        total, width = sources[0], self._width[sources[0]]
        for source in sources[1:]:
            name = f"add_{len(self._ops)}"
            self._add(name, "aten.add.Tensor", (Ref(total), Ref(source)), width, width)
            total = name
        return total

    def done(self, last: str) -> Graph:
        """Return the graph; its loss is a mean."""
        width = self._width[last]
        self._add("loss", "aten.mean.default", (Ref(last),), 0, width)
        spec = TensorSpec(("B", _WIDTHS[0]), "float32", (_WIDTHS[0], 1), False)
        entry = Input("x", ("x",), spec)
        ops, params = tuple(self._ops), tuple(self._params)
        return Graph("scenario", ops, (entry,), params, (), "loss", batch=ROWS)

    def _add(
        self,
        name: str,
        target: str,
        args: tuple[Arg, ...],
        width: int,
        flops: int,
        weight_bytes: int = 0,
    ) -> None:
        """Add an op; `flops` are per row."""
        read = sum(self._width[ref.value] for ref in args if isinstance(ref, Ref))
        out = TensorSpec(("B", width), "float32", (width, 1), True)
        self._width[name] = width
        self._ops.append(
            Op(
                name,
                target,
                args,
                outputs=(out if width else TensorSpec((), "float32", (), True),),
                flops=f"{flops}*B",
                reads_bytes=f"{4 * read}*B + {weight_bytes}",
                writes_bytes=f"{4 * width}*B" if width else 4,
            )
        )
