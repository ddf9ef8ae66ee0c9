"""Clusters that plans are hashed on: CPU devices of one host each, by name."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from bigbrain_fx.core import Cluster, Device, Link

_GIB = 2**30
_GIGABIT, _FAST_ETHERNET = Link(1e-4, 125e6), Link(1e-4, 12.5e6)
_TEN_GIGABIT = Link(2e-5, 1.25e9)
_PATH = (3, 0, 6, 1, 4, 7, 2, 5)
"""Along which the links of the last cluster are fast; its devices are listed by name."""


def clusters() -> Mapping[str, Cluster]:
    """Return the clusters of all models by name; numbers are speeds in 20 GFLOP/s."""
    names = [f"d{i}" for i in range(len(_PATH))]
    fast = tuple((names[a], names[b], _GIGABIT) for a, b in pairwise(_PATH))
    return {
        "2 alike": Cluster(_devices(1, 1), _GIGABIT),
        "2:1": Cluster(_devices(2, 1), _GIGABIT),
        "4:2:1:1": Cluster(_devices(4, 2, 1, 1), _GIGABIT),
        "4:2:1:1, 100 Mbit/s": Cluster(_devices(4, 2, 1, 1), _FAST_ETHERNET),
        "4:2:1:1, 10 Gbit/s": Cluster(_devices(4, 2, 1, 1), _TEN_GIGABIT),
        "8 alike, a fast path": Cluster(_devices(*[1] * 8), _FAST_ETHERNET, fast),
    }


def _devices(*speeds: float) -> tuple[Device, ...]:
    return tuple(
        Device(f"d{i}", f"h{i}", "cpu", 64 * _GIB, s * 20e9, s * 12e9, 5e-6 / s)
        for i, s in enumerate(speeds)
    )
