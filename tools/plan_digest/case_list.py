"""Plans to hash: models, clusters, and options by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from bigbrain_fx.core import Cluster, Device, DeviceStore, Host, Link
from bigbrain_fx.plan import Options
from bigbrain_fx.planning.registry import preset
from tools.plan_digest.cluster_list import clusters

MODELS = ("gpt", "llama", "unet", "resnet", "encdec", "moe", "digits")
MICRO_BATCHES = 8
EVAL = ", eval"
"""Ends the name of a model that is captured for inference."""
TIGHT_MIB = {"digits": 40.4, "encdec": 42.5}
"""Memory of each device where a model has little: its stages make some ops again."""
SMALL_MODELS = tuple(TIGHT_MIB)
"""Planned on more clusters, and with every schedule and feature."""
ALL_MODELS = (*MODELS, f"digits{EVAL}")
PLANNERS = ("naive", "analytical", "auto")
SCHEDULES = ("gpipe", "1f1b", "list", "zb-h1", "interleaved", "zb-v", "dualpipe-v", "auto")
FEATURES: Mapping[str, Mapping[str, object]] = {
    "alone": {},
    "recompute": {"recompute": "all"},
    "replicas 2": {"replicas": 2},
    "ZeRO 1": {"replicas": 2, "zero_stage": 1},
    "ZeRO 2": {"replicas": 2, "zero_stage": 2, "sum_order": "micro"},
    "ZeRO 3": {"replicas": 2, "zero_stage": 3, "sum_order": "micro"},
    "tensor 2": {"tensor": 2},
    "tensor 2 of 2 replicas": {"tensor": 2, "replicas": 2},
    "offload activations, state": {"offload": ("activations", "state")},
    "offload weights": {"offload": ("weights",)},
    "2bw": {"asynchronous": "2bw"},
    "stash": {"asynchronous": "stash"},
}
"""Options; where one is refused with a schedule, that it is refused is what is hashed."""
_GIB, _MIB = 2**30, 2**20


@dataclass(frozen=True)
class Case:
    """One plan: a model, a cluster by name, and what is asked for, by name."""

    model: str
    cluster: str
    way: str
    options: Options

    @property
    def key(self) -> str:
        """The case's name in the table."""
        return f"{self.model} | {self.cluster} | {self.way}"


@cache
def places() -> Mapping[str, Cluster]:
    """Return every cluster by name: those of all models, and those of the small ones."""
    return {**clusters(), **_more_clusters()}


def _more_clusters() -> Mapping[str, Cluster]:
    unlike = clusters()["4:2:1:1"]
    names = [device.name for device in unlike.devices]
    stores = tuple(DeviceStore(f"disk {name}", name, 64 * _GIB, 1e9) for name in names)
    crowded = tuple(replace(d, host="h0" if d.name in names[:2] else "h1") for d in unlike.devices)
    shared = tuple(Host(name, 125e6, 20e9, 1) for name in ("h0", "h1"))
    tight = {f"tight for {model}": _with_memory(unlike, mib) for model, mib in TIGHT_MIB.items()}
    return {
        "stores": replace(unlike, stores=stores),
        "hosts share": replace(unlike, devices=crowded, hosts=shared),
        "GPUs of 2 hosts": _gpus(),
        **tight,
    }


def _with_memory(cluster: Cluster, mib: float) -> Cluster:
    devices = (replace(device, memory_bytes=int(mib * _MIB)) for device in cluster.devices)
    return replace(cluster, devices=tuple(devices))


def _gpus() -> Cluster:
    """Return two cards on each of two hosts, as fast as an A100 and a V100 by their datasheets."""
    rates = {"a": (19.5e12, 312e12, 1.55e12, 40), "v": (15.7e12, 125e12, 0.9e12, 16)}
    devices = tuple(
        Device(f"{kind}{i}", kind, "cuda", gib * _GIB, f32, rate, 6e-6, half_flops_per_s=half)
        for kind, (f32, half, rate, gib) in rates.items()
        for i in range(2)
    )
    inside = tuple((f"{kind}0", f"{kind}1", Link(5e-6, 100e9)) for kind in rates)
    hosts = tuple(Host(kind, 1.25e9) for kind in rates)
    return Cluster(devices, Link(2e-5, 1.25e9), inside, hosts)


def cases(models: Sequence[str] = ALL_MODELS) -> tuple[Case, ...]:
    """Return what is planned of some models, each case once."""
    return tuple(case for model in models for case in _of_model(model))


def gate_cases() -> tuple[Case, ...]:
    """Return those that a test plans each time: of the smallest model, two of `auto`.

    Every schedule is there alone, and with a third of the features; every feature with a third of
    the schedules.
    """
    searched = ("2:1", "GPUs of 2 hosts")
    every = (case for case in cases(SMALL_MODELS[:1]) if not case.way.endswith("open"))
    seen = (case for case in every if case.way not in _left_out())
    return tuple(c for c in seen if "auto" not in c.way or c.cluster in searched)


def _left_out() -> frozenset[str]:
    """Return two thirds of the pairs of a schedule and a feature."""
    pairs = {
        f"{schedule}, {feature}": (row + column) % 3
        for row, schedule in enumerate(SCHEDULES)
        for column, feature in enumerate(FEATURES)
        if feature != "alone"
    }
    return frozenset(way for way, turn in pairs.items() if turn)


def _of_model(model: str) -> Iterator[Case]:
    known = [*clusters()]
    if model in SMALL_MODELS:
        known += ["stores", "hosts share", "GPUs of 2 hosts", f"tight for {model}"]
    for cluster in known:
        for planner in PLANNERS:
            yield Case(model, cluster, planner, _options(planner))
    if model in SMALL_MODELS:
        yield from _small(model)


def _options(planner: str, **chosen: object) -> Options:
    method, estimator = preset(planner)
    plain = Options(method, estimator, None, MICRO_BATCHES)
    return replace(plain, **chosen)  # type: ignore[arg-type]  # fields of Options by name


def _small(model: str) -> Iterator[Case]:
    for cluster in ("4:2:1:1", "GPUs of 2 hosts", f"tight for {model}"):
        for planner in PLANNERS:
            way = f"{planner}, micro-batches open"
            yield Case(model, cluster, way, _options(planner, micro_batches=None))
    yield Case(model, "2:1", "gems", _options("naive", schedule="gems"))
    yield Case(model, "4:2:1:1", "replicas open", _options("analytical", replicas=0))
    for stage in (0, 1, 2):
        backend = _options("naive", replicas=2, zero_stage=stage, sum_order="backend")
        yield Case(model, "2 alike", f"backend, ZeRO {stage}", backend)
    for schedule in SCHEDULES:
        for name, chosen in FEATURES.items():
            options = _options("naive", schedule=schedule, **chosen)
            yield Case(model, "stores", f"{schedule}, {name}", options)
