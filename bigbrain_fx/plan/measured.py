"""What a run measured beside what was forecast: bars of the same names, as one Chrome trace.

It knows plans and timelines; who measured, and how, it does not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from bigbrain_fx.core import Forecast, Slice
from bigbrain_fx.plan.making import timeline
from bigbrain_fx.plan.nouns import Plan

Event: TypeAlias = dict[str, object]
Held: TypeAlias = Mapping[str, Sequence[tuple[float, int]]]  # device -> (seconds, bytes)

COMPUTES = ("forward", "backward", "weights", "optimizer")
STEP = "step "  # begins the name of a bar around all of a step's
MEASURED, FORECAST = 1, 2  # rows of a device
US = 1e6


@dataclass(frozen=True)
class MeasuredRun:
    """What the devices of a run noted, in seconds since the first note.

    Attributes:
        bars: what each device did: instructions, and around those of a step one bar "step 7"; one
            whose end nobody noted ends with the trace.
        held: bytes that each device held, at the ends of bars.
        marks: what happened to processes.
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
        *(_bar(bar, pids[bar.device], MEASURED, bar.start_s) for bar in measured.bars),
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
        yield _title("thread", "measured", pid, MEASURED)
        yield _title("thread", "forecast", pid, FORECAST)


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
    places = {name: (pid, FORECAST) for name, pid in pids.items()}
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
