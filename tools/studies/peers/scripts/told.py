"""What all scripts of peers share: how many steps, which rank, and how a step is told."""

from __future__ import annotations

import os
import sys

STEPS = int(os.environ.get("PEER_STEPS", "5"))
RANK = int(os.environ.get("RANK", "0"))


def tell(rank: int, step: int, loss: float) -> None:
    """Print a step's loss; `tools.studies.peers` reads it."""
    sys.stdout.write(f"STEP {rank} {step} {loss!r}\n")  # in one piece: other ranks print, too
    sys.stdout.flush()
