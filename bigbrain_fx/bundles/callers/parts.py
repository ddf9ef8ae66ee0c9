"""Micro-batches of a session's batches: compared with the whole batch now and then.

The session has seen the example alone when it planned. Padding may come later, and the loop may
give its loss other weights.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from bigbrain_fx.errors import InputError, warn_caller

if TYPE_CHECKING:
    from collections.abc import Callable

    from bigbrain_fx.bundles.found_model import CompareLater
    from bigbrain_fx.frontend import MicroBatchEffect

_EACH = 8  # batches that are all compared; of later ones those whose number is a power of two,
_MOST = 64  # up to this one


@dataclass
class PartsWatch:
    """Look for a batch that micro-batches train otherwise; once.

    Attributes:
        compare: returns the effect on a batch; None where there is none.
        is_open: whether another number of micro-batches may be planned with.
        seen: number of batches.
    """

    compare: Callable[[object], MicroBatchEffect | None]
    is_open: bool = False
    seen: int = 0

    @staticmethod
    def of(count: int, compare: CompareLater | None, *, is_open: bool) -> PartsWatch | None:
        """Return what looks at the batches of a session; None where they are not cut."""
        if compare is None or count < 2:
            return None
        return PartsWatch(partial(compare, count), is_open)

    def look_at(self, batch: object) -> None:
        """Compare a batch, if it is its turn; warn of one that differs.

        Raises:
            InputError: it differs, and the number of micro-batches is open.
        """
        self.seen += 1
        is_due = self.seen <= _EACH or self.seen.bit_count() == 1
        if not 1 < self.seen <= _MOST or not is_due:
            return
        effect = None
        with suppress(Exception):  # the caller's own code: a step of the devices would say so
            effect = self.compare(batch)
        if effect is None:
            return
        self.seen = _MOST
        if effect.unknown:
            warn_caller(effect.unknown[0])
        elif self.is_open:
            raise InputError(
                f"{effect.micro_batches} micro-batches train something else than this batch: "
                f"{effect.difference}. {effect.cause}",
                code="BX3202",
            )
        else:
            warn_caller(effect.warning)
