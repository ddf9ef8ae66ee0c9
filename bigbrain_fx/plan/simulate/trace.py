"""A forecast as a Chrome trace, for Perfetto and chrome://tracing.

It knows only the timeline: a bar's name says which computations a message goes between.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeAlias

from bigbrain_fx.core import Forecast, Slice

Event: TypeAlias = dict[str, object]

DEVICES, LINKS = 1, 2  # process numbers in the trace
_MESSAGE = re.compile(r"(activation|gradient) .* (\d+)->(\d+) (#\d+)", re.DOTALL)
_COMPUTE = {"activation": "forward", "gradient": "backward"}


def chrome_trace(forecast: Forecast) -> list[Event]:
    """Return the timeline as trace events, ready for `json.dump({"traceEvents": events}, file)`.

    Devices are threads of one process and links of another. Bars are "X" events, and an arrow ("s",
    "t", "f") leads from the computation that made a message, over its link, to the one that reads
    it.
    """
    names = {entry.device for entry in forecast.devices}
    rows = list(dict.fromkeys(bar.device for bar in forecast.timeline))
    place = {row: (DEVICES if row in names else LINKS, number) for number, row in enumerate(rows)}
    return [
        *_titles(place),
        *(_bar(bar, place) for bar in forecast.timeline),
        *_arrows(forecast, place),
    ]


def _titles(place: dict[str, tuple[int, int]]) -> Iterator[Event]:
    for pid, name in ((DEVICES, "devices"), (LINKS, "links")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    for row, (pid, tid) in place.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": row}}


def _bar(bar: Slice, place: dict[str, tuple[int, int]]) -> Event:
    pid, tid = place[bar.device]
    start_us, end_us = bar.start_s * 1e6, bar.end_s * 1e6
    return {
        "ph": "X",
        "name": bar.what,
        "cat": bar.what.split(" ", 1)[0],
        "pid": pid,
        "tid": tid,
        "ts": start_us,
        "dur": end_us - start_us,
    }


def _arrows(forecast: Forecast, place: dict[str, tuple[int, int]]) -> Iterator[Event]:
    computed = {bar.what: bar for bar in forecast.timeline if place[bar.device][0] == DEVICES}
    for number, bar in enumerate(forecast.timeline):
        found = _MESSAGE.fullmatch(bar.what)
        if place[bar.device][0] == DEVICES or found is None:
            continue
        kind, source, target, micro = found.groups()
        made = computed[f"{_COMPUTE[kind]} {source} {micro}"]
        read = computed[f"{_COMPUTE[kind]} {target} {micro}"]
        # an arrow hangs on the bar around its time, and at a bar's end the next one may begin
        inside_s = made.start_s + 0.99 * (made.end_s - made.start_s)
        yield _arrow("s", number, kind, made, inside_s, place)
        yield _arrow("t", number, kind, bar, bar.start_s, place)
        yield {**_arrow("f", number, kind, read, read.start_s, place), "bp": "e"}


def _arrow(
    phase: str, number: int, kind: str, bar: Slice, when_s: float, place: dict[str, tuple[int, int]]
) -> Event:
    pid, tid = place[bar.device]
    return {
        "ph": phase,
        "id": number,
        "name": kind,
        "cat": "message",
        "pid": pid,
        "tid": tid,
        "ts": when_s * 1e6,
    }
