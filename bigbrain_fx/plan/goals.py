"""What a plan has to keep to, beside the memory of devices: money and time. Nouns only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Goals:
    """Limits of a plan, of which None is none.

    Attributes:
        tokens: of all training, for which money and time are counted; rows, where no input is a row
            of tokens.
        max_usd: that all of them may cost.
        max_hour_usd: that devices and messages may cost by the hour.
        min_per_s: tokens, or rows, a second at least.
        deadline_s: in which all of them have to be computed.
    """

    tokens: float | None = None
    max_usd: float | None = None
    max_hour_usd: float | None = None
    min_per_s: float | None = None
    deadline_s: float | None = None

    @property
    def limits(self) -> bool:
        """Whether anything is limited."""
        return any(
            each is not None
            for each in (self.max_usd, self.max_hour_usd, self.min_per_s, self.deadline_s)
        )

    @property
    def needs_prices(self) -> bool:
        """Whether money is limited."""
        return self.max_usd is not None or self.max_hour_usd is not None


@dataclass(frozen=True)
class Offer:
    """Some devices, and what the best plan on them takes and costs; None where there is none.

    Attributes:
        devices: that it uses.
        step_s: of its forecast.
        step_usd: of a step; None, too, where a device has no price.
        why: against the plan that was chosen, or why there is no plan.
    """

    devices: tuple[str, ...]
    step_s: float | None = None
    step_usd: float | None = None
    why: str = ""
