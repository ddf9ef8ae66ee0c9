"""How far apart two forecasts of one model must be to say which plan is faster.

Two plans of one model share most of what a forecast gets wrong (a card's share, its kernels), so
their ratio is known better than either step: `spread` has the interval of one step. It knows
devices by their kind only; below this, `auto` takes the simpler plan.
"""

from __future__ import annotations

from bigbrain_fx.core import Cluster

CPU = 0.012
"""tools/studies/fidelity: choosing by `steady` lost 1.2 % to the best that was measured. The middle
pair of its cells is 5.6 % off, but one run is 5.4 % off another: more cannot be known there."""
GPU = 0.04
"""`python -m tools.studies.published_gpus.pairs`: the ratio of the middle pair of rows of one model
and card on unlike numbers of GPUs is 4.2 % off. At that distance the forecast's order is right
three times in four, and below it less."""

SPLIT = 1.06
"""Times its forecast a step of split backwards counts, where plans are compared. `python -m
tools.studies.unlike --against whole`, 12 cells of four models: such plans gained 5.5 % less than
forecast in the middle, 11 % in the lowest quarter, 1 % at most for the model of the largest
products. Those devices were emulated on one machine, where the same forward takes 5 to 15 % longer
while others compute, as they do under such schedules: of machines apart it is too much, but none
was tried."""


def least_gap(cluster: Cluster) -> float:
    """Return the share that a plan must be faster by; the largest of a cluster's devices'."""
    return max(CPU if device.kind == "cpu" else GPU for device in cluster.devices)


def times_counted(*, is_split: bool) -> float:
    """Return times its forecast a step counts where plans are compared."""
    return SPLIT if is_split else 1.0
