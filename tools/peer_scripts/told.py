"""What all scripts of peers share: how many steps, which rank, and how a step is told."""

from __future__ import annotations

import os

STEPS = int(os.environ.get("PEER_STEPS", "5"))
RANK = int(os.environ.get("RANK", "0"))


def tell(rank: int, step: int, loss: float) -> None:
    """Print a step's loss; `tools.peers` reads it."""
    print(f"STEP {rank} {step} {loss!r}", flush=True)
