"""Measurements of this host (`host`), of ops (`ops`), and of bundles beside each other.

`host` and `ops` know no plans; `comparison` runs bundles in turn. Only child processes import
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bigbrain_fx.core import door

if TYPE_CHECKING:
    from bigbrain_fx.measure.comparison import (
        Comparison as Comparison,
        Contender as Contender,
        compare as compare,
    )
    from bigbrain_fx.measure.host import (
        HostProbe as HostProbe,
        Hosts as Hosts,
        Survey as Survey,
        probe as probe,
        survey_hosts as survey_hosts,
    )
    from bigbrain_fx.measure.machine_here import machine as machine
    from bigbrain_fx.measure.ops import (
        TWENTY_OPS as TWENTY_OPS,
        ProfileOptions as ProfileOptions,
        profile as profile,
    )
else:
    __getattr__ = door(__name__)
