"""Bundles that train beside a reference in one process, so that tests may compare every bit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from bigbrain_fx.core import Cluster, Device, Link
from bigbrain_fx.emit import write_bundle
from bigbrain_fx.frontend import capture, load_model_file
from bigbrain_fx.plan import Options, Plan, Source, make_plan
from bigbrain_fx.verification.imported_bundle import batches_of, run_bundle, weights_of
from bigbrain_fx.verification.links import same_training
from bigbrain_fx.verification.members import same_leaves
from bigbrain_fx.verification.trace import Trace
from tests.support.bundles import MODEL
from tools.conformance.matrix import Bench, imported, other_bytes

STEPS = 3
APART = "        self.head.weight = self.embed.weight\n"
HEAD = "        self.head"
LAST_NORM = f"self.norm = nn.LayerNorm(16)\n{HEAD}"
HEADS = MODEL.replace(
    "class Net(",
    """class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x):
        n, length, _ = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(n, length, 16))


class Net(""",
).replace(
    LAST_NORM, LAST_NORM.replace("nn.LayerNorm(16)", "nn.Sequential(Mixed(), nn.LayerNorm(16))")
)
"""The model of `bundles.MODEL` with attention before its last norm."""
# A weight that all heads share: its gradient is a sum over members, of no rows.
SHARED = HEADS.replace(
    "self.out = nn.Linear(16, 16)",
    "self.out = nn.Linear(16, 16)\n        self.scale = nn.Parameter(torch.ones(4))",
).replace("        mixed = F.sc", "        q = q * self.scale\n        mixed = F.sc")
# Tensors below a page stay in memory.
PAGES = HEADS.replace("16", "64").replace("48", "192").replace("32", "256")
PAGES = PAGES.replace("3, 4, 4)", "3, 4, 16)")
AXES = {"tensor_axes": ("heads", "hidden", "sequence")}
WIDE = """import torch
from torch import nn


def model():
    return nn.Sequential(nn.Linear(160, 96), nn.GELU(), nn.Linear(96, 160), nn.LayerNorm(160))


def loss(output, batch):
    return output.square().mean()


def batches(seed):
    dice = torch.Generator().manual_seed(seed)
    while True:
        yield {"input": torch.randn(256, 160, generator=dice)}


def example_batch():
    return next(batches(0))


def lr_scale(step):
    return 1.0 / (1 + step)
"""
ROWS = """class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, x):
        {forward}


class Net("""
FLAT = "return self.norm(x.flatten(0, 1)).view_as(x)"


def with_layer(init: str, forward: str = FLAT) -> str:
    """Return the model with a layer of one's own in the place of its norms."""
    layer = ROWS.format(init=init, forward=forward)
    return MODEL.replace("class Net(", layer).replace("nn.LayerNorm(16)", "Rows()")


BATCH_NORM = with_layer("self.norm = nn.BatchNorm1d(16)")


def untied(text: str) -> str:
    """Return the model with a weight of its own for the head, and without clipping."""
    return text.replace(APART, "").replace("clip_norm = 0.5", "")


BFLOAT16 = '\n\nautocast = "bfloat16"\n'
SCALED = (
    MODEL.replace("def lr_scale(step):\n    return 1.0 / (1 + step)\n", "")
    + """
autocast = "float16"
grad_scaler = {"init_scale": 2.0**24, "growth_interval": 2}


def scheduler(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50)
"""
)


def bench_of(text: str, *, leaves: tuple[str, ...] = (), steps: int = STEPS) -> Bench:
    """Return a model file that is captured once, and how many steps it trains."""
    return replace(_captured(text, leaves), steps=steps)


@lru_cache
def _captured(text: str, leaves: tuple[str, ...]) -> Bench:
    path = Path(tempfile.mkdtemp(dir=_scratch().name)) / "net.py"
    path.write_text(text)
    file = load_model_file(path)
    about = {"name": "net", "autocast": file.autocast, "leaves": leaves}
    captured = capture(file.model, file.example_batch, file.loss, **about)  # type: ignore[arg-type]
    return Bench(file, captured, STEPS)


@lru_cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()  # removed when the process ends


def cluster(*speeds: int, replicas: tuple[tuple[str, ...], ...] = ()) -> Cluster:
    """Return CPU devices of these speeds on one host."""
    made = (Device(f"d{i}", "h", "cpu", 2**33, s * 1e9, 12e9, 1e-6) for i, s in enumerate(speeds))
    return Cluster(tuple(made), Link(50e-6, 1e9), replicas=replicas)


def equal(devices: int) -> Cluster:
    """Return CPU devices that are alike."""
    return cluster(*[1] * devices)


def planned(bench: Bench, where: Cluster, **choices: object) -> Plan:
    """Plan with the settings of the model file, by naive and eight micro-batches unless told."""
    file = bench.file
    source = Source(
        str(file.path),
        has_batches=True,
        has_loss=True,
        has_lr_scale=file.lr_scale is not None,
        clip_norm=file.clip_norm,
        has_scheduler=file.scheduler is not None,
        grad_scaler=file.grad_scaler,
        drop_last=file.drop_last,
    )
    given = {"partitioner": "naive", "micro_batches": 8, **choices}
    options = Options(**given)  # type: ignore[arg-type]  # fields of Options
    return make_plan(bench.captured.graph, where, source, options)


def with_own_optimizer(plan: Plan) -> Plan:
    """Return the plan of a bundle that trains with the optimizer of the model file."""
    return replace(plan, source=replace(plan.source, has_optimizer=True))


def grouped(bench: Bench, devices: int, **choices: object) -> Plan:
    """Plan for equal devices in tensor groups, of two and with four micro-batches unless told."""
    given = {"micro_batches": 4, "tensor": 2, **choices}
    return planned(bench, equal(devices), **given)


def trained(bench: Bench, plan: Plan, folder: Path | None = None) -> tuple[Trace, str]:
    """Train a bundle and its reference; return what the bundle made, and what differs."""
    with tempfile.TemporaryDirectory() as scratch:
        made = write_bundle(plan, bench, folder or Path(scratch, "bundle"))
        with imported(made, force_adamw=False) as bundle:
            expected = bench.reference(plan, made, bundle)
            checks = [_leaves(bench, plan, made, bundle)] if plan.placement.tensor else []
            actual = run_bundle(bundle, plan, bench.steps, plan.seed)
    checks += same_training(plan, expected, actual)
    found = "; ".join(f"{c['name']}: {c['detail']}" for c in checks if c["passed"] is False)
    return actual, found or other_bytes(expected, actual) or ", ".join(sorted(actual.unlike))


def _leaves(bench: Bench, plan: Plan, folder: Path, bundle: object) -> dict[str, object]:
    weights, stream = weights_of(folder, plan), batches_of(bundle, plan)  # type: ignore[arg-type]
    return same_leaves(plan, weights, bench.captured.functions, stream(0), 1e-6)


def same(a: Trace, b: Trace) -> bool:
    """Whether two runs made the same losses and tensors, bit for bit."""
    return a.losses == b.losses and all(torch.equal(t, b.tensors[n]) for n, t in a.tensors.items())


Choices = Mapping[str, object]


@dataclass(frozen=True)
class Table:
    """Plans of a model file, by devices and options, and the fact that they are there for."""

    text: str
    rows: Sequence[tuple[int, Choices]]
    shows: Callable[[Plan], object] = lambda plan: plan
    common: Choices = field(default_factory=dict)
    where: Callable[[int], Cluster] = equal
    leaves: tuple[str, ...] = ()
    steps: int = STEPS
    patches: Mapping[tuple[Any, str], int] = field(default_factory=dict)


Case = tuple[Table, int, Choices]


def cases(tables: Mapping[str, Table]) -> dict[str, Case]:
    """Return the rows of all tables, by the table's name, devices and options."""
    return {
        f"{name}: {devices} {' '.join(f'{key}={value}' for key, value in choices.items())}": (
            table,
            devices,
            choices,
        )
        for name, table in tables.items()
        for devices, choices in table.rows
    }


def require_bits(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train a row beside its reference: all losses, gradients of step 0, and tensors at the end."""
    table, devices, choices = case
    for (module, number), value in table.patches.items():
        monkeypatch.setattr(module, number, value)
    bench = bench_of(table.text, leaves=table.leaves, steps=table.steps)
    given: Any = {**table.common, **choices}
    plan = planned(bench, table.where(devices), **given)
    assert table.shows(plan)
    made, fault = trained(bench, plan)
    assert fault == ""
    assert len(made.losses) == table.steps
    assert all(torch.isfinite(tensor).all() for tensor in made.tensors.values())
