"""Split a PyTorch model over the devices of a cluster and write plain Python for each.

    import bigbrain_fx as bb

    made = bb.split("model.py", "cluster.json", "bundle", bb.Options(micro_batches=4))
    print(bb.explain(made.plan))
    done = bb.run(made.bundle, bb.RunOptions(steps=30))
    bb.verify(made.bundle).require_passed()

Public names are loaded when they are first used. Importing this package imports no torch, and
neither does planning; `capture` of a module in memory does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bigbrain_fx.api import NAMES
from bigbrain_fx.core import VERSION, door

if TYPE_CHECKING:
    from bigbrain_fx.api import *  # noqa: F403  # what `api` lists is public here, too
else:
    __getattr__ = door("bigbrain_fx.api", __name__)

__all__ = [*NAMES, "__version__"]
__version__ = VERSION


def __dir__() -> list[str]:
    return sorted({*globals(), *NAMES})
