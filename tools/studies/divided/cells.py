"""What is run, as data: ways to divide a step, on which models and clusters; and rows of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bigbrain_fx.core import Cluster
from bigbrain_fx.plan import Options
from tools.studies.emulated_models import MODELS, SITES, Site

TIMES = 3  # the rows of tools.studies.fidelity
MICRO_BATCHES = (
    12  # of as many rows as there: 3 : 1, 2 : 1 and 4 : 2 : 1 : 1 divide them, or nearly
)
# Members exchange parts in the middle of a micro-batch. An emulated device that waits saves what it
# may compute in one period of its quota (8 ms), and is faster after that: so groups have few and
# large micro-batches, whose ops take far longer.
FEW = 3
ONE, EQUAL, PLANNED = "one device", "replicas, equal shares", "replicas"
ALONE = "one device of speed "  # of a slower one


@dataclass(frozen=True)
class Way:
    """How devices share a step: on so many of them, with these choices of `split`."""

    name: str
    choices: Mapping[str, Any] = field(default_factory=dict)
    places: tuple[int, ...] = ()
    replicas: tuple[tuple[str, ...], ...] = ()
    batches: int = 1

    def of(self, cluster: Cluster) -> Cluster:
        """Return the part of a cluster that is used: the devices of its places, or all."""
        devices = tuple(cluster.devices[place] for place in self.places) or cluster.devices
        return replace(cluster, devices=devices, replicas=self.replicas)

    @property
    def tensor_shares(self) -> tuple[int, ...]:
        """What members of a group have of it; empty: no op is divided."""
        return tuple(self.choices.get("tensor_shares", ()))

    @property
    def micro_batches(self) -> int:
        """How many a step has: of a batch so many times larger, so many times more."""
        return self.batches * int(self.choices.get("micro_batches", MICRO_BATCHES))

    def options(self, estimator: str) -> Options:
        """Return what is planned; pipelines are cut for unlike devices."""
        about = {"schedule": "1f1b", **self.choices, "micro_batches": self.micro_batches}
        return Options("chain-dp", estimator, **about)


def ways(site: Site, batches: int = 1) -> tuple[Way, ...]:
    """Return how a cluster's devices are used, for a batch so many times larger."""
    return tuple(replace(way, batches=batches) for way in _ways(site))


def _ways(site: Site) -> tuple[Way, ...]:
    count = len(site.speeds)
    equal = Way(EQUAL, {"replicas": count, "replica_shares": (1,) * count})
    found = (
        Way(ONE, places=(0,)),
        *_slower(site.speeds),
        *((equal,) if len(set(site.speeds)) > 1 else ()),
        Way(PLANNED, {"replicas": count}),
        Way("replicas, ZeRO 1", {"replicas": count, "zero_stage": 1}),
    )
    if count == 2:
        parts = dict.fromkeys(((1, 1), site.speeds))
        return (*found, *(_tensor(shares) for shares in parts))
    return (
        *found,
        Way("2 replicas of pipelines", {"replicas": 2}),
        Way(
            "2 replicas of tensor groups",
            {"replicas": 2, **_groups((2, 1), FEW)},
            replicas=(("d0", "d1"), ("d2", "d3")),
        ),
        Way("pipeline of tensor groups", _groups((1, 1), FEW)),
    )


def _slower(speeds: Sequence[float]) -> Iterator[Way]:
    """Yield a device of each speed but the first's: what a step takes there says how fast it is."""
    for place, speed in enumerate(speeds):
        if speed not in speeds[: max(1, place)]:
            yield Way(f"{ALONE}{speed:g}", places=(place,))


def _tensor(shares: tuple[int, ...]) -> Way:
    return Way(f"tensor {':'.join(map(str, shares))}", _groups(shares, 1))


def _groups(shares: tuple[int, ...], micro_batches: int) -> dict[str, Any]:
    return {"tensor": len(shares), "tensor_shares": shares, "micro_batches": micro_batches}


@dataclass(frozen=True)
class Row:
    """What one way came to.

    Attributes:
        step_s: the median step of each round.
        reference_s: of a matrix product beside each round.
        forecast_s: of the plan, with processors as fast as beside the rounds.
        busy: share of all processors' time in use during each round.
        shares: micro-batches of each replica, or parts of a tensor group; empty: neither.
        batches: how many times larger the batch is than most rows' of that model.
    """

    model: str
    site: str
    way: str
    step_s: tuple[float, ...]
    reference_s: tuple[float, ...]
    forecast_s: float
    busy: tuple[float, ...]
    shares: tuple[int, ...] = ()
    batches: int = 1

    @property
    def cell(self) -> tuple[str, str, int]:
        """Which rows it was measured in turn with."""
        return self.model, self.site, self.batches

    @property
    def measured_s(self) -> float:
        """The median of its rounds."""
        return statistics.median(self.step_s)

    @property
    def error(self) -> float:
        """Forecast over measured, less one."""
        return self.forecast_s / self.measured_s - 1

    @property
    def is_alone(self) -> bool:
        """Whether nothing is divided."""
        return self.way == ONE or self.way.startswith(ALONE)

    @property
    def is_tensor(self) -> bool:
        """Whether ops are divided."""
        return "tensor" in self.way


PAIRS = tuple(
    (model, site)
    for site in ("uneven2-1000", "equal2-1000", "uneven4-1000", "equal2-100")
    for model in ("llama", "encdec", "unet", "mixer")
)


def wanted(only: Sequence[str]) -> list[tuple[str, str]]:
    """Return models and clusters whose "model/cluster/" holds one of the texts."""
    return [pair for pair in PAIRS if not only or any(t in f"{pair[0]}/{pair[1]}/" for t in only)]


def site_of(name: str) -> Site:
    """Return a cluster by its name."""
    return SITES[name]


def rows_of(model: str, batches: int = 1) -> int:
    """Return the rows of a mini-batch, so many times larger."""
    return batches * TIMES * MODELS[model].rows
