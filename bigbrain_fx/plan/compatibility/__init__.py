"""Rules of incompatible options, models and clusters, in one table.

require_compatible(Request(options, cluster))     InputError of the first rule that applies
conflict(Request(options, cluster, graph))        that rule, or None: for searches
RULES                                             all of them, as docs/reference/compatibility.md
has them
"""

from bigbrain_fx.plan.compatibility.features import (
    Feature as Feature,
    Request as Request,
    Rule as Rule,
)
from bigbrain_fx.plan.compatibility.table import (
    RULES as RULES,
    conflict as conflict,
    require_compatible as require_compatible,
)
