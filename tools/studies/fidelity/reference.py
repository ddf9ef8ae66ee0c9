"""How fast the machine is while something is measured: a matrix product, timed again and again.

Other guests of the same hardware slow this one down for seconds or minutes. What is measured is
divided by the median of the products of the same seconds; a few before and after would be noise of
their own (a tenth, where the measurement itself repeats within a twentieth).
"""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path
from types import TracebackType

import torch

PRODUCT, PRODUCTS = 512, 6  # square; of one sample, whose median counts
PAUSE_S = 0.4  # between samples: they take a twentieth of one core
FEWEST = 8  # samples of a short measurement: more are taken after it


class Reference:
    """Time the product beside what happens inside `with`.

    The time is that of the thread, so that waiting for a core does not count.
    """

    def __init__(self) -> None:
        self.samples_s: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="reference")
        self._ticks = (0, 0)
        self.busy = 0.0

    def __enter__(self) -> Reference:
        self._ticks = processor_times()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.busy = busy_since(self._ticks)
        self._over.set()
        self._thread.join()

    @property
    def seconds(self) -> float:
        """The median product, in seconds."""
        return statistics.median(self.samples_s)

    def _run(self) -> None:
        x = torch.ones(PRODUCT, PRODUCT)
        _product_s(x)  # the first one opens buffers
        while not self._over.is_set() or len(self.samples_s) < FEWEST:
            taken_s = [_product_s(x) for _ in range(PRODUCTS)]
            self.samples_s.append(statistics.median(taken_s))
            self._over.wait(PAUSE_S)


def _product_s(x: torch.Tensor) -> float:
    start_s = time.thread_time()
    torch.mm(x, x)
    return time.thread_time() - start_s


def processor_times() -> tuple[int, int]:
    """Return the ticks that all processors have been busy, and all ticks, since the start.

    What has stepped back for all others (nice: `tools/studies/emulation/awake.py`) is not busy.
    """
    first = Path("/proc/stat").read_text().splitlines()[0]
    user, _, *rest = (int(word) for word in first.split()[1:9])
    system, _, _, *interrupts = rest  # idle, iowait
    ticks = sum(int(word) for word in first.split()[1:9])
    return user + system + sum(interrupts), ticks


def busy_since(before: tuple[int, int]) -> float:
    """Return the share of all processors' time that was in use since `processor_times`."""
    busy, ticks = processor_times()
    return (busy - before[0]) / max(1, ticks - before[1])
