"""Bytes of all tensors of a process at their most, as torch's profiler hears them come and go.

It hears what the thread that makes it allocates and frees, in C++ too (the buckets of
DistributedDataParallel). What another thread frees it does not hear: then the peak grows from step
to step, and is none.
"""

from __future__ import annotations

import itertools

from torch.profiler import ProfilerActivity, profile

_COME_OR_GONE = "[memory]"  # the profiler's name of such an event


class TensorPeak:
    """A meter that is on from when it is made until it is read."""

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.start()

    def read(self) -> int:
        """Turn it off; return the peak in bytes."""
        self._profile.stop()
        inner = self._profile.profiler
        assert inner is not None and inner.kineto_results is not None  # noqa: PT018
        found = [e for e in inner.kineto_results.events() if e.name() == _COME_OR_GONE]
        found.sort(key=lambda event: event.start_ns())
        return max(itertools.accumulate(_nbytes(event) for event in found), default=0)


def _nbytes(event: object) -> int:
    nbytes: int = event.nbytes()  # type: ignore[attr-defined]  # its stub lacks it
    return nbytes
