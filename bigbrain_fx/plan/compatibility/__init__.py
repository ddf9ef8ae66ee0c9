"""Rules of incompatible options, models and clusters, in one table.

`require_compatible(Request(options, cluster))` raises the first rule that applies, `conflict` of a
request with a graph returns it, or None. `RULES` are all, as in docs/reference/compatibility.md.
"""

from bigbrain_fx.plan.compatibility.features import Request as Request, Rule as Rule
from bigbrain_fx.plan.compatibility.table import (
    RULES as RULES,
    conflict as conflict,
    require_compatible as require_compatible,
)
