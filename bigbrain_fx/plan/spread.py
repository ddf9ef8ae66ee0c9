"""How far a forecast may be off: an interval that holds nine of ten measured steps.

Calibrated where forecasts were held against what was measured, each row left out of what it is
judged by: GPUs in docs/gpu.md, CPUs in docs/fidelity.md. It knows no devices but by their kind and
card; what nobody has measured gets a wider interval, and a note that says why.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigbrain_fx.cluster import PRESETS
from bigbrain_fx.core import Device
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


MEASURED_CARD = _Ratios(0.82, 1.29)
OTHER_CARD = _Ratios(0.72, 1.41)
"""`python -m tools.published_gpus.held_out`: the model left out, and the card left out."""
CPU_ANALYTICAL = _Ratios(0.78, 1.28)
"""docs/fidelity.md, `analytical`: the worst of 75 held-out cells was 27.8 % off."""
CPU_PROFILED = _Ratios(0.90, 1.10)
"""docs/fidelity.md, `steady`: 72 of 75 held-out cells were within 10 %."""
_WIDER = 1.5  # a model family, a precision or devices together that no row was of


def spread(plan: Plan) -> Spread:
    """Return the interval of a plan's step, the widest of its devices'."""
    used = [plan.cluster.device[name] for name in plan.stages.devices]
    ratios = [_of(device, plan.estimator) for device in used]
    low, high = min(r.low for r in ratios), max(r.high for r in ratios)
    notes = list(dict.fromkeys(filter(None, (_note(device) for device in used))))
    if plan.stages.replicas > 1:
        low, high = 1 - _WIDER * (1 - low), 1 + _WIDER * (high - 1)
        notes.append("replicas were never held against measured steps")
    if plan.placement.tensor is not None:
        low, high = 1 - _WIDER * (1 - low), 1 + _WIDER * (high - 1)
        notes.append("tensor groups were never held against measured steps")
    return Spread(plan.forecast.step_s * low, plan.forecast.step_s * high, "; ".join(notes))


def _of(device: Device, estimator: str) -> _Ratios:
    if device.kind == "cpu":
        return CPU_ANALYTICAL if estimator == "analytical" else CPU_PROFILED
    return MEASURED_CARD if _is_measured(device) else OTHER_CARD


def _is_measured(device: Device) -> bool:
    card = PRESETS.get(device.preset)
    return card is not None and card.sustained.source != "usual"


def _note(device: Device) -> str:
    if device.kind == "cpu" or _is_measured(device):
        return ""
    which = device.preset or f"{device.name}, a GPU without a preset,"
    return f"no published row of {which} was forecast before"
