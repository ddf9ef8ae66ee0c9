"""What the best plan so far takes, what single replicas take -> which replicas are not planned on.

    replicas alone: 0.09 s, 0.08 s ──▶ together 0.08 s at the least ──▶ the best has 0.03 s: no more

Together they take what the slowest takes, and one of them at least has an even share of the
micro-batches. Sums of gradients only add to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bigbrain_fx.errors import NoPlanError

FAR = 1.35
"""Times the best of other plans: no ZeRO and no split backward is known to gain so much."""
SURE = 0.95
"""Of what single replicas take, where one plan of them is at hand: searches find a few percent more
or less."""


class OutdoneError(NoPlanError):
    """Report replicas that are not planned to their end, since another plan is faster.

    Attributes:
        least_s: of a step, about.
    """

    def __init__(self, least_s: float) -> None:
        super().__init__(f"takes about {least_s:.4g} s at the least")
        self.least_s = least_s


@dataclass
class Rival:
    """The best that is known: mutable.

    Attributes:
        other_s: of other plans, as they count where plans are compared.
        own_s: of these replicas, of other numbers of micro-batches.
        outdone_s: the least of what was not planned on.
    """

    other_s: float = float("inf")
    own_s: float = float("inf")
    outdone_s: float = float("inf")

    def require_worth(self, alone_s: Sequence[float]) -> None:
        """Refuse to plan replicas together of which each takes so long for an even share.

        Raises:
            OutdoneError: another plan is faster.
        """
        least_s = min(alone_s)
        if least_s >= FAR * self.other_s or SURE * least_s >= self.own_s:
            self.outdone_s = min(self.outdone_s, least_s)
            raise OutdoneError(least_s)

    def is_far(self, step_s: float) -> bool:
        """Whether the best of these replicas is too slow for anything to make up for it."""
        return step_s >= FAR * self.other_s
