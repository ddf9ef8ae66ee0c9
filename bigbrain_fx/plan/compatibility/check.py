"""A request -> the first rule that it breaks.

What options alone show is refused before a model is captured, which may take minutes: features of
the model are not found in a request without one.
"""

from __future__ import annotations

from bigbrain_fx.plan.compatibility.rule import Request, Rule
from bigbrain_fx.plan.compatibility.table import RULES


def conflict(request: Request) -> Rule | None:
    """Return the first rule that a request breaks, or None."""
    return next((rule for rule in RULES if rule.applies(request)), None)


def require_compatible(request: Request) -> None:
    """Refuse what does not go together.

    Raises:
        InputError: two things were asked for that do not; says what to do instead.
    """
    rule = conflict(request)
    if rule is not None:
        raise rule.error(request)
