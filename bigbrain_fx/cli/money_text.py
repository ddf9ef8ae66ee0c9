"""Prices of a plan, and the gain of devices that it leaves out, as lines and JSON.

It knows plans and words; it decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from bigbrain_fx.plan import Goals, Offer, Plan, money, per_step, steps_for, unit

_MILLION = 1e6
_DAY_S, _HOUR_S, _MINUTE_S = 86_400, 3_600, 60


def money_lines(plan: Plan, goals: Goals | None) -> Iterator[str]:
    """Yield what a plan costs, where its devices have prices, and what others would take."""
    paid, what = money(plan), unit(plan.graph)
    if paid is not None:
        count = len(plan.stages.devices)
        sent = (
            f", {paid.spent_hour_usd - paid.hour_usd:.4g} USD/h for messages"
            if paid.sent_usd
            else ""
        )
        yield (
            f"money: {paid.hour_usd:.4g} USD/h for {count} device{'s' * (count != 1)}{sent}; "
            f"{_a_million(plan, paid.step_usd):.4g} USD a million {what}"
        )
    elif plan.cluster.prices:
        used = plan.stages.devices
        lacking = ", ".join(name for name in used if name not in plan.cluster.price)
        yield f"money: not known, as price_per_hour_usd is missing: {lacking}"
    if goals is not None and goals.tokens is not None:
        steps = steps_for(plan.graph, goals.tokens)
        usd = "" if paid is None else f" and {steps * paid.step_usd:,.4g} USD"
        total_s = steps * plan.forecast.step_s
        yield f"{_count_text(goals.tokens)} {what}: {time_text(total_s)}{usd}, in {steps:,} steps"
    yield from _others(plan)


def time_text(seconds: float) -> str:
    """Return seconds in the unit that people would use."""
    for size, name in ((_DAY_S, "days"), (_HOUR_S, "hours"), (_MINUTE_S, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {name}"
    return f"{seconds:.3g} s"


def _a_million(plan: Plan, step_usd: float) -> float:
    return step_usd / per_step(plan.graph) * _MILLION


def _count_text(count: float) -> str:
    """Show a count as --tokens takes it: 300B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.4g}{letter}"
    return f"{count:,.4g}"


def _others(plan: Plan) -> Iterator[str]:
    """Yield what other choices of devices would give, the chosen one's being 1."""
    if not plan.rented:
        return
    own, *others = plan.rented
    left = [each.name for each in plan.cluster.devices if each.name not in own.devices]
    if left:
        yield f"devices left out: {', '.join(left)}"
    for each in others:
        yield f"compared: {', '.join(each.devices)}: {_against(own, each)}"


def _against(own: Offer, other: Offer) -> str:
    if other.step_s is None or own.step_s is None:
        return other.why
    found = f"{own.step_s / other.step_s:.3g} times the throughput"
    if other.step_usd is not None and own.step_usd:
        found += f" at {other.step_usd / own.step_usd:.3g} times the cost"
    return found + (f"; {other.why}" if other.why else "")


def money_json(plan: Plan, goals: Goals | None) -> dict[str, object]:
    """Return the same as fields of JSON; nothing, where nothing has a price or a limit."""
    paid, found = money(plan), dict[str, object]()
    if plan.rented:
        found["rented"] = [asdict(each) for each in plan.rented]
    if paid is not None:
        about = {"hour_usd": paid.spent_hour_usd, "devices_hour_usd": paid.hour_usd}
        million = _a_million(plan, paid.step_usd)
        found["money"] = {**about, "step_usd": paid.step_usd, "million_usd": million}
    if goals is not None and goals.tokens is not None:
        steps = steps_for(plan.graph, goals.tokens)
        usd = None if paid is None else steps * paid.step_usd
        total_s = steps * plan.forecast.step_s
        found["training"] = {"tokens": goals.tokens, "steps": steps, "s": total_s, "usd": usd}
    return found
