"""`m-sct`: `m-etf`, where a device waits for the favorite child of what it has just run.

Source: Baechi (Jeon et al., SoCC'20), section 3.3, after Hanen and Munier (ETFA'95); the linear
program is solved by HiGHS. The guarantee holds for transfers shorter than ops, which operator
graphs do not keep to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from typing_extensions import override

from .baechi import favorite_children
from .jobs import Jobs
from .m_etf import METF


@dataclass(frozen=True)
class MSCT(METF):
    """Place groups of ops by earliest start, keeping a device free for a favorite child."""

    name = "m-sct"

    @override
    def favorites(self, jobs: Jobs) -> Mapping[int, int]:
        return favorite_children(jobs)
