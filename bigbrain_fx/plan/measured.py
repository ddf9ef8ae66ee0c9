"""Measured run beside its forecast: bars of the same names, as one Chrome trace.

The module knows plans and timelines; other modules measure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from bigbrain_fx.cluster import MEASURED
from bigbrain_fx.core import Device, Forecast, Graph, Slice
from bigbrain_fx.plan.making import timeline
from bigbrain_fx.plan.nouns import Plan

# ------------------------------------------------------------------------------------------------
# How far a forecast may be off: an interval that holds nine of ten measured steps.
#
# Calibrated where forecasts were held against what was measured, each row left out of what it is
# judged by: GPUs in tools/studies/published_gpus, CPUs in tools/studies/fidelity, replicas and
# tensor groups in tools/studies/divided.


@dataclass(frozen=True)
class Spread:
    """Nine of ten steps take from `low_s` to `high_s`; `note` says what widened it, or ""."""

    low_s: float
    high_s: float
    note: str = ""

    def __str__(self) -> str:
        """Show it as a forecast does."""
        return f"{self.low_s:.4g} to {self.high_s:.4g} s (90 %)"


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


# ------------------------------------------------------------------------------------------------
# What a run measured beside what was forecast: bars of the same names, as one Chrome trace.


Event: TypeAlias = dict[str, object]
Held: TypeAlias = Mapping[str, Sequence[tuple[float, int]]]  # device -> (seconds, bytes)

COMPUTES = ("forward", "backward", "weights", "optimizer")
STEP = "step "  # begins the name of a bar around all of a step's
MEASURED_ROW, FORECAST_ROW = 1, 2  # rows of a device
US = 1e6


@dataclass(frozen=True)
class MeasuredRun:
    """Notes of the devices of a run, in seconds since the first note.

    Attributes:
        bars: of each device, its instructions, and around those of a step one bar "step 7". A bar
            without a noted end ends with the trace.
        held: bytes that each device held, at the ends of bars.
        marks: events of processes.
    """

    bars: tuple[Slice, ...]
    held: Held
    marks: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True)
class MeasuredStep:
    """One step of a run, in seconds since its beginning; what was held where that was measured."""

    step: int
    step_s: float
    bars: tuple[Slice, ...]
    held: Held

    @property
    def peak_bytes(self) -> Mapping[str, int]:
        """The most that each device held."""
        return {name: max(nbytes for _, nbytes in found) for name, found in self.held.items()}

    def busy_s(self, device: str) -> float:
        """Return how long a device computed; waiting for messages and sending are left out."""
        own = (bar for bar in self.bars if bar.device == device and _kind(bar) in COMPUTES)
        return sum(bar.end_s - bar.start_s for bar in own)


def _kind(bar: Slice) -> str:
    return bar.what.split(" ", 1)[0]


def typical_step(measured: MeasuredRun, devices: Sequence[str]) -> MeasuredStep | None:
    """Return the step of median length that every device ran once, the first one left out."""
    spans: dict[int, list[Slice]] = {}
    for bar in measured.bars:
        if bar.what.startswith(STEP):
            spans.setdefault(int(bar.what.removeprefix(STEP)), []).append(bar)
    whole = {n: found for n, found in spans.items() if _is_whole(found, devices)}
    lengths = sorted((_end_s(whole[n]) - _start_s(whole[n]), n) for n in sorted(whole)[1:])
    if not lengths:
        return None
    step_s, step = lengths[(len(lengths) - 1) // 2]
    around = {bar.device: bar for bar in whole[step]}
    return MeasuredStep(step, step_s, _within(measured, around), _held(measured.held, around))


def _is_whole(found: Sequence[Slice], devices: Sequence[str]) -> bool:
    return sorted(bar.device for bar in found) == sorted(devices)


def _start_s(found: Sequence[Slice]) -> float:
    return min(bar.start_s for bar in found)


def _end_s(found: Sequence[Slice]) -> float:
    return max(bar.end_s for bar in found)


def _within(measured: MeasuredRun, around: Mapping[str, Slice]) -> tuple[Slice, ...]:
    zero_s = min(bar.start_s for bar in around.values())
    return tuple(
        Slice(bar.device, bar.what, bar.start_s - zero_s, bar.end_s - zero_s)
        for bar in measured.bars
        if bar != around[bar.device] and _is_in(around[bar.device], bar.start_s)
    )


def _is_in(bar: Slice, when_s: float) -> bool:
    return bar.start_s <= when_s <= bar.end_s


def _held(held: Held, around: Mapping[str, Slice]) -> Held:
    zero_s = _start_s([*around.values()])
    of_step = {
        name: [(when_s - zero_s, nbytes) for when_s, nbytes in entries if _is_in(bar, when_s)]
        for name, bar in around.items()
        for entries in (held.get(name, ()),)
    }
    return {name: found for name, found in of_step.items() if found}


def run_trace(plan: Plan, measured: MeasuredRun) -> list[Event]:
    """Return a run as Chrome trace events: a process for each device, and in it two rows.

    Beside each measured step stands the forecast, as long as the step or not: both begin together.
    Counters say the bytes held, measured and by forecast.
    """
    devices = plan.stages.devices
    pids = {name: number for number, name in enumerate(devices, start=1)}
    begins, forecast = _begins(measured), timeline(plan)
    held = {entry.device: entry.held for entry in forecast.devices}
    return [
        *_names(pids),
        *(_bar(bar, pids[bar.device], MEASURED_ROW, bar.start_s) for bar in measured.bars),
        *_forecast(forecast, pids, begins),
        *_counters(measured.held, pids, "bytes held, measured", (0.0,)),
        *_counters(held, pids, "bytes held, forecast", begins),
        *(_mark(when_s, what) for when_s, what in measured.marks),
    ]


def _begins(measured: MeasuredRun) -> Sequence[float]:
    """Return when each step began, on the device that was first; 0 where none has."""
    found: dict[str, float] = {}
    for bar in measured.bars:
        if bar.what.startswith(STEP):
            found[bar.what] = min(found.get(bar.what, bar.start_s), bar.start_s)
    return sorted(found.values()) or (0.0,)


def _names(pids: Mapping[str, int]) -> Iterator[Event]:
    for name, pid in (("run", 0), *pids.items(), ("links", len(pids) + 1)):
        yield _title("process", name, pid, 0)
    for pid in pids.values():
        yield _title("thread", "measured", pid, MEASURED_ROW)
        yield _title("thread", "forecast", pid, FORECAST_ROW)


def _title(kind: str, name: str, pid: int, tid: int) -> Event:
    return {"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _bar(bar: Slice, pid: int, tid: int, start_s: float) -> Event:
    about = {"name": bar.what, "cat": _kind(bar), "pid": pid, "tid": tid}
    return {"ph": "X", **about, "ts": start_s * US, "dur": (bar.end_s - bar.start_s) * US}


def _forecast(
    forecast: Forecast, pids: Mapping[str, int], begins: Sequence[float]
) -> Iterator[Event]:
    bars = forecast.timeline
    links = list(dict.fromkeys(bar.device for bar in bars if bar.device not in pids))
    places = {name: (pid, FORECAST_ROW) for name, pid in pids.items()}
    places |= {name: (len(pids) + 1, number) for number, name in enumerate(links, start=1)}
    yield from (_title("thread", f"{n}, forecast", *places[n]) for n in links)
    for begin_s in begins:
        for bar in bars:
            yield _bar(bar, *places[bar.device], begin_s + bar.start_s)


def _counters(
    held: Held, pids: Mapping[str, int], name: str, begins: Sequence[float]
) -> Iterator[Event]:
    for begin_s in begins:
        for device, entries in held.items():
            about = {"ph": "C", "name": name, "pid": pids[device], "tid": 0}
            for when_s, nbytes in entries:
                yield {**about, "ts": (begin_s + when_s) * US, "args": {"bytes": nbytes}}


def _mark(when_s: float, what: str) -> Event:
    return {"ph": "i", "s": "g", "name": what, "pid": 0, "tid": 0, "ts": when_s * US}
