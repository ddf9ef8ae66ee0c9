"""`simulate --trace`: what a training gives while devices come and go; lines and JSON."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from bigbrain_fx.cli.money_text import time_text
from bigbrain_fx.cli.output import emit

if TYPE_CHECKING:
    from bigbrain_fx.plan import OverTime, Plan, Stretch

_HOW = {
    "start": "start",
    "same": "goes on",
    "elastic": "goes on without replicas (--elastic)",
    "resplit": "resplit",
    "wait": "no plan fits",
}


def print_trace(plan: Plan, path: Path, as_json: bool) -> None:
    """Print what each period of a trace gives, and all of them together."""
    from bigbrain_fx.cluster import read_availability
    from bigbrain_fx.plan import over_time, unit

    found = over_time(plan, read_availability(path, plan.cluster))
    totals = {
        "computed": found.computed,
        "unit": unit(plan.graph),
        "usd": found.usd,
        "lost_s": found.lost_s,
        "planning_s": found.planning_s,
        "checkpoint_s": found.checkpoint_s,
    }
    periods = [dataclasses.asdict(each) for each in found.stretches]
    emit(as_json, {**totals, "periods": periods}, "\n".join(_lines(found, unit(plan.graph))))


def _lines(found: OverTime, unit: str) -> list[str]:
    usd = found.usd
    paid = "" if usd is None else f" for {usd:,.4g} USD"
    if usd is not None and found.computed > 0:
        paid += f" ({usd / found.computed * 1e6:.4g} USD a million)"
    return [
        *(_line(each, found.per_step, unit) for each in found.stretches),
        f"in all: {found.computed:,.4g} {unit}{paid}; {time_text(found.lost_s)} stopped or undone, "
        f"with a checkpoint every {time_text(found.checkpoint_s)}",
        f"planning anew took {found.planning_s:.2g} s of processor time at most",
    ]


def _line(each: Stretch, per_step: int, unit: str) -> str:
    period = f"{each.period.from_h:g} to {each.period.until_h:g} h: {_HOW[each.how]}"
    if each.step_s is None:
        return period
    usd = "" if each.usd is None else f", {each.usd:,.4g} USD"
    undone = f", {time_text(each.undone_s)} undone" if each.undone_s else ""
    stopped = f", {time_text(each.stopped_s)} stopped" if each.stopped_s else ""
    return (
        f"{period} on {', '.join(each.devices)}: {each.step_s:.4g} s a step, "
        f"{each.steps * per_step:,.4g} {unit}{usd}{stopped}{undone}"
    )
