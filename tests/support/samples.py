"""The models of models/ captured once a run, plans over a fixed cluster, and their files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import TypeAdapter
from torch import Tensor, nn

from bigbrain_fx.cluster import parse_cluster
from bigbrain_fx.core import Cluster, Graph
from bigbrain_fx.emit.files.code import BLOCKS
from bigbrain_fx.emit.files.texts import bundle_texts
from bigbrain_fx.emit.modules.names import device_names
from bigbrain_fx.frontend import Captured, capture, load_model_file
from bigbrain_fx.plan import Options, Plan, Source, make_plan
from tests.support.cached_bundles import once

ROOT = Path(__file__).resolve().parents[2]
CPU = '"kind": "cpu", "memory": "4GiB", "flops": "60GFLOP/s", "memory_bandwidth": "12GB/s"'
LINK = '"bandwidth": "1GB/s", "latency": "50us"'


GATE = frozenset({"digits", "encdec", "gpt"})  # the models on which the gate shows a behaviour


@dataclass(frozen=True)
class Sample:
    """The graph of a captured model and what a plan remembers of its file.

    Attributes:
        tensors: the captured tensors of a module in memory.
    """

    graph: Graph
    source: Source
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


def cases(rows: Iterable[Any]) -> list[Any]:
    """Mark rows of other models than `GATE` as nightly; a row is a model or begins with one."""
    nightly = pytest.mark.nightly
    tuples = [row if isinstance(row, tuple) else (row,) for row in rows]
    return [pytest.param(*row, marks=[] if row[0] in GATE else nightly) for row in tuples]


@lru_cache(maxsize=16)
def captured(name: str) -> Captured:
    """Capture models/<name>.py."""
    file = load_model_file(ROOT / "models" / f"{name}.py")
    return capture(file.model, file.example_batch, file.loss)


@lru_cache(maxsize=16)
def sample(name: str) -> Sample:
    """Return the graph of models/<name>.py, which the processes of a run capture once."""
    path = ROOT / "models" / f"{name}.py"
    file = load_model_file(path)
    source = Source(
        path=str(path),
        has_batches=file.batches is not None,
        has_optimizer=file.optimizer is not None,
        has_loss=file.loss is not None,
        has_lr_scale=file.lr_scale is not None,
        clip_norm=file.clip_norm,
    )
    return Sample(_graph(name, path.read_text()), source)


def _graph(name: str, text: str) -> Graph:
    codec = TypeAdapter(Graph)

    def fill(folder: Path) -> None:
        (folder / "graph.json").write_bytes(codec.dump_json(captured(name).graph))

    folder = once((name, text), fill)
    if folder is None:
        return captured(name).graph
    return codec.validate_json((folder / "graph.json").read_bytes())


def of_module(module: nn.Module, batch: object, loss: Callable[..., Any] | None) -> Sample:
    """Capture a module in memory."""
    found = capture(module, batch, loss)
    return Sample(found.graph, Source(""), found.tensors)


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
    return make_plan(found.graph, cluster(devices), found.source, options)


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
    with shared_blocks(texts):
        found: type = getattr(loaded(texts[f"{names.module}.py"], names.module), names.program)
    return found


def with_blocks(texts: Mapping[str, str], file: str) -> str:
    """Return the text of a device file after that of the blocks which several devices have."""
    return texts.get(f"{BLOCKS}.py", "") + texts[file]


@contextmanager
def shared_blocks(texts: Mapping[str, str]) -> Iterator[None]:
    """Let emitted files find the blocks that they share, where they do."""
    text = texts.get(f"{BLOCKS}.py")
    with pytest.MonkeyPatch.context() as patch:
        if text is not None:
            patch.setitem(sys.modules, f"bigbrain_fx.{BLOCKS}", loaded(text, BLOCKS))
        yield


def loaded(text: str, name: str) -> ModuleType:
    """Run an emitted file as a module; its runtime is the one that bundles get a copy of."""
    module = ModuleType(f"bigbrain_fx.{name}")
    module.__package__ = "bigbrain_fx"
    exec(compile(text, f"{name}.py", "exec"), module.__dict__)
    return module
