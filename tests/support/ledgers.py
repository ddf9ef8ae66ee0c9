"""A ledger for devices of one process, as `train.py --in-process` has it."""

from __future__ import annotations

import torch.distributed as dist

from bigbrain_fx.runtime.checkpoint_options import Ledger


def local_ledger(deadline_s: float = 60.0) -> Ledger:
    """Return a ledger in a store of this process."""
    return Ledger(dist.HashStore(), deadline_s)  # type: ignore[attr-defined]  # torch has it
