"""The calls that were timed on a device, as a cluster file names them.

It knows `core.KERNELS`; what their seconds mean to a forecast is an estimator's.
"""

from __future__ import annotations

from bigbrain_fx.cluster.document import Document, JsonPath
from bigbrain_fx.cluster.file import DeviceEntry
from bigbrain_fx.cluster.quantity import nearest, quoted
from bigbrain_fx.core import KERNEL


def timed_kernels(
    document: Document, path: JsonPath, entry: DeviceEntry
) -> tuple[tuple[str, float], ...]:
    """Return the timed calls in the order of `KERNELS`."""
    given = entry.kernels or {}
    for name, took_s in given.items():
        place = (*path, "kernels", name)
        if name not in KERNEL:
            near = nearest(name, list(KERNEL))
            hint = f'did you mean "{near[0]}"? ' if near else ""
            again = "`bigbrain-fx doctor --kind cuda` times those that this version knows"
            raise document.error(
                place, f"no kernel {quoted(name)} is known", hint + again, code="BX1049"
            )
        if not took_s > 0.0:
            raise document.error(
                place, "no call takes no time", "delete it, or time it again", code="BX1050"
            )
    return tuple((name, given[name]) for name in KERNEL if name in given)
