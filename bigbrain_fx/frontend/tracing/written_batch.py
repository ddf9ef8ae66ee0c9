"""What becomes of what forward or loss write into the batch in place: told, or refused.

Each step of a bundle begins with what batches() gave, and each entry has memory of its own. This
file knows batches; it runs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.translation.batch import Batch


def on_written(names: Sequence[str], batch: Batch) -> tuple[str, ...]:
    """Say what becomes of what forward or loss write into the batch.

    Raises:
        InputError: it is another entry's memory, too, which a device would not see written.
    """
    if not names:
        return ()
    shared = batch.overlapping()
    for name in names:
        if name in shared:
            raise InputError(
                f"forward or loss writes into {name} of the batch in place, and {shared[name]} is "
                "the same memory: in a bundle each entry has its own, and is not written with it",
                code="BX2165",
                at="example_batch",
                help=f"compute with a copy: x = x * 2 for x.mul_(2); or give {shared[name]} as a "
                "copy, if it is to stay as it was: y = x.clone()",
            )
    return (
        f"forward or loss writes into the batch in place ({', '.join(names[:3])}): each step "
        "begins with what batches() gave, also where it gives the same memory again; a plain loop "
        "would go on from what was written there (x = x * 2 for x.mul_(2) leaves no doubt)",
    )
