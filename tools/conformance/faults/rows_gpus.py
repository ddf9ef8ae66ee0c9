"""Row 24: processes on a GPU, which die while others compute on the same one."""

from __future__ import annotations

import torch

from tools.conformance.faults.bundle import Fault
from tools.conformance.faults.verdicts import (
    BROKEN,
    SKIPPED,
    Ground,
    Verdict,
    ground_of_gpus,
    judged,
    last_line,
    same_bits,
)

WARM_S = 1.0
PLACES = (("d0", 3, "forward", 1), ("d1", 6, "backward", 2), ("d0", 9, "updated", 0))


def on_gpus(_: Ground) -> Verdict:
    """Row 24: over gloo, as what is on nccl cannot be replaced."""
    if not torch.cuda.is_available():
        return Verdict(SKIPPED, "skipped: no GPU here")
    with ground_of_gpus() as here:
        return struck(here)


def struck(here: Ground) -> Verdict:
    """Run with faults; where bits are others, say whether they are without, too."""
    reference = here.reference()
    if reference.code:
        return Verdict(BROKEN, last_line(reference.said), problems=(reference.said,))
    faults = [Fault(name, step, at, nth, spares=1) for name, step, at, nth in PLACES]
    run = here.run(faults)
    alike = same_bits(run, reference) or same_bits(here.run(), reference)
    more = [] if alike else ["two runs without a fault have other bits"]
    return judged(run, reference, faults, "replayed on the GPU", WARM_S, more=more)
