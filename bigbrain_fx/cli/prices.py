"""Price of a forecast: from a price by the hour to money for a million tokens or rows.

It knows plans and words; it decides nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bigbrain_fx.bundles import simulate
from bigbrain_fx.errors import BigBrainError, InputError
from bigbrain_fx.plan import Plan, Spread, money, spread, tokens

_HOUR_S = 3600.0
_PRICE = re.compile(r"^\s*\D{0,3}(\d+(?:\.\d+)?)\s*/\s*h\s*$")


def hourly(text: str) -> float:
    """Read "2.1/h", which is for all devices together.

    Raises:
        InputError: it is no price.
    """
    found = _PRICE.match(text)
    if found is None or float(found[1]) <= 0:
        raise InputError(
            f"expected a price by the hour, found {text!r}",
            code="BX3519",
            help="--price 2.1/h, for all devices of the cluster together",
        )
    return float(found[1])


@dataclass(frozen=True)
class Price:
    """Money for a million of what the batch's rows are made of: "tokens", or "rows"."""

    a_million: float
    unit: str

    def __str__(self) -> str:
        """Show it in a sentence."""
        return f"{self.a_million:.4g} a million {self.unit}"


def cost(plan: Plan, price: float) -> Price:
    """Return what a million tokens cost; rows, where no input is a row of tokens."""
    each = tokens(plan.graph)
    per_s = plan.micro_batches * plan.rows * (each or 1) / plan.forecast.step_s
    return Price(price / _HOUR_S / per_s * 1e6, "tokens" if each else "rows")


@dataclass(frozen=True)
class Offer:
    """A cluster file, and what a plan would give there; `refused` says why it would not.

    `code` is that of the error.
    """

    devices: str
    step_s: float | None = None
    rows_per_s: float | None = None
    spread: Spread | None = None
    cost: Price | None = None
    refused: str = ""
    code: str | None = None


def offers(
    plan: Plan, clusters: Sequence[Path], prices: Sequence[str], *, again: bool
) -> list[Offer]:
    """Forecast a plan on each cluster, the cheapest first, or the fastest without prices.

    Without a price on the command line, those of the cluster files hold.

    Raises:
        InputError: there are prices, and not one for each cluster.
    """
    if prices and len(prices) not in (1, len(clusters)):
        raise InputError(
            f"expected a price for each of {len(clusters)} clusters, found {len(prices)}",
            code="BX3520",
            help="repeat --price in the order of --devices, or give one for all",
        )
    each = [hourly(text) for text in prices] * (len(clusters) if len(prices) == 1 else 1)
    priced: Sequence[float | None] = each or [None] * len(clusters)
    found = [_offer(plan, path, price, again) for path, price in zip(clusters, priced, strict=True)]
    return sorted(found, key=_order)


def _offer(plan: Plan, path: Path, price: float | None, again: bool) -> Offer:
    try:
        moved = simulate(plan, path, again=again)
    except BigBrainError as error:
        return Offer(str(path), refused=error.what, code=error.code)
    return Offer(
        str(path),
        moved.forecast.step_s,
        moved.micro_batches * moved.rows / moved.forecast.step_s,
        spread(moved),
        _paid(moved, price),
    )


def _paid(plan: Plan, price: float | None) -> Price | None:
    """Return what a plan costs by the price that was given, or else by those of its devices."""
    if price is not None:
        return cost(plan, price)
    found = money(plan)
    return None if found is None else cost(plan, found.spent_hour_usd)


def _order(each: Offer) -> tuple[bool, float]:
    if each.step_s is None:
        return True, 0.0
    return False, each.step_s if each.cost is None else each.cost.a_million
