"""What costs the tests' own processes time and shows nothing: cycles looked for, seeds queued."""

from __future__ import annotations

import gc
import sys

COLLECTED_EACH = (20_000, 20, 20)  # Python's own thresholds take a tenth of the gate
QUEUES = ("torch.cuda.random", "torch.xpu.random", "torch.mtia")


def collect_rarely() -> None:
    """Look for cycles less often, and not among what has been imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTED_EACH)


def queue_no_seeds() -> None:
    """Let `torch.manual_seed` queue nothing for devices that this host has not.

    It would write the whole stack down, three times a call: milliseconds below pytest.
    """
    torch = sys.modules.get("torch")
    if torch is None or torch.accelerator.is_available():
        return
    for name in QUEUES:
        if name in sys.modules:
            vars(sys.modules[name])["_lazy_call"] = lambda *_, **__: None
