"""What the best plan so far takes, what single replicas take -> which replicas are not planned on.

    replicas alone: 0.07 s, 0.06 s of work ──▶ together 0.06 s at the least ──▶ the best has 0.03 s

Together they take what the slowest takes, and one of them at least has an even share of the
micro-batches: no schedule, of split backwards neither, goes below the work of the replica that
does that first, all of its devices busy. Sums of gradients only add to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bigbrain_fx.errors import NoPlanError

NEAR = 1.05
"""Times the best of other plans: one so near may be taken all the same, as the simpler."""
SURE = 0.95
"""Of what single replicas take, where one plan of them is at hand: searches find a few percent more
or less."""


class OutdoneError(NoPlanError):
    """Report replicas that are not planned to their end, since another plan is faster.

    Attributes:
        least_s: of a step, about.
    """

    def __init__(self, least_s: float) -> None:
        super().__init__(f"takes about {least_s:.4g} s at the least", code="BX1289")
        self.least_s = least_s


@dataclass
class Rival:
    """The best that is known: mutable.

    Attributes:
        other_s: of other plans, as they count where plans are compared.
        own_s: of these replicas, of other numbers of micro-batches.
        outdone_s: the least of what was not planned on.
        busy_s: the least that any number of micro-batches takes, all devices busy.
    """

    other_s: float = float("inf")
    own_s: float = float("inf")
    outdone_s: float = float("inf")
    busy_s: float = float("inf")

    def require_worth(self, alone_s: Sequence[float], busy_s: Sequence[float]) -> None:
        """Refuse to plan replicas together of which each takes so long for an even share.

        Args:
            alone_s: what each takes by itself, as it was planned; empty with ZeRO.
            busy_s: what no plan of it goes below.

        Raises:
            OutdoneError: another plan is faster.
        """
        self.busy_s = min(self.busy_s, min(busy_s))
        least_s = min(alone_s, default=min(busy_s))
        if self._is_outdone(min(busy_s)) or (alone_s and SURE * least_s >= self.own_s):
            self.outdone_s = min(self.outdone_s, least_s)
            raise OutdoneError(least_s)

    def is_far(self) -> bool:
        """Whether no schedule of these replicas can be faster than other plans."""
        return self.busy_s < float("inf") and self._is_outdone(self.busy_s)

    def _is_outdone(self, busy_s: float) -> bool:
        return busy_s >= NEAR * self.other_s
