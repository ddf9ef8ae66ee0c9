"""How far a forecast may be off: an interval that holds nine of ten measured steps.

Calibrated where forecasts were held against what was measured, each row left out of what it is
judged by: GPUs in tools/studies/published_gpus, CPUs in tools/studies/fidelity, replicas and tensor
groups in tools/studies/divided. It knows no devices but by their kind and card; what nobody has
measured gets a wider interval, and a note that says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bigbrain_fx.cluster import MEASURED
from bigbrain_fx.core import Device, Graph
from bigbrain_fx.plan.nouns import Plan


@dataclass(frozen=True)
class Spread:
    """Nine of ten steps take from `low_s` to `high_s`; `note` says what widened it, or ""."""

    low_s: float
    high_s: float
    note: str = ""

    def __str__(self) -> str:
        """Show it as a forecast does."""
        return f"{self.low_s:.4g} to {self.high_s:.4g} s in nine of ten"


@dataclass(frozen=True, slots=True)
class _Ratios:
    """Measured over forecast: the 5th and the 95th of a hundred rows."""

    low: float
    high: float


MEASURED_CARD = _Ratios(0.80, 1.42)
OTHER_CARD = _Ratios(0.70, 1.50)
"""tools/studies/published_gpus, what was left out: models that no rule was fitted on, and the card
left out."""
CPU_ANALYTICAL = _Ratios(0.78, 1.28)
"""tools/studies/fidelity, `analytical`: the worst of 75 held-out cells was 27.8 % off."""
CPU_PROFILED = _Ratios(0.90, 1.10)
"""tools/studies/fidelity, `steady`: 72 of 75 held-out cells were within 10 %."""
DIVIDED = {"replicas": _Ratios(0.95, 1.15), "tensor groups": _Ratios(0.92, 1.16)}
"""tools/studies/divided, ops profiled on CPUs: 20 rows with replicas, 12 with tensor groups."""
_WIDER = 1.5  # a model family, a precision or devices together that no row was of


def spread(plan: Plan) -> Spread:
    """Return the interval of a plan's step, the widest of its devices'."""
    used = [plan.cluster.device[name] for name in plan.stages.devices]
    ratios = [_of(device, plan) for device in used]
    low, high = min(r.low for r in ratios), max(r.high for r in ratios)
    notes = list(dict.fromkeys(filter(None, (_note(device, plan.graph) for device in used))))
    profiled_cpus = {(d.kind, plan.estimator != "analytical") for d in used} == {("cpu", True)}
    for divided in _divided(plan):
        if profiled_cpus:
            known = DIVIDED[divided]
            low, high = min(low, known.low), max(high, known.high)
            continue
        low, high = 1 - _WIDER * (1 - low), 1 + _WIDER * (high - 1)
        notes.append(f"{divided} were held against measured steps on CPUs with profiled ops only")
    return Spread(plan.forecast.step_s * low, plan.forecast.step_s * high, "; ".join(notes))


def _divided(plan: Plan) -> Iterator[str]:
    """Name what computes a batch, or an op, on several devices."""
    if plan.stages.replicas > 1:
        yield "replicas"
    if plan.placement.tensor is not None:
        yield "tensor groups"


def _of(device: Device, plan: Plan) -> _Ratios:
    if device.kind == "cpu":
        return CPU_ANALYTICAL if plan.estimator == "analytical" else CPU_PROFILED
    return OTHER_CARD if _note(device, plan.graph) else MEASURED_CARD


def _note(device: Device, graph: Graph) -> str:
    if device.kind == "cpu":
        return ""
    known = MEASURED.get(device.preset, ())
    if not known:
        which = device.preset or f"{device.name}, a GPU without a preset,"
        return f"no published row of {which} was forecast before"
    rate = _rate(device, graph)
    in_words = {"half": "half precision", "tf32": "TF32", "fp32": "FP32"}[rate]
    row = f"no published row of {device.preset} in {in_words} was forecast before"
    return "" if rate in known else row


def _rate(device: Device, graph: Graph) -> str:
    """Return which of a card's rates most of a model's products are computed at."""
    types = {param.spec.dtype for param in graph.params if param.kind == "parameter"}
    half = {"float16", "bfloat16"} & (types | {graph.autocast}) - set(device.lacks)
    if half:
        return "half"
    in_tf32 = device.tf32_flops_per_s and device.matmul_precision != "highest"
    return "tf32" if in_tf32 else "fp32"
