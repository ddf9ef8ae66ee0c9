"""The models of models/ captured once a session, plans over a fixed cluster, and their files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from bigbrain_fx.cluster import parse_cluster
from bigbrain_fx.core import Cluster
from bigbrain_fx.emit.files.texts import bundle_texts
from bigbrain_fx.emit.modules.names import device_names
from bigbrain_fx.frontend import Captured, capture, load_model_file
from bigbrain_fx.plan import Options, Plan, Source, make_plan

ROOT = Path(__file__).resolve().parents[2]
CPU = '"kind": "cpu", "memory": "4GiB", "flops": "60GFLOP/s", "memory_bandwidth": "12GB/s"'
LINK = '"bandwidth": "1GB/s", "latency": "50us"'


@dataclass(frozen=True)
class Sample:
    """A captured model and what a plan remembers of its file."""

    captured: Captured
    source: Source


@lru_cache(maxsize=16)
def sample(name: str) -> Sample:
    """Capture models/<name>.py, once a session."""
    file = load_model_file(ROOT / "models" / f"{name}.py")
    captured = capture(file.model, file.example_batch, file.loss)
    source = Source(
        path=str(ROOT / "models" / f"{name}.py"),
        has_batches=file.batches is not None,
        has_optimizer=file.optimizer is not None,
        has_loss=file.loss is not None,
        has_lr_scale=file.lr_scale is not None,
        clip_norm=file.clip_norm,
    )
    return Sample(captured, source)


def of_module(module: nn.Module, batch: object, loss: Callable[..., Any] | None) -> Sample:
    """Capture a module in memory."""
    return Sample(capture(module, batch, loss), Source(""))


def cluster(devices: int) -> Cluster:
    """Describe equal CPU devices d0, d1, ...; fixed numbers, nothing measured."""
    return parse_cluster(cluster_text(devices), "cluster.json")


def cluster_text(devices: int) -> str:
    """Write the cluster.json of `cluster`."""
    named = (f'{{"name": "d{i}", "host": "a", "threads": 1, {CPU}}}' for i in range(devices))
    return f'{{"devices": [{", ".join(named)}], "links": {{"default": {{{LINK}}}}}}}'


@lru_cache(maxsize=64)
def plan(
    name: str,
    partitioner: str = "naive",
    devices: int = 3,
    schedule: str | None = None,
    micro_batches: int = 4,
) -> Plan:
    """Plan a model of models/."""
    found = sample(name)
    return planned(found, partitioner, devices, schedule, micro_batches)


def planned(
    found: Sample, partitioner: str, devices: int, schedule: str | None, micro_batches: int
) -> Plan:
    """Plan a sample."""
    options = Options(partitioner, schedule=schedule, micro_batches=micro_batches)
    return make_plan(found.captured.graph, cluster(devices), found.source, options)


@lru_cache(maxsize=64)
def texts(
    name: str,
    partitioner: str = "naive",
    devices: int = 3,
    schedule: str | None = None,
    micro_batches: int = 4,
) -> dict[str, str]:
    """Emit a model of models/."""
    return bundle_texts(plan(name, partitioner, devices, schedule, micro_batches))


def program(plan: Plan, texts: Mapping[str, str], device: str) -> type:
    """Run the file of a device; return the class of its program."""
    names = device_names(plan.stages.devices)[device]
    found: type = getattr(loaded(texts[f"{names.module}.py"], names.module), names.program)
    return found


def loaded(text: str, name: str) -> ModuleType:
    """Run an emitted file as a module; its runtime is the one that bundles get a copy of."""
    module = ModuleType(f"bigbrain_fx.{name}")
    module.__package__ = "bigbrain_fx"
    exec(compile(text, f"{name}.py", "exec"), module.__dict__)
    return module
